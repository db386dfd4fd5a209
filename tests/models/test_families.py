"""Exits on networks of the package transformers: `benchmarks/families.py` on each family."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from anytime.errors import AttachWarning
from anytime.models import AttachedExits, attach_exits, measure_cost

pytest.importorskip("transformers")


def _families() -> ModuleType:
    file = Path(__file__).parents[2] / "benchmarks" / "families.py"
    spec = importlib.util.spec_from_file_location("families", file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["families"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


families = _families()
TRACED = {"BEiT", "ConvNeXt", "ResNet", "MobileViT"}


def attached(name: str) -> tuple[AttachedExits, dict[str, Tensor] | Tensor]:
    module, x = families.hugging_face(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttachWarning)
        return attach_exits(module, at=[0.3, 0.6], example=x).eval(), x


@pytest.mark.parametrize("name", families.HUGGING_FACE)
@torch.no_grad()
def test_a_family_runs_in_stages_costs_something_and_ends_with_its_own_logits(name: str) -> None:
    model, x = attached(name)
    assert model.method == ("trace" if name in TRACED else "replay"), model.why
    alone = model.backbone(**x) if isinstance(x, dict) else model.backbone(x)
    logits = model(x)
    torch.testing.assert_close(logits[-1], alone.logits)
    few = {key: tensor[1:3] for key, tensor in x.items()} if isinstance(x, dict) else x[1:3]
    torch.testing.assert_close(model(few), logits[:, 1:3], rtol=1e-3, atol=1e-5)
    macs = measure_cost(model, x).macs
    assert 0 < macs[0] < macs[1] < macs[2]


@pytest.mark.long
@pytest.mark.parametrize("name", families.HUGGING_FACE)
def test_every_row_of_the_table(name: str) -> None:
    row = families.measure(name, families.hugging_face, name)
    assert float(row.eager) == 0
    assert float(row.onnx) < 1e-4


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["BERT", "DistilBERT", "GPT-2", "DeBERTa-v2", "Llama"])
@torch.no_grad()
def test_more_padding_moves_no_exit(name: str, side: str) -> None:
    """On the left, position ids keep the positions of the tokens, where the family takes them."""
    if side == "left" and name in ("BERT", "DistilBERT", "DeBERTa-v2"):
        pytest.skip("positions count from the start of the row")
    module, x = families.hugging_face(name)

    def wide(pads: int) -> dict[str, Tensor]:
        before, after = (pads, 0) if side == "left" else (0, pads)
        ids, mask = (F.pad(tensor, (before, after), value=v) for tensor, v in ((x["input_ids"], 1), (x["attention_mask"], 0)))
        places = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if name in ("GPT-2", "Llama") else {}
        return {"input_ids": ids, "attention_mask": mask, **places}

    model = attach_exits(module, at=[0.25, 0.5], example=wide(0), method="replay").eval()
    logits = model(wide(0))
    for pads in (1, 8):
        torch.testing.assert_close(model(wide(pads)), logits, rtol=0, atol=1e-5)

"""Hugging Face's Trainer itself: models with exits are trained, and their logits come out with the exits first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anytime
from anytime.errors import DtypeError, LabelError, OptionError, ShapeError
from anytime.integrations.transformers import (
    TrainerModel,
    batch_first,
    collect_with_trainer,
    compute_metrics,
    exits_first,
)
from anytime.models import MLP, MLPConfig

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="Trainer needs accelerate")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
]

X = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
Y = torch.arange(50) % 6
ROWS = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]


class ExitsFirst(nn.Module):
    """As research code does it: logits with the exits first, or as a tuple of exits."""

    def __init__(self, model: MLP, *, as_tuple: bool) -> None:
        super().__init__()
        self.model, self.as_tuple = model, as_tuple

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.model(x)
        return {"loss": logits.sum() * 0, "logits": tuple(logits) if self.as_tuple else logits}


@pytest.fixture
def model() -> MLP:
    return MLP(MLPConfig(classes=6, exits=3)).eval()


def trainer(module: nn.Module, folder: Path, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_eval_batch_size=8,
        per_device_train_batch_size=10,
        num_train_epochs=1,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    return transformers.Trainer(module, arguments, train_dataset=ROWS, eval_dataset=ROWS, **options)


def expected(model: MLP) -> Tensor:
    with torch.no_grad():
        return model(X)


def test_predict_gives_the_exits_first_and_metrics(model: MLP, tmp_path: Path) -> None:
    run = trainer(TrainerModel(model), tmp_path, compute_metrics=compute_metrics(["product"]))
    output = run.predict(ROWS)
    found = exits_first(output)
    torch.testing.assert_close(found.logits, expected(model))
    assert torch.equal(found.labels, Y)
    evaluation = anytime.evaluate(found, rules=["product"], sets=None)
    assert output.metrics["test_product/accuracy/exit_3"] == pytest.approx(evaluation.rules["product"].accuracy[2])


@pytest.mark.parametrize("as_tuple", [False, True])
def test_models_with_the_exits_first_are_scrambled_by_predict_and_not_with_batch_first(
    model: MLP, as_tuple: bool, tmp_path: Path
) -> None:
    module = ExitsFirst(model, as_tuple=as_tuple)
    plain = trainer(module, tmp_path).predict(ROWS)
    if as_tuple:
        torch.testing.assert_close(exits_first(plain).logits, expected(model))
    else:
        with pytest.raises(ShapeError, match="batch_first"):
            exits_first(plain)
    found = exits_first(trainer(module, tmp_path, preprocess_logits_for_metrics=batch_first).predict(ROWS))
    torch.testing.assert_close(found.logits, expected(model))
    torch.testing.assert_close(collect_with_trainer(trainer(module, tmp_path), ROWS).logits, expected(model))


def test_training_and_collecting_with_the_trainer(model: MLP, tmp_path: Path) -> None:
    before = expected(model).clone()
    run = trainer(TrainerModel(model), tmp_path)
    run.train()
    assert not torch.allclose(expected(model.eval()), before)
    model.train()
    found = collect_with_trainer(run, out=tmp_path / "logits.npz")
    assert model.training
    torch.testing.assert_close(found.logits, expected(model.eval()))
    assert torch.equal(found.labels, Y)
    assert anytime.open_logits(tmp_path / "logits.npz").labels is not None


def test_a_batch_with_as_many_rows_as_exits_is_collected(model: MLP, tmp_path: Path) -> None:
    found = collect_with_trainer(trainer(TrainerModel(model.eval()), tmp_path), ROWS[: model.num_exits])
    torch.testing.assert_close(found.logits, expected(model)[:, : model.num_exits])


def test_mistakes_with_a_trainer_are_explained(model: MLP, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="attach_exits"):
        TrainerModel(nn.Linear(2, 4))
    with pytest.raises(OptionError, match="remove_unused_columns"):
        TrainerModel(model)(labels=Y)
    with pytest.raises(ShapeError, match="TrainerModel"):
        exits_first(SimpleNamespace(predictions=X.numpy(), label_ids=None))
    with pytest.raises(DtypeError, match=r"Trainer\.predict"):
        exits_first(X)
    with pytest.raises(ShapeError, match="rank 2"):  # of a model with one output
        batch_first(X)
    with pytest.raises(DtypeError, match="collect_logits"):
        collect_with_trainer(model)
    run = trainer(TrainerModel(model), tmp_path)
    run.label_names = ["start", "end"]
    with pytest.raises(LabelError, match="label_names"):
        collect_with_trainer(run)

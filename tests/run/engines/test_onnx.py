"""The ONNX Runtime engine: what cannot be exported, and what is not installed."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from anytime.errors import DtypeError, MissingExtraError, OptionError, ShapeError
from anytime.models import Carry, MultiExit, create
from anytime.run.engines import onnx

pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")


class Branching(MultiExit):
    """Branches on values."""

    num_exits = 1

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        (x,) = carry
        return (), x if float(x.sum()) > 0 else 2 * x


class Counting(MultiExit):
    """Takes the number of rows as a number."""

    num_exits = 1

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        (x,) = carry
        return (), x + float(x.shape[0])


def test_a_stage_that_branches_on_values_is_refused() -> None:
    with pytest.raises(OptionError, match="cannot be exported to ONNX"):
        onnx.OnnxRuntimeEngine(Branching(), torch.tensor([[1.0], [-3.0]]))


def test_a_trace_with_a_fixed_number_of_rows_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def exported(*_: Any) -> bytes:
        called.append(True)
        raise ValueError("no")

    monkeypatch.setattr(onnx, "exported", exported)
    with pytest.raises(OptionError, match=r"differ by .* with 1 rows; by torch\.export: ValueError: no"):
        onnx.OnnxRuntimeEngine(Counting(), torch.ones(2, 3))
    assert called


class LogAddExp(MultiExit):
    """Has an operation that torch.export supports and the tracing exporter does not."""

    num_exits = 1

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        return (), torch.logaddexp(carry[0], -carry[0])


def test_a_failed_trace_prints_nothing_and_torch_export_is_used(capfd: pytest.CaptureFixture[str]) -> None:
    model, x = LogAddExp(), torch.randn(3, 2)
    with pytest.raises(Exception, match="logaddexp"):
        onnx.traced(onnx.Stage(model, 0), (x,), ["x"], ["logits"], {})
    run = onnx.OnnxRuntimeEngine(model, x).begin(x)
    torch.testing.assert_close(run.advance(), next(iter(model.exits(x))))
    assert capfd.readouterr() == ("", "")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, make_network: Any) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    model, x = make_network("mlp")
    with pytest.raises(MissingExtraError, match=r"pip install 'anytime-nn\[engines\]'"):
        onnx.OnnxRuntimeEngine(model, x)


def test_integers_may_go_in() -> None:
    class Table(MultiExit):
        num_exits = 2

        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(10, 4)

        def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
            (tokens,) = carry
            return ((tokens,) if exit == 0 else ()), self.table(tokens).mean(1) * (exit + 1)

    model, tokens = Table().eval(), torch.randint(0, 10, (3, 5))
    run = onnx.OnnxRuntimeEngine(model, tokens).begin(tokens)
    for wanted in model.exits(tokens):
        torch.testing.assert_close(run.advance(), wanted.detach())


def test_texts_of_any_length_are_run_by_one_engine() -> None:
    torch.manual_seed(0)
    model = create("encoder-tiny", classes=5, vocabulary=40).eval()
    engine = onnx.OnnxRuntimeEngine(model, torch.randint(1, 40, (2, 12)))
    for length in (3, 12, 20):
        ids = torch.randint(1, 40, (3, length))
        ids[0, length - 1] = model.config.pad
        stages = engine.begin(ids)
        found = torch.stack([stages.advance() for _ in range(engine.num_exits)])
        with torch.inference_mode():
            torch.testing.assert_close(found, model(ids), atol=1e-5, rtol=1e-4)


def test_inputs_that_do_not_fit_are_named() -> None:
    engine = onnx.OnnxRuntimeEngine(create("mlp-toy", classes=4).eval(), torch.zeros(1, 2))
    for x in (torch.zeros(1, 3), torch.zeros(2)):
        with pytest.raises(ShapeError, match="x has shape"):
            engine.begin(x).advance()
    with pytest.raises(DtypeError, match="uint8"):
        engine.begin(torch.zeros(1, 2, dtype=torch.uint8)).advance()

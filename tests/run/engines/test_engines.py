"""Every engine passes `check_engine` with every network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anytime.models import MultiExit
from anytime.run.engines.cuda import CudaGraphsEngine
from anytime.run.engines.eager import EagerEngine
from anytime.run.engines.folded import FoldedEngine
from anytime.run.engines.onnx import OnnxRuntimeEngine
from anytime.testing import check_engine

Network = tuple[MultiExit, Tensor]


def eager(model: MultiExit, x: Tensor, recorder: Any) -> EagerEngine:
    return EagerEngine(model)


def folded(model: MultiExit, x: Tensor, recorder: Any) -> FoldedEngine:
    return FoldedEngine(model, x)


def onnxruntime(model: MultiExit, x: Tensor, recorder: Any) -> OnnxRuntimeEngine:
    pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    return OnnxRuntimeEngine(model, x)


def cuda_graphs(model: MultiExit, x: Tensor, recorder: Any) -> CudaGraphsEngine:
    return CudaGraphsEngine(model, x, sizes=(1, 2, 4), recorder=recorder)


EVERY = pytest.mark.parametrize("make", [eager, folded, onnxruntime, cuda_graphs])


def inputs(like: Tensor, rows: int) -> Tensor:
    return torch.randn(rows, *like.shape[1:], generator=torch.Generator().manual_seed(rows))


@EVERY
def test_every_engine_passes_the_battery(make: Callable[..., Any], network: Network, recorder: Any) -> None:
    model, x = network
    engine = make(model, x, recorder)
    check_engine(engine, model, inputs(x, 7), tolerance=engine.TOLERANCE or 1e-6)


class Doubling(MultiExit):
    """A model that gives exits alone, and the same memory each time."""

    num_exits = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.computed = 0
        self.closed = False

    def exits(self, x: Tensor) -> Any:
        logits = x.clone()
        try:
            for _ in range(3):
                self.computed += 1
                logits *= 2
                yield logits
        finally:
            self.closed = True


def test_a_model_that_is_not_staged_runs_by_its_generator() -> None:
    model = Doubling()
    run = EagerEngine(model).begin(torch.ones(3, 2))
    assert model.computed == 0
    first = run.advance()
    run.keep(torch.tensor([2, 0]))
    run.keep(torch.tensor([1]))
    assert run.advance().tolist() == [[4.0, 4.0]]
    assert first.tolist() == [[2.0, 2.0]] * 3
    run.close()
    assert model.computed == 2
    assert model.closed


def test_the_eager_engine_puts_the_model_into_eval_mode_and_the_others_leave_it(make_network: Any, recorder: Any) -> None:
    for make in (folded, onnxruntime, cuda_graphs):
        model, x = make_network("msdnet")
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.train()
        make(model, x, recorder)
        assert all(part.training for part in model.modules())
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    EagerEngine(model)
    assert not any(part.training for part in model.modules())

"""Properties of every engine: the model's logits, exit by exit, whichever rows are dropped and however runs are interleaved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anytime.errors import DtypeError, ShapeError, StateError
from anytime.models import MultiExit
from anytime.run.engines.cuda import CudaGraphsEngine
from anytime.run.engines.eager import EagerEngine
from anytime.run.engines.folding import FoldedEngine, difference
from anytime.run.engines.onnx import OnnxRuntimeEngine


def eager(model: MultiExit, x: Tensor, recorder: Any) -> EagerEngine:
    return EagerEngine(model)


def folded(model: MultiExit, x: Tensor, recorder: Any) -> FoldedEngine:
    return FoldedEngine(model, x)


def onnxruntime(model: MultiExit, x: Tensor, recorder: Any) -> OnnxRuntimeEngine:
    pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    return OnnxRuntimeEngine(model, x)


def cuda_graphs(model: MultiExit, x: Tensor, recorder: Any) -> CudaGraphsEngine:
    return CudaGraphsEngine(model, x, sizes=(1, 2, 4), recorder=recorder)


ENGINES = (eager, folded, onnxruntime, cuda_graphs)
EVERY = pytest.mark.parametrize("make", ENGINES)


def inputs(like: Tensor, rows: int) -> Tensor:
    return torch.randn(rows, *like.shape[1:], generator=torch.Generator().manual_seed(rows))


NETWORKS = ("msdnet", "msdnet-min", "imta", "mlp", "intervals", "ensemble", "cascade", "resnet")
SLOW = ("dvit", "averaged", "attached", "dvit-performers")  # torch.export takes long for these


def pairs() -> list[Any]:
    slow = [
        pytest.param(name, make, marks=pytest.mark.long if make is onnxruntime else ()) for name in SLOW for make in ENGINES
    ]
    return [*((name, make) for name in NETWORKS for make in ENGINES), *slow]


@pytest.mark.parametrize(("name", "make"), pairs())
def test_every_engine_gives_the_logits_of_every_network(
    name: str, make: Callable[..., Any], make_network: Any, recorder: Any
) -> None:
    model, x = make_network(name)
    engine = make(model, x, recorder)
    limit = engine.TOLERANCE or 1e-6
    for rows in (1, 2, 7):
        batch = inputs(x, rows)
        wanted = list(model.exits(batch))
        run = engine.begin(batch)
        found = [run.advance() for _ in range(engine.num_exits)]
        assert all(logits.dtype == torch.float32 and logits.device.type == "cpu" for logits in found)
        assert difference(found, wanted) <= limit
        run = engine.begin(batch)
        assert difference([run.advance()], wanted[:1]) <= limit
        kept = torch.arange(rows).flip(0)[: max(1, rows - 2)]
        run.keep(kept)
        assert difference([run.advance()], [wanted[1][kept]]) <= limit
        mask = torch.zeros(len(kept), dtype=torch.bool)
        mask[-1] = True
        run.keep(mask)
        later = [run.advance() for _ in range(2, engine.num_exits)]
        assert not later or difference(later, [logits[kept[-1:]] for logits in wanted[2:]]) <= limit
        run.close()


@EVERY
def test_runs_may_be_mixed_and_given_logits_stay(make: Callable[..., Any], make_network: Any, recorder: Any) -> None:
    model, x = make_network("msdnet")
    engine = make(model, x, recorder)
    batches = [inputs(x, rows) for rows in (2, 2, 1, 5, 2)]
    runs = [engine.begin(batch) for batch in batches]
    given: list[list[Tensor]] = [[] for _ in runs]
    for _ in range(engine.num_exits):
        for run, found in zip(runs, given, strict=True):
            found.append(run.advance())
    for batch, found in zip(batches, given, strict=True):
        assert difference(found, list(model.exits(batch))) <= 1e-4


@EVERY
def test_rows_may_leave_before_the_first_stage(make: Callable[..., Any], make_network: Any, recorder: Any) -> None:
    model, x = make_network("mlp")
    run = make(model, x, recorder).begin(inputs(x, 5))
    run.keep(torch.tensor([4, 1]))
    assert difference([run.advance()], [next(model.exits(inputs(x, 5)[[4, 1]]))]) <= 1e-4


@EVERY
def test_a_run_ends_after_the_last_stage_or_when_closed(make: Callable[..., Any], make_network: Any, recorder: Any) -> None:
    model, x = make_network("mlp")
    engine = make(model, x, recorder)
    run = engine.begin(x)
    for _ in range(engine.num_exits):
        run.advance()
    run.keep(torch.tensor([0]))
    with pytest.raises(StateError, match="after the last"):
        run.advance()
    run.close()
    run.close()
    with pytest.raises(StateError, match=r"after close\(\)"):
        run.advance()


@EVERY
def test_wrong_inputs_and_rows_are_named(make: Callable[..., Any], make_network: Any, recorder: Any) -> None:
    model, x = make_network("mlp")
    engine = make(model, x, recorder)
    with pytest.raises(ShapeError, match="at least one input"):
        engine.begin(x[:0])
    run = engine.begin(x)
    for rows in (torch.tensor([2]), torch.tensor([-1]), torch.tensor([], dtype=torch.int64), torch.tensor([[0]])):
        with pytest.raises(ShapeError, match="from 0 to 1"):
            run.keep(rows)
    for odd in (torch.tensor([0.0]), torch.tensor([True])):
        with pytest.raises(DtypeError, match="a mask of shape"):
            run.keep(odd)


class Doubling(MultiExit):
    """A model that only has a generator, and reuses the memory of its logits."""

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
    model = Doubling().eval()
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


def test_no_engine_changes_the_model(make_network: Any, recorder: Any) -> None:
    for make in ENGINES:
        model, x = make_network("msdnet")
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.train()
        make(model, x, recorder)
        assert all(part.training for part in model.modules())
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

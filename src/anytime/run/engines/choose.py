"""Which engine to use: by name, or the quickest by a short measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anytime.checks import check_threads
from anytime.errors import AnytimeError, CheckError, OptionError
from anytime.models.base import ExitModel, is_staged
from anytime.models.modes import without_autocast
from anytime.run.engines.base import Engine
from anytime.run.engines.eager import EagerEngine
from anytime.run.engines.folding import apart, rounded_factors
from anytime.run.engines.running import check_inputs, device_of

ENGINES = ("eager", "folded", "onnxruntime", "cuda-graphs")
_ROUNDS, _SECONDS = 9, 0.3


@without_autocast()  # engines give the model's logits in float32; autocast around a request is for `eager` and `folded`
def make_engine(model: ExitModel, name: str = "auto", *, example: Tensor | None = None, threads: int | None = 1) -> Engine:
    """Make a model ready to be run stage by stage.

    Every engine gives the model's logits within its `TOLERANCE`; this is checked on the example.

    Args:
        model: Any model with exits. Engines other than `eager` need one that is staged (`anytime.models.is_staged`).
        name: One of `ENGINES`, or `auto`: the one that is quickest on the example here and now.
        example: Inputs like those to come, batch first. Only `eager` does without; `auto` is `eager` then.
        threads: How many threads work on one stage; a setting of the whole process where torch does the work. None leaves
            torch's setting alone.

    Returns:
        The engine. Its `why` says why it is this one.

    Example:
        >>> from anytime.models import MLP, MLPConfig
        >>> engine = make_engine(MLP(MLPConfig(classes=4)), "folded", example=torch.zeros(1, 2))
        >>> engine.name, engine.num_exits
        ('folded', 5)
    """
    if name not in (*ENGINES, "auto"):
        raise OptionError(f"engine is {name!r}", expected=f"one of {', '.join((*ENGINES, 'auto'))}", fix="'auto' measures")
    if threads is not None:
        _set_threads(threads)
    if name == "auto":
        return _quickest(model, example, threads)
    return _make(model, name, example, threads)


def _quickest(model: ExitModel, example: Tensor | None, threads: int | None) -> Engine:
    eager = EagerEngine(model)
    if example is None or not is_staged(model):
        eager.why = "there is no example to measure on" if is_staged(model) else "the model cannot be run stage by stage"
        return eager
    candidates: dict[str, Engine] = {"eager": eager}
    left_out = []
    for name in _fitting(model):
        try:
            candidates[name] = _make(model, name, example, threads)
        except AnytimeError as error:
            left_out.append(f"{name} is left out: {error.got}")
    times = _measure(candidates, example)
    order = sorted(times, key=times.__getitem__)
    chosen = candidates[order[0]]
    measured = ", ".join(f"{name} {1e3 * times[name]:.3g} ms" for name in order)
    chosen.why = "; ".join([f"all exits for a batch of {len(example)}: {measured}", *left_out])  # type: ignore[attr-defined]
    return chosen


def _fitting(model: object) -> tuple[str, ...]:
    """What may be quicker than eager where a model lies."""
    return ("folded", "cuda-graphs") if device_of(model).type == "cuda" else ("folded", "onnxruntime")


def _make(model: ExitModel, name: str, example: Tensor | None, threads: int | None) -> Engine:
    if name == "eager":
        return EagerEngine(model)
    if not is_staged(model):
        raise OptionError(
            f"the engine {name!r} was asked for a {type(model).__name__} that cannot be run stage by stage",
            expected="a model with stage(exit, carry), see anytime.models.is_staged",
            fix="use engine='eager', or attach the exits with method='trace', which says what is in the way",
        )
    if example is None:
        raise OptionError(
            f"the engine {name!r} was asked for without an example",
            expected="inputs to make it ready with",
            fix="pass example=x",
        )
    engine: Any = _MAKERS[name](model, check_inputs(example), threads)
    _check_agrees(engine, EagerEngine(model), example)
    made: Engine = engine
    return made


def _folded(model: Any, example: Tensor, threads: int | None) -> Any:
    from anytime.run.engines.folded import FoldedEngine

    return FoldedEngine(model, example)


def _onnxruntime(model: Any, example: Tensor, threads: int | None) -> Any:
    from anytime.run.engines.onnx import OnnxRuntimeEngine

    return OnnxRuntimeEngine(model, example, threads=threads or torch.get_num_threads())


def _cuda_graphs(model: Any, example: Tensor, threads: int | None) -> Any:
    from anytime.run.engines.cuda import SIZES, CudaGraphsEngine

    return CudaGraphsEngine(model, example, sizes=(*SIZES, len(example)))


_MAKERS: dict[str, Callable[[Any, Tensor, int | None], Any]] = {
    "folded": _folded,
    "onnxruntime": _onnxruntime,
    "cuda-graphs": _cuda_graphs,
}


def run_all(engine: Engine, x: Tensor) -> list[Tensor]:
    """The logits of all exits."""
    run = engine.begin(x)
    try:
        return [run.advance() for _ in range(engine.num_exits)]
    finally:
        run.close()


def _check_agrees(engine: Any, eager: Engine, example: Tensor) -> None:
    with rounded_factors(False):  # by default torch rounds more on a GPU than engines may differ
        share = apart(run_all(engine, example), run_all(eager, example))
    if share > engine.TOLERANCE:
        raise CheckError(
            f"the engine {engine.name!r} gives logits {share:.2g} times the largest of their exit away from the model's",
            expected=f"at most {engine.TOLERANCE:g}",
            fix="use engine='eager'; a model whose stages draw lots or keep a state cannot be run by another",
        )


def _measure(engines: dict[str, Engine], example: Tensor) -> dict[str, float]:
    """The median seconds of each for all exits; they take turns, so that a busy moment meets them all."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    end = time.perf_counter() + _SECONDS * len(engines)
    for turn in range(_ROUNDS + 1):
        for name, engine in engines.items():
            begin = time.perf_counter()
            run_all(engine, example)
            if turn:  # the first warms up
                times[name].append(time.perf_counter() - begin)
        if turn >= 2 and time.perf_counter() > end:
            break
    return {name: statistics.median(values) for name, values in times.items()}


def _set_threads(threads: int) -> None:
    check_threads(threads)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)

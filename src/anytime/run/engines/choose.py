"""Engines by name, or the fastest one by a short measurement."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from anytime.checks import Inputs, check_inputs, check_threads, count_rows
from anytime.combine import Rule
from anytime.errors import AnytimeError, CheckError, OptionError
from anytime.models.base import ExitModel, is_staged
from anytime.models.given import not_staged
from anytime.models.modes import without_autocast
from anytime.run.engines.base import Engine
from anytime.run.engines.eager import EagerEngine, dtype_of
from anytime.run.engines.folding import FoldedEngine, allow_tf32, difference, eval_copy
from anytime.run.engines.running import device_of
from anytime.run.forks import never_forked

ENGINES = ("eager", "folded", "onnxruntime", "cuda-graphs")
_ROUNDS, _SECONDS = 9, 0.3


@without_autocast()  # engines return the model's logits in float32; autocast around a request applies to `eager` and `folded`
def make_engine(
    model: ExitModel,
    name: str = "auto",
    *,
    example: Inputs | None = None,
    threads: int | None = 1,
    rule: Rule[Any] | None = None,
) -> Engine:
    """Prepare a model to run stage by stage.

    Every engine returns the model's logits within its `TOLERANCE`; this is checked on the example. Engines other than `eager`
    compute in float32: for a model in half precision, they are compared with the model's logits in float32.

    Args:
        model: Any model with exits. Engines other than `eager` need a staged one (`anytime.models.is_staged`).
        name: One of `ENGINES`, or `auto` for the fastest one on the example.
        example: Typical inputs, a tensor or a tuple or dict of tensors, batch first. Only `eager` works without; `auto` is then
            `eager`.
        threads: Threads per stage. For torch engines this sets `torch.set_num_threads` for the whole process; None leaves it.
        rule: A rule that `cuda-graphs` evaluates on the GPU after each stage; other engines return logits only.

    Returns:
        The engine. Its `why` explains the choice.

    Example:
        >>> from anytime.models import MLP, MLPConfig
        >>> engine = make_engine(MLP(MLPConfig(classes=4)), "folded", example=torch.zeros(1, 2))
        >>> engine.name, engine.num_exits
        ('folded', 5)
    """
    check_runnable(model)
    if name not in (*ENGINES, "auto"):
        names = ", ".join((*ENGINES, "auto"))
        raise OptionError(f"engine is {name!r}", expected=f"one of {names}", fix="use 'auto' for the fastest one")
    if threads is not None and torch.get_num_threads() != check_threads(threads):
        torch.set_num_threads(threads)
    if name == "auto":
        return _fastest(model, example, threads, rule)
    return _make(model, name, example, threads, rule)


def check_runnable(model: Any) -> int:
    """The number of exits of a model or an engine; anything else is refused."""
    exits = getattr(model, "num_exits", None)
    if not isinstance(exits, int) or not (isinstance(model, ExitModel) or hasattr(model, "begin")):
        raise OptionError(
            f"the model is a {type(model).__name__}",
            expected="a model with num_exits and exits(x), or an engine",
            fix="add exits to a network with anytime.attach_exits; wrap one that returns the logits of all exits in "
            "anytime.models.from_outputs, and several networks in anytime.models.Ensemble",
        )
    return exits


def _fastest(model: ExitModel, example: Inputs | None, threads: int | None, rule: Rule[Any] | None) -> Engine:
    eager = EagerEngine(model)
    if example is None or not is_staged(model):
        eager.why = "no example to measure on" if is_staged(model) else "the model cannot be run stage by stage"
        return eager
    candidates: dict[str, Any] = {"eager": eager}
    left_out = []
    for name in ("folded", "cuda-graphs" if device_of(model).type == "cuda" else "onnxruntime"):
        try:
            candidates[name] = _make(model, name, example, threads, rule)
        except AnytimeError as error:
            left_out.append(f"{name} is left out: {error.got}")
    times = _measure(candidates, example)
    order = sorted(times, key=times.__getitem__)
    chosen: Engine = candidates[order[0]]
    measured = ", ".join(f"{name} {1e3 * times[name]:.3g} ms" for name in order)
    rows = count_rows(check_inputs(example))
    reasons = [f"all exits for a batch of {rows}: {measured}", *_other_precision(model, order[0]), *left_out]
    candidates[order[0]].why = "; ".join(reasons)
    return chosen


def _make(model: ExitModel, name: str, example: Inputs | None, threads: int | None, rule: Rule[Any] | None) -> Engine:
    if name == "eager":
        return EagerEngine(model)
    if not is_staged(model):
        raise not_staged(model, f"the engine {name!r} was requested, and ", fix="use engine='eager', or ")
    if example is None:
        raise OptionError(
            f"the engine {name!r} was requested without an example", expected="typical inputs", fix="pass example=x"
        )
    example = check_inputs(example)
    other = _other_precision(model, name)
    # In half precision the model's own logits are less exact than the engine's.
    reference: Any = eval_copy(model).to(device_of(model)) if other else model
    with allow_tf32(False):  # torch's default on a GPU rounds more than the tolerance
        wanted = run_all(EagerEngine(reference), example)  # first, since it explains what is wrong with an example
    engine = _build(model, name, example, threads, rule)
    with allow_tf32(False):
        ratio = difference(run_all(engine, example), wanted)
    if ratio > engine.TOLERANCE:
        raise CheckError(
            f"logits of the engine {name!r} differ from the model's by {ratio:.2g} of the largest logit of an exit",
            expected=f"at most {engine.TOLERANCE:g}",
            fix="use engine='eager'; models whose stages are random or keep state cannot be run by another",
        )
    engine.why = "; ".join([engine.why, *other])
    found: Engine = engine
    return found


def _other_precision(model: ExitModel, name: str) -> list[str]:
    """A note if an engine computes in float32 and the model in half precision."""
    own = dtype_of(model)
    if name == "eager" or own not in (torch.float16, torch.bfloat16):
        return []
    return [f"computes in float32, the model in {str(own).removeprefix('torch.')}"]


def _build(model: Any, name: str, example: Inputs, threads: int | None, rule: Rule[Any] | None) -> Any:
    if name == "folded":
        return FoldedEngine(model, example)
    if name == "onnxruntime":
        from anytime.run.engines.onnx import OnnxRuntimeEngine

        return OnnxRuntimeEngine(model, example, threads=threads or torch.get_num_threads())
    from anytime.run.engines.cuda import SIZES, CudaGraphsEngine

    return CudaGraphsEngine(model, example, sizes=(*SIZES, count_rows(example)), rule=rule)


@never_forked(stage=True)
def run_all(engine: Engine, x: Inputs) -> list[Tensor]:
    """The logits of all exits."""
    run = engine.begin(x)
    try:
        return [run.advance() for _ in range(engine.num_exits)]
    finally:
        run.close()


def _measure(engines: dict[str, Engine], example: Inputs) -> dict[str, float]:
    """The median seconds of each engine for all exits; they take turns, so that other load affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    end = time.perf_counter() + _SECONDS * len(engines)
    for turn in range(_ROUNDS + 1):
        for name, engine in engines.items():
            begin = time.perf_counter()
            run_all(engine, example)
            if turn:  # the first is a warm-up
                times[name].append(time.perf_counter() - begin)
        if turn >= 2 and time.perf_counter() > end:
            break
    return {name: statistics.median(values) for name, values in times.items()}

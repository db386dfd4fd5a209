"""The battery for engines: `check_engine(engine, model, example)` compares an engine with the model it runs.

An engine is anything with `name`, `num_exits` and `begin(x)`, as `anytime.run.engines.base.Engine` describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anytime.checks import Inputs, count_rows, map_inputs
from anytime.errors import InputError, StateError
from anytime.models.base import ExitModel
from anytime.testing.laws import check_close, check_equal, check_raises, fail, run_laws
from anytime.testing.models import check_example, left_as_found, watched


def check_engine(engine: Any, model: ExitModel, example_input: Inputs, *, tolerance: float = 1e-4) -> None:
    """Run every law on an engine; raise `CheckError` at the first that does not hold.

    Args:
        engine: The engine.
        model: The model that it runs, in eval mode.
        example_input: A batch of at least two different rows.
        tolerance: How far logits may differ from the model's, relative to the largest logit of an exit (at least 1).

    Example:
        >>> from anytime.models import MLP, MLPConfig
        >>> from anytime.run.engines import make_engine
        >>> model, x = MLP(MLPConfig(classes=4)), torch.randn(3, 2)
        >>> check_engine(make_engine(model, "folded", example=x), model.eval(), x)
    """
    check_example(example_input)
    with left_as_found(model), torch.no_grad():
        run_laws(LAWS, engine, model, example_input, tolerance)


def gives_the_logits_of_the_model(engine: Any, model: ExitModel, x: Inputs, tolerance: float) -> None:
    """Each stage gives the model's logits, float32 on the CPU without gradients, for one row and for several."""
    if not isinstance(engine.name, str) or engine.num_exits != model.num_exits:
        fail(f"name is {engine.name!r} and num_exits {engine.num_exits}, the model has {model.num_exits} exits")
    for rows in sorted({1, 2, count_rows(x)}):
        some = _part(x, slice(rows))
        stages = engine.begin(some)
        found = [stages.advance() for _ in range(engine.num_exits)]
        if any(now.dtype != torch.float32 or now.device.type != "cpu" or now.requires_grad for now in found):
            fail("logits are not float32 tensors on the CPU without gradients")
        _compare(found, list(model.exits(some)), tolerance, f"with {rows} rows")


def keeps_rows_in_the_order_given(engine: Any, model: ExitModel, x: Inputs, tolerance: float) -> None:
    """`keep` goes on with some rows only, given as indices or as a mask, before any stage."""
    expected = list(model.exits(x))
    for first in range(engine.num_exits):
        stages = engine.begin(x)
        for _ in range(first):
            stages.advance()
        kept = torch.arange(count_rows(x)).flip(0)[: max(2, count_rows(x) - 2)]
        stages.keep(kept)
        _compare([stages.advance()], [expected[first][kept]], tolerance, f"with rows {kept.tolist()}")
        mask = torch.arange(len(kept)) == len(kept) - 1
        stages.keep(mask)
        later = [stages.advance() for _ in range(first + 1, engine.num_exits)]
        _compare(later, [now[kept[mask]] for now in expected[first + 1 :]], tolerance, "with a mask of one row")


def runs_do_not_disturb_each_other(engine: Any, model: ExitModel, x: Inputs, tolerance: float) -> None:
    """Several runs may be open at once, and logits do not change after they were returned."""
    batches = [x, *_other_rows(x), x]
    runs = [engine.begin(batch) for batch in batches]
    found: list[list[Tensor]] = [[] for _ in runs]
    copies: list[list[Tensor]] = [[] for _ in runs]
    for _ in range(engine.num_exits):
        for stages, given, copy in zip(runs, found, copies, strict=True):
            given.append(stages.advance())
            copy.append(given[-1].clone())
    for batch, given, copy in zip(batches, found, copies, strict=True):
        for one, other in zip(given, copy, strict=True):
            check_equal(one, other, "logits that were already returned: they")
        _compare(given, list(model.exits(batch)), tolerance, "with several runs open")


def joins_and_splits_runs(engine: Any, model: ExitModel, x: Inputs, tolerance: float) -> None:
    """If `engine.joins`, runs of equal `kind` at the same exit share a batch and part again, with the same logits."""
    if not getattr(engine, "joins", False):
        return
    batches = [x, *_other_rows(x)]
    expected = [list(model.exits(batch)) for batch in batches]
    for first in range(1, engine.num_exits):
        begun = [engine.begin(batch) for batch in batches]
        for exit in range(first):
            _compare([run.advance() for run in begun], [each[exit] for each in expected], tolerance, "before a join")
        alike = [number for number, run in enumerate(begun) if run.kind == begun[0].kind]
        runs, wanted = [begun[number] for number in alike], [expected[number] for number in alike]
        joint = runs[0].join(runs[1:])
        _compare([joint.advance()], [torch.cat([each[first] for each in wanted])], tolerance, "of joined runs")
        parts = joint.split([count_rows(batches[number]) for number in alike])
        for part, each in zip(parts, wanted, strict=True):
            _compare([part.advance() for _ in each[first + 1 :]], each[first + 1 :], tolerance, "after a split")
        # If a joint stage fails, each run goes on alone.
        _compare([run.advance() for run in runs], [each[first] for each in wanted], tolerance, "of runs that were joined")
        for run in (*begun, *parts):
            run.close()


def computes_only_what_is_requested(engine: Any, model: ExitModel, x: Inputs, tolerance: float) -> None:
    """`begin` computes nothing, and each stage runs only when it is requested."""
    if not isinstance(model, nn.Module):
        return
    with watched(model) as calls:  # empty for an engine that runs a compiled copy of the model
        stages = engine.begin(x)
        if calls[-1]:
            fail(f"{calls[-1][0]!r} ran in begin(x)")
        stages.advance()
        first = len(calls[-1])
        stages.close()
        if len(calls[-1]) != first:
            fail(f"{calls[-1][first]!r} ran in close()")
        for _ in model.exits(x):
            break
    if first and len(calls[-1]) != 2 * first:
        fail(f"{first} submodules ran for the first exit, {len(calls[-1]) - first} in the model itself")


def ends_once(engine: Any, model: ExitModel, x: Inputs, tolerance: float) -> None:
    """`advance` raises `StateError` after the last stage and after `close`, which may be called twice."""
    stages = engine.begin(x)
    for _ in range(engine.num_exits):
        stages.advance()
    check_raises(StateError, stages.advance, "a stage after the last")
    stages.close()
    stages = engine.begin(x)
    stages.close()
    stages.close()
    check_raises(StateError, stages.advance, "a stage after close()")


def refuses_wrong_inputs(engine: Any, model: ExitModel, x: Inputs, tolerance: float) -> None:
    """An empty batch, rows outside of the batch, no rows and rows that are not integers raise `InputError`."""
    check_raises(InputError, lambda: engine.begin(_part(x, slice(0))), "an empty batch")
    stages = engine.begin(x)
    count = count_rows(x)
    for rows in ([count], [-1], [[0]], [0.0], [True] * (count + 1)):
        check_raises(InputError, partial(stages.keep, torch.tensor(rows)), f"rows {rows}")
    check_raises(InputError, lambda: stages.keep(torch.zeros(0, dtype=torch.int64)), "no rows")
    stages.close()


LAWS = (
    gives_the_logits_of_the_model,
    keeps_rows_in_the_order_given,
    runs_do_not_disturb_each_other,
    joins_and_splits_runs,
    computes_only_what_is_requested,
    ends_once,
    refuses_wrong_inputs,
)


def _part(x: Inputs, rows: slice) -> Inputs:
    return map_inputs(lambda each: each[rows], x)


def _other_rows(x: Inputs) -> list[Inputs]:
    """The first two rows in reverse order, and the last row."""
    return [map_inputs(lambda each: each[:2].flip(0), x), _part(x, slice(-1, None))]


def _compare(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float, what: str) -> None:
    for exit, (one, other) in enumerate(zip(found, expected, strict=True), 1):
        limit = tolerance * max(1.0, float(other.abs().max()))
        check_close(one, other.cpu().float(), f"logits of exit {exit} {what}", rtol=0.0, atol=limit)

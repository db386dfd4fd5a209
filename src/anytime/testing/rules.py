"""The battery for rules: `check_rule(my_rule)` runs every law that the rest of the library relies on.

A rule is anything with `start(exits)`, `step(state, logits)` and a call over all exits, as `anytime.Rule` describes. If it was
fitted for some numbers of exits or classes, pass those: `check_rule(my_rule, exits=(7,), classes=100)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anytime.checks import check_count, check_counts
from anytime.combine import Prediction
from anytime.errors import InputError, NonFiniteError, OptionError, StateError
from anytime.testing.laws import check_close, check_equal, check_raises, fail, run_laws

_SHAPES = ((1, 1, 1), (1, 4, 3), (2, 0, 5), (3, 7, 2), (4, 5, 10), (8, 3, 101))
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LARGE = 1e30
_ACROSS = {"rtol": 1e-4, "atol": 1e-5}
"""Tolerances for probabilities of the same row in another batch."""


@dataclass(frozen=True)
class Sizes:
    """The logits that a rule accepts: any numbers of exits and classes, unless it was fitted for some."""

    exits: tuple[int, ...] | None = None
    classes: int | None = None

    def random(self, exits: int, batch: int, classes: int, *, seed: int = 0) -> Tensor:
        """Random logits of this shape, or of the nearest numbers of exits and classes that the rule accepts."""
        exits = exits if self.exits is None else min(self.exits, key=lambda known: abs(known - exits))
        shape = (exits, batch, self.classes or classes)
        return 4 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_rule(rule: Any, *, exits: Sequence[int] | None = None, classes: int | None = None) -> None:
    """Run every law on a rule; raise `CheckError` at the first that does not hold.

    Args:
        rule: The rule.
        exits: The numbers of exits that it accepts; None for any. For others it must raise `OptionError`.
        classes: The number of classes that it accepts; None for any. Such a rule may treat classes differently.

    Example:
        >>> from anytime import Product
        >>> check_rule(Product())
        >>> check_rule(Product(weights=(0.5, 1.0)), exits=[2])
    """
    known = None if exits is None else check_counts(tuple(exits), "exits")
    run_laws(LAWS, rule, Sizes(known, None if classes is None else check_count(classes, "classes")))


def gives_distributions(rule: Any, sizes: Sizes) -> None:
    """Predictions have the right shape, are never NaN or negative, and sum to one."""
    for logits in _cases(sizes):
        _check_prediction(rule(logits), logits)


def survives_extreme_values(rule: Any, sizes: Sizes) -> None:
    """Huge, tiny, equal, zero and opposite logits also give distributions."""
    for value in (0.0, -0.0, 1e8, -1e8, 1e-40, 1e-45, -1e-45, _LARGE, -_LARGE):
        logits = torch.full_like(sizes.random(3, 4, 5), value)
        logits[:, 0, 0] = -value
        logits[len(logits) // 2, 1, -1] = 1.0
        logits[-1, 2] = -logits[-1, 2]
        _check_prediction(rule(logits), logits)


def steps_as_it_calls(rule: Any, sizes: Sizes) -> None:
    """Stepping exit by exit gives what the call over all exits gives, up to rounding."""
    for logits in _cases(sizes):
        whole = rule(logits)
        for exit, prediction in enumerate(steps(rule, logits)):
            check_close(prediction.log_probs, whole.log_probs[exit], f"log_probs of exit {exit + 1}")
            check_equal(prediction.fell_back, whole.fell_back[exit], f"fell_back of exit {exit + 1}")
            check_equal(prediction.labels, whole.labels[exit], f"labels of exit {exit + 1}")


def steps_are_pure(rule: Any, sizes: Sizes) -> None:
    """A step changes neither its state nor its input: repeated, it gives the same."""
    logits = sizes.random(3, 4, 6)
    copy = logits.clone()
    state = rule.start(len(logits))
    for now in logits:
        _, first = rule.step(state, now)
        state, again = rule.step(state, now)
        check_close(first.log_probs, again.log_probs, "a repeated step")
    rule(logits)
    check_equal(logits, copy, "the input")


def ignores_later_exits(rule: Any, sizes: Sizes) -> None:
    """The prediction at an exit does not depend on later exits."""
    logits, other = sizes.random(5, 6, 7), sizes.random(5, 6, 7, seed=1)
    for exit in range(len(logits)):
        mixed = torch.cat((logits[: exit + 1], other[exit + 1 :]))
        check_close(rule(mixed).log_probs[exit], rule(logits).log_probs[exit], f"exit {exit + 1}")


def treats_rows_independently(rule: Any, sizes: Sizes) -> None:
    """The prediction for a row does not depend on the other rows of the batch or on their order."""
    logits = sizes.random(4, 9, 11)
    whole = rule(logits).probs
    order = torch.randperm(9, generator=torch.Generator().manual_seed(2))
    check_close(rule(logits[:, order]).probs, whole[:, order], "rows in another order", **_ACROSS)
    check_close(rule(logits[:, 3:5]).probs, whole[:, 3:5], "rows 3 and 4 alone", **_ACROSS)


def treats_classes_alike(rule: Any, sizes: Sizes) -> None:
    """Permuting the classes permutes the predictions, unless the rule was fitted for these classes."""
    if sizes.classes is None:
        logits = sizes.random(4, 9, 11)
        order = torch.randperm(11, generator=torch.Generator().manual_seed(3))
        check_close(rule(logits[..., order]).probs, rule(logits).probs[..., order], "permuted classes", **_ACROSS)


def computes_in_full_precision(rule: Any, sizes: Sizes) -> None:
    """Half-precision logits are processed in float32, float64 logits in float64."""
    logits = sizes.random(3, 4, 5)
    for dtype in (torch.float16, torch.bfloat16):
        half = logits.to(dtype)
        check_close(rule(half).log_probs, rule(half.float()).log_probs, f"{dtype} compared with float32")
    if rule(logits.double()).log_probs.dtype != torch.float64:
        fail("float64 logits gave log-probabilities of lower precision")


def refuses_non_finite_logits(rule: Any, sizes: Sizes) -> None:
    """NaN and infinity raise a `NonFiniteError` with the exit and the row, in the call and in a step."""
    for value in (float("nan"), float("inf"), -float("inf")):
        logits = sizes.random(3, 4, 5)
        last = len(logits) - 1
        logits[last, 1, -1] = value
        for attempt in (lambda logits=logits: rule(logits), lambda logits=logits: list(steps(rule, logits))):
            error = check_raises(NonFiniteError, attempt, f"{value} at the last exit")
            if (error.exit, error.row) != (last + 1, 1):
                fail(f"the error names exit {error.exit} and row {error.row}, not {last + 1} and 1")


def refuses_wrong_shapes(rule: Any, sizes: Sizes) -> None:
    """Wrong ranks, changing shapes, wrong numbers of exits and steps after the last exit raise typed errors."""
    logits = sizes.random(2, 4, 5)
    exits, rows, classes = logits.shape
    check_raises(InputError, lambda: rule(logits[0]), "logits of rank 2")
    check_raises(InputError, lambda: rule(logits.long()), "integer logits")
    state, _ = rule.step(rule.start(exits), logits[0])
    if exits > 1:
        check_raises(InputError, lambda: rule.step(state, torch.zeros(rows - 1, classes)), "another batch size")
        check_raises(InputError, lambda: rule.step(state, torch.zeros(rows, classes + 1)), "another number of classes")
    for now in logits[1:]:
        state, _ = rule.step(state, now)
    check_raises(StateError, lambda: rule.step(state, logits[-1]), "a step after the last exit")
    if sizes.exits is not None:
        check_raises(OptionError, lambda: rule.start(max(sizes.exits or ()) + 1), "another number of exits")


LAWS: tuple[Callable[[Any, Sizes], None], ...] = (
    gives_distributions,
    survives_extreme_values,
    steps_as_it_calls,
    steps_are_pure,
    ignores_later_exits,
    treats_rows_independently,
    treats_classes_alike,
    computes_in_full_precision,
    refuses_non_finite_logits,
    refuses_wrong_shapes,
)


def steps(rule: Any, logits: Tensor) -> Iterator[Prediction]:
    """The predictions of a rule, one step at a time."""
    state = rule.start(len(logits))
    for now in logits:
        state, prediction = rule.step(state, now)
        yield prediction


def _cases(sizes: Sizes) -> Iterator[Tensor]:
    for seed, shape in enumerate(_SHAPES):
        for dtype in _FLOATS:
            yield sizes.random(*shape, seed=seed).to(dtype)


def _check_prediction(prediction: Any, logits: Tensor) -> None:
    log_probs, fell_back = prediction.log_probs, prediction.fell_back
    where = f"for {logits.dtype} logits of shape {tuple(logits.shape)}"
    if log_probs.shape != logits.shape or fell_back.shape != logits.shape[:2] or fell_back.dtype != torch.bool:
        fail(f"{where} log_probs are {tuple(log_probs.shape)}, fell_back {tuple(fell_back.shape)}")
    if log_probs.dtype not in (torch.float32, torch.float64):
        fail(f"{where} log_probs are {log_probs.dtype}")
    if bool(log_probs.isnan().any()) or bool((log_probs > 1e-6).any()):
        fail(f"{where} log-probabilities are NaN or above zero")
    named = log_probs.gather(-1, prediction.labels[..., None])[..., 0]
    if not torch.equal(named, log_probs.amax(-1)):
        fail(f"{where} the label is not a most probable class")
    off = (log_probs.double().exp().sum(-1) - 1).abs()
    if off.numel() and float(off.max()) > 1e-4:
        fail(f"{where} probabilities sum to one only within {float(off.max()):.2g}")

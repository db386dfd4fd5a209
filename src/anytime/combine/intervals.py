"""Anytime regression: the product of uniform densities is the uniform density on the intersection (appendix B.6).

Each exit gives an interval; after m exits the answer is [max of the lower ends, min of the upper ends]. It can only shrink,
and the density at any point still inside can only rise. Where the intersection is empty the answer falls back, as a collapsed
product does: it is the current exit's own interval, there and at all later exits. A single point is not empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anytime.checks import as_tensor, check_count
from anytime.errors import DtypeError, InputError, ShapeError, StateError


@dataclass(frozen=True, eq=False)
class Interval:
    """The answer at one exit, or at all of them with one more dimension in front.

    Attributes:
        lower, upper: The ends, any shape; the density is 1/width between them.
        fell_back: Same shape, true where the intersection was empty.
    """

    lower: Tensor
    upper: Tensor
    fell_back: Tensor

    @property
    def width(self) -> Tensor:
        """Length of the interval."""
        return self.upper - self.lower

    @property
    def middle(self) -> Tensor:
        """The mean of the uniform density."""
        return self.lower + self.width / 2

    def log_density(self, target: Tensor) -> Tensor:
        """Logarithm of the density at `target`; `-inf` outside, `inf` at a single point."""
        inside = (self.lower <= target) & (target <= self.upper)
        return torch.where(inside, -self.width.log(), -math.inf)


@dataclass(frozen=True)
class IntervalState:
    """The intersection of the first `seen` of `exits` intervals, empty where lower > upper."""

    exits: int
    seen: int = 0
    lower: Tensor | None = None
    upper: Tensor | None = None


@dataclass(frozen=True)
class Intersection:
    """The product of uniform intervals, exit by exit or over all of them at once.

    Example:
        >>> ends = torch.tensor([[0.0], [1.0]]), torch.tensor([[4.0], [9.0]])
        >>> Intersection()(*ends).lower.tolist(), Intersection()(*ends).upper.tolist()
        ([[0.0], [1.0]], [[4.0], [4.0]])
    """

    def start(self, exits: int) -> IntervalState:
        """The state before the first of `exits` exits."""
        return IntervalState(check_count(exits, "exits"))

    def step(self, state: IntervalState, lower: Any, upper: Any) -> tuple[IntervalState, Interval]:
        """Process the interval of the next exit; return the new state and the intersection so far."""
        if state.seen >= state.exits:
            raise StateError(
                f"a step after the last of {state.exits} exits",
                expected=f"at most {state.exits} steps",
                fix="call start(exits) for the next inputs",
            )
        low, high = _check_ends(lower, upper, exit=state.seen)
        if state.lower is None or state.upper is None:
            new_low, new_high = low, high
        elif low.shape != state.lower.shape:
            raise ShapeError(
                f"intervals of exit {state.seen + 1} have shape {tuple(low.shape)}",
                expected=f"{tuple(state.lower.shape)}, as the exits before it",
                fix="step all exits of the same inputs",
            )
        else:
            new_low, new_high = torch.maximum(state.lower, low), torch.minimum(state.upper, high)
        empty = new_low > new_high
        answer = Interval(torch.where(empty, low, new_low), torch.where(empty, high, new_high), empty)
        return IntervalState(state.exits, state.seen + 1, new_low, new_high), answer

    def __call__(self, lower: Any, upper: Any) -> Interval:
        """The answer at every exit from ends of shape `(exits, ...)`."""
        low, high = _same_shape(lower, upper, "")
        if low.ndim == 0 or low.shape[0] == 0:
            raise ShapeError(f"lower has shape {tuple(low.shape)}", expected="(exits, ...)", fix="stack the exits first")
        state, answers = self.start(low.shape[0]), []
        for now_low, now_high in zip(low, high, strict=True):
            state, answer = self.step(state, now_low, now_high)
            answers.append(answer)
        ends = ((answer.lower, answer.upper, answer.fell_back) for answer in answers)
        return Interval(*(torch.stack(part) for part in zip(*ends, strict=True)))


def _check_ends(lower: Any, upper: Any, *, exit: int) -> tuple[Tensor, Tensor]:
    low, high = _same_shape(lower, upper, f" of exit {exit + 1}")
    if not (low.is_floating_point() and high.is_floating_point()):
        raise DtypeError(f"ends are {low.dtype} and {high.dtype}", expected="floats", fix="convert them: .float()")
    wrong = ~(torch.isfinite(low) & torch.isfinite(high) & (low <= high))
    if bool(wrong.any()):
        row = int(wrong.reshape(wrong.shape[0] if wrong.ndim else 1, -1).any(-1).nonzero()[0])
        raise InputError(
            f"{int(wrong.sum())} intervals of exit {exit + 1} are not intervals, the first in row {row} (rows count from 0)",
            expected="finite ends with lower ≤ upper",
            fix="pass the lower ends first, then the upper ends",
        )
    return low, high


def _same_shape(lower: Any, upper: Any, where: str) -> tuple[Tensor, Tensor]:
    low, high = as_tensor(lower, "lower"), as_tensor(upper, "upper")
    if low.shape != high.shape:
        raise ShapeError(
            f"lower{where} has shape {tuple(low.shape)}, upper {tuple(high.shape)}",
            expected="one shape for both",
            fix="pass one lower and one upper end per input and exit",
        )
    return low, high

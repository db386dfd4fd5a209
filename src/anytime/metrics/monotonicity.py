"""Conditional monotonicity: does the answer for an input get worse (section 3, appendices B.1, B.5 and B.7 of the paper)?

All functions take trajectories of shape `(exits, batch)`, or of several rules `(exits, rules, batch)`, and return one value per
input, or one per exit and input.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

DROPS = (0.01, 0.05, 0.1, 0.2, 0.25, 0.33, 0.5)
ENTROPY_RISES = (0.01, 0.1, 0.5, 1.0)
SIZE_RISES = (1, 2, 5, 10)
ROUNDING = 8
"""The rounding error of a difference of two probabilities, in units of the last place of 1."""


def drop(trajectory: Tensor) -> Tensor:
    """The largest decrease between any earlier and any later exit, `(batch,)`; 0 if it never decreases (the paper's MPD).

    >>> round(drop(torch.tensor([[0.2], [0.9], [0.5], [0.6]])).item(), 4)
    0.4
    """
    return (trajectory.cummax(0).values - trajectory).amax(0)


def rise(trajectory: Tensor) -> Tensor:
    """The largest increase between any earlier and any later exit, `(batch,)` (the paper's MUI, of an uncertainty)."""
    return (trajectory - trajectory.cummin(0).values).amax(0)


def reach(values: Tensor, thresholds: Iterable[float], *, strict: bool = False) -> Tensor:
    """How many of `values`, in their last dimension, reach each threshold (≥, the paper's text) or, strictly, exceed it (>, its
    released code).

    A value that differs from a threshold only by rounding equals it: a drop from 0.6 to 0.5 is a drop of 0.1 on any processor.

    >>> reach(drop(torch.tensor([[0.6, 0.9], [0.5, 0.8]])), (0.1, 0.2)).tolist()
    [2, 0]
    """
    given, reached, error = values.double(), [], rounding(values)
    for limit in thresholds:  # numbers of Python, not a tensor of them: copying one to a GPU would wait for it
        near = min(error * max(limit, 1.0), abs(limit) / 2)  # 0 never reaches a positive threshold
        reached.append(given > limit + near if strict else given >= limit - near)
    return torch.stack(reached).sum(-1) if reached else given.new_zeros(0, dtype=torch.int64)


def rounding(values: Tensor) -> float:
    """The rounding error of differences of probabilities of this type."""
    return ROUNDING * torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0


def is_monotone(correct: Tensor) -> Tensor:
    """Inputs whose answer never goes from correct to wrong, `(batch,)`, including those never correct."""
    return (correct[:-1] <= correct[1:]).all(0)


def improvable(correct: Tensor) -> Tensor:
    """Wrong now, correct at an earlier exit: `(exits, batch)`. Its fraction of all wrong answers is hindsight improvability."""
    return ~correct & correct.cummax(0).values


def learned(correct: Tensor) -> Tensor:
    """The exit at which the answer is correct for the first time, as a one-hot `(exits, batch)`."""
    return first(correct)


def forgot(correct: Tensor) -> Tensor:
    """The first exit that is wrong after a correct one, as a one-hot `(exits, batch)`.

    The paper counts points "incorrectly classified for the first time"; literally that would include every
    input that is wrong at the first exit and forgot nothing.
    """
    return first(improvable(correct))


def first(event: Tensor) -> Tensor:
    """The first exit with an event, as a one-hot `(exits, batch)`."""
    return event & (event.cumsum(0) == 1)

"""Prediction sets per exit: regularised adaptive prediction sets (RAPS), both ways they are in use.

A set holds the most probable classes of a row, as many as a threshold admits; the threshold is the quantile of the
labels' scores on calibration rows. Sets are prefixes of the ranking, so the sorted probabilities of a row suffice.

`paper` is what the paper's released code does: the penalty is randomised with the probability, the quantile has the
finite-sample correction, sets may be empty. `original` is the public code of RAPS: only the probability is randomised,
the quantile is plain, and a set holds at least one class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from anytime.errors import OptionError, ShapeError
from anytime.metrics.trajectories import above_zero


@dataclass(frozen=True)
class Raps:
    """Settings of the sets.

    Args:
        alpha: Share of labels that may be missed.
        penalty: λ, added for each rank beyond `free`.
        free: k_reg, how many ranks come without penalty.
        variant: `paper` or `original`.
    """

    alpha: float = 0.05
    penalty: float = 0.01
    free: int = 5
    variant: Literal["paper", "original"] = "paper"

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1 or self.penalty < 0 or not math.isfinite(self.penalty) or self.free < 0:
            raise OptionError(
                f"alpha {self.alpha}, penalty {self.penalty}, free {self.free}",
                expected="alpha between 0 and 1, a penalty and a number of free ranks of at least 0",
                fix="the paper uses alpha=0.05, penalty=0.01, free=5",
            )
        if self.variant not in ("paper", "original"):
            raise OptionError(
                f"variant is {self.variant!r}", expected="'paper' or 'original'", fix="see anytime.conformal.Raps"
            )

    def label_score(self, ascending: Tensor, rank: Tensor, uniform: Tensor) -> Tensor:
        """The score of each row's label, which stands at `rank` (from 0) of the sorted row."""
        values = above_zero(ascending).flip(-1).exp()
        value, total = _at(values, rank), _at(values.cumsum(-1), rank)
        beyond = (rank + 1 - self.free).clamp(min=0)
        if self.variant == "original":
            return total - value + uniform * value + self.penalty * beyond
        return total + self.penalty * beyond - uniform * (value + self.penalty * (beyond > 0))

    def threshold(self, scores: Tensor) -> Tensor:
        """The quantile of the calibration scores, `(exits, rows)`, at each exit."""
        rows = scores.shape[-1]
        if rows == 0:
            raise ShapeError("no calibration rows", expected="at least one", fix="hold out more rows")
        if self.variant == "original":
            index = math.ceil((rows - 1) * (1 - self.alpha) - 1e-9)  # the "higher" of the two neighbours
        else:
            level = min(1.0, math.ceil((rows + 1) * (1 - self.alpha) - 1e-9) / rows)
            index = math.ceil((rows - 1) * level - 1e-9)
        return scores.sort(-1).values[..., index]

    def size(self, ascending: Tensor, threshold: Tensor, uniform: Tensor) -> Tensor:
        """How many classes each row's set holds: the set is that many of the most probable ones.

        Args:
            ascending: Sorted log-probabilities, `(exits, batch, classes)`, as `sort_rows` gives them.
            threshold: One an exit, `(exits,)`.
            uniform: One draw an exit and row, `(exits, batch)`.
        """
        classes = ascending.shape[-1]
        limit = threshold[:, None]
        values = above_zero(ascending[..., classes - self._reachable(limit, classes) :]).flip(-1).exp()
        beyond = (torch.arange(1, values.shape[-1] + 1, device=values.device) - self.free).clamp(min=0)
        sums = values.cumsum(-1)
        reach = sums + self.penalty * beyond
        if self.variant == "paper":
            step = values + self.penalty * (beyond > 0)
            return _count(reach - uniform[..., None] * step <= limit[..., None])
        size = (_count(reach <= limit[..., None]) + 1).clamp(max=values.shape[-1])
        value = _at(values, size - 1)
        below = _at(sums, size - 1) - value + self.penalty * (size - self.free).clamp(min=0)
        chance = (limit - below) / value.clamp(min=torch.finfo(value.dtype).tiny)
        size = (size - (uniform >= chance).long()).clamp(min=1)
        return torch.where(limit == 1.0, classes, size)

    def _reachable(self, limit: Tensor, classes: int) -> int:
        """A rank that no set goes beyond: by then the penalties alone exceed the threshold."""
        if self.penalty == 0 or not bool(torch.isfinite(limit).all()):
            return classes
        return min(classes, self.free + 2 + max(0, math.ceil(float(limit.max()) / self.penalty)))


def sort_rows(log_probs: Tensor) -> Tensor:
    """Each row sorted, the most probable class last."""
    if log_probs.device.type == "cpu":  # NumPy's sort is vectorised, some fifty times faster here
        return torch.from_numpy(np.sort(log_probs.detach().numpy(), -1))
    return log_probs.sort(-1).values


def rank_of(log_probs: Tensor, ascending: Tensor, labels: Tensor) -> Tensor:
    """The rank of each row's label, from 0; among equal probabilities the lower class index comes first.

    Args:
        log_probs: `(exits, batch, classes)`.
        ascending: The same, sorted.
        labels: `(batch,)`.
    """
    classes = log_probs.shape[-1]
    given = labels.expand(log_probs.shape[:-1]).unsqueeze(-1)
    value = log_probs.gather(-1, given)
    rank = classes - torch.searchsorted(ascending, value, right=True).squeeze(-1)
    equal = classes - rank - torch.searchsorted(ascending, value).squeeze(-1)
    tied = equal > 1
    if bool(tied.any()):
        index = torch.arange(classes, device=log_probs.device)
        rank[tied] += _count((log_probs[tied] == value[tied]) & (index < given[tied]))
    return rank


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _count(inside: Tensor) -> Tensor:
    return inside.float().sum(-1).long()  # a sum of floats is vectorised, one of booleans is not

"""Prediction sets per exit: regularised adaptive prediction sets (RAPS), both ways they are in use, and APS.

A set holds the most probable classes of a row, as many as a threshold admits; the threshold is the quantile of the
labels' scores on calibration rows. Sets are prefixes of the ranking, so the sorted probabilities of a row suffice.

`paper` is the score of the paper's released code: the penalty is randomised with the probability, and sets may be empty.
`original` is that of the public code of RAPS: only the probability is randomised, and a set holds at least one class. Without
a penalty either is APS. The quantile is the exact one by default, which keeps the coverage asked for with any number of rows;
`quantile="corrected"` is that of the paper's code, `quantile="plain"` that of the public code of RAPS, and neither keeps it.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from anytime.checks import check_choice, check_count, check_fraction, check_number
from anytime.errors import FewRowsWarning, ShapeError
from anytime.metrics.trajectories import above_zero

Quantile = Literal["exact", "corrected", "plain"]
_NEAR = 1e-9
"""(n + 1)(1 - α) is a whole number more often than its floating point value is."""


@dataclass(frozen=True)
class Raps:
    """Settings of the sets.

    Args:
        alpha: Fraction of labels that may be missed.
        penalty: λ, added for each rank beyond `free`; 0 is APS.
        free: k_reg, how many ranks come without penalty.
        variant: `paper` or `original`.
        randomised: Whether scores and sets use the draws. Without them every score is taken whole, on calibration rows
            too, and coverage lies above 1 - alpha by more. (The public code of RAPS adds one more class to such sets.)
        quantile: Of the n calibration scores. `exact` is the ⌈(n + 1)(1 - α)⌉-th smallest: coverage lies between 1 - α and
            1 - α + 1/(n + 1), and with fewer rows than 1/α - 1 sets hold all classes. `corrected` is the level
            ⌈(n + 1)(1 - α)⌉/n, at most 1, rounded to the higher score, most often one score further; with fewer rows than
            1/α - 1 coverage is below 1 - α. `plain` is the level 1 - α, without correction: coverage is below 1 - α.
        empty: Whether a set may be empty. None is yes for the paper's variant and no for the original.
    """

    alpha: float = 0.05
    penalty: float = 0.01
    free: int = 5
    variant: Literal["paper", "original"] = "paper"
    randomised: bool = True
    quantile: Quantile = "exact"
    empty: bool | None = None

    def __post_init__(self) -> None:
        check_fraction(self.alpha, "alpha")
        check_number(self.penalty, "penalty", low=0)
        check_count(self.free, "free", low=0)
        check_choice(self.variant, "variant", ("paper", "original"))
        check_choice(self.quantile, "quantile", get_args(Quantile))
        if self.empty is None:
            object.__setattr__(self, "empty", self.variant == "paper")

    def label_score(self, ascending: Tensor, rank: Tensor, uniform: Tensor) -> Tensor:
        """The score of each row's label, which stands at `rank` (from 0) of the sorted row."""
        values = above_zero(ascending).flip(-1).exp()
        return self._score(_at(values.cumsum(-1), rank), _at(values, rank), rank + 1, uniform)

    def threshold(self, scores: Tensor) -> Tensor:
        """The quantile of the calibration scores, `(exits, rows)`, at each exit."""
        rows = scores.shape[-1]
        if rows == 0:
            raise ShapeError("no calibration rows", expected="at least one", fix="hold out more rows")
        least = _least(rows, self.alpha)
        if self.quantile == "exact":
            if least > rows:
                return scores.new_full(scores.shape[:-1], math.inf)
            index = least - 1
        else:
            level = min(1.0, least / rows) if self.quantile == "corrected" else 1 - self.alpha
            index = math.ceil((rows - 1) * level - _NEAR)  # the "higher" of the two neighbours
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
        ranks = torch.arange(1, values.shape[-1] + 1, device=values.device)
        # Without draws, and for classes without probability, a score is a whole row's sum: 1 up to rounding, which must not
        # decide between classes.
        slack = 8 * torch.finfo(values.dtype).eps
        size = _count(self._score(values.cumsum(-1), values, ranks, uniform[..., None]) <= limit[..., None] + slack)
        if not self.empty:
            size = size.clamp(min=1)
        return torch.where((limit - 1).abs() <= slack, classes, size) if self.variant == "original" else size

    def _score(self, total: Tensor, value: Tensor, rank: Tensor, uniform: Tensor) -> Tensor:
        """The score of the class at `rank`, from 1: of probability `value`, `total` with those before it.

        It rises with the rank, so the classes whose score is at most the threshold are a prefix of the ranking. With
        the original's score, this prefix is the set that its code gets by shrinking a larger one by chance.
        """
        beyond = (rank - self.free).clamp(min=0)
        whole = total + self.penalty * beyond
        if not self.randomised:
            return whole
        if self.variant == "original":
            return whole - (1 - uniform) * value
        return whole - uniform * (value + self.penalty * (beyond > 0))

    def _reachable(self, limit: Tensor, classes: int) -> int:
        """A rank that no set goes beyond: by then the penalties alone exceed the threshold."""
        most = float(limit.max()) if limit.numel() else 0.0
        if self.penalty == 0 or not math.isfinite(most):
            return classes
        return min(classes, self.free + 2 + max(0, math.ceil(most / self.penalty)))


def warn_of_few_rows(raps: Raps, rows: int, *, stacklevel: int = 2) -> None:
    """Warn where so many calibration rows cannot give the coverage asked for by anything but sets of all classes.

    Args:
        raps: The settings.
        rows: How many calibration rows there are.
        stacklevel: Of the caller that the warning is for, as `warnings.warn` counts from here.
    """
    if rows == 0 or _least(rows, raps.alpha) <= rows:
        return
    needed = math.ceil(1 / raps.alpha - 1 - _NEAR / raps.alpha)
    what = "all sets hold all classes" if raps.quantile == "exact" else "coverage is lower than asked for"
    warnings.warn(
        f"{rows} calibration rows are too few for alpha={raps.alpha:g}: {what}. Hold out at least {needed} rows, or allow a "
        "larger alpha.",
        FewRowsWarning,
        stacklevel=stacklevel + 1,
    )


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


def members_of(log_probs: Tensor, ascending: Tensor, size: Tensor) -> Tensor:
    """The sets as booleans, `(..., batch, classes)`: the `size` most probable classes, in the order of `rank_of`."""
    classes = log_probs.shape[-1]
    last = _at(ascending, (classes - size).clamp(max=classes - 1)).unsqueeze(-1)
    above, equal = log_probs > last, log_probs == last
    room = size.unsqueeze(-1) - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def _least(rows: int, alpha: float) -> int:
    """How many of the scores of n + 1 exchangeable rows must not exceed the threshold."""
    return math.ceil((rows + 1) * (1 - alpha) - _NEAR)


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _count(inside: Tensor) -> Tensor:
    return inside.float().sum(-1).long()  # a sum of floats is vectorised, one of booleans is not

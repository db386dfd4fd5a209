"""Prediction sets per exit: regularised adaptive prediction sets (RAPS), in both published variants, and APS.

A set holds the most probable classes of a row, as many as a threshold admits; the threshold is a quantile of the labels' scores
on calibration rows. Sets are prefixes of the ranking, so the sorted probabilities of a row suffice.

`paper` is the score of the paper's released code: the penalty is randomised together with the probability, and sets may be
empty. `original` is that of the public code of RAPS: only the probability is randomised, and a set holds at least one class.
With a penalty of 0 both are APS. The default quantile is exact, which guarantees the coverage with any number of rows;
`quantile="corrected"` (the paper's code) and `quantile="plain"` (the public code of RAPS) do not.
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
"""Tolerance for (n + 1)(1 - α), which may be a whole number while its floating-point value is not."""
SLACK = 8 * torch.finfo(torch.float32).eps
"""Unrandomised scores, and those of classes without probability, are sums of whole rows: 1 up to rounding, which must not
decide between classes. It is that of float32 for float64 too: rows of both types may have one threshold."""


@dataclass(frozen=True)
class Raps:
    """Settings of the sets; `lam_reg` and `k_reg` are named as in the RAPS paper.

    Args:
        alpha: The fraction of labels that may be missed.
        lam_reg: λ, the penalty for each rank beyond `k_reg`; 0 is APS.
        k_reg: The number of ranks without a penalty.
        variant: `paper` or `original`.
        randomised: Whether scores and sets are randomised. Otherwise coverage exceeds 1 - alpha by more. (The public code of
            RAPS adds one more class to sets that are not.)
        quantile: Of the n calibration scores. `exact` is the ⌈(n + 1)(1 - α)⌉-th smallest: coverage is between 1 - α and
            1 - α + 1/(n + 1), and with fewer rows than 1/α - 1 sets hold all classes. `corrected` is the level
            ⌈(n + 1)(1 - α)⌉/n, at most 1, rounded to the higher score, usually one score further; with fewer rows than
            1/α - 1 coverage is below 1 - α. `plain` is the level 1 - α without correction: coverage is below 1 - α.
        empty: Whether a set may be empty. None: yes for `paper`, no for `original`.
    """

    alpha: float = 0.05
    lam_reg: float = 0.01
    k_reg: int = 5
    variant: Literal["paper", "original"] = "paper"
    randomised: bool = True
    quantile: Quantile = "exact"
    empty: bool | None = None

    def __post_init__(self) -> None:
        check_fraction(self.alpha, "alpha")
        check_number(self.lam_reg, "lam_reg", low=0)
        check_count(self.k_reg, "k_reg", low=0)
        check_choice(self.variant, "variant", ("paper", "original"))
        check_choice(self.quantile, "quantile", get_args(Quantile))
        if self.empty is None:
            object.__setattr__(self, "empty", self.variant == "paper")

    def label_score(self, ascending: Tensor, rank: Tensor, uniform: Tensor) -> Tensor:
        """The score of each row's label, which has this `rank` (from 0) in the sorted row."""
        values = above_zero(ascending).flip(-1).exp()
        return self._score(_at(values.cumsum(-1), rank), _at(values, rank), rank + 1, uniform)

    def threshold(self, scores: Tensor) -> Tensor:
        """The quantile of the calibration scores, `(exits, rows)`, at each exit."""
        rows = scores.shape[-1]
        if rows == 0:
            raise ShapeError("there are no calibration rows", expected="at least one", fix="hold out more rows")
        least = _least(rows, self.alpha)
        if self.quantile == "exact":
            if least > rows:
                return scores.new_full(scores.shape[:-1], math.inf)
            index = least - 1
        else:
            level = min(1.0, least / rows) if self.quantile == "corrected" else 1 - self.alpha
            index = math.ceil((rows - 1) * level - _NEAR)  # the "higher" of the two neighbours
        return scores.kthvalue(index + 1).values

    def size(self, ascending: Tensor, threshold: Tensor, uniform: Tensor) -> Tensor:
        """How many classes each row's set holds: the set is that many of the most probable ones.

        Args:
            ascending: Sorted log-probabilities, `(exits, batch, classes)`, from `sort_rows`.
            threshold: One per exit, `(exits,)`.
            uniform: Random numbers from 0 to 1, `(exits, batch)`.
        """
        classes = ascending.shape[-1]
        limit = threshold[:, None]
        values = above_zero(ascending[..., classes - self._reachable(limit, classes) :]).flip(-1).exp()
        ranks = torch.arange(1, values.shape[-1] + 1, device=values.device)
        size = _count(self._score(values.cumsum(-1), values, ranks, uniform[..., None]) <= limit[..., None] + SLACK)
        if not self.empty:
            size = size.clamp(min=1)
        return torch.where((limit - 1).abs() <= SLACK, classes, size) if self.variant == "original" else size

    def _score(self, total: Tensor, value: Tensor, rank: Tensor, uniform: Tensor) -> Tensor:
        """The score of the class at `rank`, from 1: of probability `value`, `total` with those before it.

        It increases with the rank, so the classes whose score is at most the threshold are a prefix of the ranking. For
        `original`, this prefix is the set that its code gets by randomly shrinking a larger one.
        """
        beyond = (rank - self.k_reg).clamp(min=0)
        whole = total + self.lam_reg * beyond
        if not self.randomised:
            return whole
        if self.variant == "original":
            return whole - (1 - uniform) * value
        return whole - uniform * (value + self.lam_reg * (beyond > 0))

    def _reachable(self, limit: Tensor, classes: int) -> int:
        """A rank that no set exceeds: from there on the penalties alone exceed the threshold."""
        most = float(limit.max()) if limit.numel() else 0.0
        if self.lam_reg == 0 or not math.isfinite(most):
            return classes
        return min(classes, self.k_reg + 2 + max(0, math.ceil(most / self.lam_reg)))


def warn_of_few_rows(raps: Raps, rows: int, *, stacklevel: int = 2) -> None:
    """Warn if there are too few calibration rows for the coverage, unless sets hold all classes.

    Args:
        raps: The settings.
        rows: The number of calibration rows.
        stacklevel: As for `warnings.warn`.
    """
    if rows == 0 or _least(rows, raps.alpha) <= rows:
        return
    needed = math.ceil(1 / raps.alpha - 1 - _NEAR / raps.alpha)
    what = "all sets hold all classes" if raps.quantile == "exact" else "coverage is below 1 - alpha"
    warnings.warn(
        f"{rows} calibration rows are too few for alpha={raps.alpha:g}: {what}. Hold out at least {needed} rows, or allow a "
        "larger alpha.",
        FewRowsWarning,
        stacklevel=stacklevel + 1,
    )


def sort_rows(log_probs: Tensor) -> Tensor:
    """Each row sorted, the most probable class last."""
    if log_probs.device.type == "cpu":  # NumPy's sort is vectorised, about fifty times faster here
        return torch.from_numpy(np.sort(log_probs.detach().numpy(), -1))
    return log_probs.sort(-1).values


def rank_of(log_probs: Tensor, ascending: Tensor, labels: Tensor) -> Tensor:
    """The rank of each row's label, from 0; among equal probabilities the lower class index is first.

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
    left = size.unsqueeze(-1) - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= left))


def _least(rows: int, alpha: float) -> int:
    """How many of the scores of n + 1 exchangeable rows must be at most the threshold."""
    return math.ceil((rows + 1) * (1 - alpha) - _NEAR)


def _at(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _count(inside: Tensor) -> Tensor:
    return inside.float().sum(-1).long()  # a sum of floats is vectorised, one of booleans is not

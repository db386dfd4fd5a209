"""Prediction sets as a fitted object: one threshold per exit, found on held-out rows.

Each exit is calibrated separately, so coverage is marginal and holds per exit: not for all exits at once, and not for each
input. With `simultaneous=True` the exits are calibrated jointly: the label is in all sets at once, so also in their running
intersection, with probability 1 - α. The sets belong to the rule they were calibrated for; a temperature is part of that rule
(`anytime.combine.Scaled`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from anytime.checks import check_count, check_labels, check_log_probs, check_logits, check_seed
from anytime.combine import Rule, parse_rule
from anytime.combine.named import as_rule, name_of
from anytime.conformal.nesting import SetMetrics, measure_sets
from anytime.conformal.raps import Quantile, Raps, members_of, rank_of, sort_rows, warn_of_few_rows
from anytime.errors import OptionError, ShapeError
from anytime.fitted import Fitted
from anytime.threads import one_thread_for_few

PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)
"""The values of λ that the original chooses from."""
TUNING_FRACTION = 0.3
_SPLIT, _CALIBRATION, _USE = range(3)  # random streams of a seed
_OLD_NAMES = {"rule": "text", "penalties": "lam_reg", "free": "k_reg"}


@dataclass(frozen=True)
class ConformalSets(Fitted, kind="conformal-sets", version=2, oldest=1, renamed=_OLD_NAMES):
    """Prediction sets at every exit, as `fit_conformal_sets` returns them.

    Args:
        text: The rule they were calibrated for, as text, or None if they were fitted on log-probabilities.
        variant, alpha, randomised, quantile, empty: As in `Raps`.
        lam_reg, k_reg: As in `Raps`, at each exit.
        thresholds: The quantile of the calibration scores at each exit.
        simultaneous: Whether coverage holds for all exits at once.
        shared: Whether a row uses one random number for all exits, so that its set sizes only differ by the exits.
        rows: The number of rows that gave the quantiles.
    """

    text: str | None
    variant: Literal["paper", "original"]
    alpha: float
    randomised: bool
    quantile: Quantile
    empty: bool
    lam_reg: tuple[float, ...]
    k_reg: tuple[int, ...]
    thresholds: tuple[float, ...]
    simultaneous: bool
    shared: bool
    rows: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values in (("lam_reg", self.lam_reg), ("k_reg", self.k_reg), ("thresholds", self.thresholds)):
            if len(values) != self.exits or any(math.isnan(value) for value in values):
                raise OptionError(
                    f"{name} is {values}", expected=f"{self.exits} numbers, one per exit", fix="fit the sets again"
                )
        _ = self._raps  # checks the settings

    @property
    def rule(self) -> Rule[Any] | None:
        """The rule they were calibrated for, or None if they were fitted on log-probabilities."""
        return None if self.text is None else parse_rule(self.text)

    def sizes(self, log_probs: Any, *, seed: int = 0) -> Tensor:
        """The number of classes in each set, `(exits, batch)`.

        Args:
            log_probs: The rule's log-probabilities, `(exits, batch, classes)`.
            seed: Of the randomisation.
        """
        given = self._checked(log_probs)
        return self._sizes(given, sort_rows(given), seed)

    def sets(self, log_probs: Any, *, seed: int = 0) -> Tensor:
        """The sets as booleans, `(exits, batch, classes)`; arguments as for `sizes`."""
        given = self._checked(log_probs)
        ascending = sort_rows(given)
        return members_of(given, ascending, self._sizes(given, ascending, seed))

    def set_at(self, exit: int, log_probs: Tensor, draw: torch.Generator | Tensor | float | None = None) -> Tensor:
        """The sets at one exit, `(batch, classes)`, for use while a model runs.

        Args:
            exit: Counted from 1.
            log_probs: The rule's log-probabilities there, `(batch, classes)`.
            draw: A generator, or random numbers from 0 to 1, one per row or one for all; with `shared`, the same for all
                exits of a row. Not needed if sets are not randomised.
        """
        check_count(exit, "exit", most=self.exits)
        if log_probs.ndim != 2:
            raise ShapeError(
                f"log_probs has shape {tuple(log_probs.shape)}", expected="(batch, classes)", fix="use sets() for all exits"
            )
        self.check_fits(self.exits, log_probs.shape[1])
        if draw is None and self.randomised:
            raise OptionError(
                "draw is None, and the sets are randomised",
                expected="a torch.Generator, or one number from 0 to 1 per row",
                fix="keep one generator, or fit with Raps(randomised=False)",
            )
        if isinstance(draw, torch.Generator):
            draw = torch.rand(len(log_probs), generator=draw, dtype=torch.float32, device=draw.device)
        uniform = torch.as_tensor(0.0 if draw is None else draw).to(log_probs).expand(len(log_probs))
        ascending = sort_rows(log_probs)
        limit = log_probs.new_tensor(self.thresholds[exit - 1 : exit])
        size = self._raps[exit - 1].size(ascending[None], limit, uniform[None])[0]
        return members_of(log_probs, ascending, size)

    def measure(self, log_probs: Any, labels: Any, *, seed: int = 0) -> SetMetrics:
        """Size, coverage, rise and nestedness on other rows than those it was fitted on."""
        return measure_sets(self.sets(log_probs, seed=seed), labels)

    @cached_property
    def _raps(self) -> tuple[Raps, ...]:
        settings = Raps(self.alpha, variant=self.variant, randomised=self.randomised, quantile=self.quantile, empty=self.empty)
        return tuple(replace(settings, lam_reg=lam, k_reg=k) for lam, k in zip(self.lam_reg, self.k_reg, strict=True))

    def _checked(self, log_probs: Any) -> Tensor:
        given = check_log_probs(log_probs)
        self.check_fits(given.shape[0], given.shape[2])
        return given

    def _sizes(self, log_probs: Tensor, ascending: Tensor, seed: int) -> Tensor:
        uniform = _uniform(log_probs, seed, _USE, shared=self.shared)
        limits = log_probs.new_tensor(self.thresholds)
        return torch.cat(
            [raps.size(ascending[m, None], limits[m, None], uniform[m, None]) for m, raps in enumerate(self._raps)]
        )


@one_thread_for_few
def fit_conformal_sets(
    logits: Any,
    labels: Any,
    *,
    rule: str | Rule[Any] | Fitted | None = "product",
    raps: Raps = Raps(),  # noqa: B008 - frozen
    tune: bool = False,
    simultaneous: bool = False,
    shared: bool = False,
    seed: int = 0,
) -> ConformalSets:
    """Calibrate prediction sets on held-out rows.

    Args:
        logits: `(exits, rows, classes)`; with `rule=None`, log-probabilities from any rule.
        labels: `(rows,)`.
        rule: The rule whose predictions get sets: a rule, its text, or a fitted rule.
        raps: The settings.
        tune: Choose λ and k_reg of each exit on a random 30 % of the rows, as the original does, and calibrate on the rest.
        simultaneous: Calibrate all exits jointly: the score of a row is the highest rank, over the exits, of its label's score
            among those of 30 % of the rows, and the rest give its quantile. Sets are larger, and the label is in all of them
            at once with probability 1 - α.
        shared: Use one random number per row for all exits.
        seed: Of the random split and the randomisation.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> logits, labels = torch.randn(2, 400, 10, generator=generator), torch.arange(400) % 10
        >>> fit_conformal_sets(logits, labels, rule="latest", raps=Raps(alpha=0.1)).rows
        400
    """
    if rule is None:
        log_probs, text = check_log_probs(logits), None
    else:
        given = check_logits(logits)
        known = as_rule(rule, exits=given.shape[0], classes=given.shape[2])
        log_probs, text = known(given).log_probs, name_of(known)
    exits, rows, classes = log_probs.shape
    wanted = check_labels(labels, batch=rows, classes=classes, device=log_probs.device)
    uniform = _uniform(log_probs, seed, _CALIBRATION, shared=shared)
    ascending = sort_rows(log_probs)
    rank = rank_of(log_probs, ascending, wanted)
    settings: Sequence[Raps] = (raps,) * exits
    chosen, rest = tuning_split(rows, seed) if tune or simultaneous else (slice(0), slice(rows))
    if tune:
        settings = _tuned(raps, ascending[:, chosen], rank[:, chosen], uniform[:, chosen])
    warn_of_few_rows(raps, len(wanted[rest]))
    scored = zip(settings, ascending, rank, uniform, strict=True)
    scores = torch.stack([each.label_score(a, r, u) for each, a, r, u in scored])
    thresholds = _jointly(raps, scores[:, chosen], scores[:, rest]) if simultaneous else raps.threshold(scores[:, rest])
    assert raps.empty is not None  # set by Raps
    return ConformalSets(
        exits=exits,
        classes=classes,
        text=text,
        variant=raps.variant,
        alpha=raps.alpha,
        randomised=raps.randomised,
        quantile=raps.quantile,
        empty=raps.empty,
        lam_reg=tuple(each.lam_reg for each in settings),
        k_reg=tuple(each.k_reg for each in settings),
        thresholds=tuple(thresholds.tolist()),
        simultaneous=simultaneous,
        shared=shared,
        rows=len(wanted[rest]),
    )


conformal_sets = fit_conformal_sets
"""The name at the top level: `anytime.conformal_sets`."""


def tuning_split(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """A random split of the held-out rows: 30 % to choose λ and k_reg, the others for the quantile.

    A temperature fitted on the first part does not affect the guarantee.
    """
    order = torch.from_numpy(np.random.default_rng([check_seed(seed), _SPLIT]).permutation(rows))
    chosen = math.ceil(TUNING_FRACTION * rows)
    if chosen == rows:
        raise ShapeError(f"{rows} rows to tune and calibrate on", expected="at least two", fix="hold out more rows")
    return order[:chosen].sort().values, order[chosen:].sort().values


def _jointly(raps: Raps, known: Tensor, scores: Tensor) -> Tensor:
    """Thresholds, one per exit, that the scores of a new row are below at all exits at once with probability 1 - α."""
    ladder = known.sort(-1).values
    below = torch.searchsorted(ladder, scores.contiguous())  # how many of the known scores are smaller
    highest = raps.threshold(below.amax(0)[None].double())
    unbounded = torch.cat((ladder, ladder.new_full((len(ladder), 1), math.inf)), -1)
    return unbounded[:, int(highest.clamp(max=ladder.shape[-1]))]


def _tuned(raps: Raps, ascending: Tensor, ranks: Tensor, uniform: Tensor) -> list[Raps]:
    """At each exit: k_reg by the labels' ranks, then the λ with the smallest sets on the same rows."""
    found = []
    for rows, rank, draws in zip(ascending, ranks, uniform, strict=True):
        k_reg = int(np.quantile(rank.cpu().numpy(), 1 - raps.alpha, method="higher")) + 1
        trials = [replace(raps, lam_reg=lam_reg, k_reg=k_reg) for lam_reg in PENALTIES]
        found.append(min(trials, key=lambda trial: _mean_size(trial, rows, rank, draws)))
    return found


def _mean_size(raps: Raps, ascending: Tensor, rank: Tensor, uniform: Tensor) -> float:
    limit = raps.threshold(raps.label_score(ascending, rank, uniform)[None])
    return float(raps.size(ascending[None], limit, uniform[None]).double().mean())


def _uniform(log_probs: Tensor, seed: int, stream: int, *, shared: bool = False) -> Tensor:
    """Random numbers from 0 to 1, `(exits, rows)`; those of the first rows do not depend on how many follow."""
    exits, rows, _ = log_probs.shape
    drawn = np.random.default_rng([check_seed(seed), stream]).random((rows, 1 if shared else exits))
    return torch.from_numpy(drawn).to(log_probs).T.expand(exits, rows)

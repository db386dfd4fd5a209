"""Prediction sets as a fitted object: one threshold an exit, found on held-out rows and kept beside a model.

Each exit is calibrated by itself, so coverage holds at each exit by itself, over the draw of calibration and test rows
(marginally): not for all exits at once and not for each input. With `simultaneous=True` the exits are calibrated together,
and the label is in all sets at once, so also in their running intersection, with probability 1 - α. The sets belong to the
rule they were calibrated for; a temperature is part of that rule (`anytime.combine.Scaled`).
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

from anytime.checks import check_labels, check_log_probs, check_logits, check_seed
from anytime.combine import Rule, parse_rule
from anytime.combine.named import name_of
from anytime.conformal.nesting import SetFigures, measure_sets
from anytime.conformal.raps import Quantile, Raps, members_of, rank_of, sort_rows, warn_of_few_rows
from anytime.errors import OptionError, ShapeError
from anytime.fitted import Fitted

PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)
"""The values of λ that the original chooses from."""
TUNING_SHARE = 0.3
_SPLIT, _CALIBRATION, _USE = range(3)  # streams of draws that a seed gives


@dataclass(frozen=True)
class ConformalSets(Fitted, kind="conformal-sets"):
    """Prediction sets at every exit, as `fit_sets` gives them.

    Args:
        rule: The text of the rule they were calibrated for, or None if they were fitted on log-probabilities.
        variant, alpha, randomised, quantile, empty: As in `Raps`.
        penalties, free: λ and k_reg at each exit.
        thresholds: The quantile of the calibration scores at each exit.
        simultaneous: Whether coverage is that of all exits at once.
        shared: Whether a row has one draw for all exits, so that sizes differ between exits for no reason but the exits.
        rows: How many rows gave the quantiles.
    """

    rule: str | None
    variant: Literal["paper", "original"]
    alpha: float
    randomised: bool
    quantile: Quantile
    empty: bool
    penalties: tuple[float, ...]
    free: tuple[int, ...]
    thresholds: tuple[float, ...]
    simultaneous: bool
    shared: bool
    rows: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, values in (("penalties", self.penalties), ("free", self.free), ("thresholds", self.thresholds)):
            if len(values) != self.exits or any(math.isnan(value) for value in values):
                raise OptionError(f"{name} are {values}", expected=f"{self.exits} numbers", fix="one an exit")
        _ = self._raps  # a file's settings are checked when it is read

    def sizes(self, log_probs: Any, *, seed: int = 0) -> Tensor:
        """How many classes each set holds, `(exits, batch)`.

        Args:
            log_probs: What the rule gives, `(exits, batch, classes)`.
            seed: Of the draws.
        """
        given = self._checked(log_probs)
        return self._sizes(given, sort_rows(given), seed)

    def sets(self, log_probs: Any, *, seed: int = 0) -> Tensor:
        """The sets as booleans, `(exits, batch, classes)`; the arguments are those of `sizes`."""
        given = self._checked(log_probs)
        ascending = sort_rows(given)
        return members_of(given, ascending, self._sizes(given, ascending, seed))

    def set_at(self, exit: int, log_probs: Tensor, draw: torch.Generator | Tensor | float | None = None) -> Tensor:
        """The sets at one exit, `(batch, classes)`, for use while a model runs.

        Args:
            exit: Which one, from 1.
            log_probs: What the rule gives there, `(batch, classes)`.
            draw: A generator to draw from, or the draws: numbers from 0 to 1, one a row or one for all. Where draws are
                `shared`, keep those of a row over its exits. Not needed where sets are not randomised.
        """
        if not 1 <= exit <= self.exits:
            raise OptionError(f"exit is {exit}", expected=f"1 to {self.exits}", fix="give the number of an exit, from 1")
        if log_probs.ndim != 2:
            raise ShapeError(
                f"log_probs has shape {tuple(log_probs.shape)}", expected="(batch, classes)", fix="use sets() for all exits"
            )
        self.check_fits(self.exits, log_probs.shape[1])
        uniform = self._draw(draw, log_probs)
        ascending = sort_rows(log_probs)
        limit = log_probs.new_tensor(self.thresholds[exit - 1 : exit])
        size = self._raps[exit - 1].size(ascending[None], limit, uniform[None])[0]
        return members_of(log_probs, ascending, size)

    def measure(self, log_probs: Any, labels: Any, *, seed: int = 0) -> SetFigures:
        """Size, coverage, rise and nestedness on other rows than those it was fitted on."""
        return measure_sets(self.sets(log_probs, seed=seed), labels)

    @cached_property
    def _raps(self) -> tuple[Raps, ...]:
        settings = Raps(self.alpha, variant=self.variant, randomised=self.randomised, quantile=self.quantile, empty=self.empty)
        return tuple(
            replace(settings, penalty=penalty, free=free) for penalty, free in zip(self.penalties, self.free, strict=True)
        )

    def _checked(self, log_probs: Any) -> Tensor:
        given = check_log_probs(log_probs)
        self.check_fits(given.shape[0], given.shape[2])
        return given

    def _sizes(self, log_probs: Tensor, ascending: Tensor, seed: int) -> Tensor:
        uniform = _draws(log_probs, seed, _USE, shared=self.shared)
        limits = log_probs.new_tensor(self.thresholds)
        return torch.cat(
            [raps.size(ascending[m, None], limits[m, None], uniform[m, None]) for m, raps in enumerate(self._raps)]
        )

    def _draw(self, draw: torch.Generator | Tensor | float | None, log_probs: Tensor) -> Tensor:
        if isinstance(draw, torch.Generator):
            return torch.rand(len(log_probs), generator=draw, device=draw.device).to(log_probs)
        if draw is None and self.randomised:
            raise OptionError(
                "no draw came for a randomised set",
                expected="a torch.Generator, or a number from 0 to 1 a row",
                fix="keep one generator, or fit with Raps(randomised=False)",
            )
        return torch.as_tensor(0.0 if draw is None else draw).to(log_probs).expand(len(log_probs))


def fit_sets(
    logits: Any,
    labels: Any,
    *,
    rule: str | Rule[Any] | None = "product",
    raps: Raps = Raps(),  # noqa: B008 - frozen
    tune: bool = False,
    simultaneous: bool = False,
    shared: bool = False,
    seed: int = 0,
) -> ConformalSets:
    """Calibrate prediction sets on held-out rows.

    Args:
        logits: `(exits, rows, classes)`; with `rule=None`, log-probabilities of any rule of your own.
        labels: `(rows,)`.
        rule: The rule whose answers get sets, by name or as an object.
        raps: The settings.
        tune: Choose λ and k_reg of each exit on 30 % of the rows, as the original does, and calibrate on the rest.
        simultaneous: Calibrate all exits together: the score of a row is the worst, over the exits, of its label's place
            among the scores of 30 % of the rows, and the rest give its quantile. Sets are larger, and the label is in all of
            them at once with the probability asked for.
        shared: Use one draw a row for all exits instead of fresh ones.
        seed: Of the tuning split and the draws.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> logits, labels = torch.randn(2, 400, 10, generator=generator), torch.arange(400) % 10
        >>> fit_sets(logits, labels, rule="latest", raps=Raps(alpha=0.1)).rows
        400
    """
    if rule is None:
        log_probs, text = check_log_probs(logits), None
    else:
        known = parse_rule(rule) if isinstance(rule, str) else rule
        log_probs, text = known(check_logits(logits)).log_probs, name_of(known)
    exits, rows, classes = log_probs.shape
    wanted = check_labels(labels, batch=rows, classes=classes, device=log_probs.device)
    uniform = _draws(log_probs, seed, _CALIBRATION, shared=shared)
    ascending = sort_rows(log_probs)
    rank = rank_of(log_probs, ascending, wanted)
    settings: Sequence[Raps] = (raps,) * exits
    chosen, rest = tuning_split(rows, seed) if tune or simultaneous else (slice(0), slice(rows))
    if tune:
        settings = _tuned(raps, ascending[:, chosen], rank[:, chosen], uniform[:, chosen])
    warn_of_few_rows(raps, len(wanted[rest]))
    scored = zip(settings, ascending, rank, uniform, strict=True)
    scores = torch.stack([each.label_score(a, r, u) for each, a, r, u in scored])
    thresholds = _together(raps, scores[:, chosen], scores[:, rest]) if simultaneous else raps.threshold(scores[:, rest])
    assert raps.empty is not None  # Raps fills it in
    return ConformalSets(
        exits=exits,
        classes=classes,
        rule=text,
        variant=raps.variant,
        alpha=raps.alpha,
        randomised=raps.randomised,
        quantile=raps.quantile,
        empty=raps.empty,
        penalties=tuple(each.penalty for each in settings),
        free=tuple(each.free for each in settings),
        thresholds=tuple(thresholds.tolist()),
        simultaneous=simultaneous,
        shared=shared,
        rows=len(wanted[rest]),
    )


def tuning_split(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Which of the held-out rows choose λ and k_reg (30 %, by lot), and which give the quantile.

    A temperature that is fitted on the first of these leaves the guarantee as it is.
    """
    order = torch.from_numpy(np.random.default_rng([check_seed(seed), _SPLIT]).permutation(rows))
    chosen = math.ceil(TUNING_SHARE * rows)
    if chosen == rows:
        raise ShapeError(f"{rows} rows to tune and calibrate on", expected="at least two", fix="hold out more rows")
    return order[:chosen].sort().values, order[chosen:].sort().values


def _together(raps: Raps, known: Tensor, scores: Tensor) -> Tensor:
    """Thresholds, one an exit, that the scores of a new row stay under at all exits at once with the probability asked for."""
    ladder = known.sort(-1).values
    below = torch.searchsorted(ladder, scores.contiguous())  # how many of the known scores are smaller
    worst = raps.threshold(below.amax(0)[None].double())
    endless = torch.cat((ladder, ladder.new_full((len(ladder), 1), math.inf)), -1)
    return endless[:, int(worst.clamp(max=ladder.shape[-1]))]


def _tuned(raps: Raps, ascending: Tensor, ranks: Tensor, uniform: Tensor) -> list[Raps]:
    """At each exit: k_reg by the labels' ranks, then the λ with the smallest sets on the same rows."""
    found = []
    for rows, rank, draws in zip(ascending, ranks, uniform, strict=True):
        free = int(np.quantile(rank.cpu().numpy(), 1 - raps.alpha, method="higher")) + 1
        trials = [replace(raps, penalty=penalty, free=free) for penalty in PENALTIES]
        found.append(min(trials, key=lambda trial: _mean_size(trial, rows, rank, draws)))
    return found


def _mean_size(raps: Raps, ascending: Tensor, rank: Tensor, uniform: Tensor) -> float:
    limit = raps.threshold(raps.label_score(ascending, rank, uniform)[None])
    return float(raps.size(ascending[None], limit, uniform[None]).double().mean())


def _draws(log_probs: Tensor, seed: int, stream: int, *, shared: bool = False) -> Tensor:
    """One number an exit and row, `(exits, rows)`; the first rows get the same whatever comes after them."""
    exits, rows, _ = log_probs.shape
    drawn = np.random.default_rng([check_seed(seed), stream]).random((rows, 1 if shared else exits))
    return torch.from_numpy(drawn).to(log_probs).T.expand(exits, rows)

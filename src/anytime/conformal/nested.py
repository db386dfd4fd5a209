"""Sets of classes that are nested over the exits: what has been ruled out stays out (anytime-valid, after Jazbec et al.).

The evidence α_l(y) of exit l is its logit where that reaches a threshold θ_l and is positive, else 0. One draw
π_l ~ Dirichlet(α_l) an input and exit gives the ratio R_t(y) = Π_{l≤t} [α_l(y) / Σ α_l] / π_l(y), infinite for good once
a class is without evidence. The set after t exits holds the classes whose ratio never exceeded 1/α.

What is promised: given the label, and were π_l drawn from the Dirichlet that has seen it, Dirichlet(α_l + e_y), the ratio of
the label would be a martingale of mean 1, and by Ville's inequality the label would stay in all sets at once with
probability 1 - α. Nobody has that draw before the label is known. With the one that can be had, from Dirichlet(α_l), the
proof is gone; coverage rests on the thresholds, which are chosen on held-out rows so that it is met there. Hence it holds about
as well on rows like these, and not beyond; `anytime conformal` measures it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.checks import check_fraction, check_labels, check_logits, check_number, check_seed, check_step
from anytime.errors import LabelError, OptionError, StateError
from anytime.fitted import Fitted

_CALIBRATION, _USE = range(2)  # streams of draws that a seed gives


@dataclass(frozen=True)
class NestedState:
    """Where some inputs stand after `seen` exits.

    Attributes:
        seed: Of the draws.
        log_ratio: Logarithm of R so far, `(batch, classes)`.
        inside: The set so far, `(batch, classes)`.
    """

    seed: int
    seen: int = 0
    log_ratio: Tensor | None = None
    inside: Tensor | None = None


@dataclass(frozen=True)
class NestedAnswer:
    """The sets at one exit, or at all of them with one more dimension in front.

    Attributes:
        members: `(..., batch, classes)`.
        empty: `(..., batch)`, true where no class is left: the exits contradict each other, often on unusual inputs.
    """

    members: Tensor
    empty: Tensor


@dataclass(frozen=True)
class NestedSets(Fitted, kind="nested-sets"):
    """Nested sets of classes, as `fit_nested` gives them.

    Args:
        alpha: Share of labels that may be missed.
        thresholds: θ, one an exit.
        rows: How many rows chose them.
        coverage: Share of these rows whose label is in the sets up to each exit.
    """

    alpha: float
    thresholds: tuple[float, ...]
    rows: int
    coverage: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self.alpha, "alpha")
        for name, values in (("thresholds", self.thresholds), ("coverage", self.coverage)):
            if len(values) != self.exits or not all(math.isfinite(value) for value in values):
                raise OptionError(f"{name} are {values}", expected=f"{self.exits} finite numbers", fix="one an exit")

    @property
    def reached(self) -> bool:
        """Whether coverage was at least 1 - alpha on the rows that chose the thresholds, with one more row that is missed."""
        return bool(_enough(torch.tensor(self.coverage[-1]), self.rows, self.alpha))

    def start(self, seed: int = 0) -> NestedState:
        """The state of some inputs before the first exit; other inputs need another seed to have draws of their own."""
        return NestedState(seed)

    def step(self, state: NestedState, logits: Any) -> tuple[NestedState, NestedAnswer]:
        """Take the logits of the next exit, `(batch, classes)`; give the new state and the sets so far."""
        if state.seen >= self.exits:
            raise StateError(
                f"a step after the last of {self.exits} exits",
                expected=f"at most {self.exits} steps",
                fix="begin anew: start()",
            )
        given = check_step(logits, exit=state.seen, like=state.log_ratio)
        self.check_fits(self.exits, given.shape[1])
        ratio = log_ratio(given, self.thresholds[state.seen], log_gammas(given, [state.seed, _USE, state.seen]))
        if state.log_ratio is not None:
            ratio = ratio + state.log_ratio
        inside = ratio <= -math.log(self.alpha)
        if state.inside is not None:
            inside = inside & state.inside
        after = NestedState(state.seed, state.seen + 1, ratio, inside)
        return after, NestedAnswer(inside, ~inside.any(-1))

    def __call__(self, logits: Any, *, seed: int = 0) -> NestedAnswer:
        """The sets at every exit from logits of shape `(exits, batch, classes)`."""
        given = check_logits(logits)
        self.check_fits(given.shape[0], given.shape[2])
        state, answers = self.start(seed), []
        for now in given:
            state, answer = self.step(state, now)
            answers.append(answer)
        return NestedAnswer(torch.stack([a.members for a in answers]), torch.stack([a.empty for a in answers]))


def fit_nested(
    logits: Any, labels: Any, *, alpha: float = 0.05, first: float = 1.0, raise_by: float = 0.5, seed: int = 0
) -> NestedSets:
    """Choose the thresholds of nested sets on held-out rows.

    Exit by exit the threshold is raised, which makes sets smaller, while at least 1 - alpha of the labels are in all sets,
    where one more label counts as missed: without it few rows would promise more than they can show. Where not even `first`
    admits so many, the search begins at 0 and, if that fails too, ends there: see `reached`.

    Args:
        logits: `(exits, rows, classes)`.
        labels: `(rows,)`.
        alpha: Share of labels that may be missed.
        first: Where each threshold begins.
        raise_by: By how much it is raised at a time.
        seed: Of the draws, which are the same throughout the search.
    """
    check_fraction(alpha, "alpha")
    given = check_logits(logits)
    exits, rows, classes = given.shape
    wanted = check_labels(labels, batch=rows, classes=classes, device=given.device)
    if rows == 0:
        raise LabelError("there are no rows", expected="rows to choose thresholds on", fix="hold out some rows")
    check_number(first, "first")
    check_number(raise_by, "raise_by", above=0)
    drawn = [log_gammas(now, [seed, _CALIBRATION, exit]) for exit, now in enumerate(given)]

    def of_labels(exit: int, threshold: float) -> Tensor:
        return log_ratio(given[exit], threshold, drawn[exit]).gather(1, wanted[:, None])[:, 0]

    def covered(ratios: Tensor) -> Tensor:
        return (ratios.cumsum(0) <= -math.log(alpha)).cummin(0).values.double().mean(1)

    for start in (first, min(first, 0.0)):
        thresholds = [start] * exits
        ratios = torch.stack([of_labels(exit, start) for exit in range(exits)])
        if _enough(covered(ratios)[-1], rows, alpha):
            break
    for exit in range(exits):
        while True:
            trial = ratios.clone()
            trial[exit] = of_labels(exit, thresholds[exit] + raise_by)
            if not _enough(covered(trial)[-1], rows, alpha):
                break
            thresholds[exit] += raise_by
            ratios = trial
    return NestedSets(
        exits=exits,
        classes=classes,
        alpha=alpha,
        thresholds=tuple(thresholds),
        rows=rows,
        coverage=tuple(covered(ratios).tolist()),
    )


def _enough(coverage: Tensor, rows: int, alpha: float) -> bool:
    return float(coverage) * rows >= (1 - alpha) * (rows + 1) - 1e-9


def log_ratio(logits: Tensor, threshold: float, drawn: Tensor) -> Tensor:
    """One exit's factor of R, in logarithms, `(batch, classes)`: infinite for classes without evidence.

    Args:
        logits: Of one exit, `(batch, classes)`.
        threshold: θ.
        drawn: What `log_gammas` gives: a Dirichlet draw on any support, once normalised over it.
    """
    support = (logits >= threshold) & (logits > 0)
    evidence = torch.where(support, logits, -math.inf).to(drawn.dtype)
    mean = evidence.log().where(support, evidence).log_softmax(-1)
    draw = drawn.where(support, -math.inf).log_softmax(-1)
    return torch.where(support, mean - draw, math.inf)


def log_gammas(shapes: Tensor, seed: list[int]) -> Tensor:
    """Logarithms of one Gamma(shape) number for each positive shape, in float64; elsewhere the number means nothing.

    Small shapes give numbers that underflow, so the logarithm is drawn: Gamma(a) is Gamma(a + 1) · U^(1/a).
    """
    positive = shapes.detach().double().cpu().numpy()
    positive = np.where(positive > 0, positive.clip(1e-300), 1.0)
    generator = np.random.default_rng([check_seed(part) for part in seed])
    drawn = np.log(generator.standard_gamma(positive + 1)) - generator.standard_exponential(positive.shape) / positive
    return torch.from_numpy(drawn).to(shapes.device)

"""Sets of classes that are nested over the exits: a class that has been ruled out stays out (anytime-valid, Jazbec et al.).

The evidence α_l(y) of exit l is its logit where that is positive and reaches a threshold θ_l, else 0. One sample
π_l ~ Dirichlet(α_l) per input and exit gives the ratio R_t(y) = Π_{l≤t} [α_l(y) / Σ α_l] / π_l(y), infinite for good once
a class has no evidence. The set after t exits holds the classes whose ratio never exceeded 1/α.

Guarantee: if π_l were sampled from the Dirichlet that has seen the label, Dirichlet(α_l + e_y), the ratio of the label would be
a martingale of mean 1, and by Ville's inequality the label would be in all sets at once with probability 1 - α. That sample
is not available before the label is known. With samples from Dirichlet(α_l) the proof does not apply; coverage rests on the
thresholds, which are chosen so that it is met on held-out rows. It holds approximately on similar rows; `anytime conformal`
measures it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.checks import check_fraction, check_labelled, check_logits, check_number, check_seed, check_step
from anytime.errors import OptionError, StateError
from anytime.fitted import Fitted
from anytime.threads import one_thread_for_few

_CALIBRATION, _USE = range(2)  # random streams of a seed


@dataclass(frozen=True)
class NestedState:
    """The state of some inputs after `seen` exits.

    Attributes:
        seed: Of the samples.
        log_ratio: Logarithm of R so far, `(batch, classes)`.
        inside: The set so far, `(batch, classes)`.
    """

    seed: int
    seen: int = 0
    log_ratio: Tensor | None = None
    inside: Tensor | None = None


@dataclass(frozen=True, eq=False)
class NestedAnswer:
    """The sets at one exit, or at all of them with one more dimension in front.

    Attributes:
        members: `(..., batch, classes)`.
        empty: `(..., batch)`, true if no class is left: the exits contradict each other, often on unusual inputs.
    """

    members: Tensor
    empty: Tensor


@dataclass(frozen=True)
class NestedSets(Fitted, kind="nested-sets"):
    """Nested sets of classes, as `fit_nested_sets` returns them.

    Args:
        alpha: The fraction of labels that may be missed.
        thresholds: θ, one per exit.
        rows: The number of rows they were chosen on.
        coverage: The fraction of these rows whose label is in the sets up to each exit.
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
                raise OptionError(
                    f"{name} are {values}", expected=f"{self.exits} finite numbers, one per exit", fix="fit them again"
                )

    @property
    def reached(self) -> bool:
        """Whether coverage was at least 1 - alpha on the rows that chose the thresholds, with one more row missed."""
        return _enough(self.coverage[-1], self.rows, self.alpha)

    def start(self, seed: int = 0) -> NestedState:
        """The state before the first exit; use another seed for other inputs, so that their samples differ."""
        return NestedState(seed)

    def step(self, state: NestedState, logits: Any) -> tuple[NestedState, NestedAnswer]:
        """Take the logits of the next exit, `(batch, classes)`; return the new state and the sets so far."""
        check_not_done(state.seen, self.exits)
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


@one_thread_for_few
def fit_nested_sets(
    logits: Any, labels: Any, *, alpha: float = 0.05, first: float = 1.0, raise_by: float = 0.5, seed: int = 0
) -> NestedSets:
    """Choose the thresholds of nested sets on held-out rows.

    Exit by exit the threshold is raised, which makes sets smaller, while at least 1 - alpha of the labels are in all sets.
    One more label counts as missed, so that few rows do not give too high thresholds. If `first` covers too few labels, the
    search starts at 0 and, if that fails too, stays there: see `reached`.

    Args:
        logits: `(exits, rows, classes)`.
        labels: `(rows,)`.
        alpha: The fraction of labels that may be missed.
        first: The initial value of each threshold.
        raise_by: The step by which it is raised.
        seed: Of the samples, which are the same throughout the search.
    """
    check_fraction(alpha, "alpha")
    given, wanted = check_labelled(logits, labels)
    exits, rows, classes = given.shape
    check_number(first, "first")
    check_number(raise_by, "raise_by", above=0)
    drawn = [log_gammas(now, [seed, _CALIBRATION, exit]) for exit, now in enumerate(given)]

    def label_ratios(exit: int, threshold: float) -> Tensor:
        return log_ratio(given[exit], threshold, drawn[exit]).gather(1, wanted[:, None])[:, 0]

    def coverage(ratios: Tensor) -> list[float]:
        inside: list[float] = (ratios.cumsum(0) <= -math.log(alpha)).cummin(0).values.double().mean(1).tolist()
        return inside

    for start in (first, min(first, 0.0)):
        thresholds = [start] * exits
        ratios = torch.stack([label_ratios(exit, start) for exit in range(exits)])
        if _enough(coverage(ratios)[-1], rows, alpha):
            break
    for exit in range(exits):
        while True:
            trial = ratios.clone()
            trial[exit] = label_ratios(exit, thresholds[exit] + raise_by)
            if not _enough(coverage(trial)[-1], rows, alpha):
                break
            thresholds[exit] += raise_by
            ratios = trial
    return NestedSets(exits, classes, alpha, thresholds=tuple(thresholds), rows=rows, coverage=tuple(coverage(ratios)))


def check_not_done(seen: int, exits: int) -> None:
    """Raise if all exits have been seen."""
    if seen >= exits:
        raise StateError(
            f"a step after the last of {exits} exits", expected=f"at most {exits} steps", fix="call start() for new inputs"
        )


def _enough(coverage: float, rows: int, alpha: float) -> bool:
    return coverage * rows >= (1 - alpha) * (rows + 1) - 1e-9


def log_ratio(logits: Tensor, threshold: float, drawn: Tensor) -> Tensor:
    """One exit's factor of R, in logarithms, `(batch, classes)`: infinite for classes without evidence.

    Args:
        logits: Of one exit, `(batch, classes)`.
        threshold: θ.
        drawn: From `log_gammas`: a Dirichlet sample on any support, once normalised over it.
    """
    support = (logits >= threshold) & (logits > 0)
    evidence = torch.where(support, logits, -math.inf).to(drawn.dtype)
    mean = evidence.log().where(support, evidence).log_softmax(-1)
    draw = drawn.where(support, -math.inf).log_softmax(-1)
    return torch.where(support, mean - draw, math.inf)


def log_gammas(shapes: Tensor, seed: list[int]) -> Tensor:
    """Logarithms of one Gamma(shape) sample for each positive shape, in float64; undefined elsewhere.

    Small shapes give samples that underflow, so the logarithm is sampled: Gamma(a) is Gamma(a + 1) · U^(1/a).
    """
    positive = shapes.detach().double().cpu().numpy()
    positive = np.where(positive > 0, positive.clip(1e-300), 1.0)
    generator = np.random.default_rng([check_seed(part) for part in seed])
    drawn = np.log(generator.standard_gamma(positive + 1)) - generator.standard_exponential(positive.shape) / positive
    return torch.from_numpy(drawn).to(shapes.device)

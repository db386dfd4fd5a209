"""Intervals for regression that are nested over the exits (anytime-valid, Jazbec et al.).

Each exit l has features h_l and a Bayesian linear last layer on them, whose prior and noise maximise the evidence. One sample
w_l of its weights, shared by all inputs, gives the ratio R_t(y) = Π_{l≤t} N(y; h·μ_l, σ_l² + v_l) / N(y; h·w_l, σ_l²); the
interval after t exits is where R_s(y) ≤ 1/α at every s ≤ t. Each of these sets is where a quadratic in y is not positive, so
three numbers per input suffice.

Guarantee: if w_l were sampled from the posterior that has also seen the target, the ratio at the target would be a martingale
of mean 1 and, by Ville's inequality, the target would be in all intervals at once with probability 1 - α. The available
sample is from the posterior without it. The two hardly differ with many more rows than features, and coverage is then far
above 1 - α; it is not proved, and it does not hold if the linear model is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.checks import as_float, as_tensor, check_count, check_fraction, check_seed
from anytime.conformal.nested import check_not_done
from anytime.errors import InputError, OptionError, ShapeError
from anytime.fitted import Fitted

_ITERATIONS = 1000
_TOLERANCE = 1e-5
_INITIAL = 1e-5
_UNINFORMATIVE = 1e-8


@dataclass(frozen=True, eq=False)
class LinearLayer:
    """A Bayesian linear layer: posterior of the weights (the last is the intercept) and the noise.

    Attributes:
        mean: μ, `(features + 1,)`.
        factor: F, `(features + 1, features + 1)`, of their covariance Σ = FF'.
        noise: σ², the variance of a target around its prediction.
    """

    mean: Tensor
    factor: Tensor
    noise: float

    def variance(self, inputs: Tensor) -> Tensor:
        """The variance hΣh' of each input's prediction, `(batch,)`, from features with a column of ones."""
        return (inputs @ self.factor).square().sum(-1)

    def draw(self, draws: int, seed: list[int]) -> Tensor:
        """Weights from the posterior, `(draws, features + 1)`; a larger number of draws starts with the same ones."""
        noise = np.random.default_rng([check_seed(part) for part in seed]).standard_normal((draws, len(self.mean)))
        return self.mean + torch.from_numpy(noise).to(self.factor) @ self.factor.T


def fit_linear(features: Any, targets: Any) -> LinearLayer:
    """A Bayesian linear layer whose prior precision a and noise precision b maximise the evidence.

    From a = b = 1e-5: Σ = (aI + bX'X)⁻¹, μ = bΣX'y, γ = Σ_i e_i/(e_i + a) with e the eigenvalues of bX'X, then a = γ/|μ|²,
    b = (n - γ)/|y - Xμ|², until both settle.

    Args:
        features: `(rows, width)`.
        targets: `(rows,)`.
    """
    inputs, wanted = _with_one(_checked(features, 2, "features")), _checked(targets, 1, "targets")
    rows = len(wanted)
    if len(inputs) != rows or rows < 2:
        raise ShapeError(
            f"{len(inputs)} rows of features and {rows} targets",
            expected="the same number of both, at least 2",
            fix="pass one target per row of features",
        )
    values, basis = torch.linalg.eigh(inputs.T @ inputs)
    values = values.clamp(min=0)
    turned = basis.T @ (inputs.T @ wanted)  # X'y in the eigenbasis, where Σ is diagonal
    prior, precision = _INITIAL, _INITIAL
    for _ in range(_ITERATIONS):
        mean = basis @ (precision * turned / (prior + precision * values))
        known = float((precision * values / (precision * values + prior)).sum())
        size, error = float(mean @ mean), float((wanted - inputs @ mean).square().sum())
        if not (error > 0 and rows > known):
            raise InputError(
                f"{inputs.shape[1] - 1} features explain all {rows} targets without error",
                expected="targets with noise, and more rows than features",
                fix="hold out more rows, or pass fewer features",
            )
        if size == 0 or known < _UNINFORMATIVE:  # uninformative features: the prior precision diverges
            break
        before, (prior, precision) = (prior, precision), (known / size, (rows - known) / error)
        if math.isclose(prior, before[0], rel_tol=_TOLERANCE) and math.isclose(precision, before[1], rel_tol=_TOLERANCE):
            break
    spread = 1 / (prior + precision * values)
    return LinearLayer(basis @ (precision * turned * spread), basis * spread.sqrt(), 1 / precision)


@dataclass(frozen=True, eq=False)
class NestedInterval:
    """The intervals at one exit, or at all of them with one more dimension in front.

    Attributes:
        lower, upper: The ends, `(..., batch)`; both are NaN if it is empty.
        empty: True if no target is left: the exits contradict each other, often on unusual inputs.
    """

    lower: Tensor
    upper: Tensor
    empty: Tensor

    def holds(self, targets: Tensor) -> Tensor:
        """Whether each interval contains its input's target."""
        return (self.lower <= targets) & (targets <= self.upper)  # false for NaN


@dataclass(frozen=True)
class IntervalsState:
    """The state of some inputs after `seen` exits.

    Attributes:
        seed: Of the samples.
        draws: The number of intersected samples.
        centre: `(batch,)`, which targets are relative to.
        quadratic: Coefficients of the quadratic that is at most 0 where R ≤ 1/α, `(3, draws, batch)`.
        interval: The intervals so far, `(batch,)`.
    """

    seed: int
    draws: int
    seen: int = 0
    centre: Tensor | None = None
    quadratic: Tensor | None = None
    interval: NestedInterval | None = None


@dataclass(frozen=True)
class NestedIntervals(Fitted, kind="nested-intervals"):
    """Nested intervals for regression, as `fit_nested_intervals` returns them.

    Args:
        alpha: The fraction of targets that may be missed, for one sample.
        means, factors, noises: The linear layer of each exit.
        rows: The number of rows they were fitted on.
    """

    alpha: float
    means: tuple[Tensor, ...]
    factors: tuple[Tensor, ...]
    noises: tuple[float, ...]
    rows: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self.alpha, "alpha")
        if not len(self.means) == len(self.factors) == len(self.noises) == self.exits:
            raise OptionError(f"got {len(self.means)} layers", expected=f"{self.exits}, one per exit", fix="fit it again")
        for mean, factor, noise in zip(self.means, self.factors, self.noises, strict=True):
            if mean.ndim != 1 or factor.shape != (len(mean), len(mean)) or not 0 < noise < math.inf:
                raise OptionError(
                    f"a layer has a mean of shape {tuple(mean.shape)}, a factor of {tuple(factor.shape)} and noise {noise}",
                    expected="shapes (width,) and (width, width), and positive noise",
                    fix="fit it again",
                )

    def guarantee(self, draws: int = 1) -> float:
        """The coverage with this many intersected samples, each of which may miss: 1 - draws · alpha."""
        return max(0.0, 1 - draws * self.alpha)

    def start(self, seed: int = 0, *, draws: int = 1) -> IntervalsState:
        """The state before the first exit.

        Args:
            seed: Of the sampled weights.
            draws: The number of samples to intersect: narrower intervals, with coverage `guarantee(draws)`, not 1 - alpha.
        """
        return IntervalsState(seed, check_count(draws, "draws"))

    def step(self, state: IntervalsState, features: Any) -> tuple[IntervalsState, NestedInterval]:
        """Take the features of the next exit, `(batch, width)`; return the new state and the intervals so far."""
        check_not_done(state.seen, self.exits)
        layer = LinearLayer(self.means[state.seen], self.factors[state.seen], self.noises[state.seen])
        inputs = _with_one(_checked(features, 2, "features"))
        if inputs.shape[1] != len(layer.mean) or (state.centre is not None and len(inputs) != len(state.centre)):
            raise ShapeError(
                f"features of exit {state.seen + 1} have shape {(inputs.shape[0], inputs.shape[1] - 1)}",
                expected=f"{len(layer.mean) - 1} columns, and as many rows as at earlier exits",
                fix="step all exits of the same inputs, with the features that the layers were fitted on",
            )
        centre = inputs @ layer.mean if state.centre is None else state.centre
        drawn = inputs @ layer.draw(state.draws, [state.seed, state.seen]).T
        coefficients = torch.stack(quadratic(layer, inputs, drawn.T, centre))
        if state.quadratic is None:
            coefficients[2] += math.log(self.alpha)
        else:
            coefficients += state.quadratic
        lower, upper = (ends + centre for ends in _roots(*coefficients))
        lower, upper = lower.amax(0), upper.amin(0)
        if state.interval is not None:  # the NaN of an empty interval stays
            lower, upper = torch.maximum(lower, state.interval.lower), torch.minimum(upper, state.interval.upper)
        empty = ~(lower <= upper)
        interval = NestedInterval(lower.masked_fill(empty, math.nan), upper.masked_fill(empty, math.nan), empty)
        return replace(state, seen=state.seen + 1, centre=centre, quadratic=coefficients, interval=interval), interval

    def __call__(self, features: Sequence[Any], *, seed: int = 0, draws: int = 1) -> NestedInterval:
        """The intervals at every exit, `(exits, batch)`, from the features of each, `(batch, width)`."""
        if len(features) != self.exits:
            raise ShapeError(
                f"got features of {len(features)} exits", expected=f"{self.exits} exits", fix="pass one array per exit"
            )
        state, answers = self.start(seed, draws=draws), []
        for now in features:
            state, answer = self.step(state, now)
            answers.append(answer)
        return NestedInterval(*(torch.stack([getattr(a, name) for a in answers]) for name in ("lower", "upper", "empty")))


def fit_nested_intervals(features: Sequence[Any], targets: Any, *, alpha: float = 0.05) -> NestedIntervals:
    """Fit a Bayesian linear layer to each exit's features.

    Args:
        features: `(rows, width)` per exit; widths may differ.
        targets: `(rows,)`.
        alpha: The fraction of targets that may be missed.

    Example:
        >>> rows = torch.randn(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> fitted = fit_nested_intervals([rows[:, :1], rows], rows.sum(1) + 0.1 * rows[:, 0].sin())
        >>> bool(fitted([rows[:5, :1], rows[:5]]).holds(rows[:5].sum(1)).all())
        True
    """
    check_fraction(alpha, "alpha")
    if not len(features):
        raise ShapeError("features is empty", expected="one array per exit", fix="pass a list of arrays")
    layers = [fit_linear(now, targets) for now in features]
    return NestedIntervals(
        exits=len(layers),
        classes=None,
        alpha=alpha,
        means=tuple(layer.mean for layer in layers),
        factors=tuple(layer.factor for layer in layers),
        noises=tuple(layer.noise for layer in layers),
        rows=len(targets),
    )


def quadratic(layer: LinearLayer, inputs: Tensor, drawn: Tensor, centre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One exit's ln R as A·y² + B·y + G, with y relative to `centre`, which keeps the digits of large targets.

    Args:
        layer: Of the exit.
        inputs: Features with a column of ones, `(batch, width + 1)`.
        drawn: The predictions of the sampled weights, `(draws, batch)`.
        centre: `(batch,)`.
    """
    total = layer.noise + layer.variance(inputs)
    expected, sampled = inputs @ layer.mean - centre, drawn - centre
    square = (0.5 / layer.noise - 0.5 / total).expand_as(sampled)
    slope = expected / total - sampled / layer.noise
    constant = (
        sampled.square() / (2 * layer.noise) - expected.square() / (2 * total) + 0.5 * (math.log(layer.noise) - total.log())
    )
    return square, slope, constant


def _roots(square: Tensor, slope: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
    """Where A·y² + B·y + G ≤ 0: NaN if nowhere, the whole line if the quadratic is a constant that is not positive."""
    inner = slope.square() - 4 * square * constant
    half = inner.sqrt()  # NaN where there is no root
    lower, upper = (-slope - half) / (2 * square), (-slope + half) / (2 * square)
    flat = (square <= 0) & (constant <= 0)  # the weights are known exactly: nothing is ruled out
    return lower.masked_fill(flat, -math.inf), upper.masked_fill(flat, math.inf)


def _with_one(features: Tensor) -> Tensor:
    return torch.cat((features, features.new_ones(len(features), 1)), 1)


def _checked(values: Any, rank: int, name: str) -> Tensor:
    given = as_float(as_tensor(values, name), name).double()
    if given.ndim != rank:
        shape = "(rows, width)" if rank == 2 else "(rows,)"
        raise ShapeError(f"{name} have shape {tuple(given.shape)}", expected=shape, fix="pass one array per exit")
    if not bool(torch.isfinite(given).all()):
        raise InputError(f"{name} contain NaN or infinity", expected="finite numbers", fix="look for overflow")
    return given

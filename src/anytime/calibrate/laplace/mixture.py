"""The mixture of exits with last-layer Laplace of Meronen et al. (2024), which they call MIE.

Each exit has a Gaussian over its last layer, in a variant of the Kronecker form: U is the mean of diag p - ppᵀ, V that of φφᵀ,
and √N U + I/σ and √N V + I/σ are the two factors of the precision, for N training rows and a prior of variance σ². Sampled
logits are divided by a temperature, and their softmaxes averaged. The answer at exit m is the mean of the exits so far,
weighted by their cost: p̄_m = Σ_{i≤m} c_i p_i / Σ_{i≤m} c_i, which is the rule `Mixture(Exponential(), weights=c)` on the
exits' log-probabilities. σ² and temperature of an exit are chosen on held-out rows by the mixture's NLL, one exit after the
other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from anytime.calibrate.laplace.curvature import Kron, Sums, blocks, draw, eigen, log_mean_softmax
from anytime.calibrate.laplace.last_layer import FittedHeads, Head, Layer, check_batch, check_layers, check_samples, check_total
from anytime.checks import check_costs, check_disjoint, check_seed
from anytime.combine import Exponential, Mixture, Prediction
from anytime.combine.rules import MixtureState
from anytime.errors import OptionError
from anytime.metrics import nll
from anytime.models.base import ExitModel
from anytime.models.features import exit_features

Factors = Literal["exact", "running"]

TEMPERATURES = (0.3, 0.5, 0.7, 1.0, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0)
VARIANCES = (0.5, 0.7, 1.0, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0)
_DECAY = 0.95


@dataclass(frozen=True)
class LaplaceMixture(FittedHeads, kind="Laplace mixture"):
    """Exits that sample their last layer, and the mixture of them. Made by `fit_mixture`.

    Attributes:
        costs: c of each exit, its cumulative cost over that of the last.
        variances: σ² of each exit.
        temperatures: Of each exit.
        samples: How many logits are sampled.
        seed: Of the draws, which all inputs and exits share.
        losses: The mixture's NLL at each exit on the rows it was tuned on.
    """

    costs: tuple[float, ...]
    variances: tuple[float, ...]
    temperatures: tuple[float, ...]
    samples: int
    seed: int
    losses: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_lengths("variances", "temperatures", "losses")
        check_costs(self.costs, exits=self.exits)
        check_samples(self.samples)
        for name in ("variances", "temperatures"):
            _check_positive(name, getattr(self, name))
        for exit in range(self.exits):
            self.curvature(exit, "kron")

    @property
    def rule(self) -> Mixture:
        """The rule that turns the exits' log-probabilities into the mixture's."""
        return _rule(self.costs)

    def predict_at(self, exit: int, features: Any) -> Tensor:
        """Log-probabilities of one exit alone, `(rows, classes)`: what the rule takes.

        Args:
            exit: Which one, from 1.
            features: What its linear layer reads, `(rows, features)`.
        """
        index = self.index(exit)
        head = self.head(index)
        phi = head.check(features, index)
        curvature = self.curvature(index, "kron")
        assert isinstance(curvature, Kron)
        draws = draw(self.samples, len(head.weights), seed=self.seed, like=phi)
        return _sampled(head, curvature.like(phi), phi, draws, self.variances[index], [self.temperatures[index]])[0]

    def predict(self, features: Sequence[Any]) -> Prediction:
        """The mixture at every exit, from one tensor of features an exit."""
        self.check_exits(features)
        return self.rule(torch.stack([self.predict_at(exit, now) for exit, now in enumerate(features, 1)]))

    def start(self) -> MixtureState:
        """The state before the first exit."""
        return self.rule.start(self.exits)

    def step(self, state: MixtureState, features: Any) -> tuple[MixtureState, Prediction]:
        """Take the features of the next exit; give the new state and the mixture so far."""
        return self.rule.step(state, self.predict_at(state.seen + 1, features))

    def stream(self, model: ExitModel, x: Tensor) -> Iterator[Prediction]:
        """Yield the mixture at each exit as the model gets there; as lazy as `model.exits(x)`."""
        state = self.start()
        for features, _ in exit_features(model, x):
            state, prediction = self.step(state, features)
            yield prediction


def fit_mixture(
    features: Sequence[Any],
    labels: Any,
    layers: Sequence[Layer],
    costs: Any,
    *,
    tuning_features: Sequence[Any],
    tuning_labels: Any,
    rows: int | None = None,
    samples: int = 50,
    seed: int = 0,
    variances: Sequence[float] = VARIANCES,
    temperatures: Sequence[float] = TEMPERATURES,
    factors: Factors = "exact",
    batch: int = 64,
) -> LaplaceMixture:
    """Fit the mixture of exits with last-layer Laplace.

    Args:
        features: What the last layer of each exit reads, `(rows, features)` an exit, for rows it was trained on.
        labels: `(rows,)`.
        layers: The last layers (`anytime.models.features.last_layers`), or pairs of weight and bias (or None).
        costs: The cost up to each exit, such as `measure_cost(model, example).macs`.
        tuning_features: As `features`, for rows that were not trained on.
        tuning_labels: Their labels.
        rows: N, how many rows the layers were trained on, where `features` are a sample of them.
        samples: How many logits to sample.
        seed: Of the draws.
        variances: The σ² to try; by default those of the published code.
        temperatures: The temperatures to try; by default those of the published code.
        factors: `exact` for U and V as means over all rows. `running` is as published: means over batches, of which the
            latest weigh most, with labels drawn from the predictions in place of their expectation.
        batch: Of `running`.
    """
    heads = check_layers(layers)
    phis, wanted = check_batch(features, labels, heads)
    tuned, tuned_wanted = check_batch(tuning_features, tuning_labels, heads)
    check_disjoint(phis, tuned, names=("the fit", "the choice of variance and temperature"))
    spent = check_costs(costs, exits=len(heads))
    shares = tuple((spent / spent[-1]).tolist())
    check_samples(samples)
    for name, values in (("variances", variances), ("temperatures", temperatures)):
        _check_positive(name, values)
    total = check_total(rows, len(wanted))
    check_total(None, len(tuned_wanted))
    _check_factors(factors, batch)
    curvatures = [_curvature(head, phi, wanted, total, factors, batch, seed) for head, phi in zip(heads, phis, strict=True)]
    draws = draw(samples, len(heads[0].weights), seed=seed, like=tuned[0])
    rule = _rule(shares)
    state = rule.start(len(heads))
    choices = []
    for head, curvature, phi in zip(heads, curvatures, tuned, strict=True):
        trials = _trials(head, curvature.like(phi), phi, draws, variances, temperatures)
        state, choice = _best(rule, state, trials, tuned_wanted)
        choices.append(choice)
    return LaplaceMixture(
        exits=len(heads),
        classes=len(heads[0].weights),
        rows=total,
        weights=tuple(head.weights.float().cpu() for head in heads),
        biased=tuple(head.biased for head in heads),
        curvatures=tuple(curvature.tensors() for curvature in curvatures),
        costs=shares,
        variances=tuple(variance for _, variance, _ in choices),
        temperatures=tuple(temperature for _, _, temperature in choices),
        samples=samples,
        seed=seed,
        losses=tuple(loss for loss, _, _ in choices),
    )


def _rule(costs: tuple[float, ...]) -> Mixture:
    return Mixture(Exponential(), weights=costs)


def _curvature(head: Head, phi: Tensor, labels: Tensor, rows: int, factors: Factors, batch: int, seed: int) -> Kron:
    """√N U and √N V, decomposed."""
    if factors == "exact":
        sums = Sums(head.weights, "kron")
        sums.add(phi, labels)
        found = sums.curvature(rows)  # U and N V
        assert isinstance(found, Kron)
        return Kron(found.inputs / math.sqrt(rows), found.input_basis, math.sqrt(rows) * found.outputs, found.output_basis)
    inputs, outputs = _running(head, phi, batch, torch.Generator().manual_seed(check_seed(seed)))
    return Kron(*eigen(math.sqrt(rows) * inputs), *eigen(math.sqrt(rows) * outputs))


def _running(head: Head, phi: Tensor, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """V and U as means over batches that decay, with one drawn label a row."""
    classes, width = head.weights.shape
    inputs, outputs = head.weights.new_zeros(width, width), head.weights.new_zeros(classes, classes)
    for number, now in enumerate(torch.split(phi.double(), batch)):
        keep = min(1 - 1 / (number + 1), _DECAY)
        probs = head.logits(now).softmax(-1)
        said = torch.multinomial(probs.cpu(), 1, generator=generator).to(probs.device)
        off = probs.scatter_add(1, said, probs.new_full(said.shape, -1.0))
        inputs = keep * inputs + (1 - keep) * (now.mT @ now) / len(now)
        outputs = keep * outputs + (1 - keep) * (off.mT @ off) / len(now)
    return inputs, outputs


def _sampled(
    head: Head, curvature: Kron, phi: Tensor, draws: Tensor, variance: float, temperatures: Sequence[float]
) -> list[Tensor]:
    """Log-probabilities `(rows, classes)` for each temperature: of f + √(φᵀV⁻¹φ) U^{-½} z with the prior in U and V."""
    damping = variance**-0.5
    turned = (draws @ curvature.output_basis * (curvature.outputs + damping).rsqrt()) @ curvature.output_basis.mT
    spread = ((phi @ curvature.input_basis).square() @ (curvature.inputs + damping).reciprocal()).sqrt()
    logits = head.logits(phi)
    found: list[list[Tensor]] = [[logits[:0]] for _ in temperatures]
    for part in blocks(len(phi), draws.numel()):
        samples = logits[part, None] + spread[part, None, None] * turned
        for pieces, temperature in zip(found, temperatures, strict=True):
            pieces.append(log_mean_softmax(samples / temperature))
    return [torch.cat(pieces) for pieces in found]


def _trials(
    head: Head, curvature: Kron, phi: Tensor, draws: Tensor, variances: Sequence[float], temperatures: Sequence[float]
) -> Iterator[tuple[float, float, Tensor]]:
    for variance in variances:
        answers = _sampled(head, curvature, phi, draws, variance, temperatures)
        yield from ((variance, temperature, answer) for temperature, answer in zip(temperatures, answers, strict=True))


def _best(
    rule: Mixture, state: MixtureState, trials: Iterator[tuple[float, float, Tensor]], labels: Tensor
) -> tuple[MixtureState, tuple[float, float, float]]:
    """The state after the trial with which the mixture's NLL is least, and that NLL, variance and temperature."""
    best: tuple[float, MixtureState, float, float] | None = None
    for variance, temperature, log_probs in trials:
        after, prediction = rule.step(state, log_probs)
        loss = float(nll(prediction.log_probs.gather(1, labels[:, None])).mean())
        if best is None or loss < best[0]:
            best = loss, after, variance, temperature
    assert best is not None
    loss, after, variance, temperature = best
    return after, (loss, variance, temperature)


def _check_positive(name: str, values: Sequence[float]) -> None:
    if not values or any(isinstance(value, bool) or not 0 < value < math.inf for value in values):
        raise OptionError(f"{name} are {values!r}", expected="finite numbers above 0", fix=f"leave {name} out")


def _check_factors(factors: str, batch: int) -> None:
    if factors not in ("exact", "running"):
        raise OptionError(f"factors is {factors!r}", expected="'exact' or 'running'", fix="'exact' is the default")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise OptionError(f"batch is {batch!r}", expected="a whole number, at least 1", fix="leave batch out")

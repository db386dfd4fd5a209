"""Last-layer Laplace at every exit: a Gaussian over the weights of the exit's linear layer, around those that were trained.

Fitted on the rows the layer was trained on (or a sample of them), it says how far each logit could be off, and a prediction
averages over that: by the probit approximation softmax(f/√(1 + π/8 · var f)), or over sampled logits. For a linear head all
of it has a closed form (`anytime.calibrate.laplace.curvature`), so that no gradients and no further package are needed. The
results are log-probabilities, which serve as the logits of any rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytime.calibrate.laplace.curvature import Curvature, Structure, Sums, blocks, draw, log_mean_softmax
from anytime.calibrate.laplace.last_layer import FittedHeads, Head, Layer, check_batch, check_layers, check_samples, check_total
from anytime.checks import check_choice, check_disjoint, check_number
from anytime.errors import LabelError, OptionError
from anytime.models.attach.probe import evaluating
from anytime.models.base import ExitModel
from anytime.models.features import exit_features, last_layers

Prior = float | Literal["evidence", "grid"]
Method = Literal["probit", "sampled"]
Batch = tuple[Sequence[Any], Any]
"""Features of each exit, and labels."""
Choice = tuple[float, bool]
"""λ, and whether it lies at an end of what was searched."""
Chooser = Callable[[Sequence[Head], Sequence[Curvature]], list[Choice]]

SAMPLES = 100
"""How many logits are sampled, unless told otherwise."""
LOWEST, HIGHEST = 1e-6, 1e8
"""Between these prior precisions the evidence is maximised."""
GRID = tuple(10 ** (step / 4) for step in range(-16, 25))
"""The prior precisions that `grid` tries: four a decade from 1e-4 to 1e6."""


@dataclass(frozen=True)
class LastLayerLaplace(FittedHeads, kind="last-layer Laplace"):
    """The posterior of each exit's linear layer. Made by `fit_laplace`, `from_model` or `laplace_torch`.

    Predictions are made in the number format and on the device of the features, in blocks of rows. For 1,000 classes and 2,048
    features an exit takes 29 MB, and fitting it 250 MB.

    Attributes:
        structure: `kron`, `full` or `diag`.
        prior_precision: λ of each exit.
        at_bound: Whether λ lies at an end of what was searched.
        log_evidence: Of each exit, for as many rows as it stands for.
    """

    structure: Structure
    prior_precision: tuple[float, ...]
    at_bound: tuple[bool, ...]
    log_evidence: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_lengths("prior_precision", "at_bound", "log_evidence")
        for exit, prior in enumerate(self.prior_precision):
            _check_number(prior)
            self.curvature(exit, self.structure)

    @classmethod
    def from_model(
        cls,
        model: ExitModel,
        batches: Iterable[tuple[Tensor, Tensor]],
        *,
        prior_precision: Prior = "evidence",
        structure: Structure = "kron",
        rows: int | None = None,
        tuning: Iterable[tuple[Tensor, Tensor]] = (),
        method: Method = "probit",
    ) -> Self:
        """Fit it to a model on batches that are read once, without keeping their features.

        Args:
            model: A torch module whose exits end in an `nn.Linear`; it is run in eval mode.
            batches: Inputs with labels, of rows the model was trained on.
            prior_precision: As for `fit_laplace`.
            structure: As for `fit_laplace`.
            rows: As for `fit_laplace`.
            tuning: Inputs with labels that the model was not trained on, for `grid`.
            method: As for `fit_laplace`.
        """
        check_prior(prior_precision, method)
        remaining = iter(batches)
        first = next(remaining, None)
        if first is None:
            raise LabelError("there are no batches", expected="inputs with labels", fix="give at least one batch")
        heads = check_layers(last_layers(model, first[0][:1]))
        assert isinstance(model, nn.Module)
        with evaluating(model), torch.no_grad():
            fitted = _features(model, chain((first,), remaining))
            tuned = _features(model, tuning)
            choose = chooser(prior_precision, tuned, method)
            return cls._fit(heads, fitted, structure=structure, rows=rows, choose=choose)

    def predict_at(
        self, exit: int, features: Any, *, method: Method = "probit", samples: int = SAMPLES, seed: int = 0
    ) -> Tensor:
        """Log-probabilities of one exit, `(rows, classes)`.

        Args:
            exit: Which one, from 1.
            features: What its linear layer reads, `(rows, features)`.
            method: `probit`, or `sampled` for the mean softmax of sampled logits.
            samples: How many of them.
            seed: Of the draws, which all inputs and exits share: a row alone is answered as in a batch.
        """
        _check_method(method)
        check_samples(samples)
        index = self.index(exit)
        head, prior = self.head(index), self.prior_precision[index]
        phi = head.check(features, index)
        curvature, logits = self.curvature(index, self.structure).like(phi), head.logits(phi)
        draws = draw(samples, logits.shape[1], seed=seed, like=phi)
        return _predict(logits, curvature, phi, prior, None if method == "probit" else draws)

    def predict(self, features: Sequence[Any], *, method: Method = "probit", samples: int = SAMPLES, seed: int = 0) -> Tensor:
        """Log-probabilities of all exits, `(exits, rows, classes)`.

        They serve as logits for rules that only read differences of logits, such as `Latest`, `Caching`, `Powers` and
        `Product(Exponential())`. A ReLU product refuses them: it reads their sign, and all of them are negative.

        Args:
            features: One tensor an exit.
            method: As for `predict_at`.
            samples: As for `predict_at`.
            seed: As for `predict_at`.
        """
        self.check_exits(features)
        return torch.stack(
            [self.predict_at(exit, now, method=method, samples=samples, seed=seed) for exit, now in enumerate(features, 1)]
        )

    def stream(
        self, model: ExitModel, x: Tensor, *, method: Method = "probit", samples: int = SAMPLES, seed: int = 0
    ) -> Iterator[Tensor]:
        """Yield the log-probabilities of each exit as the model gets there; as lazy as `model.exits(x)`."""
        for exit, (features, _) in enumerate(exit_features(model, x), 1):
            yield self.predict_at(exit, features, method=method, samples=samples, seed=seed)

    def variance_at(self, exit: int, features: Any) -> Tensor:
        """The variance of each logit of one exit, `(rows, classes)`."""
        phi = self.head(exit).check(features, exit)
        return _variances(self.curvature(exit, self.structure).like(phi), phi, self.prior_precision[exit])

    @classmethod
    def _fit(
        cls, heads: Sequence[Head], batches: Iterable[Batch], *, structure: Structure, rows: int | None, choose: Chooser
    ) -> Self:
        sums = [Sums(head.weights, structure) for head in heads]
        for features, labels in batches:
            phis, wanted = check_batch(features, labels, heads)
            for each, phi in zip(sums, phis, strict=True):
                each.add(phi, wanted)
        total = check_total(rows, sums[0].rows)
        curvatures = [each.curvature(total) for each in sums]
        likelihoods = [each.log_likelihood * total / each.rows for each in sums]
        return cls.around(heads, curvatures, likelihoods, structure=structure, rows=total, choose=choose)

    @classmethod
    def around(
        cls,
        heads: Sequence[Head],
        curvatures: Sequence[Curvature],
        log_likelihoods: Sequence[float],
        *,
        structure: Structure,
        rows: int,
        choose: Chooser,
    ) -> Self:
        """The posterior with these curvatures, however they were found, and λ as `choose` has it."""
        found = choose(heads, curvatures)
        evidence = (
            likelihood + _evidence(curvature, head, prior)
            for likelihood, curvature, head, (prior, _) in zip(log_likelihoods, curvatures, heads, found, strict=True)
        )
        return cls(
            exits=len(heads),
            classes=len(heads[0].weights),
            structure=structure,
            rows=rows,
            weights=tuple(head.weights.float().cpu() for head in heads),
            biased=tuple(head.biased for head in heads),
            curvatures=tuple(curvature.tensors() for curvature in curvatures),
            prior_precision=tuple(prior for prior, _ in found),
            at_bound=tuple(bound for _, bound in found),
            log_evidence=tuple(evidence),
        )


def fit_laplace(
    features: Sequence[Any],
    labels: Any,
    layers: Sequence[Layer],
    *,
    prior_precision: Prior = "evidence",
    structure: Structure = "kron",
    rows: int | None = None,
    tuning_features: Sequence[Any] | None = None,
    tuning_labels: Any = None,
    method: Method = "probit",
) -> LastLayerLaplace:
    """Fit a Gaussian to the last layer of each exit.

    Args:
        features: What the last layer of each exit reads, `(rows, features)` an exit, for rows it was trained on.
        labels: `(rows,)`.
        layers: The last layers (`anytime.models.features.last_layers`), or pairs of weight and bias (or None).
        prior_precision: λ, the same for all exits; `evidence` for the λ of each exit that makes the rows most probable, of
            which there is one, found by bisection; `grid` for the one of `GRID` with the least NLL on the tuning rows.
        structure: `kron`; `full`, which is exact, for small heads; or `diag`.
        rows: How many rows the layers were trained on, where `features` are a sample of them; the curvature grows in
            proportion.
        tuning_features: As `features`, for rows that were not trained on: for `grid`.
        tuning_labels: Their labels.
        method: The predictions that `grid` chooses for, `probit` or `sampled` (with 100 samples of seed 0).

    Example:
        >>> features, labels = [torch.randn(50, 3), torch.randn(50, 5)], torch.arange(50) % 4
        >>> posterior = fit_laplace(features, labels, [nn.Linear(3, 4), nn.Linear(5, 4)])
        >>> posterior.predict(features).shape
        torch.Size([2, 50, 4])
    """
    check_prior(prior_precision, method)
    heads = check_layers(layers)
    tuning = check_tuning(heads, features, labels, tuning_features, tuning_labels)
    choose = chooser(prior_precision, tuning, method)
    return LastLayerLaplace._fit(heads, [(features, labels)], structure=structure, rows=rows, choose=choose)


def chooser(prior_precision: Prior, tuning: Iterable[Batch], method: Method) -> Chooser:
    """How λ is chosen."""
    if prior_precision == "evidence":
        return lambda heads, curvatures: [_most_evident(*pair) for pair in zip(curvatures, heads, strict=True)]
    if prior_precision == "grid":
        return lambda heads, curvatures: _best_of_grid(curvatures, heads, tuning, method)
    return lambda heads, _: [(float(prior_precision), False)] * len(heads)


def check_tuning(
    heads: Sequence[Head], features: Sequence[Any], labels: Any, tuning_features: Sequence[Any] | None, tuning_labels: Any
) -> list[Batch]:
    """The tuning rows as a list of one batch or none; refused where they are among those fitted to."""
    if tuning_features is None:
        return []
    fitted, _ = check_batch(features, labels, heads)
    tuned, _ = check_batch(tuning_features, tuning_labels, heads)
    check_disjoint(fitted, tuned, names=("the fit", "the choice of λ"))
    return [(tuning_features, tuning_labels)]


def check_prior(prior_precision: Prior, method: Method = "probit") -> None:
    """Refuse what is neither a positive number nor the name of a search, before any work is done."""
    _check_method(method)
    if prior_precision not in ("evidence", "grid"):
        _check_number(prior_precision)


def _check_number(prior: Any) -> None:
    check_number(prior, "prior_precision", above=0, fix="pass a number, 'evidence' or 'grid'")


def _check_method(method: str) -> None:
    check_choice(method, "method", ("probit", "sampled"))


def _features(model: ExitModel, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Batch]:
    for x, labels in batches:
        yield [features for features, _ in exit_features(model, x)], labels


def _predict(logits: Tensor, curvature: Curvature, phi: Tensor, prior: float, draws: Tensor | None) -> Tensor:
    """Log-probabilities, `(rows, classes)`: over the draws, or by probit where there are none."""
    if draws is None:
        return (logits * (1 + math.pi / 8 * _variances(curvature, phi, prior)).rsqrt()).log_softmax(-1)
    each = draws.numel() + curvature.row_size(phi.shape[1])
    pieces = [
        log_mean_softmax(logits[part, None] + curvature.noise(phi[part], prior, draws)) for part in blocks(len(phi), each)
    ]
    return torch.cat([logits[:0], *pieces])


def _variances(curvature: Curvature, phi: Tensor, prior: float) -> Tensor:
    size = curvature.row_size(phi.shape[1])
    return torch.cat([curvature.variances(phi[part], prior) for part in (slice(0), *blocks(len(phi), size))])


def _most_evident(curvature: Curvature, head: Head) -> Choice:
    """The λ of the greatest evidence, and whether it lies at a bound.

    In ln λ the evidence is concave; its slope is zero where λ‖θ‖² = Σ e/(e + λ) over the eigenvalues e.
    """
    values, square = curvature.eigenvalues, float(head.weights.square().sum())

    def rises(prior: float) -> bool:
        return float((values / (values + prior)).sum()) > prior * square

    if not rises(LOWEST) or rises(HIGHEST):
        return (HIGHEST if rises(LOWEST) else LOWEST), True
    low, high = math.log(LOWEST), math.log(HIGHEST)
    while high - low > 1e-10:
        middle = (low + high) / 2
        low, high = (middle, high) if rises(math.exp(middle)) else (low, middle)
    return math.exp((low + high) / 2), False


def _evidence(curvature: Curvature, head: Head, prior: float) -> float:
    """What the prior adds to the log-likelihood: -½λ‖θ‖² + ½P ln λ - ½Σ ln(e + λ)."""
    spread = torch.log1p(curvature.eigenvalues / prior).sum()
    return -0.5 * float(prior * head.weights.square().sum() + spread)


def _best_of_grid(
    curvatures: Sequence[Curvature], heads: Sequence[Head], tuning: Iterable[Batch], method: Method
) -> list[Choice]:
    """The λ of each exit with the least NLL on the tuning rows, and whether it lies at an end of the grid."""
    losses = torch.zeros(len(heads), len(GRID), dtype=torch.float64)
    seen = 0
    for features, labels in tuning:
        phis, wanted = check_batch(features, labels, heads)
        seen += len(wanted)
        for exit, (head, curvature, phi) in enumerate(zip(heads, curvatures, phis, strict=True)):
            logits, local = head.logits(phi), curvature.like(phi)
            draws = draw(SAMPLES, logits.shape[1], seed=0, like=phi) if method == "sampled" else None
            for column, prior in enumerate(GRID):
                log_probs = _predict(logits, local, phi, prior, draws)
                losses[exit, column] += float(F.nll_loss(log_probs, wanted, reduction="sum"))
    if not seen:
        raise OptionError(
            "prior_precision is 'grid', and there are no tuning rows",
            expected="rows that were not trained on",
            fix="give tuning rows, or use 'evidence', which needs none",
        )
    best = losses.argmin(1).tolist()
    return [(GRID[index], index in (0, len(GRID) - 1)) for index in best]

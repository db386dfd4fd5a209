"""Last-layer Laplace at every exit: a Gaussian over the weights of the exit's linear layer, around the trained ones.

Fitted on the rows the layer was trained on (or a sample of them), it gives the variance of each logit, and a prediction
averages over it: by the probit approximation softmax(f/√(1 + π/8 · var f)), or over sampled logits. For a linear head all of
it has a closed form (`anytime.calibrate.laplace.curvature`), which needs neither gradients nor another package. The results
are log-probabilities, which can be passed to rules as logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytime.calibrate.laplace.curvature import (
    Curvature,
    Full,
    Structure,
    Sums,
    blocks,
    draw,
    log_mean_softmax,
    row_size,
    stored_curvature,
)
from anytime.calibrate.laplace.heads import Head, Layer, check_batch, check_layers
from anytime.checks import check_choice, check_count, check_disjoint, check_number
from anytime.errors import LabelError, OptionError, ShapeError
from anytime.fitted import Fitted
from anytime.models.attach.probe import evaluating
from anytime.models.base import ExitModel
from anytime.models.features import exit_features, last_layers
from anytime.threads import one_thread_for_few

Prior = float | Literal["evidence", "grid"]
Method = Literal["probit", "sampled"]
Batch = tuple[Sequence[Any], Any]
"""Features of each exit, and labels."""
Choice = tuple[float, bool]
"""λ, and whether it is at a bound of the search."""
Chooser = Callable[[Sequence[Head], Sequence[Curvature]], list[Choice]]

SAMPLES = 100
"""The default number of sampled logits."""
LOWEST, HIGHEST = 1e-6, 1e8
"""The prior precisions between which the evidence is maximised."""
GRID = tuple(10 ** (step / 4) for step in range(-16, 25))
"""The prior precisions that `grid` tries: four per decade from 1e-4 to 1e6."""


@dataclass(frozen=True)
class Laplace(Fitted, kind="laplace"):
    """The posterior of each exit's linear layer, from `fit_laplace` or `from_model`.

    Predictions use the dtype and device of the features, in blocks of rows. With 1,000 classes and 2,048 features, an exit
    takes 29 MB, and fitting it 250 MB.

    Attributes:
        rows: The number of training rows it stands for.
        weights: Of each exit, `(classes, width)`, the bias as the last column if there is one; float32.
        biased: Whether there is one.
        curvatures: Of each exit, decomposed; float32.
        structure: `kron`, `full` or `diag`.
        prior_precision: λ of each exit.
        at_bound: Whether λ is at a bound of the search.
        log_evidence: Of each exit, for as many rows as it stands for.
    """

    rows: int
    weights: tuple[Tensor, ...]
    biased: tuple[bool, ...]
    curvatures: tuple[Mapping[str, Tensor], ...]
    structure: Structure
    prior_precision: tuple[float, ...]
    at_bound: tuple[bool, ...]
    log_evidence: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weights", "biased", "curvatures", "prior_precision", "at_bound", "log_evidence"):
            count = len(getattr(self, name))
            if count != self.exits:
                raise ShapeError(f"{name} has {count} entries", expected=f"{self.exits}, one per exit", fix="fit it again")
        shapes = [tuple(weights.shape) for weights in self.weights]
        if any(len(shape) != 2 or shape[0] != self.classes for shape in shapes):
            raise ShapeError(
                f"weights have the shapes {shapes}", expected=f"({self.classes}, width) at every exit", fix="fit it again"
            )
        for index, prior in enumerate(self.prior_precision):
            _check_prior(prior)
            self._curvature(index)

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
        """Fit it to a model on batches that are read once; their features are not kept.

        Args:
            model: A torch module whose exits end in an `nn.Linear`; it is run in eval mode.
            batches: Inputs with labels, of rows the model was trained on.
            prior_precision: As for `fit_laplace`.
            structure: As for `fit_laplace`.
            rows: As for `fit_laplace`.
            tuning: Inputs with labels that the model was not trained on, for `grid`.
            method: As for `fit_laplace`.
        """
        _check_prior(prior_precision)
        remaining = iter(batches)
        first = next(remaining, None)
        if first is None:
            raise LabelError("there are no batches", expected="inputs with labels", fix="pass at least one batch")
        heads = check_layers(last_layers(model, first[0][:1]))
        assert isinstance(model, nn.Module)
        with evaluating(model), torch.no_grad():
            choose = _chooser(prior_precision, _features(model, tuning), method)
            return cls._fit(heads, _features(model, chain((first,), remaining)), structure, rows, choose)

    def predict_at(
        self, exit: int, features: Any, *, method: Method = "probit", samples: int = SAMPLES, seed: int = 0
    ) -> Tensor:
        """Log-probabilities of one exit, `(rows, classes)`.

        Args:
            exit: Counted from 1.
            features: The input of its linear layer, `(rows, features)`.
            method: `probit`, or `sampled` for the mean softmax of sampled logits.
            samples: The number of samples.
            seed: Of the samples, which all inputs and exits share: a row's prediction does not depend on its batch.
        """
        check_choice(method, "method", get_args(Method))
        check_count(samples, "samples")
        head, curvature, prior, phi = self._at(exit, features)
        logits = head.logits(phi)
        draws = None if method == "probit" else draw(samples, logits.shape[1], seed=seed, like=phi)
        return _predict(logits, curvature, phi, prior, draws)

    def predict(self, features: Sequence[Any], *, method: Method = "probit", samples: int = SAMPLES, seed: int = 0) -> Tensor:
        """Log-probabilities of all exits, `(exits, rows, classes)`.

        They can be passed as logits to rules that only use differences of logits, such as `Latest`, `Caching`, `Powers` and
        `Product(Exponential())`. A ReLU product refuses them: it needs the sign, and all of them are negative.

        Args:
            features: One tensor per exit.
            method: As for `predict_at`.
            samples: As for `predict_at`.
            seed: As for `predict_at`.
        """
        self.check_fits(len(features), self.classes or 1)
        return torch.stack(
            [self.predict_at(exit, now, method=method, samples=samples, seed=seed) for exit, now in enumerate(features, 1)]
        )

    def stream(
        self, model: ExitModel, x: Tensor, *, method: Method = "probit", samples: int = SAMPLES, seed: int = 0
    ) -> Iterator[Tensor]:
        """Yield the log-probabilities of each exit as the model computes it; as lazy as `model.exits(x)`."""
        for exit, (features, _) in enumerate(exit_features(model, x), 1):
            yield self.predict_at(exit, features, method=method, samples=samples, seed=seed)

    def variance_at(self, exit: int, features: Any) -> Tensor:
        """The variance of each logit of one exit, counted from 1, `(rows, classes)`."""
        head, curvature, prior, phi = self._at(exit, features)
        return _variances(curvature, phi, prior, row_size(self.structure == "full", *head.weights.shape))

    def _at(self, exit: int, features: Any) -> tuple[Head, Curvature, float, Tensor]:
        index = check_count(exit, "exit", most=self.exits) - 1
        head = Head(self.weights[index], self.biased[index])
        phi = head.check(features, index)
        return head, self._curvature(index).like(phi), self.prior_precision[index], phi

    def _curvature(self, index: int) -> Curvature:
        classes, width = self.weights[index].shape
        return stored_curvature(self.structure, self.curvatures[index], classes=classes, width=width)

    @classmethod
    def _fit(
        cls, heads: Sequence[Head], batches: Iterable[Batch], structure: Structure, rows: int | None, choose: Chooser
    ) -> Self:
        sums = [Sums(head.weights, structure) for head in heads]
        for features, labels in batches:
            phis, wanted = check_batch(features, labels, heads)
            for each, phi in zip(sums, phis, strict=True):
                each.add(phi, wanted)
        seen = sums[0].rows
        if not seen:
            raise LabelError("there are no rows", expected="at least one row", fix="pass features with their labels")
        total = seen if rows is None else check_count(rows, "rows", low=seen, fix="leave rows out to count the rows given")
        curvatures = [each.curvature(total) for each in sums]
        found = choose(heads, curvatures)
        evidence = (
            each.log_likelihood * total / seen + _evidence(curvature, head, prior)
            for each, curvature, head, (prior, _) in zip(sums, curvatures, heads, found, strict=True)
        )
        return cls(
            exits=len(heads),
            classes=len(heads[0].weights),
            structure=structure,
            rows=total,
            weights=tuple(head.weights.float().cpu() for head in heads),
            biased=tuple(head.biased for head in heads),
            curvatures=tuple(curvature.tensors() for curvature in curvatures),
            prior_precision=tuple(prior for prior, _ in found),
            at_bound=tuple(bound for _, bound in found),
            log_evidence=tuple(evidence),
        )


@one_thread_for_few
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
) -> Laplace:
    """Fit a Gaussian to the last layer of each exit.

    Args:
        features: The input of the last layer of each exit, `(rows, features)` per exit, for rows it was trained on.
        labels: `(rows,)`.
        layers: The last layers (`anytime.models.features.last_layers`), or pairs of weight and bias (or None).
        prior_precision: λ, the same for all exits; `evidence` for the unique λ per exit that maximises the evidence; `grid` for
            the one of `GRID` with the smallest NLL on the tuning rows.
        structure: `kron`; `full`, which is exact, for small heads; or `diag`.
        rows: How many rows the layers were trained on, if `features` are a sample of them; the curvature grows in proportion.
        tuning_features: As `features`, for rows that were not trained on: for `grid`.
        tuning_labels: Their labels.
        method: The predictions that `grid` chooses for, `probit` or `sampled` (with 100 samples of seed 0).

    Example:
        >>> features, labels = [torch.randn(50, 3), torch.randn(50, 5)], torch.arange(50) % 4
        >>> posterior = fit_laplace(features, labels, [nn.Linear(3, 4), nn.Linear(5, 4)])
        >>> posterior.predict(features).shape
        torch.Size([2, 50, 4])
    """
    _check_prior(prior_precision)
    heads = check_layers(layers)
    tuning: list[Batch] = []
    if tuning_features is not None:
        fitted, _ = check_batch(features, labels, heads)
        tuned, _ = check_batch(tuning_features, tuning_labels, heads)
        check_disjoint(fitted, tuned, names=("the fit", "the choice of λ"))
        tuning = [(tuning_features, tuning_labels)]
    return Laplace._fit(heads, [(features, labels)], structure, rows, _chooser(prior_precision, tuning, method))


def _chooser(prior_precision: Prior, tuning: Iterable[Batch], method: Method) -> Chooser:
    """How λ is chosen."""
    check_choice(method, "method", get_args(Method))
    if prior_precision == "evidence":
        return lambda heads, curvatures: [_most_evident(*pair) for pair in zip(curvatures, heads, strict=True)]
    if prior_precision == "grid":
        return lambda heads, curvatures: _best_of_grid(curvatures, heads, tuning, method)
    return lambda heads, _: [(float(prior_precision), False)] * len(heads)


def _check_prior(prior: Any) -> None:
    if prior not in ("evidence", "grid"):
        check_number(prior, "prior_precision", above=0, fix="pass a number, 'evidence' or 'grid'")


def _features(model: ExitModel, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Batch]:
    for x, labels in batches:
        yield [features for features, _ in exit_features(model, x)], labels


def _predict(logits: Tensor, curvature: Curvature, phi: Tensor, prior: float, draws: Tensor | None) -> Tensor:
    """Log-probabilities, `(rows, classes)`: the mean over samples, or by probit if there are none."""
    size = row_size(isinstance(curvature, Full), logits.shape[1], phi.shape[1])
    if draws is None:
        return (logits * (1 + math.pi / 8 * _variances(curvature, phi, prior, size)).rsqrt()).log_softmax(-1)
    parts = blocks(len(phi), draws.numel() + size)
    means = [log_mean_softmax(logits[part, None] + curvature.noise(phi[part], prior, draws)) for part in parts]
    return torch.cat([logits[:0], *means])


def _variances(curvature: Curvature, phi: Tensor, prior: float, size: int) -> Tensor:
    return torch.cat([curvature.variances(phi[part], prior) for part in (slice(0), *blocks(len(phi), size))])


def _most_evident(curvature: Curvature, head: Head) -> Choice:
    """The λ that maximises the evidence, and whether it is at a bound.

    The evidence is concave in ln λ; its slope is zero where λ‖θ‖² = Σ e/(e + λ) over the eigenvalues e.
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
    """The terms of the log-evidence besides the likelihood: -½λ‖θ‖² + ½P ln λ - ½Σ ln(e + λ)."""
    spread = torch.log1p(curvature.eigenvalues / prior).sum()
    return -0.5 * float(prior * head.weights.square().sum() + spread)


def _best_of_grid(
    curvatures: Sequence[Curvature], heads: Sequence[Head], tuning: Iterable[Batch], method: Method
) -> list[Choice]:
    """The λ of each exit with the smallest NLL on the tuning rows, and whether it is at an end of the grid."""
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
            fix="pass tuning rows, or use 'evidence', which needs none",
        )
    best = losses.argmin(1).tolist()
    return [(GRID[index], index in (0, len(GRID) - 1)) for index in best]

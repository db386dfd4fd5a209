"""The linear layers that exits end in, as methods with a distribution over their weights take, check and store them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytime.calibrate.laplace.curvature import Curvature, Structure, stored_curvature
from anytime.checks import as_tensor, check_count, check_labels, check_step
from anytime.errors import DtypeError, LabelError, OptionError, ShapeError
from anytime.fitted import Fitted

Layer = nn.Linear | tuple[Any, Any]
"""A linear layer, or its weight `(classes, features)` and its bias `(classes,)` or None."""


@dataclass(frozen=True, eq=False)
class Head:
    """A linear layer: weights `(classes, width)`, the bias as the last column if there is one."""

    weights: Tensor
    biased: bool

    @property
    def features(self) -> int:
        """How many features it reads."""
        return self.weights.shape[1] - self.biased

    def check(self, features: Any, exit: int) -> Tensor:
        """Features of one exit as float32 or float64, `(rows, width)`, with a 1 appended where there is a bias."""
        shape = tuple(getattr(features, "shape", ()))
        if len(shape) != 2 or shape[1] != self.features:
            raise ShapeError(
                f"the features of exit {exit + 1} have shape {shape}",
                expected=f"(rows, {self.features}): what the linear layer of this exit reads",
                fix="get them with anytime.models.features.exit_features(model, x)",
            )
        checked = check_step(features, exit=exit, like=None, name="features").detach()
        return F.pad(checked, (0, 1), value=1.0) if self.biased else checked

    def logits(self, phi: Tensor) -> Tensor:
        """What the layer gives, `(rows, classes)`, for features with their 1."""
        return phi @ self.weights.to(phi).mT


@dataclass(frozen=True)
class FittedHeads(Fitted):
    """Heads with their curvature, stored in float32: what the methods of this kind have in common.

    Attributes:
        rows: How many training rows they stand for.
        weights: Of each exit, `(classes, width)`, the bias as the last column if there is one.
        biased: Whether there is one.
        curvatures: Of each exit, decomposed (`anytime.calibrate.laplace.curvature`).
    """

    rows: int
    weights: tuple[Tensor, ...]
    biased: tuple[bool, ...]
    curvatures: tuple[Mapping[str, Tensor], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_lengths("weights", "biased", "curvatures")
        shapes = [tuple(weights.shape) for weights in self.weights]
        if any(len(shape) != 2 or shape[0] != self.classes for shape in shapes):
            raise ShapeError(
                f"weights have the shapes {shapes}", expected=f"({self.classes}, width) at every exit", fix="fit it anew"
            )

    def check_lengths(self, *names: str) -> None:
        """Refuse fields that do not have one entry an exit."""
        for name in names:
            count = len(getattr(self, name))
            if count != self.exits:
                raise ShapeError(f"{name} has {count} entries", expected=f"{self.exits}, one an exit", fix="fit it anew")

    def index(self, exit: int) -> int:
        """The place of an exit, from 0, that a caller names by its number, from 1."""
        return check_count(exit, "exit", most=self.exits) - 1

    def head(self, index: int) -> Head:
        """The linear layer of one exit, by its place, from 0."""
        return Head(self.weights[index], self.biased[index])

    def curvature(self, exit: int, structure: Structure) -> Curvature:
        """The curvature of one exit."""
        classes, width = self.weights[exit].shape
        return stored_curvature(structure, self.curvatures[exit], classes=classes, width=width)

    def check_exits(self, features: Sequence[Any]) -> None:
        """Refuse features of another number of exits than it was fitted for."""
        assert self.classes is not None
        self.check_fits(len(features), self.classes)


def check_layers(layers: Sequence[Layer]) -> list[Head]:
    """The heads of all exits, which must have the same number of classes."""
    heads = [_head(layer, exit) for exit, layer in enumerate(layers)]
    classes = [len(head.weights) for head in heads]
    if not heads or any(count != classes[0] for count in classes):
        raise ShapeError(
            f"the layers give {', '.join(map(str, classes)) or 'no'} logits",
            expected="at least one layer, and the same number of classes at every exit",
            fix="give the last layer of each exit: anytime.models.features.last_layers(model, example)",
        )
    return heads


def check_batch(features: Sequence[Any], labels: Any, heads: Sequence[Head]) -> tuple[list[Tensor], Tensor]:
    """Features of each exit with their 1, and labels, for as many heads."""
    if isinstance(features, Tensor) or len(features) != len(heads):
        came = f"a tensor of shape {tuple(features.shape)}" if isinstance(features, Tensor) else f"{len(features)} tensors"
        raise ShapeError(
            f"features are {came}", expected=f"a list of {len(heads)} tensors, one an exit", fix="give one tensor an exit"
        )
    phis = [head.check(now, exit) for exit, (now, head) in enumerate(zip(features, heads, strict=True))]
    counts = [len(phi) for phi in phis]
    if any(count != counts[0] for count in counts):
        raise ShapeError(
            f"the exits have features of {', '.join(map(str, counts))} rows",
            expected="the same rows at every exit",
            fix="collect them in one go: anytime.models.features.collect_features(model, batches)",
        )
    return phis, check_labels(labels, batch=counts[0], classes=len(heads[0].weights), device=phis[0].device)


def check_total(rows: int | None, seen: int) -> int:
    """How many rows the layers were trained on, if `seen` of them were given; None for just these."""
    if not seen:
        raise LabelError("there are no rows", expected="rows to fit to", fix="give features with labels")
    if rows is None:
        return seen
    return check_count(rows, "rows", low=seen, fix="leave rows out to count the rows given")


def check_samples(samples: int) -> None:
    """Refuse a number of samples that is none."""
    check_count(samples, "samples")


def _head(layer: Layer, exit: int) -> Head:
    if isinstance(layer, nn.Linear):
        weight, bias = layer.weight, layer.bias
    elif isinstance(layer, tuple) and len(layer) == 2:
        weight, bias = layer
    else:
        raise DtypeError(
            f"the layer of exit {exit + 1} is a {type(layer).__name__}",
            expected="an nn.Linear, or a pair of its weight and its bias or None",
            fix="get them with anytime.models.features.last_layers(model, example)",
        )
    weights = as_tensor(weight, "the weight").detach().double()
    column = None if bias is None else as_tensor(bias, "the bias").detach().double()
    if weights.ndim != 2 or (column is not None and column.shape != weights.shape[:1]):
        raise ShapeError(
            f"the layer of exit {exit + 1} has a weight of shape {tuple(weights.shape)}"
            + ("" if column is None else f" and a bias of shape {tuple(column.shape)}"),
            expected="(classes, features) and (classes,)",
            fix="give them as nn.Linear has them",
        )
    joined = weights if column is None else torch.cat((weights, column[:, None]), 1)
    if not bool(joined.isfinite().all()):
        raise OptionError(
            f"the layer of exit {exit + 1} has weights that are not finite", expected="finite ones", fix="train anew"
        )
    return Head(joined, column is not None)

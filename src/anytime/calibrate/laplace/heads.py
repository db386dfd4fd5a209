"""The linear layers that exits end in, and the features they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytime.checks import as_tensor, check_labels, check_step
from anytime.errors import DtypeError, OptionError, ShapeError

Layer = nn.Linear | tuple[Any, Any]
"""A linear layer, or its weight `(classes, features)` and its bias `(classes,)` or None."""


@dataclass(frozen=True, eq=False)
class Head:
    """A linear layer: weights `(classes, width)`, the bias as the last column if there is one."""

    weights: Tensor
    biased: bool

    def check(self, features: Any, exit: int) -> Tensor:
        """Features of the exit with this index as float32 or float64, `(rows, width)`, with a 1 appended for the bias."""
        shape, width = tuple(getattr(features, "shape", ())), self.weights.shape[1] - self.biased
        if len(shape) != 2 or shape[1] != width:
            raise ShapeError(
                f"the features of exit {exit + 1} have shape {shape}",
                expected=f"(rows, {width}): the input of this exit's linear layer",
                fix="get them with anytime.models.features.exit_features(model, x)",
            )
        checked = check_step(features, exit=exit, like=None, name="features").detach()
        return F.pad(checked, (0, 1), value=1.0) if self.biased else checked

    def logits(self, phi: Tensor) -> Tensor:
        """The output of the layer, `(rows, classes)`, for checked features."""
        return phi @ self.weights.to(phi).mT


def check_layers(layers: Sequence[Layer]) -> list[Head]:
    """The heads of all exits, which must have the same number of classes."""
    heads = [_head(layer, exit) for exit, layer in enumerate(layers)]
    classes = [len(head.weights) for head in heads]
    if not heads or any(count != classes[0] for count in classes):
        raise ShapeError(
            f"the layers give {', '.join(map(str, classes)) or 'no'} logits",
            expected="at least one layer, and the same number of classes at every exit",
            fix="pass the last layer of each exit: anytime.models.features.last_layers(model, example)",
        )
    return heads


def check_batch(features: Sequence[Any], labels: Any, heads: Sequence[Head]) -> tuple[list[Tensor], Tensor]:
    """Checked features of each exit, and labels."""
    if isinstance(features, Tensor) or len(features) != len(heads):
        got = f"a tensor of shape {tuple(features.shape)}" if isinstance(features, Tensor) else f"{len(features)} tensors"
        raise ShapeError(
            f"features are {got}",
            expected=f"a list of {len(heads)} tensors, one per exit",
            fix="collect them with anytime.models.features.collect_features(model, batches)",
        )
    phis = [head.check(now, exit) for exit, (now, head) in enumerate(zip(features, heads, strict=True))]
    counts = [len(phi) for phi in phis]
    if any(count != counts[0] for count in counts):
        raise ShapeError(
            f"the exits have features of {', '.join(map(str, counts))} rows",
            expected="the same rows at every exit",
            fix="collect them in one pass: anytime.models.features.collect_features(model, batches)",
        )
    return phis, check_labels(labels, batch=counts[0], classes=len(heads[0].weights), device=phis[0].device)


def _head(layer: Layer, exit: int) -> Head:
    if isinstance(layer, nn.Linear):
        weight, bias = layer.weight, layer.bias
    elif isinstance(layer, tuple) and len(layer) == 2:
        weight, bias = layer
    else:
        raise DtypeError(
            f"the layer of exit {exit + 1} is a {type(layer).__name__}",
            expected="an nn.Linear, or a pair of its weight and its bias or None",
            fix="get the layers with anytime.models.features.last_layers(model, example)",
        )
    weights = as_tensor(weight, "the weight").detach().double()
    column = None if bias is None else as_tensor(bias, "the bias").detach().double()
    if weights.ndim != 2 or (column is not None and column.shape != weights.shape[:1]):
        raise ShapeError(
            f"the layer of exit {exit + 1} has a weight of shape {tuple(weights.shape)}"
            + ("" if column is None else f" and a bias of shape {tuple(column.shape)}"),
            expected="(classes, features) and (classes,)",
            fix="pass them as nn.Linear stores them",
        )
    joined = weights if column is None else torch.cat((weights, column[:, None]), 1)
    if not bool(joined.isfinite().all()):
        raise OptionError(
            f"the weights of exit {exit + 1} are not finite", expected="finite weights", fix="train again with a lower rate"
        )
    return Head(joined, column is not None)

"""Cascading heads on a frozen network, as in Zero Time Waste (ZTW).

Each head reads the features at its place and, beside them, the logits of the head before it; no gradient flows back through
those. The first head has none before it, and the network's own output, the last exit, reads no head.
`anytime.calibrate.ensembles.fit_geometric` then weighs the exits against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor, nn

from anytime.models.attach.exits import AttachedExits, Head, Location, Method, Statistics
from anytime.models.attach.heads import pooling


class CascadeHead(nn.Module):
    """FC([pooled features, LayerNorm(logits of the head before)]).

    Args:
        shape: Of the features of one input.
        classes: How many logits to read and give.
        reads_previous: Whether there is a head before this one.
        normalise: Whether the logits before are normalised. Scale and shift are left to the linear layer that follows.
        convolution: Whether maps first pass a 3×3 convolution of the same width and a ReLU.
    """

    def __init__(
        self, shape: Sequence[int], classes: int, *, reads_previous: bool, normalise: bool = True, convolution: bool = True
    ) -> None:
        super().__init__()
        self.reads_previous = reads_previous
        self.features = _convolution(shape[0]) if convolution and len(shape) == 3 else nn.Identity()
        self.pool, width = pooling(shape)
        self.norm = nn.LayerNorm(classes, elementwise_affine=False) if normalise else nn.Identity()
        self.linear = nn.Linear(width + (classes if reads_previous else 0), classes)

    def forward(self, features: Tensor, previous: Tensor | None = None) -> Tensor:
        pooled = self.pool(self.features(features)).flatten(1)
        if self.reads_previous:
            assert previous is not None
            pooled = torch.cat((pooled, self.norm(previous.detach())), dim=1)
        logits: Tensor = self.linear(pooled)
        return logits


def cascade_heads(classes: int, *, normalise: bool = True, convolution: bool = True) -> Head:
    """Makes the heads of one network in turn: the first reads features alone, each later one the head before it too."""
    made = count()

    def make(shape: tuple[int, ...]) -> nn.Module:
        later = next(made) > 0
        return CascadeHead(shape, classes, reads_previous=later, normalise=normalise, convolution=convolution)

    return make


def attach_cascade(
    module: nn.Module,
    at: Sequence[Location],
    *,
    example: Tensor,
    classes: int,
    normalise: bool = True,
    convolution: bool = True,
    frozen: bool = True,
    statistics: Statistics = "fixed",
    method: Method = "auto",
) -> AttachedExits:
    """Put cascading heads on a module, which stays as it is.

    Args:
        module: A trained network that gives logits.
        at: Names or fractions of the MACs, as for `attach_exits`, which has the further arguments too.
        example: A batch of inputs.
        classes: How many classes there are.
        normalise: Whether heads normalise the logits they read.
        convolution: Whether heads on maps have a convolution.
        frozen: Whether only the heads learn.
        statistics: Of the batch norms of a frozen module.
        method: How the module is stopped.
    """
    head = cascade_heads(classes, normalise=normalise, convolution=convolution)
    return AttachedExits(
        module, at, head, example=example, classes=classes, frozen=frozen, statistics=statistics, method=method
    )


def _convolution(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU())

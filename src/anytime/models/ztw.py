"""Cascading heads on a frozen network, as in Zero Time Waste (ZTW).

Each head reads the features at its place and the logits of the head before it, through which no gradient flows. The first head
reads features only, and the last exit is the network's own output. `anytime.calibrate.ensembles.fit_geometric` then weights the
exits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from anytime.models.attach.exits import AttachedExits, Head
from anytime.models.attach.heads import pooling
from anytime.models.attach.places import Location


class CascadeHead(nn.Module):
    """FC([pooled features, LayerNorm(logits of the head before)]).

    Args:
        shape: The shape of the features of one input.
        classes: The number of classes.
        reads_previous: Whether there is a head before this one.
        normalise: Whether to normalise its logits, without scale and shift, which the linear layer can learn.
        convolution: Whether feature maps first go through a 3×3 convolution of the same width and a ReLU.
        channels_first: Whether the features of a sequence are `(channels, length)`, as those of 1-D convolutions.
    """

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        *,
        reads_previous: bool,
        normalise: bool = True,
        convolution: bool = True,
        channels_first: bool = False,
    ) -> None:
        super().__init__()
        self.reads_previous, self.channels_first = reads_previous, channels_first and len(shape) == 2
        on_maps = convolution and len(shape) == 3
        self.features = nn.Sequential(nn.Conv2d(shape[0], shape[0], 3, padding=1), nn.ReLU()) if on_maps else nn.Identity()
        self.pool, width = pooling(tuple(reversed(shape)) if self.channels_first else shape)
        self.norm = nn.LayerNorm(classes, elementwise_affine=False) if normalise else nn.Identity()
        self.linear = nn.Linear(width + (classes if reads_previous else 0), classes)

    def forward(self, features: Tensor, previous: Tensor | None = None) -> Tensor:
        features = features.mT if self.channels_first else self.features(features)
        pooled = self.pool(features).flatten(1)
        if self.reads_previous:
            assert previous is not None
            pooled = torch.cat((pooled, self.norm(previous.detach())), dim=1)
        logits: Tensor = self.linear(pooled)
        return logits


def cascade_heads(classes: int, *, normalise: bool = True, convolution: bool = True) -> Head:
    """A head factory for `attach_exits`: the first head reads features only, later ones also the head before."""
    made = count()

    def make(shape: tuple[int, ...], channels_first: bool = False) -> nn.Module:
        told = {"normalise": normalise, "convolution": convolution, "channels_first": channels_first}
        return CascadeHead(shape, classes, reads_previous=next(made) > 0, **told)

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
    **options: Any,
) -> AttachedExits:
    """Attach cascading heads to a trained module.

    Args:
        module: As for `attach_exits`.
        at: As for `attach_exits`.
        example: As for `attach_exits`.
        classes: The number of classes.
        normalise: As for `CascadeHead`.
        convolution: As for `CascadeHead`.
        frozen: Whether to train the heads only.
        options: Further arguments of `attach_exits`.
    """
    head = cascade_heads(classes, normalise=normalise, convolution=convolution)
    return AttachedExits(module, at, head, example=example, classes=classes, frozen=frozen, **options)

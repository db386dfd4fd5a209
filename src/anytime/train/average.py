"""An exponential moving average of the weights (Polyak averaging), as vision transformers are trained with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class WeightAverage:
    """The average of weights that change in place: after update t = 1, 2, ... it is d · average + (1 - d) · weights.

    The decay d is min(decay, (1 + t) / (10 + t)): a new average forgets the initial weights fast.

    Args:
        weights: The weights by name.
        decay: The highest decay.

    Attributes:
        values: The average by name.
        updates: Updates so far.
    """

    def __init__(self, weights: Mapping[str, Tensor], *, decay: float) -> None:
        self.weights, self.decay, self.updates = weights, decay, 0
        self.values = {name: weight.detach().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(list(self.values.values()), list(self.weights.values()), 1 - decay)

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor], *, updates: int) -> None:
        """Continue from the average `values` after `updates` updates."""
        for name, value in self.values.items():
            value.copy_(values[name])
        self.updates = updates

"""Stochastic gradient descent on flat weights, with a rate that lies on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from anytime.train.config import TrainConfig
from anytime.train.weights import FlatWeights


class SGD:
    """As `torch.optim.SGD` with momentum, L2 decay and, if asked for, Nesterov's rule.

    The rate is a tensor, so that it can change between replays of a captured step.
    """

    def __init__(self, weights: FlatWeights, config: TrainConfig) -> None:
        self.weights = weights
        self.config = config
        self.velocity = torch.zeros_like(weights.master)
        self.lr = torch.zeros((), device=weights.master.device)

    @torch.no_grad()
    def step(self) -> None:
        """Move the weights along what `weights.gradient` holds, which is overwritten."""
        gradient, master, config = self.weights.gradient, self.weights.master, self.config
        gradient.add_(master, alpha=config.weight_decay)
        self.velocity.mul_(config.momentum).add_(gradient)
        update = gradient.add_(self.velocity, alpha=config.momentum) if config.nesterov else self.velocity
        master.addcmul_(update, self.lr, value=-1)
        self.weights.refresh()

    def state(self) -> dict[str, Tensor]:
        """The velocity by parameter name."""
        return self.weights.named(self.velocity)

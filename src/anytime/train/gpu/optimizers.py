"""Optimisers on flat weights, with a rate that lies on the device.

The rate is a tensor, so that it can change between replays of a captured step. What an optimiser remembers are its
`moments`, flat tensors as long as the weights. Where heads learn faster than the rest, the rate is such a tensor too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from anytime.train.config import TrainConfig
from anytime.train.gpu.weights import FlatWeights

# Modules whose parameters begin new where the rest is pretrained. A pooler is none: every exit reads it.
_HEADS = ("heads", "mixes", "classifier")


class Optimizer(ABC):
    """Moves flat weights along what `weights.gradient` holds, which is overwritten."""

    names: tuple[str, ...]

    def __init__(self, weights: FlatWeights, config: TrainConfig) -> None:
        self.weights = weights
        self.config = config
        self.moments = {name: torch.zeros_like(weights.master) for name in self.names}
        self.lr = torch.zeros((), device=weights.master.device)
        self._factors = None if config.head_rate == 1 else _head_factors(weights, config.head_rate)

    @property
    def rate(self) -> Tensor:
        """The rate of each parameter: one for all, or a flat tensor."""
        return self.lr if self._factors is None else self.lr * self._factors

    @torch.no_grad()
    def step(self) -> None:
        """Take one step."""
        self.decay()
        self.move(self.weights.gradient)
        self.weights.refresh()

    def decay(self) -> None:
        """Add L2 decay to the gradient."""
        self.weights.gradient.add_(self.weights.master, alpha=self.config.weight_decay)

    @abstractmethod
    def move(self, gradient: Tensor) -> None:
        """Change the master weights by a gradient."""

    def tensors(self) -> list[Tensor]:
        """All that it remembers."""
        return list(self.moments.values())

    def state(self) -> dict[str, Tensor]:
        """All that is needed to go on, by names."""
        return {
            f"{moment}.{name}": view for moment, flat in self.moments.items() for name, view in self.weights.named(flat).items()
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        for moment, flat in self.moments.items():
            own = {name.removeprefix(f"{moment}."): value for name, value in state.items() if name.startswith(f"{moment}.")}
            self.weights.load(flat, own)


class SGD(Optimizer):
    """As `torch.optim.SGD` with momentum, L2 decay and, if asked for, Nesterov's rule."""

    names = ("velocity",)

    @property
    def velocity(self) -> Tensor:
        """The running sum of gradients."""
        return self.moments["velocity"]

    def move(self, gradient: Tensor) -> None:
        config = self.config
        self.velocity.mul_(config.momentum).add_(gradient)
        update = gradient.add_(self.velocity, alpha=config.momentum) if config.nesterov else self.velocity
        self.weights.master.addcmul_(update, self.rate, value=-1)


class Adam(Optimizer):
    """As `torch.optim.Adam` with its default numbers and L2 decay; for heads on a frozen backbone."""

    names = ("first", "second")
    betas = (0.9, 0.999)
    eps = 1e-8

    def __init__(self, weights: FlatWeights, config: TrainConfig) -> None:
        super().__init__(weights, config)
        self.count = torch.zeros((), device=weights.master.device)

    def move(self, gradient: Tensor) -> None:
        first, second = self.moments["first"], self.moments["second"]
        fast, slow = self.betas
        self.count.add_(1)
        first.lerp_(gradient, 1 - fast)
        second.mul_(slow).addcmul_(gradient, gradient, value=1 - slow)
        scale = (second / (1 - slow**self.count)).sqrt_().add_(self.eps)
        self.weights.master.sub_(self.rate / (1 - fast**self.count) * first / scale)

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), self.count]

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), "count": self.count}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        self.count.copy_(state["count"])


class AdamW(Adam):
    """As `torch.optim.AdamW`, for pretrained encoders: weights shrink by themselves, vectors such as biases do not."""

    def __init__(self, weights: FlatWeights, config: TrainConfig) -> None:
        super().__init__(weights, config)
        self._shrinking = torch.zeros_like(weights.master)
        for view in weights.named(self._shrinking).values():
            view.fill_(config.weight_decay if view.ndim > 1 else 0.0)

    def decay(self) -> None:
        self.weights.master.mul_(1 - self.rate * self._shrinking)


def optimizer_for(weights: FlatWeights, config: TrainConfig) -> Optimizer:
    """The optimiser a recipe asks for."""
    kinds: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
    return kinds[config.optimizer](weights, config)


def _head_factors(weights: FlatWeights, head_rate: float) -> Tensor:
    """By how much each parameter's rate is higher than that of the network without its heads."""
    factors = torch.ones_like(weights.master)
    for name, view in weights.named(factors).items():
        if name.partition(".")[0] in _HEADS:
            view.fill_(head_rate)
    return factors

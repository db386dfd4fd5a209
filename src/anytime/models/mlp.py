"""Small perceptrons with an exit after every layer, for the toy tasks: classification, and intervals for regression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytime.checks import check_count, check_fraction
from anytime.errors import ShapeError
from anytime.models.base import Carry, MultiExit

_LARGEST = 1 << 16


@dataclass(frozen=True)
class MLPConfig:
    """The shape of a perceptron with exits.

    Attributes:
        classes: How many numbers an exit gives.
        inputs: How many numbers it reads.
        width: Of every hidden layer.
        exits: How many hidden layers, each with an exit.
    """

    classes: int
    inputs: int = 2
    width: int = 64
    exits: int = 5

    def __post_init__(self) -> None:
        for name in ("classes", "inputs", "width", "exits"):
            check_count(getattr(self, name), name, most=_LARGEST)


class MLP(MultiExit):
    """A classifier of vectors: linear layers with ReLU, and a linear head after each.

    Example:
        >>> MLP(MLPConfig(classes=4, exits=3))(torch.randn(5, 2)).shape
        torch.Size([3, 5, 4])
    """

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        self.num_exits = config.exits
        widths = [config.inputs] + [config.width] * (config.exits - 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, config.width), nn.ReLU()) for width in widths)
        self.heads = nn.ModuleList(nn.Linear(config.width, config.classes) for _ in widths)

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run a stage: vectors `(batch, inputs)` go into the first, `(batch, width)` into the others."""
        self._check_carry(exit, carry)
        (x,) = carry
        if exit == 0 and (x.ndim != 2 or x.shape[1] != self.config.inputs):
            raise ShapeError(
                f"inputs have shape {tuple(x.shape)}",
                expected=f"(batch, {self.config.inputs})",
                fix="flatten each input to a vector",
            )
        x = self.layers[exit](x)
        return (x,) if exit + 1 < self.num_exits else (), self.heads[exit](x)


class IntervalMLP(MLP):
    """A regressor that gives an interval at each exit, for `anytime.Intersection`.

    Args:
        inputs: How many numbers it reads.
        width: Of every hidden layer.
        exits: How many hidden layers, each with an exit.

    Example:
        >>> lower, upper = IntervalMLP(exits=3).intervals(torch.randn(5, 1))
        >>> lower.shape, bool((lower < upper).all())
        (torch.Size([3, 5]), True)
    """

    def __init__(self, *, inputs: int = 1, width: int = 64, exits: int = 5) -> None:
        super().__init__(MLPConfig(classes=2, inputs=inputs, width=width, exits=exits))

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run a stage; in place of logits it gives the lower and the upper end, `(batch, 2)`."""
        carry, raw = super().stage(exit, carry)
        middle, spread = raw.unbind(-1)
        half = F.softplus(spread)
        return carry, torch.stack((middle - half, middle + half), dim=-1)

    def intervals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The lower and the upper ends of all exits, `(exits, batch)` each."""
        lower, upper = self(x).unbind(-1)
        return lower, upper


def interval_score(lower: Tensor, upper: Tensor, target: Tensor, *, miss: float = 0.05) -> Tensor:
    """The interval score (Winkler): the width, and 2/miss times how far the target lies outside; the smaller the better.

    The uniform density has no gradient outside of its interval; this score has, and is least in expectation for the interval
    that leaves miss/2 of the targets out on either side.

    Args:
        lower: Ends of any shape that goes with `target`.
        upper: As `lower`.
        target: What was to be covered.
        miss: The share of targets that may lie outside, above 0 and below 1.

    Example:
        >>> interval_score(torch.tensor(0.0), torch.tensor(2.0), torch.tensor([1.0, 3.0]), miss=0.5).tolist()
        [2.0, 6.0]
    """
    check_fraction(miss, "miss")
    outside = (lower - target).clamp(min=0) + (target - upper).clamp(min=0)
    return upper - lower + 2 / miss * outside


PRESETS: Mapping[str, MLPConfig] = MappingProxyType({"mlp-toy": MLPConfig(classes=4)})
"""The perceptron for the spiral with four arms."""

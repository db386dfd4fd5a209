"""Small MLPs with an exit after every hidden layer, for the toy tasks: classification, and intervals for regression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytime.checks import check_fraction
from anytime.errors import ShapeError
from anytime.models.base import Carry, MultiExit
from anytime.models.config import check_config


@dataclass(frozen=True)
class MLPConfig:
    """The shape of an MLP with exits.

    Attributes:
        classes: Outputs of each exit.
        inputs: Input features.
        width: Units of each hidden layer.
        exits: The number of hidden layers and of exits.
    """

    classes: int
    inputs: int = 2
    width: int = 64
    exits: int = 5

    def __post_init__(self) -> None:
        check_config(self, counts=dict.fromkeys(("classes", "inputs", "width", "exits"), 1 << 16))


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
        """Run a stage; the first takes vectors `(batch, inputs)`, the others `(batch, width)`."""
        self._check_carry(exit, carry)
        (x,) = carry
        if exit == 0 and (x.ndim != 2 or x.shape[1] != self.config.inputs):
            raise ShapeError(
                f"inputs have shape {tuple(x.shape)}",
                expected=f"(batch, {self.config.inputs})",
                fix="flatten each input to a vector, or create the network with another number of inputs",
            )
        x = self.layers[exit](x)
        return (x,) if exit + 1 < self.num_exits else (), self.heads[exit](x)


class IntervalMLP(MLP):
    """A regressor that predicts an interval at each exit, for `anytime.Intersection`; the arguments of `MLPConfig`.

    Example:
        >>> lower, upper = IntervalMLP(exits=3).intervals(torch.randn(5, 1))
        >>> lower.shape, bool((lower < upper).all())
        (torch.Size([3, 5]), True)
    """

    def __init__(self, *, inputs: int = 1, width: int = 64, exits: int = 5) -> None:
        super().__init__(MLPConfig(classes=2, inputs=inputs, width=width, exits=exits))

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run a stage; instead of logits it returns the lower and upper bounds, `(batch, 2)`."""
        carry, raw = super().stage(exit, carry)
        center, spread = raw.unbind(-1)
        half = F.softplus(spread)
        return carry, torch.stack((center - half, center + half), dim=-1)

    def intervals(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The lower and upper bounds of all exits, `(exits, batch)` each."""
        lower, upper = self(x).unbind(-1)
        return lower, upper


def interval_score(lower: Tensor, upper: Tensor, target: Tensor, *, miss: float = 0.05) -> Tensor:
    """The interval score (Winkler): the width plus 2/miss times the distance of the target from the interval; lower is better.

    The uniform density has no gradient outside of its interval; this score has one, and its expectation is smallest for the
    interval that leaves out miss/2 of the targets on each side.

    Args:
        lower: Lower bounds, of any shape that broadcasts with `target`.
        upper: Upper bounds.
        target: The true values.
        miss: The fraction of targets that may be outside, above 0 and below 1.

    Example:
        >>> interval_score(torch.tensor(0.0), torch.tensor(2.0), torch.tensor([1.0, 3.0]), miss=0.5).tolist()
        [2.0, 6.0]
    """
    check_fraction(miss, "miss")
    outside = (lower - target).clamp(min=0) + (target - upper).clamp(min=0)
    return upper - lower + 2 / miss * outside


PRESETS: Mapping[str, MLPConfig] = MappingProxyType({"mlp-toy": MLPConfig(classes=4)})
"""The MLP for the spiral with four arms."""

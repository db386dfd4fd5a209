"""The residual networks of He et al. (2016) for CIFAR, alone or with exits.

`CifarResNet` is the plain network of 6n + 2 layers: a convolution, three groups of n blocks with 16, 32 and 64 channels, global
average pooling and a linear layer. At the start of a group, the shortcut takes every other pixel and pads the new channels with
zeros. `ResNet` is the same network with exits: one by default, more with `at`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytime.models.attach.exits import AttachedExits, Statistics
from anytime.models.attach.heads import PooledHead
from anytime.models.attach.places import Location
from anytime.models.config import check_config, require
from anytime.models.ztw import cascade_heads

_SMALL = 1 << 16
_LIMITS = {"classes": 1 << 20, "depth": 1202, "width": 1024, "channels": 64, "image_size": 1024}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "heads": ("pooled", "cascade"),
    "frozen": (False, True),
    "statistics": ("fixed", "moving"),
}


@dataclass(frozen=True)
class ResNetConfig:
    """The shape of a CIFAR ResNet and its exits.

    Attributes:
        classes: The number of classes.
        depth: The number of layers, 6n + 2.
        width: Channels of the first group; the others have two and four times as many.
        channels: Channels of the images.
        image_size: Height and width of the images.
        at: The places of the exits besides the last: fractions of the MACs, or names such as `blocks.4`.
        heads: `pooled` as in SDN, or `cascade` as in ZTW.
        frozen: Whether to train the heads only.
        statistics: Of the batch norms of a frozen network; see `attach_exits`.
    """

    classes: int
    depth: int = 20
    width: int = 16
    channels: int = 3
    image_size: int = 32
    at: tuple[Location, ...] = ()
    heads: Literal["pooled", "cascade"] = "pooled"
    frozen: bool = False
    statistics: Statistics = "fixed"

    def __post_init__(self) -> None:
        check_config(self, counts=_LIMITS, choices=_CHOICES)
        require(
            self.depth >= 8 and self.depth % 6 == 2,
            f"depth is {self.depth}",
            expected="6n + 2: 8, 14, 20, …",
            fix="pass depth=20, 32 or 56, for example",
        )
        require(
            isinstance(self.at, list | tuple) and all(isinstance(place, str | float) for place in self.at),
            f"at is {self.at!r}",
            expected="names of submodules and fractions of the MACs",
            fix="pass, e.g., at=(0.25, 0.5)",
        )
        object.__setattr__(self, "at", tuple(self.at))

    @property
    def is_small(self) -> bool:
        """Whether making it takes little memory."""
        sizes = (self.depth * self.width**2, self.image_size**2 * max(self.width, self.channels), 64 * self.classes)
        return max(sizes) <= _SMALL


class _Block(nn.Module):
    """Two 3×3 convolutions with batch norm, added to the input."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.stride, self.new = (2 if width > width_in else 1), width - width_in
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.sum = nn.Identity()  # an exit can be attached here to read the sum before its ReLU, as in ZTW
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        if self.new:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.new // 2, self.new - self.new // 2))
        result: Tensor = self.relu2(self.sum(out + x))
        return result


class CifarResNet(nn.Module):
    """The plain network: from images `(batch, channels, side, side)` to logits `(batch, classes)`.

    Example:
        >>> sum(p.numel() for p in CifarResNet(classes=10, depth=20).parameters())
        269722
    """

    def __init__(self, *, classes: int, depth: int = 20, width: int = 16, channels: int = 3) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        widths = [width] * blocks + [2 * width] * blocks + [4 * width] * blocks
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(*(_Block(a, b) for a, b in zip([width, *widths], widths, strict=False)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.pool(self.blocks(self.stem(x))).flatten(1))
        return logits


class ResNet(AttachedExits):
    """A CIFAR ResNet with exits.

    Args:
        config: The shape and the exits; `PRESETS` has named ones.

    Example:
        >>> ResNet(ResNetConfig(classes=10, at=(0.3, 0.6))).exit_names
        ('blocks.1', 'blocks.4')
    """

    announces = False

    def __init__(self, config: ResNetConfig) -> None:
        classes = config.classes
        backbone = CifarResNet(classes=classes, depth=config.depth, width=config.width, channels=config.channels)
        super().__init__(
            backbone,
            config.at,
            cascade_heads(classes) if config.heads == "cascade" else lambda shape: PooledHead(shape, classes),
            example=torch.zeros(2, config.channels, config.image_size, config.image_size),
            classes=classes,
            frozen=config.frozen,
            statistics=config.statistics,
        )
        self.config = config


_SDN = (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
_EVERY_BLOCK = tuple(f"blocks.{number}.sum" for number in range(26))

PRESETS: Mapping[str, ResNetConfig] = MappingProxyType(
    {
        "resnet-cifar-20": ResNetConfig(classes=100),
        "resnet-cifar-32": ResNetConfig(classes=100, depth=32),
        "resnet-cifar-56": ResNetConfig(classes=100, depth=56),
        "sdn-resnet-cifar-56": ResNetConfig(classes=100, depth=56, at=_SDN),
        "ztw-resnet-cifar-56": ResNetConfig(classes=100, depth=56, at=_EVERY_BLOCK, heads="cascade", frozen=True),
    }
)
"""SDN has exits at 15 % to 90 % of the MACs, ZTW after every block but the last."""

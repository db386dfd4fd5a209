"""MSDNet, the multi-scale dense network of Huang et al. (2018), as the paper used it.

The network keeps feature maps at several scales, from fine to coarse. Every layer adds channels to every scale: half of them
computed from that scale, half from the next finer one. There are thus coarse features for a classifier after every layer.
Deeper layers drop the finest scales, which no later exit needs.

Parameters have the names of the public PyTorch port, so its weights load unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor, nn

from anytime.checks import check_counts, check_number
from anytime.models.base import Carry, MultiExit
from anytime.models.config import check_config, check_images, require

_HEAD_WIDTH = 128
_LARGEST, _MOST_LAYERS = 1 << 20, 1_000


@dataclass(frozen=True)
class LayerPlan:
    """The shape of one layer: with `width` n, scale s has `n * growth_factors[s]` channels.

    Attributes:
        stage: The stage that it belongs to, from 0.
        width: n before the layer.
        scales_in: The number of scales that it reads, the coarsest ones.
        scales_out: The number of scales that it returns; one fewer if it drops the finest.
        reduced_width: n after the transition that follows, or None if there is none.
    """

    stage: int
    width: int
    scales_in: int
    scales_out: int
    reduced_width: int | None


@dataclass(frozen=True)
class MSDNetConfig:
    """The shape of an MSDNet; the defaults are the paper's network for CIFAR.

    Attributes:
        classes: The number of classes.
        exits: The number of exits (nBlocks in the port).
        spacing: `even` puts `step` layers between exits, `linear` puts `step·i + 1` before exit i + 1 (lin_grow).
        base: Layers before the first exit, without the first layer.
        step: See `spacing`.
        channels: n before the first layer.
        growth: The increase of n per layer.
        growth_factors: One number per scale, from fine to coarse: scale s has `n · growth_factors[s]` channels.
        bottleneck_factors: One number per scale: the ratio of the width of a 1×1 bottleneck to that of its output.
        prune: When scales are dropped: `max` at regular intervals, `min` only in the last layers.
        reduction: The factor by which a transition reduces n.
        stem: `cifar` starts with a 3×3 convolution, `imagenet` with a 7×7 convolution and a pool, both with stride 2.
        image_size: Height and width of the images.
        init: `default` is PyTorch's, `he` is that of the MSDNet paper. The port intends the latter, but its loop does not reach
            nested modules, so all published results, and the reference weights, started from the former.
    """

    classes: int
    exits: int = 7
    spacing: Literal["even", "linear"] = "even"
    base: int = 4
    step: int = 2
    channels: int = 16
    growth: int = 6
    growth_factors: tuple[int, ...] = (1, 2, 4)
    bottleneck_factors: tuple[int, ...] = (1, 2, 4)
    prune: Literal["max", "min"] = "max"
    reduction: float = 0.5
    stem: Literal["cifar", "imagenet"] = "cifar"
    image_size: int = 32
    init: Literal["default", "he"] = "default"

    def __post_init__(self) -> None:
        counts = ("classes", "exits", "base", "step", "channels", "growth", "image_size")
        check_config(self, counts=dict.fromkeys(counts, _LARGEST), choices=_CHOICES)
        for name in ("growth_factors", "bottleneck_factors"):
            fix = f"pass {name}=(1, 2, 4) for CIFAR, (1, 2, 4, 4) for ImageNet"
            object.__setattr__(self, name, check_counts(getattr(self, name), name, most=_LARGEST, fix=fix))
        self._check_scales()
        check_number(self.reduction, "reduction", above=0, most=1)
        require(
            all(plan.reduced_width != 0 for plan in self.layers()),
            f"reduction is {self.reduction!r}, which leaves no channels",
            expected="at least one channel after each transition",
            fix="pass reduction=0.5, as published",
        )

    @property
    def scales(self) -> int:
        """The number of scales in the first layer."""
        return len(self.growth_factors)

    @property
    def depths(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        later = range(1, self.exits)
        return (self.base, *((self.step if self.spacing == "even" else self.step * stage + 1) for stage in later))

    def layers(self) -> tuple[LayerPlan, ...]:
        """The plans of all layers after the first.

        In a very short network with `prune="max"`, the last layer may keep a scale that no exit reads, as in the port.

        >>> [plan.reduced_width for plan in MSDNetConfig(classes=10).layers() if plan.reduced_width]
        [29, 32]
        """
        stages = [stage for stage, depth in enumerate(self.depths) for _ in range(depth)]
        plans, width = [], self.channels
        for number, stage in enumerate(stages, start=1):
            scales_in, scales_out, reduces = self._pruned(number, len(stages))
            grown = width + self.growth
            reduced = math.floor(self.reduction * grown) if reduces else None
            plans.append(LayerPlan(stage, width, scales_in, scales_out, reduced))
            width = grown if reduced is None else reduced
        return tuple(plans)

    def _pruned(self, number: int, depth: int) -> tuple[int, int, bool]:
        """Scales in and out of layer `number` (from 1) of `depth`, and whether a transition follows it."""
        if self.prune == "max":
            interval = math.ceil(depth / self.scales)
            scales_in = self.scales - max(0, number - 2) // interval
            scales_out = self.scales - (number - 1) // interval
            return scales_in, scales_out, scales_in > scales_out
        scales_in = min(self.scales, depth - number + 2)
        scales_out = min(self.scales, depth - number + 1)
        return scales_in, scales_out, number in (depth // 3, 2 * depth // 3)

    def _check_scales(self) -> None:
        require(
            len(self.bottleneck_factors) == self.scales,
            f"there are {self.scales} growth_factors and {len(self.bottleneck_factors)} bottleneck_factors",
            expected="one of each per scale",
            fix="pass two tuples of the same length",
        )
        require(
            self.scales <= sum(self.depths) <= _MOST_LAYERS,
            f"the network has {sum(self.depths)} layers and {self.scales} scales",
            expected=f"at least as many layers as scales, and at most {_MOST_LAYERS}",
            fix="change base, step or exits, or pass fewer growth_factors",
        )
        require(
            all(self.growth * factor % 2 == 0 for factor in self.growth_factors[1:]),
            f"growth is {self.growth} with growth_factors {self.growth_factors}",
            expected="an even number of new channels at all scales but the finest, half from each of two paths",
            fix="use an even growth",
        )
        halvings = (2 if self.stem == "imagenet" else 0) + (self.scales - 1) + 2
        require(
            math.ceil(self.image_size / 2**halvings) in (2, 3),  # the classifier's pool reduces these to 1×1
            f"image_size is {self.image_size} with the stem {self.stem!r} and {self.scales} scales",
            expected=f"a size from {2**halvings + 1} to {3 * 2**halvings}",
            fix="resize the images, or add or remove a scale (growth_factors, bottleneck_factors)",
        )


_CHOICES = {"spacing": ("even", "linear"), "prune": ("max", "min"), "stem": ("cifar", "imagenet"), "init": ("default", "he")}


class _Unit(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, width_in: int, width_out: int, *, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(*_conv_norm_relu(width_in, width_out, kernel=kernel, stride=stride))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class _Path(_Unit):
    """A 1×1 bottleneck, then a 3×3 convolution with the stride."""

    def __init__(self, width_in: int, width_out: int, *, factor: int, stride: int = 1) -> None:
        nn.Module.__init__(self)
        middle = min(width_in, factor * width_out)
        bottleneck = _conv_norm_relu(width_in, middle, kernel=1)
        self.net = nn.Sequential(*bottleneck, *_conv_norm_relu(middle, width_out, kernel=3, stride=stride))


class _Scale(nn.Module):
    """One scale of a layer: concatenates its input, channels from the finer scale, and channels from its own."""

    def __init__(self, config: MSDNetConfig, width: int, scale: int, *, down: bool) -> None:
        super().__init__()
        growth, bottleneck = config.growth_factors, config.bottleneck_factors
        new = config.growth * growth[scale] // (2 if down else 1)
        self.conv_down = _Path(width * growth[scale - 1], new, factor=bottleneck[scale - 1], stride=2) if down else None
        self.conv_normal = _Path(width * growth[scale], new, factor=bottleneck[scale])

    def forward(self, x: Tensor, finer: Tensor | None) -> Tensor:
        if self.conv_down is None:
            return torch.cat((x, self.conv_normal(x)), dim=1)
        return torch.cat((x, self.conv_down(finer), self.conv_normal(x)), dim=1)


class _First(nn.Module):
    """The first layer: from an image to one map per scale, each computed from the next finer one."""

    def __init__(self, config: MSDNetConfig) -> None:
        super().__init__()
        widths = [config.channels * factor for factor in config.growth_factors]
        finest = _Unit(3, widths[0], kernel=3) if config.stem == "cifar" else _imagenet_stem(widths[0])
        coarser = [_Unit(a, b, kernel=3, stride=2) for a, b in pairwise(widths)]
        self.layers = nn.ModuleList([finest, *coarser])

    def forward(self, image: list[Tensor]) -> list[Tensor]:
        maps = image
        for layer in self.layers:
            maps = [*maps, layer(maps[-1])]
        return maps[1:]


class _Layer(nn.Module):
    """A layer: all scales that are kept, from fine to coarse."""

    def __init__(self, config: MSDNetConfig, plan: LayerPlan) -> None:
        super().__init__()
        finest = config.scales - plan.scales_out
        drops = plan.scales_in > plan.scales_out
        self.layers = nn.ModuleList(
            _Scale(config, plan.width, scale, down=drops or scale > finest) for scale in range(finest, config.scales)
        )

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        kept = maps[-len(self.layers) :]
        finer = [None, *maps][-len(self.layers) - 1 : -1]
        return [layer(x, above) for layer, x, above in zip(self.layers, kept, finer, strict=True)]


class _Transition(nn.Module):
    """Reduces the channels of every scale after a layer."""

    def __init__(self, config: MSDNetConfig, plan: LayerPlan, reduced_width: int) -> None:
        super().__init__()
        width = plan.width + config.growth
        factors = config.growth_factors[-plan.scales_out :]
        self.m = nn.ModuleList(_Unit(width * factor, reduced_width * factor, kernel=1) for factor in factors)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        return [unit(x) for unit, x in zip(self.m, maps, strict=True)]


class _Classifier(nn.Module):
    """An exit: from the coarsest scale, `(batch, width, side, side)`, to logits, `(batch, classes)`."""

    def __init__(self, config: MSDNetConfig, width: int) -> None:
        super().__init__()
        inner = _HEAD_WIDTH if config.stem == "cifar" else width
        self.m = nn.Sequential(
            _Unit(width, inner, kernel=3, stride=2), _Unit(inner, inner, kernel=3, stride=2), nn.AvgPool2d(2)
        )
        self.linear = nn.Linear(inner, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.m(x).flatten(1))
        return logits


class MSDNet(MultiExit):
    """A multi-scale dense network with an exit after every stage.

    Args:
        config: The shape; `PRESETS` has the published ones.

    Example:
        >>> network = MSDNet(MSDNetConfig(classes=10)).eval()
        >>> next(network.exits(torch.zeros(1, 3, 32, 32))).shape  # only the first stage has run
        torch.Size([1, 10])
    """

    def __init__(self, config: MSDNetConfig) -> None:
        super().__init__()
        self.config = config
        self.num_exits = config.exits
        stages: list[list[nn.Module]] = [[] for _ in range(config.exits)]
        widths, scales = [0] * config.exits, [0] * config.exits
        stages[0].append(_First(config))
        for plan in config.layers():
            stages[plan.stage].append(_Layer(config, plan))
            widths[plan.stage] = plan.width + config.growth
            scales[plan.stage] = plan.scales_out
            if plan.reduced_width is not None:
                stages[plan.stage].append(_Transition(config, plan, plan.reduced_width))
                widths[plan.stage] = plan.reduced_width
        coarsest = config.growth_factors[-1]
        self.blocks = nn.ModuleList(nn.Sequential(*stage) for stage in stages)
        self.classifier = nn.ModuleList(_Classifier(config, width * coarsest) for width in widths)
        self._scales_into = (1, *scales[:-1])
        if config.init == "he":
            self.apply(_he_init)

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run a stage; the first takes images `(batch, 3, image_size, image_size)`, the others one map per scale."""
        maps = self.maps(exit, carry)
        logits: Tensor = self.classifier[exit](maps[-1])
        return tuple(maps) if exit + 1 < self.num_exits else (), logits

    def carry_size(self, exit: int) -> int:
        """One map per scale, and the images for the first stage."""
        return self._scales_into[exit]

    def maps(self, exit: int, carry: Carry) -> list[Tensor]:
        """Run a stage without its exit: the maps from fine to coarse, the last of which the exit reads."""
        self._check_carry(exit, carry)
        if exit == 0:
            check_images(carry[0], self.config.image_size)
        maps: list[Tensor] = self.blocks[exit](list(carry))
        return maps

    def stages(self, x: Tensor) -> Iterator[list[Tensor]]:
        """Yield the maps after each stage, from fine to coarse.

        The next stage reads the yielded list, so replacing an entry changes its input.
        """
        maps = [x]
        for exit in range(self.num_exits):
            maps = self.maps(exit, tuple(maps))
            yield maps


def _conv_norm_relu(width_in: int, width_out: int, *, kernel: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(width_in, width_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(width_out), nn.ReLU(inplace=True)]


def _imagenet_stem(width: int) -> nn.Sequential:
    convolution = nn.Conv2d(3, width, 7, stride=2, padding=3)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1))


def _he_init(module: nn.Module) -> None:
    # PyTorch initialises batch norms with scale 1 and shift 0 already; linear weights keep its default.
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _imagenet(step: int) -> MSDNetConfig:
    factors = (1, 2, 4, 4)
    return MSDNetConfig(
        classes=1000,
        exits=5,
        base=step,
        step=step,
        channels=32,
        growth=16,
        growth_factors=factors,
        bottleneck_factors=factors,
        stem="imagenet",
        image_size=224,
    )


PRESETS: Mapping[str, MSDNetConfig] = MappingProxyType(
    {
        "msdnet-cifar": MSDNetConfig(classes=100),
        "msdnet-cifar-linear": MSDNetConfig(classes=100, exits=5, spacing="linear", base=1, step=1),
        "msdnet-imagenet-4": _imagenet(4),
        "msdnet-imagenet-6": _imagenet(6),
        "msdnet-imagenet-7": _imagenet(7),
    }
)
"""The published networks; `anytime.models.create` sets the number of classes."""

"""MSDNet, the multi-scale dense network of Huang et al. (2018), in the form the paper used.

The network keeps its features at several scales at once, from fine to coarse. Every layer adds channels to every scale:
half of them from that scale, half from the next finer one. A classifier may thus stand after any layer, as it finds coarse
features there. Deeper layers drop the finest scales, which no later exit needs.

Parts stand here before what is made of them. The names of parameters are those of the public PyTorch port, so that its weights
load as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anytime.checks import check_choice, check_count, check_counts
from anytime.errors import OptionError, ShapeError
from anytime.models.base import Carry, MultiExit

_HEAD_WIDTH = 128
# Far beyond any network, near enough that a file made up to exhaust memory is refused.
_LARGEST, _MOST_LAYERS = 1 << 20, 1_000


@dataclass(frozen=True)
class LayerPlan:
    """Where one layer stands: `width` is n before it, scale s has `n * growth_factors[s]` channels.

    Attributes:
        stage: The stage it belongs to, from 0.
        width: n before the layer.
        scales_in: How many scales it reads, the coarsest ones.
        scales_out: How many it gives; one less where it drops the finest.
        reduced_width: n after the transition that follows, or None where none follows.
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
        classes: How many classes.
        exits: How many exits (the port's nBlocks).
        spacing: `even` puts `step` layers between exits, `linear` puts `step·i + 1` before exit i + 1 (lin_grow).
        base: Layers before the first exit, not counting the first layer.
        step: See `spacing`.
        channels: n before the first layer.
        growth: How much n grows with a layer.
        growth_factors: One number a scale, from fine to coarse: scale s has `n · growth_factors[s]` channels.
        bottleneck_factors: One number a scale: the 1×1 bottleneck is so many times as wide as what it leads to.
        prune: When scales are dropped: `max` at regular distances, `min` only in the last layers.
        reduction: What a transition leaves of n.
        stem: `cifar` begins with a 3×3 convolution, `imagenet` with a 7×7 convolution and a pool, both strided.
        image_size: Height and width of the images.
        init: `default` is PyTorch's, `he` is that of the MSDNet paper. The port means to use the latter, but its loop never
            reaches nested modules, so that all published results, the reference weights too, began from the former.
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
        for name in ("classes", "exits", "base", "step", "channels", "growth", "image_size"):
            check_count(getattr(self, name), name, most=_LARGEST)
        for name, choices in _CHOICES.items():
            check_choice(getattr(self, name), name, choices)
        for name in ("growth_factors", "bottleneck_factors"):
            object.__setattr__(self, name, _check_factors(name, getattr(self, name)))
        self._check_scales()
        self._check_reduction()
        self._check_image_size()

    @property
    def scales(self) -> int:
        """How many scales there are in the first layer."""
        return len(self.growth_factors)

    @property
    def depths(self) -> tuple[int, ...]:
        """How many layers each stage has."""
        later = range(1, self.exits)
        return (self.base, *((self.step if self.spacing == "even" else self.step * stage + 1) for stage in later))

    def layers(self) -> tuple[LayerPlan, ...]:
        """The plan of all layers but the first, in order.

        In a very short network under `max` the last layer may keep a scale that no exit reads; the port does so too.

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
        """Scales read and given by layer `number` (from 1) of `depth`, and whether a transition follows it."""
        if self.prune == "max":
            interval = math.ceil(depth / self.scales)
            scales_in = self.scales - max(0, number - 2) // interval
            scales_out = self.scales - (number - 1) // interval
            return scales_in, scales_out, scales_in > scales_out
        scales_in = min(self.scales, depth - number + 2)
        scales_out = min(self.scales, depth - number + 1)
        return scales_in, scales_out, number in (depth // 3, 2 * depth // 3)

    def _check_scales(self) -> None:
        if len(self.bottleneck_factors) != self.scales:
            raise OptionError(
                f"{self.scales} growth_factors came with {len(self.bottleneck_factors)} bottleneck_factors",
                expected="one of each a scale",
                fix="give both tuples the same length",
            )
        if not self.scales <= sum(self.depths) <= _MOST_LAYERS:
            raise OptionError(
                f"{sum(self.depths)} layers came with {self.scales} scales",
                expected=f"at least as many layers as scales, and at most {_MOST_LAYERS}",
                fix="change base, step or exits, or give fewer growth_factors",
            )
        odd = [factor for factor in self.growth_factors[1:] if self.growth * factor % 2]
        if odd:
            raise OptionError(
                f"growth {self.growth} times the factor {odd[0]} is odd",
                expected="an even number of new channels at all scales but the finest, as two paths share them",
                fix="use an even growth",
            )

    def _check_reduction(self) -> None:
        valid = isinstance(self.reduction, int | float) and 0 < self.reduction <= 1
        if not valid or any(plan.reduced_width == 0 for plan in self.layers()):
            raise OptionError(
                f"reduction is {self.reduction!r}",
                expected="a number above 0 and at most 1 that leaves at least one channel",
                fix="0.5 is the published choice",
            )

    def _check_image_size(self) -> None:
        halvings = (2 if self.stem == "imagenet" else 0) + (self.scales - 1) + 2
        if math.ceil(self.image_size / 2**halvings) not in (2, 3):  # what the classifier's pool turns into 1×1
            raise OptionError(
                f"image_size is {self.image_size} with the stem {self.stem!r} and {self.scales} scales",
                expected=f"a size from {2**halvings + 1} to {3 * 2**halvings}",
                fix="resize the images, or add or remove a scale (growth_factors, bottleneck_factors)",
            )


_CHOICES = {"spacing": ("even", "linear"), "prune": ("max", "min"), "stem": ("cifar", "imagenet"), "init": ("default", "he")}


class _Unit(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, width_in: int, width_out: int, *, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(*_unit(width_in, width_out, kernel=kernel, stride=stride))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class _Path(nn.Module):
    """A 1×1 bottleneck, then a 3×3 convolution, which has the stride."""

    def __init__(self, width_in: int, width_out: int, *, factor: int, stride: int = 1) -> None:
        super().__init__()
        middle = min(width_in, factor * width_out)
        self.net = nn.Sequential(*_unit(width_in, middle, kernel=1), *_unit(middle, width_out, kernel=3, stride=stride))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class _Scale(nn.Module):
    """One scale of a layer: what was there, then what comes from the finer scale, then what comes from this one."""

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
    """The first layer: an image in, one map a scale out, each from the next finer one."""

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
    """A layer: from fine to coarse, all scales that are kept."""

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
    """After a layer: fewer channels at every scale."""

    def __init__(self, config: MSDNetConfig, plan: LayerPlan, reduced_width: int) -> None:
        super().__init__()
        width = plan.width + config.growth
        factors = config.growth_factors[-plan.scales_out :]
        self.m = nn.ModuleList(_Unit(width * factor, reduced_width * factor, kernel=1) for factor in factors)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        return [unit(x) for unit, x in zip(self.m, maps, strict=True)]


class _Classifier(nn.Module):
    """An exit: reads the coarsest scale, `(batch, width, side, side)`, and gives logits, `(batch, classes)`."""

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
        config: Its shape; `PRESETS` has the published ones.

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
        """Run a stage: images `(batch, 3, image_size, image_size)` go into the first, one map a scale into the others."""
        maps = self.maps(exit, carry)
        logits: Tensor = self.classifier[exit](maps[-1])
        return tuple(maps) if exit + 1 < self.num_exits else (), logits

    def carry_size(self, exit: int) -> int:
        """One map a scale; the image before the first stage."""
        return self._scales_into[exit]

    def maps(self, exit: int, carry: Carry) -> list[Tensor]:
        """The maps after a stage, from fine to coarse, of which its exit reads the last; the exit itself is not run."""
        self._check_carry(exit, carry)
        size = self.config.image_size
        if exit == 0 and carry[0].shape[1:] != (3, size, size):
            raise ShapeError(
                f"images have shape {tuple(carry[0].shape)}",
                expected=f"(batch, 3, {size}, {size})",
                fix="channels come before height and width; other sizes need another image_size in the config",
            )
        maps: list[Tensor] = self.blocks[exit](list(carry))
        return maps

    def stages(self, x: Tensor) -> Iterator[list[Tensor]]:
        """Yield the maps after each stage, from fine to coarse; its exit reads the last of them.

        The next stage goes on from the list that was yielded: who changes an entry changes what that stage reads.
        """
        maps = [x]
        for exit in range(self.num_exits):
            maps = self.maps(exit, tuple(maps))
            yield maps


def _unit(width_in: int, width_out: int, *, kernel: int, stride: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(width_in, width_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(width_out), nn.ReLU(inplace=True)]


def _imagenet_stem(width: int) -> nn.Sequential:
    convolution = nn.Conv2d(3, width, 7, stride=2, padding=3)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1))


def _he_init(module: nn.Module) -> None:
    # Batch norm begins with scale 1 and shift 0 in PyTorch too, and linear weights are left alone.
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _check_factors(name: str, values: Any) -> tuple[int, ...]:
    return check_counts(values, name, most=_LARGEST, fix="pass one per scale: (1, 2, 4) for CIFAR, (1, 2, 4, 4) for ImageNet")


def _imagenet(step: int) -> MSDNetConfig:
    return MSDNetConfig(
        classes=1000,
        exits=5,
        base=step,
        step=step,
        channels=32,
        growth=16,
        growth_factors=(1, 2, 4, 4),
        bottleneck_factors=(1, 2, 4, 4),
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
"""The published networks by name; `anytime.models.create` sets the number of classes."""

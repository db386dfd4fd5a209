"""An MSDNet as a list of convolutions on one block of memory, for GPUs: two kernels per layer instead of thirteen.

All feature maps of an input are stored in one row, pixel by pixel. A layer then needs no concatenation, since its new channels
are written next to the existing ones, and all its convolutions of the same depth run in one launch: first the bottlenecks,
then the others. The average pool and the linear layer of an exit are one convolution as well. A table of integers, one row per
convolution, describes the work; `run_with_torch` and the kernel in `anytime.run.engines.kernel` both read it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytime.errors import ShapeError
from anytime.models.base import Carry
from anytime.models.msdnet import MSDNet


@dataclass(frozen=True)
class Convolution:
    """One convolution: where it reads and writes in a row, and its weights `(kernel * kernel * channels_in, channels_out)`."""

    read: int  # offset of the input map
    read_pixel: int  # stride between pixels
    read_channel: int  # stride between channels
    channels_in: int
    side_in: int  # height and width of the input map
    write: int  # offset of the first output channel
    write_pixel: int
    channels_out: int
    side_out: int
    stride: int
    kernel: int
    padding: int
    relu: int
    weights: int  # offset of the weights
    biases: int  # offset of the biases


FIELDS = len(fields(Convolution))


@dataclass(frozen=True)
class Launch:
    """Independent convolutions, and the index of the first of them in the table."""

    first: int
    work: tuple[Convolution, ...]


Run = Callable[["PackedMSDNet", Launch, Tensor, Tensor], None]
"""Runs a launch: the network, the launch, rows to read and rows to write."""


def can_be_packed(model: object) -> TypeGuard[MSDNet]:
    """Whether a model is an MSDNet made of convolutions only: one for small images, with its batch norms folded."""
    if type(model) is not MSDNet or model.config.stem != "cifar":
        return False
    return not any(isinstance(part, nn.BatchNorm2d) for part in model.modules())


class PackedMSDNet(nn.Module):
    """The stages of an MSDNet on packed rows. The carry between stages is one tensor, `(batch, row)`.

    Args:
        model: An MSDNet for which `can_be_packed` holds.
        run: Runs a launch.
    """

    table: Tensor
    weights: Tensor
    biases: Tensor

    def __init__(self, model: MSDNet, run: Run) -> None:
        super().__init__()
        self.num_exits, self.classes, self.side = model.num_exits, model.config.classes, model.config.image_size
        plan = _Plan(model)
        self.launches = plan.stages
        self.row = plan.row
        self._run = run
        rows = [astuple(one) for stage in plan.stages for launch in stage for one in launch.work]
        self.register_buffer("table", torch.tensor(rows, dtype=torch.int32))
        self.register_buffer("weights", torch.cat(plan.weights))
        self.register_buffer("biases", torch.cat(plan.biases))

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run a stage. It adds to the given rows and overwrites nothing that an earlier stage wrote."""
        (source,) = carry
        rows = source
        if exit == 0:
            if source.shape[1:] != (3, self.side, self.side):
                raise ShapeError(
                    f"images have shape {tuple(source.shape)}",
                    expected=f"(batch, 3, {self.side}, {self.side})",
                    fix="resize the images, or move the channels before height and width: images.permute(0, 3, 1, 2)",
                )
            source = source.contiguous()
            rows = source.new_empty(len(source), self.row)
        logits = torch.empty(len(rows), self.classes, device=rows.device)
        *inner, last = self.launches[exit]
        for launch in inner:
            self._run(self, launch, source, rows)
            source = rows
        self._run(self, last, rows, logits)
        return ((rows,) if exit + 1 < self.num_exits else ()), logits


def run_with_torch(network: PackedMSDNet, launch: Launch, source: Tensor, target: Tensor) -> None:
    """Run a launch with torch's own convolutions: the reference for the kernel."""
    for one in launch.work:
        strides = (source.stride(0), one.read_channel, one.side_in * one.read_pixel, one.read_pixel)
        shape = (len(source), one.channels_in, one.side_in, one.side_in)
        x = source.as_strided(shape, strides, source.storage_offset() + one.read)
        kernel = (one.kernel, one.kernel, one.channels_in, one.channels_out)
        weight = network.weights[one.weights : one.weights + math.prod(kernel)].view(kernel)
        bias = network.biases[one.biases : one.biases + one.channels_out].to(x.dtype)
        result = F.conv2d(x, weight.permute(3, 2, 0, 1), bias, stride=one.stride, padding=one.padding)
        result = result[..., : one.side_out, : one.side_out]
        if one.relu:
            result = result.relu()
        strides = (target.stride(0), 1, one.side_out * one.write_pixel, one.write_pixel)
        target.as_strided(result.shape, strides, target.storage_offset() + one.write).copy_(result)


@dataclass
class _Map:
    """A feature map in a row: its offset, its side, the channels it has space for, and the channels written so far."""

    begin: int
    side: int
    capacity: int
    channels: int


class _Plan:
    """Allocates every feature map and lists every convolution."""

    def __init__(self, model: MSDNet) -> None:
        self.row = 0
        self.weights: list[Tensor] = []
        self.biases: list[Tensor] = []
        self.stages: list[list[Launch]] = []
        self._written = [0, 0, 0]  # convolutions, weights, biases
        self._model = model
        config = model.config
        self._capacities = _capacities(model)
        sides = [_halved(config.image_size, scale) for scale in range(config.scales)]
        self._scratch = [self._new(side, _widest(model, scale)) for scale, side in enumerate(sides)]
        heads: Any = model.classifier
        width = heads[0].linear.in_features
        self._heads = [self._new(_halved(sides[-1], times), width) for times in (1, 2)]
        maps: list[_Map] = []
        blocks: Any = model.blocks
        for block, head in zip(blocks, heads, strict=True):
            self.stages.append([])
            for part in block:
                if hasattr(part, "m"):
                    maps = self._reduce(part.m, maps)
                elif not maps:
                    maps = self._begin(part.layers)
                else:
                    maps = self._grow(part.layers, maps)
            self._classify(head, maps[-1])

    def _begin(self, units: Sequence[nn.Module]) -> list[_Map]:
        """The first layer: it reads an image, channel by channel; each scale reads the next finer one."""
        side = self._model.config.image_size
        before = _Map(0, side, 1, 3)
        maps: list[_Map] = []
        for unit, capacity in zip(units, self._capacities.pop(0), strict=True):
            convolution = _convolution(unit)
            here = self._new(_halved(before.side, convolution.stride[0] - 1), capacity)
            self._launch([self._one(convolution, before, here, read_channel=1 if maps else side * side)])
            here.channels = convolution.out_channels
            maps.append(here)
            before = here
        return maps

    def _grow(self, scales: Sequence[Any], maps: list[_Map]) -> list[_Map]:
        """A layer: all bottlenecks, those of the same map as one, then all convolutions that read them."""
        kept = maps[-len(scales) :]
        finer = [None, *maps][-len(scales) - 1 : -1]
        paths = [
            (path, read, here)
            for scale, here, above in zip(scales, kept, finer, strict=True)
            for path, read in ((scale.conv_down, above), (scale.conv_normal, here))
            if path is not None
        ]
        scratch = dict(zip(map(id, maps), self._scratch[-len(maps) :], strict=True))
        narrow, wide = [], []
        for read in maps:
            bottlenecks = [_convolutions(path)[0] for path, source, _ in paths if source is read]
            if bottlenecks:
                narrow.append(self._one(_joined(bottlenecks), read, scratch[id(read)]))
        self._launch(narrow)
        taken: Counter[int] = Counter()
        for path, source, here in paths:
            first, second = _convolutions(path)
            between = scratch[id(source)]
            part = replace(between, begin=between.begin + taken[id(source)])
            wide.append(self._one(second, part, here, offset=here.channels))
            taken[id(source)] += first.out_channels
            here.channels += second.out_channels
        self._launch(wide)
        return kept

    def _reduce(self, units: Sequence[nn.Module], maps: list[_Map]) -> list[_Map]:
        """A transition: fewer channels, in new maps."""
        work, reduced = [], []
        for unit, before, capacity in zip(units, maps, self._capacities.pop(0), strict=True):
            convolution = _convolution(unit)
            here = self._new(before.side, capacity)
            work.append(self._one(convolution, before, here))
            here.channels = convolution.out_channels
            reduced.append(here)
        self._launch(work)
        return reduced

    def _classify(self, head: Any, read: _Map) -> None:
        """An exit: two convolutions, then the mean over 2 × 2 pixels and the linear layer as one convolution."""
        for unit, here in zip(head.m, self._heads, strict=False):
            convolution = _convolution(unit)
            self._launch([self._one(convolution, read, here)])
            here.channels = convolution.out_channels
            read = here
        linear = head.linear
        last = nn.Conv2d(linear.in_features, linear.out_features, 2, stride=2)
        last.weight = nn.Parameter((linear.weight / 4)[..., None, None].expand(-1, -1, 2, 2), requires_grad=False)
        last.bias = linear.bias
        self._launch([self._one(last, read, _Map(0, 1, linear.out_features, 0), relu=False)])

    def _one(
        self, layer: nn.Conv2d, read: _Map, write: _Map, *, offset: int = 0, read_channel: int = 1, relu: bool = True
    ) -> Convolution:
        assert isinstance(layer.padding, tuple)
        assert layer.bias is not None
        one = Convolution(
            read=read.begin,
            read_pixel=read.capacity,
            read_channel=read_channel,
            channels_in=layer.in_channels,
            side_in=read.side,
            write=write.begin + offset,
            write_pixel=write.capacity,
            channels_out=layer.out_channels,
            side_out=write.side,
            stride=layer.stride[0],
            kernel=layer.kernel_size[0],
            padding=layer.padding[0],
            relu=int(relu),
            weights=self._written[1],
            biases=self._written[2],
        )
        self.weights.append(layer.weight.detach().permute(2, 3, 1, 0).flatten())
        self.biases.append(layer.bias.detach())
        self._written[1] += self.weights[-1].numel()
        self._written[2] += layer.out_channels
        return one

    def _launch(self, work: Sequence[Convolution]) -> None:
        self.stages[-1].append(Launch(self._written[0], tuple(work)))
        self._written[0] += len(work)

    def _new(self, side: int, capacity: int) -> _Map:
        new = _Map(self.row, side, capacity, 0)
        self.row += -(-side * side * capacity // 32) * 32  # aligned for wide loads
        return new


def _widest(model: MSDNet, scale: int) -> int:
    """The largest number of channels that the bottlenecks of one layer reading a scale have together."""
    widest, blocks = 1, cast(Any, model.blocks)
    for layer in (part for block in blocks for part in block if hasattr(part, "layers")):
        finest = model.config.scales - len(layer.layers)
        paths = [
            getattr(one, name, None)
            for name, number in (("conv_normal", scale), ("conv_down", scale + 1))
            for one in layer.layers[max(0, number - finest) : max(0, number - finest + 1)]
        ]
        widest = max(widest, sum(_convolutions(path)[0].out_channels for path in paths if path is not None))
    return widest


def _capacities(model: MSDNet) -> list[list[int]]:
    """The channels each scale needs space for, from the start and from each transition on."""
    config = model.config
    found, scales = [], config.scales
    for plan in config.layers():
        if plan.reduced_width is not None:
            found.append([(plan.width + config.growth) * factor for factor in config.growth_factors[-scales:]])
            scales = plan.scales_out
    width = config.layers()[-1].reduced_width or config.layers()[-1].width + config.growth
    return [*found, [width * factor for factor in config.growth_factors[-scales:]]]


def _convolutions(path: nn.Module) -> list[nn.Conv2d]:
    return [part for part in path.modules() if isinstance(part, nn.Conv2d)]


def _convolution(unit: nn.Module) -> nn.Conv2d:
    (only,) = _convolutions(unit)
    return only


def _joined(layers: Sequence[nn.Conv2d]) -> nn.Conv2d:
    """1 x 1 convolutions of the same map as one."""
    joined = nn.Conv2d(layers[0].in_channels, sum(layer.out_channels for layer in layers), 1)
    joined.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
    joined.bias = nn.Parameter(torch.cat([layer.bias for layer in layers if layer.bias is not None]), requires_grad=False)
    return joined


def _halved(side: int, times: int) -> int:
    for _ in range(times):
        side = -(-side // 2)
    return side

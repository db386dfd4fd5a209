"""An MSDNet as a list of convolutions on one block of memory, for GPUs: two kernels a layer instead of thirteen.

All maps of an input lie in one row, pixel by pixel. A layer then needs no concatenation, as its new channels are written
beside those that are there, and all its convolutions at the same depth run in one launch: the bottlenecks, then the others.
The average pool and the linear layer of an exit are one convolution, too. What to do is written down in a table of whole
numbers, one row a convolution, which `run_with_torch` and the kernel in `anytime.run.engines.kernel` both read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
    """One convolution: where it reads, where it writes, and its weights, all as whole numbers.

    Attributes:
        read: Where the map that it reads begins in a row.
        read_pixel: From one pixel to the next.
        read_channel: From one channel to the next.
        channels: How many channels it reads.
        side: Height and width of that map.
        write: Where its first channel is written in a row.
        write_pixel: From one pixel to the next.
        width: How many channels it gives.
        gives: Height and width of what it gives.
        stride: From one place that it looks at to the next.
        kernel: Height and width of what it looks at.
        padding: How far it looks beyond the map.
        relu: Whether negative results become 0.
        weights: Where its weights, `(kernel · kernel · channels, width)`, begin.
        biases: Where its biases begin.
    """

    read: int
    read_pixel: int
    read_channel: int
    channels: int
    side: int
    write: int
    write_pixel: int
    width: int
    gives: int
    stride: int
    kernel: int
    padding: int
    relu: int
    weights: int
    biases: int


FIELDS = len(fields(Convolution))


@dataclass(frozen=True)
class Launch:
    """Convolutions that do not need each other.

    Attributes:
        first: The first of them in the table.
        work: The convolutions.
    """

    first: int
    work: tuple[Convolution, ...]


Run = Callable[["PackedMSDNet", Launch, Tensor, Tensor], None]
"""What runs a launch: the network, the launch, rows to read and rows to write."""


def can_be_packed(model: object) -> TypeGuard[MSDNet]:
    """Whether a model is an MSDNet of which all is a convolution: one for small images, with its batch norms folded."""
    if type(model) is not MSDNet or model.config.stem != "cifar":
        return False
    return not any(isinstance(part, nn.BatchNorm2d) for part in model.modules())


class PackedMSDNet(nn.Module):
    """The stages of an MSDNet on packed rows. What it carries from stage to stage is `(batch, numbers of an input)`.

    Args:
        model: An MSDNet for which `can_be_packed` holds.
        run: What runs a launch.
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

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the logits of each exit."""
        carry: Carry = (x,)
        for exit in range(self.num_exits):
            carry, logits = self.stage(exit, carry)
            yield logits

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run a stage. It adds to the rows that it is given, and changes nothing in them that an earlier stage has left."""
        (given,) = carry
        if exit == 0:
            given = self._checked(given)
        rows = given.new_empty(len(given), self.row) if exit == 0 else given
        logits = torch.empty(len(given), self.classes, device=given.device)
        *inner, last = self.launches[exit]
        for launch in inner:
            self._run(self, launch, given, rows)
            given = rows
        self._run(self, last, rows, logits)
        return ((rows,) if exit + 1 < self.num_exits else ()), logits

    def _checked(self, images: Tensor) -> Tensor:
        """Images of the right form, channel by channel."""
        if images.shape[1:] != (3, self.side, self.side):
            raise ShapeError(
                f"images have shape {tuple(images.shape)}",
                expected=f"(batch, 3, {self.side}, {self.side})",
                fix="channels come before height and width; other sizes need another network",
            )
        return images.contiguous()


def run_with_torch(network: PackedMSDNet, launch: Launch, given: Tensor, left: Tensor) -> None:
    """Run a launch by torch's own convolutions: what the kernel is compared with."""
    for one in launch.work:
        strides = (given.stride(0), one.read_channel, one.side * one.read_pixel, one.read_pixel)
        x = given.as_strided((len(given), one.channels, one.side, one.side), strides, given.storage_offset() + one.read)
        shape = (one.kernel, one.kernel, one.channels, one.width)
        weight = network.weights[one.weights : one.weights + math.prod(shape)].view(shape)
        bias = network.biases[one.biases : one.biases + one.width].to(x.dtype)
        result = F.conv2d(x, weight.permute(3, 2, 0, 1), bias, stride=one.stride, padding=one.padding)
        result = result[..., : one.gives, : one.gives]
        if one.relu:
            result = result.relu()
        strides = (left.stride(0), 1, one.gives * one.write_pixel, one.write_pixel)
        left.as_strided(result.shape, strides, left.storage_offset() + one.write).copy_(result)


@dataclass
class _Map:
    """A map in a row: where it begins, its side, how many channels it has room for, and how many it has."""

    begin: int
    side: int
    room: int
    channels: int


class _Plan:
    """Gives every map its place and writes down every convolution."""

    def __init__(self, model: MSDNet) -> None:
        self.row = 0
        self.weights: list[Tensor] = []
        self.biases: list[Tensor] = []
        self.stages: list[list[Launch]] = []
        self._written = [0, 0, 0]  # convolutions, weights, biases
        self._model = model
        config = model.config
        self._rooms = _rooms(model)
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
            self._answer(head, maps[-1])

    def _begin(self, units: Sequence[nn.Module]) -> list[_Map]:
        """The first layer: an image, channel by channel, in; each scale from the next finer one."""
        side = self._model.config.image_size
        before = _Map(0, side, 1, 3)
        rooms = self._rooms.pop(0)
        maps: list[_Map] = []
        for unit, room in zip(units, rooms, strict=True):
            convolution = _convolution(unit)
            here = self._new(_halved(before.side, convolution.stride[0] - 1), room)
            apart = side * side if not maps else 1
            self._launch([self._one(convolution, before, here, read_channel=apart)])
            here.channels = convolution.out_channels
            maps.append(here)
            before = here
        return maps

    def _grow(self, scales: Sequence[Any], maps: list[_Map]) -> list[_Map]:
        """A layer: all bottlenecks, those of the same map as one, then all that read them."""
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
        """A transition: fewer channels, in a new place."""
        rooms = self._rooms.pop(0)
        work, reduced = [], []
        for unit, before, room in zip(units, maps, rooms, strict=True):
            convolution = _convolution(unit)
            here = self._new(before.side, room)
            work.append(self._one(convolution, before, here))
            here.channels = convolution.out_channels
            reduced.append(here)
        self._launch(work)
        return reduced

    def _answer(self, head: Any, read: _Map) -> None:
        """An exit: two convolutions, then the mean over 2 × 2 pixels and the linear layer as one."""
        for unit, here in zip(head.m, self._heads, strict=False):
            convolution = _convolution(unit)
            self._launch([self._one(convolution, read, here)])
            here.channels = convolution.out_channels
            read = here
        linear = head.linear
        last = nn.Conv2d(linear.in_features, linear.out_features, 2, stride=2)
        last.weight = nn.Parameter((linear.weight / 4)[..., None, None].expand(-1, -1, 2, 2), requires_grad=False)
        last.bias = linear.bias
        logits = _Map(0, 1, linear.out_features, 0)
        self._launch([self._one(last, read, logits, relu=False)])

    def _one(
        self, layer: nn.Conv2d, read: _Map, write: _Map, *, offset: int = 0, read_channel: int = 1, relu: bool = True
    ) -> Convolution:
        assert isinstance(layer.padding, tuple)
        assert layer.bias is not None
        one = Convolution(
            read=read.begin,
            read_pixel=read.room,
            read_channel=read_channel,
            channels=layer.in_channels,
            side=read.side,
            write=write.begin + offset,
            write_pixel=write.room,
            width=layer.out_channels,
            gives=write.side,
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

    def _new(self, side: int, room: int) -> _Map:
        made = _Map(self.row, side, room, 0)
        self.row += -(-side * side * room // 32) * 32  # so that every map begins where a wide load may
        return made


def _widest(model: MSDNet, scale: int) -> int:
    """How many channels the bottlenecks that read a scale give at most, all those of a layer together."""
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


def _rooms(model: MSDNet) -> list[list[int]]:
    """How many channels each scale needs room for, from the start on and from each transition on."""
    config = model.config
    rooms, scales = [], config.scales
    for plan in config.layers():
        if plan.reduced_width is not None:
            rooms.append([(plan.width + config.growth) * factor for factor in config.growth_factors[-scales:]])
            scales = plan.scales_out
    width = config.layers()[-1].reduced_width or config.layers()[-1].width + config.growth
    rooms.append([width * factor for factor in config.growth_factors[-scales:]])
    return rooms


def _convolutions(path: nn.Module) -> list[nn.Conv2d]:
    return [part for part in path.modules() if isinstance(part, nn.Conv2d)]


def _convolution(unit: nn.Module) -> nn.Conv2d:
    (only,) = _convolutions(unit)
    return only


def _joined(layers: Sequence[nn.Conv2d]) -> nn.Conv2d:
    """Convolutions of the same map as one."""
    joined = nn.Conv2d(layers[0].in_channels, sum(layer.out_channels for layer in layers), 1)
    joined.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]), requires_grad=False)
    joined.bias = nn.Parameter(torch.cat([layer.bias for layer in layers if layer.bias is not None]), requires_grad=False)
    return joined


def _halved(side: int, times: int) -> int:
    for _ in range(times):
        side = -(-side // 2)
    return side

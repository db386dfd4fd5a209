"""The kernel that runs the convolutions of a packed MSDNet on a GPU, all of a launch at once; needs Triton.

Each program computes a tile of one convolution: some places, in all images, times some channels, as a product of matrices of
which the first is read from the maps on the way. The second axis of the grid is the convolution. Numbers about it are read
from the table, so that one compiled kernel does for all.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, unused-ignore"
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from anytime.errors import DeviceError
from anytime.run.engines.packed import FIELDS, Launch, PackedMSDNet, Run

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None


class Tile(NamedTuple):
    """What one program does, and with how many warps and loads on their way."""

    places: int
    channels: int
    depth: int
    warps: int
    stages: int


SMALL = Tile(places=16, channels=16, depth=64, warps=4, stages=4)
"""Many small tiles, so that no processor is idle. Of a dozen for one image among the quickest on an H200; deeper are slower."""
LARGE = Tile(places=64, channels=16, depth=32, warps=4, stages=3)
"""Few large tiles, which read less. On an H200 2.8 ms for 64 images; six tiles took 3.2 to 6.1 ms with `tf32x3`."""
FULL = 256
"""How many programs keep a GPU busy; an H200 has 132 processors."""


def run_with_triton(precision: str, *, small: Tile = SMALL, large: Tile = LARGE, full: int = FULL) -> Run:
    """What runs launches with the kernel.

    Args:
        precision: How factors are rounded: `ieee` not at all, `tf32x3` nearly not, `tf32` to ten bits.
        small: The tile for launches of little work: small images, or few of them.
        large: The tile for those of which large tiles are many.
        full: How many.
    """
    if triton is None:
        raise DeviceError(
            "Triton is not installed", expected="the build of torch for CUDA, which brings it", fix="use pack=False"
        )

    def run(network: PackedMSDNet, launch: Launch, given: Tensor, left: Tensor) -> None:
        batch = len(given)
        tile = large if sum(_tiles(launch, batch, large)) >= full else small
        tiles = _tiles(launch, batch, tile)
        convolve[(max(tiles), len(launch.work))](
            given,
            left,
            network.weights,
            network.biases,
            network.table,
            launch.first,
            batch,
            given.stride(0),
            left.stride(0),
            fields=FIELDS,
            kernel=launch.work[0].kernel,
            tile_places=tile.places,
            tile_channels=tile.channels,
            tile_depth=tile.depth,
            precision=precision,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    return run


def _tiles(launch: Launch, batch: int, tile: Tile) -> list[int]:
    """How many tiles each convolution of a launch is."""
    return [-(-batch * one.gives**2 // tile.places) * -(-one.width // tile.channels) for one in launch.work]


def _convolve(
    given,
    left,
    weights,
    biases,
    table,
    first,
    batch,
    given_row,
    left_row,
    fields: tl.constexpr,
    kernel: tl.constexpr,
    tile_places: tl.constexpr,
    tile_channels: tl.constexpr,
    tile_depth: tl.constexpr,
    precision: tl.constexpr,
):
    """A tile of a convolution; the names are those of `anytime.run.engines.packed.Convolution`."""
    one = table + (first + tl.program_id(1)) * fields
    read, read_pixel, read_channel = tl.load(one), tl.load(one + 1), tl.load(one + 2)
    channels, side = tl.load(one + 3), tl.load(one + 4)
    write, write_pixel = tl.load(one + 5), tl.load(one + 6)
    width, gives, stride = tl.load(one + 7), tl.load(one + 8), tl.load(one + 9)
    padding, relu = tl.load(one + 11), tl.load(one + 12)
    weights += tl.load(one + 13)
    biases += tl.load(one + 14)

    across = tl.cdiv(width, tile_channels)
    begin = tl.program_id(0) // across * tile_places
    area = gives * gives
    if begin < batch * area:
        place = begin + tl.arange(0, tile_places)
        channel = tl.program_id(0) % across * tile_channels + tl.arange(0, tile_channels)
        image = (place // area).to(tl.int64)
        pixel = place % area
        top = pixel // gives * stride - padding
        start = pixel % gives * stride - padding
        valid = place < batch * area
        source = given + image * given_row + read + (top * side + start) * read_pixel
        depth = kernel * kernel * channels
        part = 1.0 / channels.to(tl.float32)
        edge = side.to(tl.uint32)
        total = tl.zeros((tile_places, tile_channels), dtype=tl.float32)
        for at in range(0, depth, tile_depth):
            number = at + tl.arange(0, tile_depth)
            inside = valid[:, None] & (number < depth)[None, :]
            if kernel == 1:
                offset = number * read_channel
            else:
                tap = ((number.to(tl.float32) + 0.5) * part).to(tl.int32)  # number // channels, in fewer steps
                down, along = tap // kernel, tap % kernel
                offset = (down * side + along) * read_pixel + (number - tap * channels) * read_channel
                # As a number without a sign, one below 0 is beyond every edge.
                inside &= (top[:, None] + down[None, :]).to(tl.uint32) < edge
                inside &= (start[:, None] + along[None, :]).to(tl.uint32) < edge
            seen = tl.load(source[:, None] + offset[None, :], mask=inside, other=0.0)
            known = (number < depth)[:, None] & (channel < width)[None, :]
            factor = tl.load(weights + number[:, None] * width + channel[None, :], mask=known, other=0.0)
            total = tl.dot(seen, factor, total, input_precision=precision)
        total += tl.load(biases + channel, mask=channel < width, other=0.0).to(tl.float32)[None, :]
        total = tl.where((total < 0) & (relu == 1), 0.0, total)
        target = left + image * left_row + write + pixel * write_pixel
        tl.store(target[:, None] + channel[None, :], total, mask=valid[:, None] & (channel < width)[None, :])


if triton is not None:
    # Numbers that are 1 or multiples of 16 would each be compiled for anew.
    convolve = triton.jit(_convolve, do_not_specialize=["first", "batch", "given_row", "left_row"])

"""The Triton kernel that runs all convolutions of one launch of a packed MSDNet.

Each program computes one tile of one convolution, some output positions times some channels, as a matrix product whose first
factor is gathered from the feature maps. The second grid axis is the convolution. Its parameters are read from a table, so that
one compiled kernel serves all.
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
except ImportError:  # CPU builds of torch do not include it
    triton = None


class Tile(NamedTuple):
    """The work of one program, and its number of warps and pipeline stages."""

    positions: int
    channels: int
    depth: int
    warps: int
    stages: int


_SMALL = Tile(positions=16, channels=16, depth=64, warps=4, stages=4)
"""Many small tiles keep all processors busy. Among the fastest of a dozen for one image on an H200; deeper ones are slower."""
_LARGE = Tile(positions=64, channels=16, depth=32, warps=4, stages=3)
"""Few large tiles read less memory. On an H200 2.8 ms for 64 images; six other tiles took 3.2 to 6.1 ms with `tf32x3`."""
_FULL = 256
"""How many programs keep a GPU busy; an H200 has 132 processors."""


def run_with_triton(precision: str) -> Run:
    """A function that runs launches with the kernel.

    Args:
        precision: How factors are rounded: `ieee` not at all, `tf32x3` almost not, `tf32` to ten bits.
    """
    if triton is None:
        raise DeviceError("Triton is not installed", expected="a CUDA build of torch, which includes it", fix="use pack=False")

    def run(network: PackedMSDNet, launch: Launch, source: Tensor, target: Tensor) -> None:
        batch = len(source)
        tile = _LARGE if sum(_tiles(launch, batch, _LARGE)) >= _FULL else _SMALL
        convolve[(max(_tiles(launch, batch, tile)), len(launch.work))](
            source,
            target,
            network.weights,
            network.biases,
            network.table,
            launch.first,
            batch,
            source.stride(0),
            target.stride(0),
            fields=FIELDS,
            kernel=launch.work[0].kernel,
            tile_positions=tile.positions,
            tile_channels=tile.channels,
            tile_depth=tile.depth,
            precision=precision,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    return run


def _tiles(launch: Launch, batch: int, tile: Tile) -> list[int]:
    """The number of tiles of each convolution of a launch."""
    return [-(-batch * one.side_out**2 // tile.positions) * -(-one.channels_out // tile.channels) for one in launch.work]


def _convolve(
    source,
    target,
    weights,
    biases,
    table,
    first,
    batch,
    source_row,
    target_row,
    fields: tl.constexpr,
    kernel: tl.constexpr,
    tile_positions: tl.constexpr,
    tile_channels: tl.constexpr,
    tile_depth: tl.constexpr,
    precision: tl.constexpr,
):
    """One tile of a convolution; the names are those of `anytime.run.engines.packed.Convolution`."""
    one = table + (first + tl.program_id(1)) * fields
    read, read_pixel, read_channel = tl.load(one), tl.load(one + 1), tl.load(one + 2)
    channels_in, side_in = tl.load(one + 3), tl.load(one + 4)
    write, write_pixel = tl.load(one + 5), tl.load(one + 6)
    channels_out, side_out, stride = tl.load(one + 7), tl.load(one + 8), tl.load(one + 9)
    padding, relu = tl.load(one + 11), tl.load(one + 12)
    weights += tl.load(one + 13)
    biases += tl.load(one + 14)

    across = tl.cdiv(channels_out, tile_channels)
    begin = tl.program_id(0) // across * tile_positions
    area = side_out * side_out
    if begin < batch * area:
        position = begin + tl.arange(0, tile_positions)
        channel = tl.program_id(0) % across * tile_channels + tl.arange(0, tile_channels)
        image = (position // area).to(tl.int64)
        pixel = position % area
        top = pixel // side_out * stride - padding
        start = pixel % side_out * stride - padding
        valid = position < batch * area
        corner = source + image * source_row + read + (top * side_in + start) * read_pixel
        depth = kernel * kernel * channels_in
        part = 1.0 / channels_in.to(tl.float32)
        edge = side_in.to(tl.uint32)
        total = tl.zeros((tile_positions, tile_channels), dtype=tl.float32)
        for at in range(0, depth, tile_depth):
            number = at + tl.arange(0, tile_depth)
            inside = valid[:, None] & (number < depth)[None, :]
            if kernel == 1:
                offset = number * read_channel
            else:
                tap = ((number.to(tl.float32) + 0.5) * part).to(tl.int32)  # number // channels_in, in fewer steps
                down, along = tap // kernel, tap % kernel
                offset = (down * side_in + along) * read_pixel + (number - tap * channels_in) * read_channel
                # As an unsigned number, a negative one is beyond every edge.
                inside &= (top[:, None] + down[None, :]).to(tl.uint32) < edge
                inside &= (start[:, None] + along[None, :]).to(tl.uint32) < edge
            seen = tl.load(corner[:, None] + offset[None, :], mask=inside, other=0.0)
            known = (number < depth)[:, None] & (channel < channels_out)[None, :]
            factor = tl.load(weights + number[:, None] * channels_out + channel[None, :], mask=known, other=0.0)
            total = tl.dot(seen, factor, total, input_precision=precision)
        total += tl.load(biases + channel, mask=channel < channels_out, other=0.0).to(tl.float32)[None, :]
        total = tl.where((total < 0) & (relu == 1), 0.0, total)
        place = target + image * target_row + write + pixel * write_pixel
        tl.store(place[:, None] + channel[None, :], total, mask=valid[:, None] & (channel < channels_out)[None, :])


if triton is not None:
    # Without this, arguments that are 1 or a multiple of 16 would each trigger a compilation.
    convolve = triton.jit(_convolve, do_not_specialize=["first", "batch", "source_row", "target_row"])

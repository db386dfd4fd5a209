# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc, valid-type"
# ruff: noqa: N803
"""Batch norm and ReLU in two Triton kernels forward and two backward, for channels-last maps on a GPU.

Networks such as MSDNet have hundreds of batch norms over few channels. PyTorch launches three or four kernels for each in both
passes, and copies a gradient that is a slice of a concatenation. Here a first kernel computes partial sums, a second one adds
them up, normalises and applies the ReLU; the backward pass has the same form and reads slices in place. Statistics are float32,
relative to the first pixel, so that a large mean does not cost digits of the variance.

It is kept for its speed: MSDNet at batch 256 on one H200 trains at 20,738 images/s instead of 18,249 (14 % faster), and with
streams at 25,415 instead of 23,819 (7 %), by `python benchmarks/train.py --batch 256`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from anytime.errors import MissingExtraError

# Triton comes with torch on a GPU. Elsewhere this module can be imported, and `fuse_norms` raises an error.
_HERE = importlib.util.find_spec("triton") is not None
triton: Any = importlib.import_module("triton") if _HERE else None
tl: Any = importlib.import_module("triton.language") if _HERE else None
constexpr: Any = tl.constexpr if _HERE else None
_TILE = 2048


def _kernel(function: Any) -> Any:
    return triton.jit(function) if _HERE else function


class BatchNormReLU(nn.BatchNorm2d):
    """`ReLU(BatchNorm2d(x))` with the parameters and statistics of the `BatchNorm2d` that it replaces in training."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(norm.__dict__)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, channels, height, width)` in and out."""
        if not self.training:
            return F.relu(F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps))
        out: Tensor = _Function.apply(x, self.weight, self.bias, self.running_mean, self.running_var, self.momentum, self.eps)
        return out


def fuse_norms(network: nn.Module) -> int:
    """Replace each batch norm that is followed by a ReLU in an `nn.Sequential`; returns their number."""
    if not _HERE:
        raise MissingExtraError(
            "fused is true, and Triton is not installed", expected="the package triton", fix="set fused=false"
        )
    count = 0
    for module in list(network.modules()):
        if not isinstance(module, nn.Sequential):
            continue
        for i in range(len(module) - 1):
            norm, after = module[i], module[i + 1]
            if type(norm) is nn.BatchNorm2d and type(after) is nn.ReLU and norm.affine and norm.momentum is not None:
                module[i], module[i + 1] = BatchNormReLU(norm), nn.Identity()
                count += 1
    return count


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, bias, running_mean, running_var, momentum, eps):
        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.empty_like(x)
        mean, inverse = torch.empty_like(weight), torch.empty_like(weight)
        shape = _Shape(x)
        partial = shape.partial(x)
        _moments[shape.grid](x, partial, *shape.sizes, *shape.blocks)
        _normalise[shape.grid](
            x, y, partial, weight, bias, mean, inverse, running_mean, running_var, momentum, eps, *shape.sizes, *shape.blocks
        )
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient):
        x, weight, bias, mean, inverse = ctx.saved_tensors
        if not _rows_of(gradient):
            gradient = gradient.contiguous(memory_format=torch.channels_last)
        shape = _Shape(x)
        stride = _rows_of(gradient)
        partial = shape.partial(x)
        x_gradient = torch.empty_like(x)
        weight_gradient, bias_gradient = torch.empty_like(weight), torch.empty_like(bias)
        given = (x, gradient, stride, weight, bias, mean, inverse, partial)
        _gradient_sums[shape.grid](*given, *shape.sizes, *shape.blocks)
        _gradients[shape.grid](*given, x_gradient, weight_gradient, bias_gradient, *shape.sizes, *shape.blocks)
        return x_gradient, weight_gradient, bias_gradient, None, None, None, None


class _Shape:
    """How a map is split into programs of `rows_each` pixels, in tiles of pixels by channels."""

    def __init__(self, x: Tensor) -> None:
        count, channels, height, width = x.shape
        rows = count * height * width
        block = triton.next_power_of_2(channels)
        # Each program of the second kernel adds up all partial sums: with many channels, use fewer.
        programs = min(256, max(32, 8192 // block))
        tile = max(1, _TILE // block)
        self.grid = (programs,)
        self.sizes = (rows, channels, triton.cdiv(triton.cdiv(rows, programs), tile) * tile)
        self.blocks = (programs, tile, block)

    def partial(self, x: Tensor) -> Tensor:
        """An empty buffer for two sums per channel and program."""
        return torch.empty(self.blocks[0] * 2 * self.blocks[2], dtype=torch.float32, device=x.device)


def _rows_of(gradient: Tensor) -> int:
    """The stride between pixels of a channels-last map or a slice of one; 0 for other layouts."""
    _, channels, height, width = gradient.shape
    batch_step, channel_step, down, right = gradient.stride()
    row = right if width > 1 else (down if height > 1 else batch_step)
    good = (channel_step == 1 or channels == 1) and row >= channels
    good = good and (height == 1 or down == width * row) and batch_step == height * width * row
    return row if good else 0


@_kernel
def _moments(x, partial, rows, channels, rows_each, PROGRAMS: constexpr, TILE: constexpr, BLOCK: constexpr):
    program = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    inside = c < channels
    shift = tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
    first = tl.zeros([TILE, BLOCK], tl.float32)
    second = tl.zeros([TILE, BLOCK], tl.float32)
    begin = program * rows_each
    end = tl.minimum(begin + rows_each, rows)
    for start in range(begin, end, TILE):
        p = start + tl.arange(0, TILE)
        mask = (p < end)[:, None] & inside[None, :]
        value = tl.load(x + p[:, None] * channels + c[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.where(mask, value - shift[None, :], 0.0)
        first += value
        second += value * value
    place = partial + program * 2 * BLOCK + c
    tl.store(place, tl.sum(first, 0))
    tl.store(place + BLOCK, tl.sum(second, 0))


@_kernel
def _totals(partial, PROGRAMS: constexpr, BLOCK: constexpr):
    g = tl.arange(0, PROGRAMS)
    c = tl.arange(0, BLOCK)
    place = partial + g[:, None] * 2 * BLOCK + c[None, :]
    return tl.sum(tl.load(place), 0), tl.sum(tl.load(place + BLOCK), 0)


@_kernel
def _normalise(
    x,
    y,
    partial,
    weight,
    bias,
    mean_out,
    inverse_out,
    running_mean,
    running_var,
    momentum,
    eps,
    rows,
    channels,
    rows_each,
    PROGRAMS: constexpr,
    TILE: constexpr,
    BLOCK: constexpr,
):
    program = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    inside = c < channels
    first, second = _totals(partial, PROGRAMS, BLOCK)
    first = first / rows
    variance = tl.maximum(second / rows - first * first, 0.0)
    mean = tl.load(x + c, mask=inside, other=0.0).to(tl.float32) + first
    inverse = 1.0 / tl.sqrt(variance + eps)
    if program == 0:
        tl.store(mean_out + c, mean, mask=inside)
        tl.store(inverse_out + c, inverse, mask=inside)
        before = tl.load(running_mean + c, mask=inside, other=0.0)
        tl.store(running_mean + c, before + momentum * (mean - before), mask=inside)
        before = tl.load(running_var + c, mask=inside, other=0.0)
        tl.store(running_var + c, before + momentum * (variance * (rows / (rows - 1.0)) - before), mask=inside)
    scale = tl.load(weight + c, mask=inside, other=0.0) * inverse
    offset = tl.load(bias + c, mask=inside, other=0.0) - mean * scale
    begin = program * rows_each
    end = tl.minimum(begin + rows_each, rows)
    for start in range(begin, end, TILE):
        p = start + tl.arange(0, TILE)
        mask = (p < end)[:, None] & inside[None, :]
        place = p[:, None] * channels + c[None, :]
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        value = tl.maximum(value * scale[None, :] + offset[None, :], 0.0)
        tl.store(y + place, value.to(y.dtype.element_ty), mask=mask)


@_kernel
def _gradient_sums(
    x,
    gradient,
    stride,
    weight,
    bias,
    mean_in,
    inverse_in,
    partial,
    rows,
    channels,
    rows_each,
    PROGRAMS: constexpr,
    TILE: constexpr,
    BLOCK: constexpr,
):
    program = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    inside = c < channels
    mean = tl.load(mean_in + c, mask=inside, other=0.0)
    inverse = tl.load(inverse_in + c, mask=inside, other=0.0)
    w = tl.load(weight + c, mask=inside, other=0.0)
    b = tl.load(bias + c, mask=inside, other=0.0)
    plain = tl.zeros([TILE, BLOCK], tl.float32)
    along = tl.zeros([TILE, BLOCK], tl.float32)
    begin = program * rows_each
    end = tl.minimum(begin + rows_each, rows)
    for start in range(begin, end, TILE):
        p = start + tl.arange(0, TILE)
        mask = (p < end)[:, None] & inside[None, :]
        value = tl.load(x + p[:, None] * channels + c[None, :], mask=mask, other=0.0).to(tl.float32)
        value = (value - mean[None, :]) * inverse[None, :]
        slope = tl.load(gradient + p[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        slope = tl.where(value * w[None, :] + b[None, :] > 0.0, slope, 0.0)
        plain += slope
        along += slope * value
    place = partial + program * 2 * BLOCK + c
    tl.store(place, tl.sum(plain, 0))
    tl.store(place + BLOCK, tl.sum(along, 0))


@_kernel
def _gradients(
    x,
    gradient,
    stride,
    weight,
    bias,
    mean_in,
    inverse_in,
    partial,
    x_gradient,
    weight_gradient,
    bias_gradient,
    rows,
    channels,
    rows_each,
    PROGRAMS: constexpr,
    TILE: constexpr,
    BLOCK: constexpr,
):
    program = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    inside = c < channels
    plain, along = _totals(partial, PROGRAMS, BLOCK)
    if program == 0:
        tl.store(bias_gradient + c, plain, mask=inside)
        tl.store(weight_gradient + c, along, mask=inside)
    plain = plain / rows
    along = along / rows
    mean = tl.load(mean_in + c, mask=inside, other=0.0)
    inverse = tl.load(inverse_in + c, mask=inside, other=0.0)
    w = tl.load(weight + c, mask=inside, other=0.0)
    b = tl.load(bias + c, mask=inside, other=0.0)
    scale = w * inverse
    begin = program * rows_each
    end = tl.minimum(begin + rows_each, rows)
    for start in range(begin, end, TILE):
        p = start + tl.arange(0, TILE)
        mask = (p < end)[:, None] & inside[None, :]
        place = p[:, None] * channels + c[None, :]
        value = (tl.load(x + place, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
        slope = tl.load(gradient + p[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        slope = tl.where(value * w[None, :] + b[None, :] > 0.0, slope, 0.0)
        slope = scale[None, :] * (slope - plain[None, :] - value * along[None, :])
        tl.store(x_gradient + place, slope.to(x_gradient.dtype.element_ty), mask=mask)

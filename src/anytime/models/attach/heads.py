"""Heads: from the features at some place of a network to logits.

`PooledHead` is the internal classifier of shallow-deep networks (SDN): a learned mix of max and average pooling to a grid of
4 × 4, then a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anytime.errors import ShapeError
from anytime.models.layers import token_mean

_GRID = 4


class MixedPool(nn.AdaptiveAvgPool2d):
    """α · max + (1 - α) · mean, pooled to a grid, of maps `(batch, channels, height, width)`.

    α is learned; it starts between 0 and 1 and is not constrained. Sides of at most `grid` are not pooled.
    """

    def __init__(self, grid: int = _GRID) -> None:
        super().__init__(grid)
        self.grid = grid
        self.mix = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        size = (min(self.grid, height), min(self.grid, width))
        if size == (height, width):
            return x
        if self.grid == 1:
            return self.mix * F.adaptive_max_pool2d(x, size) + (1 - self.mix) * F.adaptive_avg_pool2d(x, size)
        if height % size[0] == width % size[1] == 0:
            window = (int(height // size[0]), int(width // size[1]))
            return self.mix * F.max_pool2d(x, window) + (1 - self.mix) * F.avg_pool2d(x, window)
        return self.mix * _pool_windows(x, size, torch.amax) + (1 - self.mix) * _pool_windows(x, size, torch.mean)


def _pool_windows(x: Tensor, size: tuple[int, int], reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Adaptive pooling, side by side: ONNX has none for windows of unequal sizes, such as from 14 to 4."""
    for dim, count in zip((-2, -1), size, strict=True):
        length = int(x.shape[dim])
        ends = ((place * length // count, -(-(place + 1) * length // count)) for place in range(count))
        x = torch.stack([reduce(x.narrow(dim, begin, end - begin), dim) for begin, end in ends], dim)
    return x


class TokenPool(nn.Module):
    """α · max + (1 - α) · mean over the tokens of a sequence `(batch, tokens, width)`, or over those of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = MixedPool(grid=1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool to `(batch, width)`.

        Args:
            x: `(batch, tokens, width)`.
            mask: `(batch, tokens)`, not zero for the tokens that count; by default all do.
        """
        if mask is None:
            return self.pool(x.mT[..., None]).flatten(1)  # type: ignore[no-any-return]
        padding = (mask == 0)[..., None]
        largest = x.masked_fill(padding, torch.finfo(x.dtype).min).amax(1)
        mean = token_mean(x.masked_fill(padding, 0), mask != 0)  # what padding holds may be NaN
        return self.pool.mix * largest + (1 - self.pool.mix) * mean


def pooling(shape: Sequence[int]) -> tuple[nn.Module, int]:
    """A pooling module for the features of one input, and the number of values that it returns per input.

    Args:
        shape: `(channels, height, width)`, `(tokens, width)` or `(width,)`.

    Example:
        >>> pooling((16, 32, 32))[1], pooling((197, 384))[1], pooling((10,))[1]
        (256, 384, 10)
    """
    match tuple(shape):
        case (channels, height, width):
            pool: nn.Module = MixedPool() if max(height, width) > _GRID else nn.Identity()
            return pool, channels * min(_GRID, height) * min(_GRID, width)
        case (_, width):
            return TokenPool(), width
        case (width,):
            return nn.Identity(), width
    raise ShapeError(
        f"the features of one input have shape {tuple(shape)}",
        expected="(channels, height, width), (tokens, width) or (width,)",
        fix="choose another place, or pass head=, a function from this shape to a module",
    )


class PooledHead(nn.Module):
    """The internal classifier of SDN: mixed pooling, then a linear layer.

    Args:
        shape: The shape of the features of one input, as for `pooling`.
        classes: The number of classes.
        channels_first: Whether the features of a sequence are `(channels, length)`, as those of 1-D convolutions.

    Attributes:
        reads_mask: Whether it takes an attention mask as `mask`: of a sequence, only real tokens are pooled.

    Example:
        >>> PooledHead((16, 8, 8), 10)(torch.zeros(2, 16, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, shape: Sequence[int], classes: int, *, channels_first: bool = False) -> None:
        super().__init__()
        self.channels_first = channels_first and len(shape) == 2
        self.pool, width = pooling(tuple(reversed(shape)) if self.channels_first else shape)
        self.linear = nn.Linear(width, classes)
        self.reads_mask = isinstance(self.pool, TokenPool)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        features = features.mT if self.channels_first else features
        pooled = self.pool(features) if mask is None else self.pool(features, mask)
        logits: Tensor = self.linear(pooled.flatten(1))
        return logits

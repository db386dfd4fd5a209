"""Random erasing (Zhong et al. 2020), mixup (Zhang et al. 2018) and cutmix (Yun et al. 2019) for a whole batch on any device.

As in `anytime.data.augment`, drawing is separate from applying. Both images of a pair are mixed with each other: rows 0 and 1,
rows 2 and 3, and so on, which stay together when several processes share a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anytime.data.augment import Drawn

_ERASED = (0.02, 1 / 3)
_LOG_RATIO = math.log(1 / 0.3)


@dataclass(frozen=True, eq=False)
class Erased(Drawn):
    """What is erased of each of N images.

    Attributes:
        box: `(N, 4)`, int64, top, bottom, left and right of a box; empty for an image that stays.
        noise: `(N,)`, int64, the image of noise that the box shows.
    """

    box: Tensor
    noise: Tensor


@dataclass(frozen=True, eq=False)
class Mixing(Drawn):
    """How the images of each of N batches are mixed.

    Attributes:
        own: `(N,)`, weight of an image's own pixels outside the box; inside it is 0.
        box: `(N, 4)`, as in `Erased`; empty for mixup.
    """

    own: Tensor
    box: Tensor


def draw_mixing(count: int, *, mixup: float, cutmix: float, height: int, width: int, rng: np.random.Generator) -> Mixing:
    """Draw mixup or cutmix for `count` batches, each with probability one half if both are above 0.

    Args:
        count: Number of batches.
        mixup: Both parameters of the beta distribution of an image's own weight; 0 for no mixup.
        cutmix: The same for the area of an image that stays.
        height: Height of the images.
        width: Width of the images.
        rng: Source of the random numbers.
    """
    cut = rng.random(count) < (0.5 if mixup and cutmix else float(cutmix > 0))
    blended = rng.beta(mixup, mixup, count) if mixup else np.ones(count)
    stays = rng.beta(cutmix, cutmix, count) if cutmix else np.ones(count)
    side = np.where(cut, np.sqrt(1 - stays), 0)  # relative to the image's
    box = _boxes(side * height, side * width, rng.random((2, count)) * [[height], [width]], height, width)
    return Mixing(torch.from_numpy(np.where(cut, 1.0, blended)).float(), torch.from_numpy(box))


def draw_erased(count: int, *, probability: float, height: int, width: int, noises: int, rng: np.random.Generator) -> Erased:
    """Draw what is erased of each of `count` images, with `noises` images of noise: 2 % to a third of some of them.

    The sides of a box have a ratio from 0.3 to its inverse, and none is longer than the image's.
    """
    least, most = _ERASED
    area = rng.uniform(least, most, count) * height * width
    ratio = np.exp(rng.uniform(-_LOG_RATIO, _LOG_RATIO, count))
    chosen = rng.random(count) < probability
    high, wide = (np.where(chosen, side, 0) for side in (np.sqrt(area * ratio), np.sqrt(area / ratio)))
    high, wide = high.clip(max=height), wide.clip(max=width)
    middle = np.stack([rng.uniform(high / 2, height - high / 2), rng.uniform(wide / 2, width - wide / 2)])
    which = rng.integers(noises, size=count)
    return Erased(torch.from_numpy(_boxes(high, wide, middle, height, width)), torch.from_numpy(which))


def inside(box: Tensor, height: int, width: int) -> Tensor:
    """Whether each pixel is in a box, `(..., 4)` to `(..., height, width)`."""
    top, bottom, left, right = box[..., None, None].unbind(-3)
    y = torch.arange(height, device=box.device)[:, None]
    x = torch.arange(width, device=box.device)
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)


def erase(images: Tensor, erased: Erased, noises: Tensor) -> Tensor:
    """Replace boxes of `(B, channels, height, width)` images by the same boxes of images of noise."""
    return torch.where(inside(erased.box, *images.shape[2:])[:, None], noises[erased.noise], images)


def own_weights(mixing: Mixing, height: int, width: int) -> Tensor:
    """The weight of an image's own pixels in one batch, `(height, width)`; its label has their mean.

    >>> one_in_four = Mixing(torch.tensor(1.0), torch.tensor([0, 1, 0, 1]))
    >>> own_weights(one_in_four, 2, 2).mean()
    tensor(0.7500)
    """
    return mixing.own * ~inside(mixing.box, height, width)


def mix(values: Tensor, own: Tensor) -> Tensor:
    """Mix each row with the other of its pair; `own` is a row's own weight, and the other has the rest.

    >>> mix(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor(0.75))
    tensor([[0.7500, 0.2500],
            [0.2500, 0.7500]])
    """
    others = values.view(-1, 2, *values.shape[1:]).flip(1).reshape(values.shape)
    return own * values + (1 - own) * others


def _boxes(high: np.ndarray, wide: np.ndarray, middle: np.ndarray, height: int, width: int) -> np.ndarray:
    """Boxes as whole numbers, `(N, 4)`, from their sizes and middles, clipped to the image."""
    edges = [(middle[0] - high / 2, height), (middle[0] + high / 2, height)]
    edges += [(middle[1] - wide / 2, width), (middle[1] + wide / 2, width)]
    return np.stack([edge.round().astype(np.int64).clip(0, most) for edge, most in edges], 1)

"""RandAugment (Cubuk et al. 2020) for a whole batch on any device: a few random operations per image, all of one magnitude.

Operations and ranges are those with which vision transformers are usually trained from scratch: each drawn operation is applied
with probability one half, at a level that varies a little around the magnitude. As in `anytime.data.augment`, drawing is
separate from applying, which has no loop over images and can be captured in a CUDA graph. Operations on colours come first,
then all geometric ones as one affine map, so that pixels are interpolated once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from anytime.data.augment import Drawn

_SPREAD, _PROBABILITY, _LARGEST_LEVEL = 0.5, 0.5, 10
# At the largest level: factor of colour, contrast, brightness and sharpness minus 1; bits; addition; degrees; slope; fraction.
_BLEND, _BITS, _ADDED, _DEGREES, _SLOPE, _SHIFT = 0.9, 4, 110, 30, 0.3, 0.45
_LUMA = (0.299, 0.587, 0.114)
Recolour = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Operations(Drawn):
    """The random operations of each of N images.

    Attributes:
        colour: `(N, operations)`, int64, index in `COLOURS`, or -1 for none.
        level: `(N, operations)`, from -1 to 1; 0 changes nothing, where an operation has levels.
        affine: `(N, 2, 3)`, the geometric operations as one map from output to input coordinates, for `grid_sample`.
    """

    colour: Tensor
    level: Tensor
    affine: Tensor


def draw_operations(
    count: int, *, operations: int, magnitude: float, rng: np.random.Generator, aspect: float = 1.0
) -> Operations:
    """Draw `operations` operations for each of `count` images.

    Args:
        count: Number of images.
        operations: Operations per image; each is applied with probability one half.
        magnitude: The mean level, from 0 to 10.
        rng: Source of the random numbers.
        aspect: Height of the images divided by their width.
    """
    shape = count, operations
    level = rng.normal(magnitude, _SPREAD, shape).clip(0, _LARGEST_LEVEL) / _LARGEST_LEVEL
    level *= rng.choice((-1.0, 1.0), shape)
    chosen = rng.integers(len(COLOURS) + len(GEOMETRY), size=shape)
    chosen[rng.random(shape) >= _PROBABILITY] = -1
    affine = np.tile(np.eye(3), (count, 1, 1))
    for index in range(operations):
        affine = affine @ _affine(chosen[:, index] - len(COLOURS), level[:, index], aspect)
    colour = np.where(chosen < len(COLOURS), chosen, -1)
    return Operations(torch.from_numpy(colour), torch.from_numpy(level).float(), torch.from_numpy(affine[:, :2]).float())


def recolour(images: Tensor, operations: Operations) -> Tensor:
    """Change the colours of `(B, channels, height, width)` images; pixels are whole numbers from 0 to 255, of any dtype.

    Returns:
        The same shape in float32, whole numbers again.
    """
    images = images.float()
    for colour, level in zip(operations.colour.unbind(1), operations.level.unbind(1), strict=True):
        colour, level, changed = (values[:, None, None, None] for values in (colour, level, images))
        changed = images
        for index, operation in enumerate(COLOURS.values()):
            changed = torch.where(colour == index, operation(images, level), changed)
        images = changed.round().clamp(0, 255)
    return images


def transform(images: Tensor, affine: Tensor) -> Tensor:
    """Apply an affine map, `(B, 2, 3)`, to each image; what comes from outside the image is 0."""
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _affine(operation: np.ndarray, level: np.ndarray, aspect: float) -> np.ndarray:
    """The maps `(N, 3, 3)` of one geometric operation per image, in coordinates from -1 to 1; of others, the identity."""
    is_rotate, *is_other = (operation == index for index in range(len(GEOMETRY)))
    angle = np.where(is_rotate, np.deg2rad(_DEGREES) * level, 0)
    shear_x, shear_y = (np.where(chosen, _SLOPE * level, 0) for chosen in is_other[:2])
    right, down = (np.where(chosen, 2 * _SHIFT * level, 0) for chosen in is_other[2:])
    maps = np.zeros((len(level), 3, 3))
    maps[:, 0] = np.stack([np.cos(angle), (shear_x - np.sin(angle)) * aspect, right], 1)
    maps[:, 1] = np.stack([(shear_y + np.sin(angle)) / aspect, np.cos(angle), down], 1)
    maps[:, 2, 2] = 1
    return maps


def _auto_contrast(images: Tensor, level: Tensor) -> Tensor:
    """Stretch each channel to the full range."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(high > low, (images - low) * (255 / (high - low).clamp(min=1)), images)


def _equalize(images: Tensor, level: Tensor) -> Tensor:
    """Make all values of each channel equally frequent."""
    values = images.long().flatten(2)  # (B, channels, pixels)
    pixels = values.shape[2]
    counts = images.new_zeros(*values.shape[:2], 256).scatter_add_(2, values, torch.ones_like(images.flatten(2)))
    brightest = counts.gather(2, values.amax(2, keepdim=True))
    darker = counts.cumsum(2) - counts
    equal = (darker * (255 / (pixels - brightest).clamp(min=1))).gather(2, values).view_as(images)
    return torch.where((brightest < pixels)[..., None], equal, images)


def _invert(images: Tensor, level: Tensor) -> Tensor:
    return 255 - images


def _posterize(images: Tensor, level: Tensor) -> Tensor:
    """Keep 8 to 4 bits."""
    step = torch.exp2((_BITS * level.abs()).round())
    return (images / step).floor() * step


def _solarize(images: Tensor, level: Tensor) -> Tensor:
    """Invert values above a threshold."""
    return torch.where(images >= 256 * (1 - level.abs()), 255 - images, images)


def _solarize_add(images: Tensor, level: Tensor) -> Tensor:
    """Make dark values brighter."""
    return torch.where(images < 128, images + _ADDED * level.abs(), images)


def _saturate(images: Tensor, level: Tensor) -> Tensor:
    return _blend(_grey(images), images, level)


def _contrast(images: Tensor, level: Tensor) -> Tensor:
    return _blend(_grey(images).mean((2, 3), keepdim=True), images, level)


def _brightness(images: Tensor, level: Tensor) -> Tensor:
    return _blend(torch.zeros_like(images), images, level)


def _sharpness(images: Tensor, level: Tensor) -> Tensor:
    """Away from, or towards, the image smoothed by a 3 × 3 filter with 5 in the middle and 1 around it; edges stay."""
    smooth = images.clone()
    inner = (..., slice(1, -1), slice(1, -1))
    smooth[inner] = (9 * F.avg_pool2d(images, 3, stride=1, padding=1)[inner] + 4 * images[inner]) / 13
    return _blend(smooth, images, level)


def _blend(other: Tensor, images: Tensor, level: Tensor) -> Tensor:
    return other + (1 + _BLEND * level) * (images - other)


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return images
    red, green, blue = (weight * channel for weight, channel in zip(_LUMA, images.unbind(1), strict=True))
    return (red + green + blue)[:, None]


COLOURS: dict[str, Recolour] = {
    "auto_contrast": _auto_contrast,
    "equalize": _equalize,
    "invert": _invert,
    "posterize": _posterize,
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "saturation": _saturate,
    "contrast": _contrast,
    "brightness": _brightness,
    "sharpness": _sharpness,
}
"""Operations on colours, functions of images and levels; those above saturation ignore the level's sign or the level."""
GEOMETRY = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")

"""Random crops and flips of a whole batch on any device, and normalisation.

Drawing is separate from applying: `draw` returns three small tensors, and `crop_flip` is a pure function of tensors without a
loop over images. It can be captured in a CUDA graph or compiled, and the same draws give the same images on CPU and GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor


class Drawn:
    """Random numbers as tensors with one entry per image or step: the base of frozen dataclasses."""

    def __getitem__(self, index: Any) -> Self:
        return self._apply(lambda tensor: tensor[index])

    def to(self, device: torch.device | str) -> Self:
        """Move all tensors to a device."""
        return self._apply(lambda tensor: tensor.to(device))

    def copy_(self, other: Self) -> None:
        """Copy the values of `other` in place."""
        for part in fields(self):  # type: ignore[arg-type]
            getattr(self, part.name).copy_(getattr(other, part.name))

    def _apply(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(*(function(getattr(self, part.name)) for part in fields(self)))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Draws(Drawn):
    """The random crop and flip of each of N images.

    Attributes:
        down: `(N,)`, the top of the crop in the padded image, from 0 to twice the padding; `pad` changes nothing.
        right: `(N,)`, the left side of the crop, as `down`.
        flip: `(N,)`, bool, whether the crop is flipped horizontally.
    """

    down: Tensor
    right: Tensor
    flip: Tensor


def draw(count: int, *, pad: int = 4, generator: torch.Generator) -> Draws:
    """Draw crops and flips for `count` images, on the generator's device."""
    device = generator.device
    shifts = torch.randint(0, 2 * pad + 1, (2, count), generator=generator, device=device)
    return Draws(shifts[0], shifts[1], torch.rand(count, generator=generator, device=device) < 0.5)


def no_draws(count: int, *, pad: int = 4, device: torch.device | str = "cpu") -> Draws:
    """Draws that leave `count` images unchanged."""
    center = torch.full((count,), pad, device=device)
    return Draws(center, center.clone(), torch.zeros(count, dtype=torch.bool, device=device))


def crop_flip(images: Tensor, rows: Tensor, draws: Draws, *, pad: int = 4) -> Tensor:
    """Select `rows` of `images`, pad them with zeros, crop them to their size and flip some of them.

    Args:
        images: `(N, channels, height, width)`, any dtype.
        rows: `(B,)`, the images to select.
        draws: For these B images, on the same device.
        pad: Pixels of padding on each side.

    Returns:
        `(B, channels, height, width)` in the dtype of `images`.
    """
    channels, height, width = images.shape[1:]
    device = images.device
    y = torch.arange(height, device=device)[None, :] + (draws.down - pad)[:, None]  # (B, height)
    across = torch.arange(width, device=device)[None, :]
    across = torch.where(draws.flip[:, None], width - 1 - across, across)
    x = across + (draws.right - pad)[:, None]  # (B, width)
    inside = ((y >= 0) & (y < height))[:, None, :, None] & ((x >= 0) & (x < width))[:, None, None, :]
    picked = images[
        rows[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        y.clamp(0, height - 1)[:, None, :, None],
        x.clamp(0, width - 1)[:, None, None, :],
    ]
    return picked * inside


def augment(images: Tensor, *, pad: int = 4, generator: torch.Generator) -> Tensor:
    """Crop and flip every image at random, as CIFAR networks are trained."""
    rows = torch.arange(len(images), device=images.device)
    return crop_flip(images, rows, draw(len(images), pad=pad, generator=generator), pad=pad)


def normalise(
    images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Normalise each channel of uint8 images: `(images / 255 - mean) / std`, computed in float32.

    To capture this in a CUDA graph, pass `mean` and `std` as tensors on the device of `images`.
    """
    center = torch.as_tensor(mean, dtype=torch.float32, device=images.device)[:, None, None]
    spread = torch.as_tensor(std, dtype=torch.float32, device=images.device)[:, None, None]
    return ((images.float() / 255.0 - center) / spread).to(dtype)

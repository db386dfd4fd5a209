"""Random crops and flips of a whole batch on any device, and normalisation.

The randomness is drawn apart from its use: `draw` gives three small tensors, `crop_flip` is then a pure function of
tensors. It has no loop over images and reads each pixel once, so it can be captured in a CUDA graph or compiled, and a
CPU and a GPU that are given the same draws see the same pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Draws:
    """What happens to each of N images.

    Attributes:
        down: `(N,)`, where the crop begins in the padded image, from 0 to twice the padding; the middle changes nothing.
        right: As `down`, across.
        flip: `(N,)`, bool, whether the crop is mirrored.
    """

    down: Tensor
    right: Tensor
    flip: Tensor

    def __getitem__(self, index: Tensor) -> Self:
        return type(self)(self.down[index], self.right[index], self.flip[index])

    def copy_(self, other: Draws) -> None:
        """Take over the values of `other`, in place."""
        self.down.copy_(other.down)
        self.right.copy_(other.right)
        self.flip.copy_(other.flip)


def draw(count: int, *, pad: int = 4, generator: torch.Generator) -> Draws:
    """Draw crops and flips for `count` images, on the generator's device."""
    where = generator.device
    shifts = torch.randint(0, 2 * pad + 1, (2, count), generator=generator, device=where)
    return Draws(shifts[0], shifts[1], torch.rand(count, generator=generator, device=where) < 0.5)


def no_draws(count: int, *, pad: int = 4, device: torch.device | str = "cpu") -> Draws:
    """Draws that leave `count` images as they are."""
    middle = torch.full((count,), pad, device=device)
    return Draws(middle, middle.clone(), torch.zeros(count, dtype=torch.bool, device=device))


def crop_flip(images: Tensor, rows: Tensor, draws: Draws, *, pad: int = 4) -> Tensor:
    """Pick `rows` of `images`, pad them with zeros, crop back to size and mirror some.

    Args:
        images: `(N, channels, height, width)`, any element type.
        rows: `(B,)` which images.
        draws: For these B images, on the same device.
        pad: By how many pixels on each side.

    Returns:
        `(B, channels, height, width)` of the type of `images`.
    """
    channels, height, width = images.shape[1:]
    device = images.device
    y = torch.arange(height, device=device)[None, :] + (draws.down - pad)[:, None]
    across = torch.arange(width, device=device)[None, :]
    across = torch.where(draws.flip[:, None], width - 1 - across, across)
    x = across + (draws.right - pad)[:, None]
    inside = ((y >= 0) & (y < height))[:, None, :, None] & ((x >= 0) & (x < width))[:, None, None, :]
    picked = images[
        rows[:, None, None, None],
        torch.arange(channels, device=device)[None, :, None, None],
        y.clamp(0, height - 1)[:, None, :, None],
        x.clamp(0, width - 1)[:, None, None, :],
    ]
    return picked * inside


def augment(images: Tensor, *, pad: int = 4, generator: torch.Generator) -> Tensor:
    """Random crop and flip of every image, the training transform of CIFAR."""
    rows = torch.arange(len(images), device=images.device)
    return crop_flip(images, rows, draw(len(images), pad=pad, generator=generator), pad=pad)


def normalise(
    images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Bytes to numbers of mean 0 and deviation 1 per channel: (bytes/255 - mean)/std, computed in float32.

    Give `mean` and `std` as tensors on the device of `images` where this is captured in a CUDA graph.
    """
    centre = torch.as_tensor(mean, dtype=torch.float32, device=images.device)[:, None, None]
    spread = torch.as_tensor(std, dtype=torch.float32, device=images.device)[:, None, None]
    return ((images.float() / 255.0 - centre) / spread).to(dtype)

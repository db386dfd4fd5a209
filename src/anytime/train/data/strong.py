"""Strong augmentation in a training step: what is drawn before an epoch, and applied to the images of a batch.

Like order and crops, everything is drawn on the CPU from the seed and the epoch alone, and copied to tensors at fixed
addresses, which a captured step reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anytime.data.mixing import Erased, Mixing, draw_erased, draw_mixing, erase, mix, own_weights
from anytime.data.rand_augment import Operations, draw_operations, recolour, transform
from anytime.train.config import StrongAugment

# Images of noise, of which each erased box shows a part of one.
_NOISES = 64


class _Epoch(NamedTuple):
    """What is drawn for an epoch: per image, per image, and per step."""

    operations: Operations
    erased: Erased
    mixing: Mixing


class StrongDraws:
    """The random numbers of an epoch, and the operations that use them.

    Args:
        settings: What is applied.
        seed: Seed of the run.
        images: Number of training images.
        steps: Steps per epoch.
        shape: Channels, height and width of the images.
        device: Where the images are.
    """

    def __init__(
        self,
        settings: StrongAugment,
        *,
        seed: int,
        images: int,
        steps: int,
        shape: tuple[int, int, int],
        device: torch.device,
    ) -> None:
        self.settings, self._seed, self._images, self._steps, self._shape = settings, seed, images, steps, shape
        noises = np.random.default_rng([seed, 3]).standard_normal((_NOISES, *shape), dtype=np.float32)
        self._noises = torch.from_numpy(noises).to(device)
        operations, erased, mixing = self._draw(0)
        self._drawn = _Epoch(operations.to(device), erased.to(device), mixing.to(device))
        self._step = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self, epoch: int) -> None:
        """Draw for an epoch."""
        drawn = self._draw(epoch)
        self._drawn.operations.copy_(drawn.operations)
        self._drawn.erased.copy_(drawn.erased)
        self._drawn.mixing.copy_(drawn.mixing)

    def select(self, step: int) -> None:
        """Prepare step `step` of the epoch."""
        self._step.fill_(step)

    def recolour(self, pixels: Tensor, rows: Tensor) -> Tensor:
        """Change the colours of pixels from 0 to 255, those of the images `rows`."""
        return recolour(pixels, self._drawn.operations[rows]) if self.settings.operations else pixels

    def distort(self, images: Tensor, rows: Tensor) -> Tensor:
        """Transform and erase normalised images; what comes from outside is their mean, 0."""
        if self.settings.operations:
            images = transform(images, self._drawn.operations.affine[rows])
        return erase(images, self._drawn.erased[rows], self._noises) if self.settings.erasing else images

    def mix(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mix images, and the probabilities of their classes."""
        if not self.settings.mixes:
            return images, targets
        own = own_weights(self._drawn.mixing[self._step], *self._shape[1:])
        return mix(images, own), mix(targets, own.mean())

    def _draw(self, epoch: int) -> _Epoch:
        settings, (_, height, width) = self.settings, self._shape
        rng = np.random.default_rng([self._seed, epoch, 3])
        size: dict[str, Any] = {"height": height, "width": width, "rng": rng}
        return _Epoch(
            draw_operations(
                self._images, operations=settings.operations, magnitude=settings.magnitude, rng=rng, aspect=height / width
            ),
            draw_erased(self._images, probability=settings.erasing, noises=_NOISES, **size),
            draw_mixing(self._steps, mixup=settings.mixup, cutmix=settings.cutmix, **size),
        )

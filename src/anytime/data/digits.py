"""Scikit-learn's handwritten digits: 1,797 real images of 8 × 8 pixels, without a download."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from anytime.checks import LARGEST_OLD_SEED, check_seed
from anytime.data.base import ImageData
from anytime.errors import MissingExtraError, OptionError

_SIZES = {"train": 1197, "val": 300, "test": 300}


def load_digits(*, channels: int = 1, seed: int = 0) -> dict[str, ImageData]:
    """Load training, validation and test images, `(N, channels, 8, 8)`, as a random split.

    Args:
        channels: 1, or 3 for networks that expect colour images.
        seed: Of the split.
    """
    if channels not in (1, 3):
        raise OptionError(f"channels is {channels}", expected="1 or 3", fix="pass 3 to repeat the grey values in each channel")
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise MissingExtraError(
            "the package scikit-learn, which contains the digits, is not installed",
            expected="scikit-learn",
            fix="pip install scikit-learn",
        ) from error
    stored = load()
    grey = torch.from_numpy((stored.images * (255 / 16)).round().astype(np.uint8))[:, None]
    order = torch.from_numpy(np.random.RandomState(check_seed(seed, most=LARGEST_OLD_SEED)).permutation(len(grey)))
    parts = dict(zip(_SIZES, torch.split(order, list(_SIZES.values())), strict=True))
    shade = grey[parts["train"]].float() / 255.0
    whole = ImageData(
        name="digits",
        split="all",
        images=grey.repeat(1, channels, 1, 1),
        labels=torch.from_numpy(stored.target.astype(np.int64)),
        class_names=tuple("0123456789"),
        mean=(float(shade.mean()),) * channels,
        std=(float(shade.std()),) * channels,
        rows=torch.arange(len(grey)),
    )
    return {split: whole.take(index, split=split) for split, index in parts.items()}


def doubled(data: ImageData) -> ImageData:
    """Each pixel repeated in both directions: 8 × 8 is too small for a network with two scales."""
    return replace(data, images=data.images.repeat_interleave(2, -1).repeat_interleave(2, -2))

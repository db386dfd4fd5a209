"""ImageNet from class folders, `train/n01440764/*.JPEG` and `val/n01440764/*.JPEG`, decoded when an image is read.

The transforms are those that MSDNet was trained with. Training: a random crop of 8 to 100 % of the area with an aspect ratio
between 3:4 and 4:3, resized to 224 × 224, flipped with probability 1/2. Evaluation: the shorter side resized to 256, then the
center 224 × 224. The random crop of an image depends on the seed, the epoch and the image's row only, so batches do not depend
on the number of threads or on the batch that a run is resumed from.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anytime.data.base import StreamedImages
from anytime.data.images import read_image
from anytime.errors import FormatError, MissingFileError

if TYPE_CHECKING:
    from PIL.Image import Image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_ENDINGS, _FORMATS = (".jpeg", ".jpg", ".png"), ("JPEG", "PNG")
_AREA, _ASPECT, _TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
_AHEAD = 2  # batches that are decoded ahead

Box = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class ImageFolders(StreamedImages):
    """Labelled images of one split in class folders; the attributes of `StreamedImages`, and these.

    Attributes:
        folder: The folder of the split.
        files: One path per image, relative to `folder`.
        size: Height and width of the images that `batches` yields.
        workers: The number of decoding threads.
    """

    folder: Path
    files: tuple[str, ...]
    labels: Tensor
    class_names: tuple[str, ...]
    rows: Tensor
    split: str
    size: int = 224
    workers: int = 4
    name: str = "imagenet"
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    per_row = ("files", "labels", "rows")

    @property
    def shape(self) -> tuple[int, int, int]:
        return (3, self.size, self.size)

    def batches(self, index: Tensor, batch: int, *, draws: tuple[int, int] | None = None) -> Iterator[Tensor]:
        rows = self.rows.cpu()
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="decode")
        waiting: deque[list[Future[NDArray[np.uint8]]]] = deque()
        try:
            for start in range(0, len(index), batch):
                part = index[start : start + batch].tolist()
                waiting.append([pool.submit(self._read, at, int(rows[at]), draws) for at in part])
                if len(waiting) > _AHEAD:
                    yield _stack(waiting.popleft())
            while waiting:
                yield _stack(waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _read(self, at: int, row: int, draws: tuple[int, int] | None) -> NDArray[np.uint8]:
        fix = "download it again, or delete it and start a new run"
        image = read_image(self.folder / self.files[at], formats=_FORMATS, fix=fix)
        if draws is None:
            cropped = center_crop(image, size=self.size)
        else:
            seed = np.random.SeedSequence((*draws, row)).generate_state(4)
            cropped = random_crop(image, np.random.RandomState(seed), size=self.size)
        return np.asarray(cropped, dtype=np.uint8)


def load_imagenet(folder: str | Path, *, size: int = 224, workers: int = 4) -> dict[str, ImageFolders]:
    """Load the training images as `train` and the published validation images as `test`.

    Args:
        folder: Contains `train` and `val`, each with one folder of images per class.
        size: Height and width of the images after cropping.
        workers: The number of decoding threads.
    """
    folder = Path(folder)
    sets = {split: _scan(folder / place, split) for split, place in (("train", "train"), ("test", "val"))}
    if sets["train"].class_names != sets["test"].class_names:
        odd = sorted(set(sets["train"].class_names) ^ set(sets["test"].class_names))
        raise FormatError(
            f"{folder / 'train'} and {folder / 'val'} differ in {len(odd)} classes: {', '.join(odd[:5])}",
            expected="the same class folders in both",
            fix="sort the validation images into folders named by their class, like the training images",
            path=folder,
        )
    for data in sets.values():
        counts = data.labels.bincount(minlength=data.classes).tolist()
        empty = [name for name, count in zip(data.class_names, counts, strict=True) if not count]
        if empty:
            raise _missing(data.folder, f"{len(empty)} class folders of {data.folder} have no images: {', '.join(empty[:5])}")
    return {split: replace(data, size=size, workers=workers) for split, data in sets.items()}


def random_crop(image: Image, random: np.random.RandomState, *, size: int = 224) -> Image:
    """The training transform: a random crop, resized, flipped with probability 1/2."""
    from PIL.Image import Resampling, Transpose

    box = random_box(image.width, image.height, random)
    cropped = image.resize((size, size), Resampling.BILINEAR, box=box)
    return cropped.transpose(Transpose.FLIP_LEFT_RIGHT) if random.random_sample() < 0.5 else cropped


def random_box(width: int, height: int, random: np.random.RandomState) -> Box:
    """Left, top, right and bottom of a random crop of 8 to 100 % of the area with an aspect ratio between 3:4 and 4:3.

    If ten random crops do not fit into the image, it is the largest center crop with an allowed aspect ratio.
    """
    for _ in range(_TRIES):
        area = width * height * random.uniform(*_AREA)
        aspect = math.exp(random.uniform(math.log(_ASPECT[0]), math.log(_ASPECT[1])))
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < across <= width and 0 < down <= height:
            left, top = random.randint(0, width - across + 1), random.randint(0, height - down + 1)
            return (left, top, left + across, top + down)
    aspect = min(max(width / height, _ASPECT[0]), _ASPECT[1])
    across, down = min(width, round(height * aspect)), min(height, round(width / aspect))
    left, top = (width - across) // 2, (height - down) // 2
    return (left, top, left + across, top + down)


def center_crop(image: Image, *, size: int = 224) -> Image:
    """The evaluation transform: the shorter side resized to 8/7 of `size` (256 for 224), then the center crop."""
    from PIL.Image import Resampling

    shorter = size * 8 // 7
    scale = shorter / min(image.width, image.height)
    across, down = max(shorter, int(image.width * scale)), max(shorter, int(image.height * scale))
    left, top = round((across - size) / 2), round((down - size) / 2)
    scaled = image.resize((across, down), Resampling.BILINEAR)
    return scaled.crop((left, top, left + size, top + size))


def _scan(folder: Path, split: str) -> ImageFolders:
    if not folder.is_dir():
        raise _missing(folder, f"there is no folder {folder}")
    with os.scandir(folder) as entries:
        names = tuple(sorted(entry.name for entry in entries if entry.is_dir()))
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(names):
        with os.scandir(folder / name) as entries:
            found = sorted(entry.name for entry in entries if entry.name.lower().endswith(_ENDINGS))
        files += [f"{name}/{file}" for file in found]
        labels += [label] * len(found)
    if not files:
        raise _missing(folder, f"{folder} has {len(names)} class folders without images")
    return ImageFolders(folder, tuple(files), torch.tensor(labels), names, torch.arange(len(files)), split)


def _missing(folder: Path, got: str) -> MissingFileError:
    return MissingFileError(
        got,
        expected="one folder per class with its .JPEG files, such as train/n01440764/n01440764_18.JPEG",
        fix="unpack ILSVRC2012 from https://image-net.org, with the validation images sorted into class folders",
        path=folder,
    )


def _stack(images: list[Future[NDArray[np.uint8]]]) -> Tensor:
    stacked = np.stack([image.result() for image in images])  # (batch, height, width, channels)
    return torch.from_numpy(np.ascontiguousarray(stacked.transpose(0, 3, 1, 2)))

"""ImageNet from class folders, `train/n01440764/*.JPEG` and `val/n01440764/*.JPEG`, decoded when an image is asked for.

The transforms are those that MSDNet was trained with. For training: a piece of 8 to 100 % of the picture, between 3:4 and
4:3, scaled to 224 × 224, and a mirror image every other time. For evaluation: the shorter side scaled to 256, and of that the
middle 224 × 224. What is drawn for an image depends on the seed, the epoch and the image's row alone, so that batches are the
same whatever the number of threads, and from whichever batch a run goes on.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anytime.data.images import read_image
from anytime.errors import FormatError, MissingFileError

if TYPE_CHECKING:
    from PIL.Image import Image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_ENDINGS, _FORMATS = (".jpeg", ".jpg", ".png"), ("JPEG", "PNG")
_AREA, _ASPECT, _TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
# Batches that are decoded ahead of the one asked for.
_AHEAD = 2

Box = tuple[float, float, float, float]


@dataclass(frozen=True, eq=False)
class ImageFolders:
    """Labelled images of one split, in class folders; a `StreamedImages`.

    Attributes:
        folder: The folder of the split.
        files: Paths within it, one an image.
        labels: `(N,)`, int64.
        class_names: The names of the class folders, in order.
        rows: `(N,)`, int64: where each image stands in the sorted list of all files.
        split: `train`, `val` or `test`.
        size: Height and width of an image as it is given out.
        workers: How many threads decode.
        name: Which data set.
        mean: Per channel, on the scale where 255 is 1.
        std: Per channel, as `mean`.
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

    def __len__(self) -> int:
        return len(self.files)

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image as it is given out."""
        return (3, self.size, self.size)

    def take(self, index: Tensor, *, split: str | None = None) -> Self:
        """The images at `index`, in that order, as a set of their own."""
        files = tuple(self.files[row] for row in index.tolist())
        return replace(self, files=files, labels=self.labels[index], rows=self.rows[index], split=split or self.split)

    def to(self, device: torch.device | str) -> Self:
        """The same set with labels and rows on another device."""
        return replace(self, labels=self.labels.to(device), rows=self.rows.to(device))

    def batches(self, index: Tensor, batch: int, *, draws: tuple[int, int] | None = None) -> Iterator[Tensor]:
        """The images at `index`, `batch` at a time, decoded ahead of their use by threads."""
        wanted = index.tolist()
        pieces = [wanted[start : start + batch] for start in range(0, len(wanted), batch)]
        rows = self.rows.cpu()
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="decode")
        waiting: deque[list[Future[NDArray[np.uint8]]]] = deque()
        try:
            for piece in pieces:
                waiting.append([pool.submit(self._read, at, int(rows[at]), draws) for at in piece])
                if len(waiting) > _AHEAD:
                    yield _stack(waiting.popleft())
            while waiting:
                yield _stack(waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _read(self, at: int, row: int, draws: tuple[int, int] | None) -> NDArray[np.uint8]:
        image = _decode(self.folder / self.files[at])
        if draws is None:
            return _pixels(middle(image, size=self.size))
        return _pixels(random_piece(image, np.random.RandomState(_seed(*draws, row)), size=self.size))


def load_imagenet(folder: str | Path, *, size: int = 224, workers: int = 4) -> dict[str, ImageFolders]:
    """The training images as `train`, the published validation images as `test`.

    Args:
        folder: Has the folders `train` and `val`, each with a folder of pictures for each class.
        size: Height and width of the images given out.
        workers: How many threads decode.
    """
    folder = Path(folder)
    sets = {split: _scan(folder / place, split) for split, place in (("train", "train"), ("test", "val"))}
    if sets["train"].class_names != sets["test"].class_names:
        odd = sorted(set(sets["train"].class_names) ^ set(sets["test"].class_names))
        raise FormatError(
            f"{folder / 'train'} and {folder / 'val'} differ in {len(odd)} classes: {', '.join(odd[:5])}",
            expected="the same class folders in both",
            fix="sort the validation images into folders named by their class, as the training images are",
            path=folder,
        )
    for data in sets.values():
        counts = data.labels.bincount(minlength=data.classes).tolist()
        empty = [name for name, count in zip(data.class_names, counts, strict=True) if not count]
        if empty:
            raise _missing(data.folder, f"{len(empty)} class folders of {data.folder} have no picture: {', '.join(empty[:5])}")
    return {split: replace(data, size=size, workers=workers) for split, data in sets.items()}


def random_piece(image: Image, random: np.random.RandomState, *, size: int = 224) -> Image:
    """The training transform: a random piece of the picture, scaled, mirrored every other time."""
    from PIL.Image import Resampling, Transpose

    box = random_box(image.width, image.height, random)
    piece = image.resize((size, size), Resampling.BILINEAR, box=box)
    return piece.transpose(Transpose.FLIP_LEFT_RIGHT) if random.random_sample() < 0.5 else piece


def random_box(width: int, height: int, random: np.random.RandomState) -> Box:
    """Left, top, right and bottom of a piece of 8 to 100 % of the area, between 3:4 and 4:3.

    Where ten draws do not fit into the picture, it is the largest piece of the nearest allowed shape, from the middle.
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


def middle(image: Image, *, size: int = 224) -> Image:
    """The evaluation transform: the shorter side scaled to 8/7 of `size` (256 for 224), and the middle of that."""
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
        raise _missing(folder, f"{folder} has {len(names)} class folders and no picture in them")
    return ImageFolders(folder, tuple(files), torch.tensor(labels), names, torch.arange(len(files)), split)


def _missing(folder: Path, got: str) -> MissingFileError:
    return MissingFileError(
        got,
        expected="a folder for each class with its .JPEG files, such as train/n01440764/n01440764_18.JPEG",
        fix="unpack ILSVRC2012 from https://image-net.org, with the validation images sorted into class folders",
        path=folder,
    )


def _decode(path: Path) -> Image:
    return read_image(path, formats=_FORMATS, fix="fetch it again, or remove it and begin anew")


def _seed(*parts: int) -> Any:
    return np.random.SeedSequence(parts).generate_state(4)


def _pixels(image: Image) -> NDArray[np.uint8]:
    return np.asarray(image, dtype=np.uint8)


def _stack(images: list[Future[NDArray[np.uint8]]]) -> Tensor:
    stacked = np.stack([image.result() for image in images])
    return torch.from_numpy(np.ascontiguousarray(stacked.transpose(0, 3, 1, 2)))

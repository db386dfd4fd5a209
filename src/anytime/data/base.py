"""What a set of labelled images is.

Images stay bytes until they reach the device that trains on them: CIFAR is then 150 MB and lies on a card whole. Sets too
large for that are `StreamedImages`, which are read batch by batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from anytime.checks import check_labels
from anytime.errors import DtypeError, OptionError, ShapeError


@dataclass(frozen=True, eq=False)
class ImageData:
    """Labelled images of one split.

    Attributes:
        name: Which data set, such as `cifar100`.
        split: `train`, `val` or `test`.
        images: `(N, channels, height, width)`, uint8.
        labels: `(N,)`, int64.
        class_names: One name a class.
        mean: Per channel, on the scale where 255 is 1; subtracted by `augment.normalise`.
        std: Per channel, as `mean`.
        rows: `(N,)`, int64: where each image stands in the published file it came from.
    """

    name: str
    split: str
    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rows: Tensor

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8:
            raise DtypeError(
                f"images of {self.name} have element type {self.images.dtype}",
                expected="uint8, the bytes of the picture",
                fix="keep the pictures as bytes; they are scaled and normalised on the device",
            )
        if self.images.ndim != 4 or self.images.shape[1] not in (1, 3):
            raise ShapeError(
                f"images of {self.name} have shape {tuple(self.images.shape)}",
                expected="(N, channels, height, width) with 1 or 3 channels",
                fix="move the channels to the front: images.permute(0, 3, 1, 2)",
            )
        channels = self.images.shape[1]
        if len(self.mean) != channels or len(self.std) != channels or min(self.std) <= 0:
            raise OptionError(
                f"mean {self.mean} and std {self.std} came with {channels} channels",
                expected=f"{channels} numbers each, deviations above 0",
                fix="give one number a channel",
            )
        check_labels(self.labels, batch=len(self.images), classes=len(self.class_names))
        if self.rows.shape != self.labels.shape:
            raise ShapeError(
                f"rows have shape {tuple(self.rows.shape)} for {len(self.labels)} images",
                expected=f"({len(self.labels)},)",
                fix="give torch.arange(len(images)) for a set that is whole",
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    def take(self, index: Tensor, *, split: str | None = None) -> Self:
        """The images at `index`, in that order, as a set of their own."""
        return replace(
            self,
            split=split or self.split,
            images=self.images[index],
            labels=self.labels[index],
            rows=self.rows[index],
        )

    def to(self, device: torch.device | str) -> Self:
        """The same set on another device."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device), rows=self.rows.to(device))


@runtime_checkable
class StreamedImages(Protocol):
    """Labelled images of one split that are read as they are needed; the attributes are those of `ImageData`."""

    @property
    def name(self) -> str:
        """Which data set."""

    @property
    def labels(self) -> Tensor:
        """`(N,)`, int64."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """One name a class."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Per channel, on the scale where 255 is 1."""

    @property
    def std(self) -> tuple[float, ...]:
        """Per channel, as `mean`."""

    @property
    def rows(self) -> Tensor:
        """`(N,)`, int64: where each image stands in the published set."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image as it is given out."""

    @property
    def classes(self) -> int:
        """How many classes there are."""

    def __len__(self) -> int: ...

    def take(self, index: Tensor, *, split: str | None = None) -> Self:
        """The images at `index`, in that order, as a set of their own."""

    def to(self, device: torch.device | str) -> Self:
        """The same set with labels and rows on another device."""

    def batches(self, index: Tensor, batch: int, *, draws: tuple[int, int] | None = None) -> Iterator[Tensor]:
        """The images at `index`, `batch` at a time: `(batch, channels, height, width)`, uint8, on the host.

        Args:
            index: Which images, in which order; the last batch may be smaller.
            batch: How many at a time.
            draws: Seed and epoch of the random crops, which depend on them and the image alone; none for the middle.
        """

"""Labelled rows of a data set, and images as the first kind of them.

Images stay bytes until they reach the device that trains on them: CIFAR is then 150 MB and fits on a GPU as a whole. Larger
data sets are `StreamedImages`, which are read batch by batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from anytime.checks import check_labels
from anytime.errors import DtypeError, OptionError, ShapeError


class LabelledRows:
    """One split of a data set: what all kinds of data have in common.

    Attributes:
        name: The data set, such as `cifar100`.
        split: `train`, `val` or `test`.
        labels: `(N,)`, int64.
        class_names: One name per class.
        rows: `(N,)`, int64: the index of each row in the published split.
    """

    name: str
    split: str
    labels: Tensor
    class_names: tuple[str, ...]
    rows: Tensor
    per_row: ClassVar[tuple[str, ...]]
    """Names of the attributes with one entry per row."""

    def _check(self, count: int) -> None:
        check_labels(self.labels, batch=count, classes=len(self.class_names))
        if self.rows.shape != (count,):
            raise ShapeError(
                f"rows has shape {tuple(self.rows.shape)} for {count} rows of data",
                expected=f"({count},)",
                fix=f"pass rows=torch.arange({count}) for a complete split",
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.class_names)

    def take(self, index: Tensor, *, split: str | None = None) -> Self:
        """Select the rows at `index`, in that order."""
        return self._replace(split=split or self.split, **{name: _pick(getattr(self, name), index) for name in self.per_row})

    def to(self, device: torch.device | str) -> Self:
        """Move all tensors to a device."""
        values = {name: getattr(self, name) for name in self.per_row}
        return self._replace(**{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)})

    def _replace(self, **changes: Any) -> Self:
        data: Any = self
        changed: Self = replace(data, **changes)
        return changed


@dataclass(frozen=True, eq=False)
class ImageData(LabelledRows):
    """Labelled images of one split; the attributes of `LabelledRows`, and these.

    Attributes:
        images: `(N, channels, height, width)`, uint8.
        mean: One number per channel for `augment.normalise`, for pixels scaled to [0, 1].
        std: As `mean`.
    """

    name: str
    split: str
    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rows: Tensor
    per_row = ("images", "labels", "rows")

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8:
            raise DtypeError(
                f"images of {self.name} have dtype {self.images.dtype}",
                expected="uint8 pixels from 0 to 255",
                fix="keep the images as uint8: they are normalised on the device",
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
                f"mean is {self.mean} and std {self.std} for {channels} channels",
                expected=f"{channels} numbers each, std above 0",
                fix="pass one number per channel",
            )
        self._check(len(self.images))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width


class StreamedImages(LabelledRows, ABC):
    """Labelled images of one split that are read when they are needed; `mean` and `std` as in `ImageData`."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the images that `batches` yields."""

    @abstractmethod
    def batches(self, index: Tensor, batch: int, *, draws: tuple[int, int] | None = None) -> Iterator[Tensor]:
        """Yield the images at `index` in batches: `(batch, channels, height, width)`, uint8, on the CPU.

        Args:
            index: The images, in order.
            batch: Images per batch; the last batch may be smaller.
            draws: Seed and epoch of the random crops; without them the center crop is used.
        """


def _pick(values: Any, index: Tensor) -> Any:
    return values[index] if isinstance(values, Tensor) else tuple(values[row] for row in index.tolist())

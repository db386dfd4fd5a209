from __future__ import annotations

from typing import Any

import pytest
import torch

from anytime.data import ImageData
from anytime.errors import AnytimeError, DtypeError, LabelError, OptionError, ShapeError


def make(**changes: Any) -> ImageData:
    values: dict[str, Any] = {
        "name": "toy",
        "split": "train",
        "images": torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1).repeat(1, 3, 2, 2),
        "labels": torch.tensor([0, 1, 0, 1]),
        "class_names": ("a", "b"),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.2, 0.2, 0.2),
        "rows": torch.arange(4),
    }
    return ImageData(**{**values, **changes})


def test_taking_rows_keeps_images_labels_and_places_together() -> None:
    part = make().take(torch.tensor([3, 1]), split="val")
    assert part.split == "val"
    assert part.images[:, 0, 0, 0].tolist() == [3, 1]
    assert part.labels.tolist() == [1, 1]
    assert part.take(torch.tensor([0])).rows.tolist() == [3]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"images": torch.zeros(4, 3, 2, 2)}, DtypeError),
        ({"images": torch.zeros(4, 2, 2, 3, dtype=torch.uint8)}, ShapeError),
        ({"labels": torch.tensor([0, 1, 0])}, LabelError),
        ({"labels": torch.tensor([0, 1, 0, 2])}, LabelError),
        ({"mean": (0.5,)}, OptionError),
        ({"std": (0.0, 1.0, 1.0)}, OptionError),
        ({"rows": torch.arange(3)}, ShapeError),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], error: type[AnytimeError]) -> None:
    with pytest.raises(error):
        make(**changes)

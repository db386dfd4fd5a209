"""Inputs to pick from on the page, and for generated traffic: the digits of the sample model, or a folder of images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytime.checks import Inputs, count_rows, map_inputs
from anytime.combine import Prediction
from anytime.data.images import FORMATS
from anytime.errors import FormatError, MissingFileError
from anytime.loading.inputs import image_batch
from anytime.loading.models import make_batch
from anytime.page import recorded
from anytime.reading import open_file, read_file
from anytime.run import Opened
from anytime.run.engines.choose import run_all
from anytime.samples import digits_model
from anytime.serve.service import Service

MOST_IMAGES = 200
"""Images of a folder that are used, in the order of their names."""
_LARGEST = 16 << 20
_SUFFIXES = {".jpg": "jpeg", **{f".{name.lower()}": name.lower() for name in FORMATS}}
_RANDOM = 64
_BATCH = 32


@dataclass(frozen=True, eq=False)
class Examples:
    """Inputs as the model takes them.

    Attributes:
        id: In addresses.
        title: For people.
        x: A tensor `(rows, ...)`, or several.
        labels: `(rows,)`, if known; -1 for a row without one.
        names: Of the rows.
        pixels: Per row, 16 shades as hexadecimal digits.
        files: Per row, the image's file.
    """

    id: str
    title: str
    x: Inputs
    labels: Tensor | None = None
    names: Sequence[str] | None = None
    pixels: Sequence[str] | None = None
    files: Sequence[Path] | None = None

    def label(self, row: int) -> int | None:
        """The class of a row, if known."""
        return None if self.labels is None or self.labels[row] < 0 else int(self.labels[row])

    def listing(self, engine: Any) -> list[dict[str, Any]]:
        """The examples to show: a sample, and those that lose most under the latest exit alone."""
        probs = torch.cat([_probabilities(engine, self.part(row, row + _BATCH)) for row in range(0, self.rows, _BATCH)], 1)
        drops = recorded.label_drops(probs, self.labels if self.labelled else None)
        return [
            {
                "id": row,
                "label": self.label(row),
                "drop": round(float(drops[row]), 3),
                **({} if self.names is None else {"name": self.names[row]}),
                **({} if self.pixels is None else {"pixels": self.pixels[row]}),
                **({} if self.files is None else {"image": True}),
            }
            for row in recorded.choose_rows(drops)
        ]

    def image(self, row: int) -> tuple[bytes, str]:
        """The image of a row, and its media type."""
        assert self.files is not None
        path = self.files[row]
        return read_file(path, most=_LARGEST, expected="an image"), f"image/{_SUFFIXES[path.suffix.lower()]}"

    @cached_property
    def labelled(self) -> bool:
        """Whether every row has a label."""
        return self.labels is not None and not bool((self.labels < 0).any())

    @cached_property
    def rows(self) -> int:
        """How many."""
        return count_rows(self.x)

    def part(self, start: int, stop: int) -> Inputs:
        """Some of the rows."""
        return map_inputs(lambda tensor: tensor[start:stop], self.x)


def digit_examples(opened: Opened) -> Examples | None:
    """The test images of the sample model; None for any other model."""
    if opened.folder.resolve() != digits_model()[0].resolve():
        return None
    data = recorded.digits_data()
    shown = recorded.shades(data.images)
    return Examples("digits", "Handwritten digits", recorded.digit_inputs(data), data.labels, pixels=shown)


def read_examples(folder: Path, opened: Opened) -> Examples:
    """The images of a folder; those in a subfolder that is named as a class have that label."""
    if not folder.is_dir():
        raise MissingFileError(
            f"there is no folder {folder}", expected="a folder of images", fix="check the path of --examples", path=folder
        )
    found = sorted(path for path in (*folder.iterdir(), *folder.glob("*/*")) if path.suffix.lower() in _SUFFIXES)[:MOST_IMAGES]
    if not found:
        raise FormatError(
            f"{folder} has no images",
            expected=f"images: {', '.join(FORMATS)}, in the folder or in one subfolder per class",
            fix="put some there, or leave out --examples",
            path=folder,
        )
    batches = []
    for path in found:
        with open_file(path, expected="an image") as file:
            batches.append(image_batch(file, path.name, opened)[0])
    words = () if opened.data is None else opened.data.class_names or ()
    labels = torch.tensor([words.index(path.parent.name) if path.parent.name in words else -1 for path in found])
    names = [path.name for path in found]
    known = labels if bool((labels >= 0).any()) else None
    return Examples("images", "Images of this server", torch.cat(batches), known, names, files=found)


def random_inputs(service: Service) -> Examples:
    """Inputs for traffic to a model without examples."""
    return Examples("random", "Random inputs", make_batch(service.opened.model, _RANDOM))


def _probabilities(engine: Any, x: Inputs) -> Tensor:
    """The probabilities at all exits, `(exits, rows, classes)`, of the exits alone where the rule is not inside."""
    found: list[Any] = run_all(engine, x)
    return torch.stack([each.probs if isinstance(each, Prediction) else each.softmax(-1) for each in found])

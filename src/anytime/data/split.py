"""Validation rows, split off the training rows with an index that can be stored and read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from anytime.checks import LARGEST_OLD_SEED, check_seed
from anytime.data.base import ImageData
from anytime.errors import FormatError, OptionError
from anytime.reading import json_from, parsing


@dataclass(frozen=True, eq=False)
class Split:
    """Which of `rows` rows are held out; the others are trained on. Both in ascending order."""

    rows: int
    seed: int
    held_out: Tensor

    def __post_init__(self) -> None:
        held = self.held_out
        if (
            not 0 <= len(held) < self.rows
            or bool((held.diff() <= 0).any())
            or (len(held) and not (int(held[0]) >= 0 and int(held[-1]) < self.rows))
        ):
            raise OptionError(
                f"{len(held)} rows held out of {self.rows}",
                expected=f"distinct ascending rows from 0 to {self.rows - 1}, and some left to train on",
                fix="make the split with hold_out(rows, count, seed=...)",
            )

    @property
    def kept(self) -> Tensor:
        """The rows to train on."""
        keep = torch.ones(self.rows, dtype=torch.bool)
        keep[self.held_out] = False
        return keep.nonzero()[:, 0]

    def apply(self, data: ImageData) -> tuple[ImageData, ImageData]:
        """Training and validation images."""
        if len(data) != self.rows:
            raise OptionError(
                f"a split of {self.rows} rows came with {len(data)} images",
                expected=f"{self.rows} images",
                fix="use the split that was made for this data set",
            )
        return data.take(self.kept, split="train"), data.take(self.held_out, split="val")

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({"rows": self.rows, "seed": self.seed, "held_out": self.held_out.tolist()})

    @classmethod
    def from_json(cls, text: str, *, path: str | Path = "the split") -> Self:
        """Read back what `to_json` wrote; `path` names the file in an error."""
        expected = "rows, seed and held_out, as a training run writes them"
        stored: Any = json_from(text, path, expected=expected)
        with parsing(path, expected=expected, kind=FormatError):
            rows, seed, places = stored["rows"], stored["seed"], stored["held_out"]
            if not all(type(number) is int and 0 <= number < 2**62 for number in (rows, seed, *places)):
                raise ValueError("not all of its numbers are whole")
            return cls(rows=rows, seed=seed, held_out=torch.tensor(places, dtype=torch.int64))


def hold_out(rows: int, count: int, *, seed: int = 0) -> Split:
    """Hold `count` of `rows` rows out, drawn by `seed`.

    >>> hold_out(10, 3, seed=0).held_out.tolist()
    [2, 4, 8]
    """
    if not 0 <= count < rows:
        raise OptionError(
            f"{count} of {rows} rows are to be held out", expected=f"0 to {rows - 1}", fix="leave rows to train on"
        )
    # RandomState's stream is frozen by NumPy's promise, a Generator's is not: the same seed is the same split for good.
    order = np.random.RandomState(check_seed(seed, most=LARGEST_OLD_SEED)).permutation(rows)
    return Split(rows=rows, seed=seed, held_out=torch.from_numpy(np.sort(order[:count]).astype(np.int64)))

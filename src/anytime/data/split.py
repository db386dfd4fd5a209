"""A random split into training and validation rows, which can be stored and read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from anytime.checks import LARGEST_OLD_SEED, check_count, check_seed
from anytime.data.base import LabelledRows
from anytime.errors import FormatError, OptionError
from anytime.reading import json_from, parsing

Data = TypeVar("Data", bound=LabelledRows)


@dataclass(frozen=True, eq=False)
class Split:
    """Which of `rows` rows are held out, in ascending order; the others are for training."""

    rows: int
    seed: int
    held_out: Tensor

    def __post_init__(self) -> None:
        held = self.held_out
        inside = not len(held) or (int(held[0]) >= 0 and int(held[-1]) < self.rows)
        if not 0 <= len(held) < self.rows or bool((held.diff() <= 0).any()) or not inside:
            raise OptionError(
                f"{len(held)} of {self.rows} rows are held out",
                expected=f"distinct ascending rows from 0 to {self.rows - 1}, and at least one row left for training",
                fix="make the split with hold_out(rows, count, seed=...)",
            )

    @property
    def kept(self) -> Tensor:
        """The training rows."""
        keep = torch.ones(self.rows, dtype=torch.bool)
        keep[self.held_out] = False
        return keep.nonzero()[:, 0]

    def apply(self, data: Data) -> tuple[Data, Data]:
        """Split data into training and validation rows."""
        if len(data) != self.rows:
            raise OptionError(
                f"the split of {self.rows} rows is applied to {len(data)} rows",
                expected=f"{self.rows} rows",
                fix="use the split that was made for this data set",
            )
        return data.take(self.kept, split="train"), data.take(self.held_out, split="val")

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({"rows": self.rows, "seed": self.seed, "held_out": self.held_out.tolist()})

    @classmethod
    def from_json(cls, text: str, *, path: str | Path = "the split") -> Self:
        """Read what `to_json` wrote; `path` names the file in an error."""
        expected = "rows, seed and held_out, as a training run writes them"
        stored: Any = json_from(text, path, expected=expected)
        with parsing(path, expected=expected, kind=FormatError):
            rows, seed, places = stored["rows"], stored["seed"], stored["held_out"]
            if not all(type(number) is int and 0 <= number < 2**62 for number in (rows, seed, *places)):
                raise ValueError("not all of its numbers are integers")
            return cls(rows=rows, seed=seed, held_out=torch.tensor(places, dtype=torch.int64))


def hold_out(rows: int, count: int, *, seed: int = 0) -> Split:
    """Hold out a random sample of `count` of `rows` rows.

    >>> hold_out(10, 3, seed=0).held_out.tolist()
    [2, 4, 8]
    """
    check_count(count, "count", low=0, most=rows - 1)
    # NumPy keeps the stream of RandomState across versions, that of a Generator not.
    order = np.random.RandomState(check_seed(seed, most=LARGEST_OLD_SEED)).permutation(rows)
    return Split(rows=rows, seed=seed, held_out=torch.from_numpy(np.sort(order[:count]).astype(np.int64)))

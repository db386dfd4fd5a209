"""Validation rows, split off the training rows with an index that can be stored and read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from anytime.data.base import ImageData
from anytime.errors import OptionError


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
    def from_json(cls, text: str) -> Self:
        """Read back what `to_json` wrote."""
        stored: dict[str, Any] = json.loads(text)
        held_out = torch.tensor(stored["held_out"], dtype=torch.int64)
        return cls(rows=int(stored["rows"]), seed=int(stored["seed"]), held_out=held_out)


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
    order = np.random.RandomState(seed).permutation(rows)
    return Split(rows=rows, seed=seed, held_out=torch.from_numpy(np.sort(order[:count]).astype(np.int64)))

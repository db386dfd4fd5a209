"""Single inputs to look at: a random sample, and the worst."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from anytime.evaluation.blocks import Combine, Rows
from anytime.metrics import drop, follow


@dataclass(frozen=True)
class Example:
    """One input, followed over the exits under each rule.

    Attributes:
        row: Its row in the data.
        label: Its class, or None without labels.
        final: Each rule's answer at the last exit.
        answers: Each rule's answer at every exit.
        probability: The label's probability at every exit, or the final answer's without labels.
        drop: The largest decrease of that probability.
    """

    row: int
    label: int | None
    final: dict[str, int]
    answers: dict[str, list[int]]
    probability: dict[str, list[float]]
    drop: dict[str, float]


class Worst:
    """The rows with the largest values so far; among equals the earlier rows."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.best: list[tuple[float, int]] = []

    def add(self, values: Tensor, first_row: int) -> None:
        """Take in the values of the rows from `first_row` on."""
        order = values.double().argsort(descending=True, stable=True)[: self.keep]
        new = [(-float(values[row]), first_row + int(row)) for row in order]
        self.best = sorted([*self.best, *new])[: self.keep]

    def rows(self) -> Tensor:
        """The rows kept, the worst first; rows with a value of zero are not among them."""
        return torch.tensor([row for value, row in self.best if value < 0], dtype=torch.long)


def examples(rows: Rows, combiners: Mapping[str, Combine], chosen: Tensor) -> list[Example]:
    """The inputs in the chosen rows, followed under each rule."""
    if chosen.numel() == 0:
        return []
    logits, labels = rows.block(chosen, 0), rows.labels_of(chosen)
    seen = {name: follow(combine(logits), labels) for name, combine in combiners.items()}
    curves = {name: each.final if each.label is None else each.label_probability for name, each in seen.items()}
    drops = {name: drop(curve) for name, curve in curves.items()}
    return [
        Example(
            row=row,
            label=None if labels is None else int(labels[column]),
            final={name: int(each.answer[-1, column]) for name, each in seen.items()},
            answers={name: each.answer[:, column].tolist() for name, each in seen.items()},
            probability={name: curve[:, column].tolist() for name, curve in curves.items()},
            drop={name: float(values[column]) for name, values in drops.items()},
        )
        for column, row in enumerate(chosen.tolist())
    ]

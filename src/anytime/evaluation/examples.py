"""Single inputs to look at: a random sample, and those whose probability drops most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from anytime.evaluation.blocks import Followed
from anytime.metrics import drop

Locate = Callable[[int], tuple[int, tuple[int, ...] | None]]


@dataclass(frozen=True)
class Example:
    """One input, followed over the exits under each rule.

    Attributes:
        row: Its row in the data; of dense logits, the input that it is a position of.
        label: Its class, or None without labels.
        final: Each rule's answer at the last exit.
        answers: Each rule's answer at every exit.
        probability: The label's probability at every exit, or the final answer's without labels.
        drop: The largest decrease of that probability.
        position: Of dense logits, the position in the input, such as (y, x).
    """

    row: int
    label: int | None
    final: dict[str, int]
    answers: dict[str, list[int]]
    probability: dict[str, list[float]]
    drop: dict[str, float]
    position: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The row and, if there is one, the position: `12` or `3 (40, 7)`."""
        return str(self.row) if self.position is None else f"{self.row} ({', '.join(map(str, self.position))})"

    def to_json(self) -> dict[str, Any]:
        """A plain document."""
        document = asdict(self)
        if self.position is None:
            del document["position"]
        return document


class ExampleCollector:
    """Collects examples chunk by chunk: the rows of a sample, and the rows that drop most under the first rule.

    Args:
        sample: The rows of the sample.
        worst: How many rows that drop most to keep; among equals the earlier ones. Rows that never drop are not kept.
        locate: The input and the position of a row.
    """

    def __init__(self, sample: Sequence[int], worst: int, locate: Locate) -> None:
        self._locate = locate
        self._sample: dict[int, Example | None] = dict.fromkeys(sample)
        self._keep = worst
        self._worst: list[tuple[float, int, Example]] = []

    def add(self, found: Mapping[str, Followed], labels: Tensor | None, first_row: int) -> None:
        """Add the rows of a chunk that starts at `first_row`."""
        seen = {name: each.seen for name, each in found.items()}
        curves = {name: each.final if each.label is None else each.label_probability for name, each in seen.items()}
        drops = drop(next(iter(curves.values())))

        def example(column: int) -> Example:
            picked = {name: curve[:, column] for name, curve in curves.items()}
            row, position = self._locate(first_row + column)
            return Example(
                row=row,
                label=None if labels is None else int(labels[first_row + column]),
                final={name: int(each.answer[-1, column]) for name, each in seen.items()},
                answers={name: each.answer[:, column].tolist() for name, each in seen.items()},
                probability={name: curve.tolist() for name, curve in picked.items()},
                drop={name: float(drop(curve[:, None])) for name, curve in picked.items()},
                position=position,
            )

        for row in self._sample:
            if first_row <= row < first_row + len(drops):
                self._sample[row] = example(row - first_row)
        top = drops.double().argsort(descending=True, stable=True)[: self._keep].tolist()
        least = -self._worst[-1][0] if len(self._worst) == self._keep and self._worst else 0.0
        new = [(-float(drops[column]), first_row + column, example(column)) for column in top if drops[column] > least]
        self._worst = sorted([*self._worst, *new], key=lambda each: each[:2])[: self._keep]

    @property
    def sample(self) -> list[Example]:
        """The sample, in its order."""
        return [example for example in self._sample.values() if example is not None]

    @property
    def worst(self) -> list[Example]:
        """The rows that drop most, the worst first."""
        return [example for _, _, example in self._worst]

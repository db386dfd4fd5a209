"""Single inputs to look at: a random sample, and those whose probability drops most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from anytime.evaluation.blocks import to_device
from anytime.metrics import Trajectories, drop
from anytime.metrics.summary import pack, unpack

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
        file: The name of the file, if there are several; `row` is then its row in that file.
    """

    row: int
    label: int | None
    final: dict[str, int]
    answers: dict[str, list[int]]
    probability: dict[str, list[float]]
    drop: dict[str, float]
    position: tuple[int, ...] | None = None
    file: str | None = None

    @property
    def name(self) -> str:
        """The row and, if there are, the position and the file: `12`, `3 (40, 7)` or `b.npz: 12`."""
        row = str(self.row) if self.position is None else f"{self.row} ({', '.join(map(str, self.position))})"
        return row if self.file is None else f"{self.file}: {row}"

    def to_json(self) -> dict[str, Any]:
        """A plain document."""
        document = asdict(self)
        for name in ("position", "file"):
            if document[name] is None:
                del document[name]
        return document


class ExampleCollector:
    """Collects examples chunk by chunk: the rows of a sample, and the rows that drop most under the first rule.

    Args:
        sample: The rows of the sample, counted over all files.
        worst: How many rows that drop most to keep; among equals the earlier ones. Rows that never drop are not kept.
        locate: The input and the position of a row, counted over the rows that are added here.
        first: How many rows of other files are before these.
        file: The name of the file, if there are several.
    """

    def __init__(self, sample: Sequence[int], worst: int, locate: Locate, *, first: int = 0, file: str | None = None) -> None:
        self._locate, self._first, self._file = locate, first, file
        self._sample: dict[int, Example | None] = dict.fromkeys(sample)
        self._keep = worst
        self._worst: list[tuple[float, int, Example]] = []

    def add(self, seen: Mapping[str, Trajectories], labels: Tensor | None, first_row: int) -> None:
        """Add the rows of a chunk that starts at `first_row`."""
        curves = [each.final if each.label is None else each.label_probability for each in seen.values()]
        drops = drop(curves[0])
        begin = self._first + first_row
        columns = [row - begin for row in self._sample if begin <= row < begin + len(drops)]
        top = drops.double().argsort(descending=True, stable=True)[: self._keep]
        chosen = torch.cat((to_device(torch.tensor(columns, dtype=torch.int64), top.device), top))
        known = None if labels is None else labels[first_row + chosen.to(labels.device)].to(chosen.device)
        curve = torch.stack([each[:, chosen] for each in curves], 1)
        answer = torch.stack([each.answer[:, chosen] for each in seen.values()], 1)
        least = -self._worst[-1][0] if len(self._worst) == self._keep and self._worst else 0.0
        worst = []
        for place, (column, example) in enumerate(self._examples(list(seen), first_row, chosen, known, curve, answer)):
            if place < len(columns):
                self._sample[begin + column] = example
            elif (lost := example.drop[next(iter(seen))]) > least:
                worst.append((-lost, begin + column, example))
        self._keep_worst(worst)

    def _examples(
        self, names: Sequence[str], first_row: int, chosen: Tensor, known: Tensor | None, curve: Tensor, answer: Tensor
    ) -> Iterator[tuple[int, Example]]:
        """The rows with the numbers `chosen`, and these; curves and answers are `(exits, rules, rows)`."""
        parts = [chosen, chosen if known is None else known, drop(curve), curve, answer]
        read = unpack(pack(parts).cpu(), parts)  # together: each would wait for a GPU
        columns, labels, drops, probability, answers = (part.movedim(-1, 0) for part in read)
        whole = (columns.long().tolist(), labels.long().tolist(), answers.long().transpose(1, 2).tolist())
        rest = (drops.tolist(), probability.transpose(1, 2).tolist())
        for column, label, answered, lost, probable in zip(*whole, *rest, strict=True):
            row, position = self._locate(first_row + column)
            yield (
                column,
                Example(
                    row=row,
                    label=None if known is None else label,
                    final={name: each[-1] for name, each in zip(names, answered, strict=True)},
                    answers=dict(zip(names, answered, strict=True)),
                    probability=dict(zip(names, probable, strict=True)),
                    drop=dict(zip(names, lost, strict=True)),
                    position=position,
                    file=self._file,
                ),
            )

    def merge(self, other: ExampleCollector) -> None:
        """Add what another collector has found in other rows of the same sample."""
        self._sample.update({row: found for row, found in other._sample.items() if found is not None})
        self._keep_worst(other._worst)

    def state(self) -> dict[str, Any]:
        """What was found, as a plain document."""
        sample = [[row, asdict(found)] for row, found in self._sample.items() if found is not None]
        return {"sample": sample, "worst": [[drop, row, asdict(found)] for drop, row, found in self._worst]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self._sample.update({row: _example(found) for row, found in state["sample"]})
        self._worst = [(drop, row, _example(found)) for drop, row, found in state["worst"]]

    def _keep_worst(self, new: Sequence[tuple[float, int, Example]]) -> None:
        self._worst = sorted([*self._worst, *new], key=lambda each: each[:2])[: self._keep]

    @property
    def sample(self) -> list[Example]:
        """The sample, in its order."""
        return [example for example in self._sample.values() if example is not None]

    @property
    def worst(self) -> list[Example]:
        """The rows that drop most, the worst first."""
        return [example for _, _, example in self._worst]


def _example(document: Mapping[str, Any]) -> Example:
    position = document["position"]
    return Example(**{**document, "position": None if position is None else tuple(position)})

"""Recorded answers: a model's logits under two rules, as the page plays them without a network.

A source is one model with its examples. For each example the probabilities of a few classes are recorded at every exit: those
that are most probable anywhere along the way, and the label.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytime import samples
from anytime.combine import Latest, Product, Rule
from anytime.conformal import ConformalSets, Raps, fit_conformal_sets
from anytime.data import load_digits
from anytime.data.augment import normalise
from anytime.data.base import ImageData
from anytime.data.digits import doubled
from anytime.metrics import drop
from anytime.models import load
from anytime.run.engines.choose import make_engine, run_all
from anytime.run.simulation import CIFAR_MSDNET

BARS = 8
"""Classes per recorded example."""
EXAMPLES, WORST = 24, 16
"""A random sample of the examples, and those that lose most under `Latest`."""
_SMALLEST_DROP = 0.01
_LISTED = 12
_CALIBRATION = 500


@dataclass(frozen=True, eq=False)
class Source:
    """Rows of logits with everything that the page shows of them.

    Attributes:
        id: In addresses.
        title: For people.
        note: Where the numbers are from.
        classes: The names of the classes.
        logits: `(exits, rows, classes)`.
        labels: `(rows,)`.
        milliseconds: Up to each exit.
        rules: By name; the first is the model as it is.
        sets: Prediction sets by rule.
        pixels: Per row, 16 shades as hexadecimal digits, if there are images.
    """

    id: str
    title: str
    note: str
    classes: Sequence[str]
    logits: Tensor
    labels: Tensor
    milliseconds: Sequence[float]
    rules: Mapping[str, Rule[Any]]
    sets: Mapping[str, ConformalSets]
    pixels: Sequence[str] | None = None

    def document(self) -> dict[str, Any]:
        """The examples as JSON."""
        found = {name: rule(self.logits) for name, rule in self.rules.items()}
        probs = {name: each.probs for name, each in found.items()}
        members = {name: sets.sets(found[name].log_probs) for name, sets in self.sets.items()}
        drops = label_drops(next(iter(probs.values())), self.labels)
        chosen = choose_rows(drops)
        examples = []
        for row in chosen:
            label = int(self.labels[row])
            peak = (
                torch.stack([each[:, row].amax(0) for each in probs.values()]).amax(0).index_fill(0, torch.tensor(label), 2.0)
            )
            bars = peak.topk(min(BARS, len(self.classes))).indices.sort().values
            examples.append(
                {
                    "id": row,
                    "label": label,
                    "drop": round(float(drops[row]), 3),
                    "bars": bars.tolist(),
                    "p": {name: rounded(each[:, row, bars]) for name, each in probs.items()},
                    "answers": {name: each.labels[:, row].tolist() for name, each in found.items()},
                    "fell_back": {name: each.fell_back[:, row].int().tolist() for name, each in found.items()},
                    "sets": {name: [in_set(exit) for exit in each[:, row]] for name, each in members.items()},
                    **({} if self.pixels is None else {"pixels": self.pixels[row]}),
                }
            )
        return {
            "id": self.id,
            "title": self.title,
            "note": self.note,
            "recorded": True,
            "exits": len(self.logits),
            "classes": list(self.classes),
            "rules": list(self.rules),
            "milliseconds": [round(each, 3) for each in self.milliseconds],
            "examples": examples,
        }


def label_drops(probs: Tensor, labels: Tensor | None) -> Tensor:
    """The largest drop of the label's probability per row, or of the final answer's; `probs` is `(exits, rows, classes)`."""
    followed = probs[-1].argmax(-1) if labels is None else labels
    return drop(probs.gather(-1, followed.expand(probs.shape[:2]).unsqueeze(-1)).squeeze(-1))


def choose_rows(drops: Tensor) -> list[int]:
    """The rows to show: a sample, and the rows with the largest drops."""
    sample = torch.randperm(len(drops), generator=torch.Generator().manual_seed(0))[:EXAMPLES].tolist()
    worst = [row for row in drops.argsort(descending=True)[:WORST].tolist() if drops[row] >= _SMALLEST_DROP]
    return list(dict.fromkeys([*sample, *worst]))


def in_set(members: Tensor) -> list[Any]:
    """The size of a prediction set, and its first classes."""
    found = members.nonzero()[:, 0].tolist()
    return [len(found), found[:_LISTED]]


def rounded(values: Tensor) -> list[Any]:
    """Probabilities with four digits."""
    found: list[Any] = (values.double() * 1e4).round().div(1e4).tolist()
    return found


def class_names() -> tuple[str, ...]:
    """The names of CIFAR-100's classes."""
    return tuple(json.loads((Path(samples.__file__).parent / "cifar100-classes.json").read_text(encoding="utf-8")))


@cache
def cifar100() -> Source:
    """The sample logits of CIFAR-100; the sets are fitted on half of the rows, and the examples are from the other half."""
    stored = samples.cifar100_msdnet()
    logits, labels = stored.logits[:].float(), stored.labels
    assert labels is not None
    labels = labels.long()
    rules: dict[str, Rule[Any]] = {"latest": Latest(), "product": Product()}
    held_out, shown = slice(0, _CALIBRATION), slice(_CALIBRATION, None)
    sets = {
        name: fit_conformal_sets(logits[:, held_out], labels[held_out], rule=rule, raps=Raps(randomised=False))
        for name, rule in rules.items()
    }
    return Source(
        "cifar100",
        "CIFAR-100 (recorded, no images)",
        "An MSDNet with 7 exits on test images of CIFAR-100. Its logits are recorded; the times are those of one core.",
        class_names(),
        logits[:, shown],
        labels[shown],
        _cumulated([1e3 * CIFAR_MSDNET.seconds(stage, 1) for stage in range(1, len(logits) + 1)]),
        rules,
        sets,
    )


def digits_data() -> ImageData:
    """The test images of scikit-learn's digits, which the sample model was not trained on."""
    return load_digits(channels=1)["test"]


def digit_inputs(data: ImageData) -> Tensor:
    """The images as the sample model takes them."""
    return normalise(doubled(data).images, data.mean, data.std)


def shades(images: Tensor) -> list[str]:
    """Images, `(rows, 1, height, width)`, as 16 shades in hexadecimal digits.

    >>> shades(torch.tensor([[[[0, 255], [128, 17]]]]))
    ['0f81']
    """
    levels = (images.double() * (15 / 255)).round().long().flatten(1)
    return ["".join(f"{level:x}" for level in row) for row in levels.tolist()]


@cache
def digits() -> Source:
    """The sample model's answers to the test images of scikit-learn's digits, with stage times measured now."""
    folder, sets = samples.digits_model()
    data = digits_data()
    x, model = digit_inputs(data), load(folder)
    engine = make_engine(model, "folded", example=x[:1])
    logits = torch.stack(run_all(engine, x))
    return Source(
        "digits",
        "Handwritten digits (recorded)",
        "A ResNet with 5 exits on test images of scikit-learn's digits, recorded with its times when this page was written.",
        data.class_names,
        logits,
        data.labels,
        measure_milliseconds(engine, x[:1]),
        {"latest": Latest(), "product": Product()},
        {"product": sets},
        shades(data.images),
    )


def measure_milliseconds(engine: Any, x: Tensor, *, rounds: int = 15) -> list[float]:
    """Milliseconds up to each exit: the medians of a few runs."""
    taken = []
    for _ in range(rounds + 1):
        run, began, marks = engine.begin(x), time.perf_counter(), []
        for _ in range(engine.num_exits):
            run.advance()
            marks.append(1e3 * (time.perf_counter() - began))
        run.close()
        taken.append(marks)
    return torch.tensor(taken[1:], dtype=torch.float64).median(0).values.tolist()  # the first is slow


def _cumulated(parts: Sequence[float]) -> list[float]:
    found = torch.tensor(parts, dtype=torch.float64).cumsum(0).tolist()
    return [float(each) for each in found]

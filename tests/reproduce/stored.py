"""What results/ has stored and what docs/reproduction.md shows, for the tests that recompute the page with `plain.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from . import plain
from .plain import Answers, Array

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "reproduction.md"
RULES: dict[str, Callable[[Array], Answers]] = {
    "latest": plain.latest,
    "caching": lambda logits: plain.caching(plain.softmax(logits)),
    "product": plain.product,
}
NUMBER = re.compile(r"[−+-]?(?:\d{1,3}(?:,\d{3})+|\d*\.?\d+)")


def seeds(prefix: str) -> list[str]:
    return sorted(path.name for path in RESULTS.iterdir() if re.fullmatch(rf"{prefix}-seed\d+", path.name))


C10, C100, IMTA = seeds("msdnet-cifar10"), seeds("msdnet-cifar100"), seeds("imta-cifar100")
MOST = seeds("msdnet-cifar100-49500")
"""MSDNet on 49,500 images of CIFAR-100, of which few logits were kept; `C100` are those on 45,000."""
GROUPS = {"MSDNet, CIFAR-10": C10, "MSDNet, CIFAR-100": MOST, "IMTA, CIFAR-10": seeds("imta-cifar10"), "IMTA, CIFAR-100": IMTA}


@cache
def rows(name: str, split: str = "test") -> tuple[Array, Array]:
    with np.load(RESULTS / name / f"{split}-sample.npz") as file:
        return file["logits"].astype(np.float64), file["labels"].astype(np.int64)


@cache
def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name / "test-metrics.json").read_text())
    return found


def published(names: Sequence[str], rule: str, metric: str) -> Array:
    """A stored metric on all test rows, one row per seed."""
    values = [document(name)["rules"][rule][metric] for name in names]
    return np.array([list(value.values()) if isinstance(value, dict) else value for value in values])


@cache
def measured(name: str, rule: str) -> dict[str, Array]:
    logits, labels = rows(name)
    return plain.measure(RULES[rule](logits), labels)


def kept(names: Sequence[str], make: Callable[[Array], Answers]) -> dict[str, Array]:
    """Metrics of a rule on the stored rows, one row per seed."""
    found = [plain.measure(make(rows(name)[0]), rows(name)[1]) for name in names]
    return {metric: np.array([each[metric] for each in found]) for metric in found[0]}


@cache
def section(study: str) -> str:
    parts = re.split(r"^## (\S+)$", PAGE.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[study]


def table(study: str) -> dict[str, list[str]]:
    """Rows of the section's tables by their first cell; of a cell that occurs again the last row."""
    lines = [line.strip("| ").split(" | ") for line in section(study).splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines if not cells[0].startswith("---")}


def claim(study: str, what: str) -> str:
    """The numbers behind a claim: what follows its text."""
    for line in section(study).splitlines():
        text = line.removeprefix("- holds: ").removeprefix("- DOES NOT HOLD: ")
        if text != line and text.startswith(what):
            return text[len(what) :]
    raise AssertionError(f"{study} has no claim {what!r}")


def check(text: str, *expected: Any, slack: float = 0.011) -> None:
    """The numbers in a text are the expected ones, up to their last digit and a rounded input or two."""
    wanted = np.concatenate([np.ravel(np.asarray(value, float)) for value in expected])
    found = NUMBER.findall(text)
    assert len(found) == len(wanted), f"{text!r}: {len(found)} numbers, expected {wanted.tolist()}"
    for shown, number in zip(found, wanted, strict=True):
        given = float(shown.replace("−", "-").replace(",", ""))
        digits = len(shown.partition(".")[2])
        room = 0.51 * 10**-digits + (slack if abs(number) > 1 or digits < 3 else 5e-4)
        assert abs(given - number) <= room, f"{text!r}: {shown}, recomputed {number:.5f}"


def check_compared(study: str, expected: dict[str, Array]) -> None:
    """Mean and deviation over seeds of every number that a study compares with the paper's."""
    found = {name: cells for name, cells in table(study).items() if cells[-1] in ("within", "NOT within")}
    assert set(found) == set(expected)
    for name, values in expected.items():
        spread = [values.std(ddof=1)] if len(values) > 1 else []
        check(found[name][1].replace("%", ""), values.mean(), *spread)


def mean(values: Array) -> Array:
    return np.asarray(values.mean(0))


def over_exits(name: str, values: Array, *, first: int = 1) -> dict[str, Array]:
    """One entry per exit from `(seeds, exits)`, named as the page does."""
    return {f"{name}, exit {exit}": values[:, exit - 1] for exit in range(first, values.shape[1] + 1)}


def cells_of(study: str) -> list[list[str]]:
    """All rows of the section's tables."""
    return [line.strip("| ").split(" | ") for line in section(study).splitlines() if line.startswith("| ")]

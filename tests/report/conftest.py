"""Small evaluations: real ones from random logits, and the same with metrics set by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from anytime.evaluation import Evaluation, Guarantees, evaluate, measure_guarantees

Make = Callable[..., Evaluation]
Change = Callable[..., Evaluation]
LIMITS = ("0.01", "0.05", "0.1", "0.2", "0.25", "0.33", "0.5")


def random_logits(exits: int, samples: int, classes: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=chance)
    logits = torch.randn(exits, samples, classes, generator=chance)
    for exit in range(exits):
        logits[exit, torch.arange(samples), labels] += 1.0 + 0.4 * exit
    return logits, labels


@pytest.fixture
def make() -> Make:
    """Evaluates random logits."""

    def build(exits: int = 4, samples: int = 60, classes: int = 8, *, labelled: bool = True, **options: Any) -> Evaluation:
        logits, labels = random_logits(exits, samples, classes)
        return evaluate(logits, labels if labelled else None, **options)

    return build


@pytest.fixture(scope="session")
def plain() -> Evaluation:
    """Four exits, eight classes, three rules, labels, costs."""
    logits, labels = random_logits(4, 400, 8)
    return evaluate(logits, labels, costs=[1.0, 2.5, 4.0, 7.0])


@pytest.fixture(scope="session")
def measured() -> Callable[..., tuple[Guarantees, Evaluation]]:
    """What was fitted on other random logits, and the evaluation that belongs to it."""

    def build(exits: int = 4, classes: int = 8, **options: Any) -> tuple[Guarantees, Evaluation]:
        test, held = random_logits(exits, 200, classes), random_logits(exits, 160, classes, seed=1)
        found = measure_guarantees(test, held, **options)
        return found, found.evaluation

    return build


@pytest.fixture
def change(plain: Evaluation) -> Change:
    """Gives `plain` with some metrics of some rules replaced, and no collapse: change(product={"ece": [...]}, samples=30)."""

    def build(**changes: Any) -> Evaluation:
        whole = {"collapsed_percent": (0.0,) * plain.exits}
        rules = {name: replace(found, **{**whole, **changes.pop(name, {})}) for name, found in plain.rules.items()}
        return replace(plain, **{"samples": 5000, "rules": rules, **changes})

    return build


def drops(big: float, small: float | None = None) -> dict[str, dict[str, float]]:
    """Drops of 0.5 and of 0.1, in percent of the inputs, for the label and the final answer alike."""
    small = max(big, 0.0) if small is None else small
    found = {limit: big if limit == "0.5" else small for limit in LIMITS}
    return {"label_drop_percent": found, "final_drop_percent": found}


@pytest.fixture(name="drops")
def drops_fixture() -> Callable[..., dict[str, dict[str, float]]]:
    return drops

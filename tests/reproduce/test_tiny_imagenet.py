"""The study of Tiny-ImageNet: its numbers by plain loops, and claims that fail where they should."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from anytime.reproduce import find
from anytime.reproduce.runs import Runs

Publish = Callable[..., Path]
Array = NDArray[np.float64]
RESULTS = Path(__file__).parents[2] / "results"
NAME = "msdnet-tiny-imagenet-seed0"


def drops(*percents: float) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Changes the product's drops in the metrics of a run."""

    def change(arrays: dict[str, Any], document: dict[str, Any]) -> None:
        found = document["rules"]["product"]["label_drop_percent"]
        document["rules"]["product"]["label_drop_percent"] = dict(zip(found, percents, strict=True))

    return change


@pytest.mark.parametrize(
    ("few", "many", "held"),
    [
        ((5, 4, 3, 2, 1, 1, 0), (4, 3, 2, 1, 1, 0, 0), [True, True]),
        ((5, 4, 3, 2, 1, 1, 0), (6, 3, 2, 1, 1, 0, 0), [True, False]),
        ((5, 4, 3, 2, 1, 1, 0), (4, 3, 2, 1, 1, 0, 0.5), [False, False]),
    ],
    ids=["fewer", "more by .01", "more by .5"],
)
def test_drops_over_the_number_of_classes(
    publish: Publish, few: tuple[float, ...], many: tuple[float, ...], held: list[bool]
) -> None:
    publish("a", data="cifar10", change=drops(*few))
    runs = Runs.open(publish("b", data="tiny-imagenet", model="msdnet-imagenet-4", exits=5, classes=20, change=drops(*many)))
    found = find("tiny-imagenet").run(runs)
    assert [claim.holds for claim in found.claims[-2:]] == held
    assert [line.x for plot in found.plots[-2:] for line in plot.lines] == [(10.0, 20.0)] * 7  # type: ignore[union-attr]
    assert set(found.runs) == {"a", "b"}


@pytest.mark.skipif(not (RESULTS / NAME).is_dir(), reason=f"no run {NAME} in results/")
def test_the_published_numbers_agree_with_plain_loops() -> None:
    found = find("tiny-imagenet").run(Runs.open(RESULTS))
    stored = json.loads((RESULTS / NAME / "test-metrics.json").read_text())["rules"]
    for rule in ("latest", "caching", "product"):
        assert found.numbers["tiny-imagenet"][rule]["accuracy"] == [tuple(stored[rule]["accuracy"])]
        assert found.numbers["drops_by_classes"]["200"][rule] == stored[rule]["label_drop_percent"]["0.05"]
    with np.load(RESULTS / NAME / "test-sample.npz") as file:
        logits, labels = file["logits"].astype(np.float64), file["labels"].astype(np.int64)
    evidence = {"ReLU": np.maximum(logits, 0), "exponential": np.exp(logits - logits.max(-1, keepdims=True))}
    for name, values in evidence.items():
        shares = values / values.sum(-1, keepdims=True)
        for rule, probs in ((f"mixture, {name}", mixture(shares)), (f"product, {name}", product(values))):
            accuracy, dropped = measure(probs, labels)
            numbers = found.numbers["tiny-imagenet, ablation"][rule]
            assert numbers["accuracy"][0] == pytest.approx(accuracy, abs=2e-3)  # a tie or two
            assert numbers["label_drop_percent"][0]["0.1"] == pytest.approx(100 * (dropped >= 0.1).mean(), abs=0.14)


def mixture(shares: Array) -> Array:
    return np.cumsum(shares, 0) / np.arange(1, len(shares) + 1)[:, None, None]


def product(values: Array) -> Array:
    exits = len(values)
    with np.errstate(divide="ignore"):
        logs = np.cumsum([m / exits * np.log(each) for m, each in enumerate(values, 1)], 0)
    powers = np.exp(logs - logs.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def measure(probs: Array, labels: NDArray[np.int64]) -> tuple[list[float], Array]:
    """Accuracy per exit, and the largest drop of each row."""
    label = probs[:, np.arange(len(labels)), labels]
    return (probs.argmax(-1) == labels).mean(1).tolist(), np.max(np.maximum.accumulate(label, 0) - label, 0)

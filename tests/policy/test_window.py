"""Windows against plain NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from anytime.errors import LabelError, OptionError, ShapeError
from anytime.policy import WindowPolicy, fit_window_policy


def plain_window(
    confidence: np.ndarray, wrong: np.ndarray, aim: str, level: float, width: float, skip: int
) -> tuple[float, ...]:
    if aim == "risk":
        order = np.argsort(-confidence, kind="stable")
        risks = [wrong[order[: rank + 1]].mean() for rank in range(len(confidence))]
        nearest = min(range(skip, len(confidence)), key=lambda rank: abs(risks[rank] - level))
        decision = confidence[order[nearest]]
    else:
        decision = np.quantile(confidence, 1 - level)
    below = np.mean(confidence <= decision)
    return decision, np.quantile(confidence, max(below - width, 0)), np.quantile(confidence, min(below + width, 1))


@pytest.mark.parametrize(("aim", "level"), [("risk", 0.1), ("risk", 0.3), ("coverage", 0.5), ("coverage", 0.95), ("fpr", 0.8)])
@pytest.mark.parametrize("width", [0.0, 0.1, 0.6])
def test_bounds_are_the_plain_ones(some: Callable, aim: str, level: float, width: float) -> None:
    log_probs, labels = some(150, 3)
    found = fit_window_policy(log_probs, labels, aim=aim, level=level, width=width, skip=30)
    for exit in range(5):
        others = np.sort(log_probs[exit].exp().numpy(), -1)[:, :-1].sum(-1)
        confidence = log_probs[exit].amax(-1).numpy() - np.log(others)
        wrong = (log_probs[exit].argmax(-1) != labels).numpy()
        expected = plain_window(confidence, wrong, aim, level, width, 30)
        bounds = (found.decision_log_odds[exit], found.lower_log_odds[exit], found.upper_log_odds[exit])
        assert bounds == pytest.approx(expected)
        assert found.decision[exit] == pytest.approx(1 / (1 + np.exp(-expected[0])))


def test_a_fraction_of_twice_the_width_goes_on(some: Callable) -> None:
    log_probs, _ = some(2000, 4)
    found = fit_window_policy(log_probs, aim="coverage", level=0.5, width=0.1)
    assert float((found.apply(log_probs) > 1).double().mean()) == pytest.approx(0.2, abs=0.002)


def test_the_bounds_belong_to_the_window(some: Callable) -> None:
    log_probs, _ = some(11, 5)
    whole = fit_window_policy(log_probs, aim="coverage", level=0.5, width=1.0)
    assert whole.apply(log_probs).tolist() == [5] * 11


def test_it_round_trips_and_refuses_others(some: Callable, tmp_path: Path) -> None:
    log_probs, labels = some(60, 6)
    found = fit_window_policy(log_probs, labels, aim="risk", level=0.2, skip=10)
    again = WindowPolicy.load(found.save(tmp_path / "window.json"))
    assert again == found
    assert torch.equal(again.apply(log_probs), found.apply(log_probs))
    with pytest.raises(ShapeError, match="6 classes"):
        again.apply(some(3, classes=4)[0])
    with pytest.raises(ShapeError, match="5 exits"):
        again.apply(some(3, exits=4)[0])


def test_bad_input_is_refused(some: Callable) -> None:
    log_probs, labels = some(60, 7)
    with pytest.raises(LabelError, match="no labels"):
        fit_window_policy(log_probs, aim="risk", level=0.1)
    with pytest.raises(OptionError, match="skip"):
        fit_window_policy(log_probs, labels, aim="risk", level=0.1)
    with pytest.raises(OptionError, match="aim"):
        fit_window_policy(log_probs, labels, aim="recall", level=0.1)
    with pytest.raises(OptionError, match="level"):
        fit_window_policy(log_probs, labels, aim="coverage", level=1.1)
    with pytest.raises(OptionError, match="width"):
        fit_window_policy(log_probs, labels, aim="coverage", level=0.5, width=-0.1)
    with pytest.raises(ShapeError, match="no rows"):
        fit_window_policy(log_probs[:, :0], aim="coverage", level=0.5)

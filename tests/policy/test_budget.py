"""Budgeted batch classification against a plain loop, its laws, and the reference logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anytime
from anytime.errors import IntegrityError, OptionError, OverlapError, ShapeError
from anytime.policy import BudgetPolicy, budget_curve, exit_fractions, fit_budget_policy, fraction_thresholds

COSTS = (1.0, 2.5, 3.0, 7.0, 8.0)


def log_odds(log_probs: torch.Tensor) -> np.ndarray:
    """As a rule's prediction has them, and close to log p/(1 - p) from the probabilities of the others."""
    found = anytime.Prediction(log_probs, torch.zeros(log_probs.shape[:2], dtype=torch.bool)).log_odds.numpy()
    others = np.sort(np.exp(log_probs.double().numpy()), -1)[..., :-1].sum(-1)
    assert found == pytest.approx(log_probs.double().amax(-1).numpy() - np.log(others))
    return found


def plain_thresholds(confidence: np.ndarray, q: float) -> list[float]:
    """METHODS 2.4, one row at a time."""
    exits, rows = confidence.shape
    fractions = [q**k for k in range(1, exits + 1)]
    total = sum(fractions)
    left, limits = set(range(rows)), []
    for k in range(exits - 1):
        ordered = sorted(left, key=lambda row: -confidence[k, row])
        count = min(int(rows * fractions[k] / total + 1e-9), len(ordered))
        limit = confidence[k, ordered[count - 1]] if count else math.inf
        limits.append(limit)
        left -= {row for row in left if confidence[k, row] >= limit}
    return [*limits, -math.inf]


def plain_exits(confidence: np.ndarray, limits: list[float]) -> list[int]:
    return [next(k for k in range(len(limits)) if confidence[k, row] >= limits[k]) for row in range(confidence.shape[1])]


@settings(max_examples=80)
@given(seed=st.integers(0, 10_000), point=st.integers(1, 59), rows=st.integers(1, 60), ties=st.booleans())
def test_thresholds_are_the_plain_ones(some: Callable, seed: int, point: int, rows: int, ties: bool) -> None:
    log_probs, _ = some(rows, seed, ties=ties)
    q = point / 20
    odds = log_odds(log_probs)
    found = fraction_thresholds(torch.from_numpy(odds), exit_fractions(q, 5))
    assert found == pytest.approx(plain_thresholds(odds, q))


def test_fractions_are_a_geometric_series_at_any_q() -> None:
    for q in (0.05, 0.5, 1.0, 1.95, 2.95):
        fractions = exit_fractions(q, 7)
        assert float(fractions.sum()) == pytest.approx(1)
        assert (fractions[1:] / fractions[:-1]).tolist() == pytest.approx([q] * 6)
    assert exit_fractions(0, 3).tolist() == [1, 0, 0]
    assert exit_fractions(math.inf, 3).tolist() == [0, 0, 1]
    assert exit_fractions(1e300, 7).tolist() == pytest.approx([0] * 6 + [1])
    for bad in (-1.0, math.nan):
        with pytest.raises(OptionError):
            exit_fractions(bad, 3)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), point=st.integers(1, 58), rows=st.integers(1, 60), ties=st.booleans())
def test_the_fractions_leave_and_a_larger_q_costs_more(some: Callable, seed: int, point: int, rows: int, ties: bool) -> None:
    log_probs, _ = some(rows, seed, ties=ties)
    price = torch.tensor(COSTS)
    spent, expected = [], []
    for q in (point / 20, (point + 1) / 20):
        fractions = exit_fractions(q, 5)
        limits = fraction_thresholds(torch.from_numpy(log_odds(log_probs)), fractions)
        exits = anytime.policy.Confidence(limits, scale="log-odds").apply(log_probs) - 1
        if not ties:
            counts = exits.bincount(minlength=5)[:-1]
            assert counts.tolist() == [math.floor(rows * fraction + 1e-9) for fraction in fractions.tolist()[:-1]]
            # Fractions are rounded to whole rows, one per exit.
            spent.append(float(price[exits].mean()))
        expected.append(float((fractions * price).sum()))
    assert expected[0] < expected[1]
    if not ties:
        assert spent[0] <= spent[1] + 4 * COSTS[-1] / rows


def test_ties_leave_together() -> None:
    log_probs = torch.tensor([[[0.75, 0.25]] * 4, [[0.5, 0.5]] * 4]).log()
    odds = torch.from_numpy(log_odds(log_probs))
    assert fraction_thresholds(odds, (0.25, 0.75)) == pytest.approx((math.log(3), -math.inf))
    assert fraction_thresholds(odds, (0.2, 0.8)) == (math.inf, -math.inf)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), budget=st.floats(1.0, 9.0), rows=st.integers(1, 80), ties=st.booleans())
def test_the_budget_is_kept_and_nearly_spent(some: Callable, seed: int, budget: float, rows: int, ties: bool) -> None:
    log_probs, labels = some(rows, seed, ties=ties)
    fit = fit_budget_policy(log_probs, labels, costs=COSTS, budget=budget)
    exits = plain_exits(log_odds(log_probs), list(fit.log_odds))
    assert fit.apply(log_probs).tolist() == [exit + 1 for exit in exits]
    finite = [(odds, value) for odds, value in zip(fit.log_odds, fit.thresholds, strict=True) if math.isfinite(odds)]
    assert [value for _, value in finite] == pytest.approx([1 / (1 + math.exp(-odds)) for odds, _ in finite])
    assert fit.cost == pytest.approx(np.mean([COSTS[exit] for exit in exits]))
    right = [int(log_probs[exit, row].argmax()) == int(labels[row]) for row, exit in enumerate(exits)]
    assert fit.accuracy == pytest.approx(np.mean(right))
    assert fit.cost <= budget
    assert fit.fractions == pytest.approx([exits.count(exit) / rows for exit in range(5)])
    if not ties:
        assert fit.cost >= min(budget, COSTS[-1]) - 5 * COSTS[-1] / rows


def test_the_ends_of_the_budget() -> None:
    log_probs = torch.randn(3, 40, 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    least, most = (fit_budget_policy(log_probs, costs=(1, 2, 3), budget=budget) for budget in (1, 3))
    assert (least.cost, most.cost) == (1, 3)
    assert least.q < 1e-6
    assert most.q == math.inf
    assert least.accuracy is None
    with pytest.raises(OptionError, match=r"the budget is 0\.9"):
        fit_budget_policy(log_probs, costs=(1, 2, 3), budget=0.9)
    with pytest.raises(OptionError, match="nan"):
        fit_budget_policy(log_probs, costs=(1, 2, 3), budget=math.nan)


def test_the_curve_is_the_plain_one(some: Callable) -> None:
    (held, _), (log_probs, labels) = some(90, 1), some(70, 2)
    curve = budget_curve(held, log_probs, labels, costs=COSTS)
    assert curve.q == tuple(point / 20 for point in range(1, 40))
    confidence, given = log_odds(log_probs), log_probs.argmax(-1).numpy()
    for point, q in enumerate(curve.q):
        exits = plain_exits(confidence, plain_thresholds(log_odds(held), q))
        assert curve.cost[point] == pytest.approx(np.mean([COSTS[exit] for exit in exits]))
        assert curve.accuracy[point] == pytest.approx(np.mean(given[exits, np.arange(70)] == labels.numpy()))
        assert sum(curve.fractions[point]) == pytest.approx(1)


def test_the_same_rows_are_refused_and_equal_answers_of_others_are_not(some: Callable) -> None:
    log_probs, labels = some(50, 3)
    with pytest.raises(OverlapError, match="50 of the 50"):
        budget_curve(log_probs, log_probs, labels, costs=COSTS)
    one_hot = torch.full((5, 50, 6), -torch.inf).scatter(2, labels.expand(5, 50)[..., None], 0.0)
    budget_curve(one_hot, one_hot, labels, costs=COSTS)
    logits = anytime.samples.cifar100_msdnet().logits[:]
    truth = anytime.samples.cifar100_msdnet().labels
    for rule in (anytime.Latest(), anytime.Product()):
        answers = rule(logits).log_probs
        budget_curve(answers[:, :500], answers[:, 500:], truth[500:], costs=range(1, 8), points=1)
        with pytest.raises(OverlapError):
            budget_curve(answers[:, :510], answers[:, 500:], truth[500:], costs=range(1, 8), points=1)


def test_bad_input_is_refused(some: Callable) -> None:
    (held, _), (log_probs, labels) = some(30, 4), some(20, 5)
    with pytest.raises(ShapeError, match="4 exits"):
        budget_curve(held[:4], log_probs, labels, costs=COSTS)
    with pytest.raises(ShapeError, match="no rows"):
        budget_curve(held[:, :0], log_probs, labels, costs=COSTS)
    with pytest.raises(OptionError, match="points"):
        budget_curve(held, log_probs, labels, costs=COSTS, points=0)
    with pytest.raises(ShapeError, match="costs"):
        fit_budget_policy(held, costs=(1, 2), budget=2)
    with pytest.raises(OptionError, match="fractions"):
        fraction_thresholds(held[..., 0], (0.5, 0.5))
    with pytest.raises(OptionError, match="fractions"):
        fraction_thresholds(held[..., 0], (0.9, 0.9, 0, 0, 0))


def test_it_round_trips_and_refuses_damage_and_others(some: Callable, tmp_path: Path) -> None:
    log_probs, labels = some(60, 6)
    fit = fit_budget_policy(log_probs, labels, costs=COSTS, budget=4.0)
    path = fit.save(tmp_path / "budget.json")
    again = BudgetPolicy.load(path)
    assert again == fit
    assert torch.equal(again.apply(log_probs), fit.apply(log_probs))
    assert math.inf not in again.fractions
    with pytest.raises(ShapeError, match="this BudgetPolicy was fitted"):
        again.apply(some(3, classes=4)[0])
    with pytest.raises(ShapeError, match="this BudgetPolicy was fitted"):
        again.answer(anytime.Latest()(torch.zeros(4, 3, 6)))
    path.write_text(path.read_text().replace("4.0", "5.0", 1))
    with pytest.raises(IntegrityError, match="damaged"):
        BudgetPolicy.load(path)


@pytest.mark.parametrize("name", ["msdnet-cifar100-val", "msdnet-cifar10-val"])
def test_stopping_by_itself_beats_a_fixed_exit_on_the_reference_logits(shared: Path, name: str) -> None:
    with np.load(shared / "reference" / f"{name}.npz") as file:
        logits, labels = torch.from_numpy(file["logits"]), torch.from_numpy(file["labels"].astype(np.int64))
    costs = np.arange(1.0, 8)
    for rule in (anytime.Latest(), anytime.Caching()):
        held, test = rule(logits[:, :2500]), rule(logits[:, 2500:])
        curve = budget_curve(held, test, labels[2500:], costs=costs)
        assert all(before < after for before, after in zip(curve.cost, curve.cost[1:], strict=False))
        fixed = (test.labels == labels[2500:]).double().mean(1).numpy()
        for exit in (1, 2):
            assert np.interp(costs[exit], curve.cost, curve.accuracy) > fixed[exit]


@pytest.mark.parametrize("scale", [1.0, 4.0, 40.0])
def test_confidences_that_round_to_one_in_float32_do_not_leave_together(scale: float) -> None:
    """Nearly all probabilities are 1 in float32 at the larger scales: the rows that leave are still as many as asked for."""
    generator = torch.Generator().manual_seed(0)
    logits = scale * torch.randn(4, 3000, 10, generator=generator)
    logits[..., 0] += 10 * scale * torch.rand(4, 3000, generator=generator)
    fractions = exit_fractions(1.95, 4)
    for rule in (anytime.Latest(), anytime.Caching()):
        prediction = rule(logits)
        limits = fraction_thresholds(prediction.log_odds, fractions)
        left = anytime.policy.Confidence(limits, scale="log-odds").apply(prediction).bincount(minlength=5)[1:] / 3000
        assert left.tolist() == pytest.approx(fractions.tolist(), abs=0.002)
    costs = (1.0, 2.0, 3.0, 4.0)
    spent = fit_budget_policy(anytime.Latest()(logits), costs=costs, budget=3.5)
    assert spent.cost == pytest.approx(3.5, abs=0.01)

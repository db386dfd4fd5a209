"""Losses, bounds and p-values against plain NumPy and MAPIE, and what risk control does with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytime.errors import FormatError, IntegrityError, LabelError, OptionError, ShapeError
from anytime.policy import Confidence, RiskControl, betting_bound, exit_losses, fit_risk_control, hoeffding_bentkus
from anytime.policy.risk import LARGEST, Loss, Method

LOSSES = get_args(Loss)
METHODS = get_args(Method)


def plain_loss(name: str, probs: np.ndarray, last: np.ndarray, label: int) -> float:
    """Of one row at one exit."""

    def score(values: np.ndarray, wanted: int) -> float:
        return float(sum((value - (index == wanted)) ** 2 for index, value in enumerate(values)))

    match name:
        case "gap":
            return float(probs.argmax() != label) - float(last.argmax() != label)
        case "consistency":
            return float(probs.argmax() != last.argmax())
        case "brier-gap":
            return score(probs, label) - score(last, label)
        case "brier-consistency":
            return score(probs, int(last.argmax())) - score(last, int(last.argmax()))
    return float(np.sqrt(((np.sqrt(probs) - np.sqrt(last)) ** 2).sum()) / np.sqrt(2))


def plain_betting(x: np.ndarray, delta: float, largest: float) -> float:
    """Waudby-Smith and Ramdas, one step at a time, as METHODS 11.2 and 13.11.2 have it."""
    n = len(x)
    nu, residuals, total, variance = [], 0.0, 0.0, 0.25
    for i in range(1, n + 1):
        nu.append(min(math.sqrt(2 * math.log(1 / delta) / (n * variance)), 1 / largest))
        total += x[i - 1]
        mean = (0.5 + total) / (i + 1)
        residuals += (x[i - 1] - mean) ** 2
        variance = (0.25 + residuals) / (i + 1)

    def capital(mu: float) -> float:
        running, best = 0.0, -math.inf
        for stake, value in zip(nu, x, strict=True):
            running += math.log(1 - stake * (value - mu))
            best = max(best, running)
        return best + math.log(delta)

    if capital(largest) < 0:
        return largest
    low, high = 1e-12, largest
    if capital(low) > 0:
        return 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if capital(middle) < 0 else (low, middle)
    return high


def plain_hoeffding_bentkus(x: np.ndarray, epsilon: float) -> float:
    n, risk = len(x), float(np.mean(x))

    def term(a: float, b: float) -> float:
        return 0.0 if a == 0 else a * math.log(a / b)

    a = min(risk, epsilon)
    hoeffding = math.exp(-n * (term(a, epsilon) + term(1 - a, 1 - epsilon)))
    return min(hoeffding, math.e * plain_binomial(math.ceil(n * risk - 1e-9), n, epsilon))


def plain_binomial(count: int, n: int, p: float) -> float:
    return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(min(count, n) + 1))


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_are_the_plain_ones(some: Callable, loss: str) -> None:
    log_probs, labels = some(12, 1)
    log_probs[2, 3] = torch.tensor([0.0] + [-math.inf] * 5)
    found = exit_losses(log_probs, labels, loss)
    probs = log_probs.exp().numpy()
    for exit in range(5):
        for row in range(12):
            plain = plain_loss(loss, probs[exit, row], probs[-1, row], int(labels[row]))
            assert float(found[exit, row]) == pytest.approx(plain, abs=1e-7)
    assert bool((found <= LARGEST[loss]).all())
    assert bool((found[-1] == 0).all())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 60),
    delta=st.sampled_from([0.01, 0.1, 0.5]),
    largest=st.sampled_from([1.0, 2.0]),
    kind=st.sampled_from(["binary", "rare", "any", "negative", "zeros", "ones"]),
)
def test_the_betting_bound_is_the_plain_one(seed: int, rows: int, delta: float, largest: float, kind: str) -> None:
    rng = np.random.default_rng(seed)
    x = largest * {
        "binary": rng.integers(0, 2, rows),
        "rare": rng.random(rows) < 0.05,
        "any": rng.random(rows),
        "negative": 2 * rng.random(rows) - 1,
        "zeros": np.zeros(rows),
        "ones": np.ones(rows),
    }[kind].astype(float)
    found = betting_bound(torch.from_numpy(x), delta, largest=largest)
    assert float(found) == pytest.approx(plain_betting(x, delta, largest), abs=1e-9)
    assert 0 <= float(found) <= largest


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 80),
    epsilon=st.sampled_from([0.01, 0.1, 0.5, 0.9]),
    kind=st.sampled_from(["any", "small", "zeros", "ones", "whole"]),
)
def test_p_values_are_the_plain_ones(seed: int, rows: int, epsilon: float, kind: str) -> None:
    rng = np.random.default_rng(seed)
    x = {
        "any": rng.random(rows),
        "small": rng.random(rows) * epsilon,
        "zeros": np.zeros(rows),
        "ones": np.ones(rows),
        "whole": np.full(rows, 0.1),
    }[kind]
    found = float(hoeffding_bentkus(torch.from_numpy(x), epsilon))
    assert found == pytest.approx(plain_hoeffding_bentkus(x, epsilon), rel=1e-9)
    doubled = torch.from_numpy(2 * x)
    assert float(hoeffding_bentkus(doubled, 2 * epsilon, largest=2)) == pytest.approx(found, rel=1e-9)
    below = torch.from_numpy(np.where(x < 0.05, -3.0, x))
    assert float(hoeffding_bentkus(below, epsilon)) <= found + 1e-12


@pytest.mark.parametrize("rows", [1, 10, 80])
@pytest.mark.parametrize("epsilon", [0.02, 0.3])
def test_binary_p_values_are_the_binomial_ones(rows: int, epsilon: float) -> None:
    for count in range(rows + 1):
        x = (torch.arange(rows) < count).double()
        assert float(hoeffding_bentkus(x, epsilon, binary=True)) == pytest.approx(plain_binomial(count, rows, epsilon))


def test_mapie_has_the_same_p_values_and_chooses_the_same() -> None:
    methods: Any = pytest.importorskip("mapie.risk_control.methods", reason="MAPIE is not installed")
    control: Any = pytest.importorskip("mapie.risk_control.fwer_control")
    rng = np.random.default_rng(0)
    rows, epsilon, delta = 400, 0.1, 0.1
    # From a risk of 0 at the first λ to one well above ε at the last.
    binary = rng.random((rows, 50)) < np.linspace(0, 0.2, 50)
    smooth = binary * rng.random((rows, 50))
    for losses, is_binary in ((binary, True), (smooth, False)):
        mine = hoeffding_bentkus(torch.from_numpy(losses.T.astype(float)), epsilon, binary=is_binary).numpy()
        theirs = methods.compute_hoeffding_bentkus_p_value(losses.mean(0), rows, epsilon, is_binary)[:, 0]
        # MAPIE rounds n·mean up, which for some whole counts is one more: its p-value is then the larger one.
        counts = losses.sum(0)
        clean = np.ceil(rows * losses.mean(0)) == np.ceil(counts - 1e-9)
        assert clean.mean() > 0.8
        assert mine[clean] == pytest.approx(theirs[clean], rel=1e-9)
        assert (mine <= theirs * (1 + 1e-9)).all()
        assert control.control_fwer(mine, delta, "fixed_sequence").tolist() == list(range(int((mine <= delta).cumprod().sum())))


def test_mapie_chooses_the_same_thresholds(some: Callable) -> None:
    methods: Any = pytest.importorskip("mapie.risk_control.methods", reason="MAPIE is not installed")
    control: Any = pytest.importorskip("mapie.risk_control.fwer_control")
    log_probs, labels = some(500, 2)
    for epsilon in (0.03, 0.1, 0.2):
        ltt = fit_risk_control(log_probs, loss="consistency", epsilon=epsilon, method="ltt")
        rejected = control.control_fwer(np.array(ltt.bounds), 0.1, "fixed_sequence")
        assert ltt.threshold == (ltt.grid[max(rejected)] if len(rejected) else 1.0)
        crc = fit_risk_control(log_probs, loss="consistency", epsilon=epsilon, method="crc", envelope=True)
        losses = np.stack([per_row(log_probs, labels, "consistency", value) for value in crc.grid], 1)
        losses = np.maximum.accumulate(losses, 1)
        mean, corrected = methods.get_r_hat_plus(losses, np.array(crc.grid), "crc", None, None, None)
        assert crc.risks == pytest.approx(mean)
        assert crc.bounds == pytest.approx(corrected)
        assert methods.find_best_predict_param(np.array(crc.grid), corrected, np.array([epsilon])) == [crc.threshold]


def per_row(log_probs: torch.Tensor, labels: torch.Tensor, loss: Any, threshold: float) -> np.ndarray:
    """The loss of each row under one λ, by the policy itself."""
    exits = Confidence(threshold, strict=True).apply(log_probs)
    return exit_losses(log_probs, labels, loss)[exits - 1, torch.arange(log_probs.shape[1])].numpy()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", METHODS)
def test_the_choice_is_the_plain_one(some: Callable, method: Any, loss: Any, ties: bool) -> None:
    rows, delta, largest = 300, 0.1, LARGEST[loss]
    log_probs, labels = some(rows, 3, ties=ties)
    grid = [step / 20 for step in range(20, -1, -1)]
    for epsilon in (0.001, 0.05, 0.15):
        found = fit_risk_control(log_probs, labels, loss=loss, epsilon=epsilon, delta=delta, method=method, grid=grid)
        passing, unbroken = [], True
        for index, value in enumerate(grid):
            x = per_row(log_probs, labels, loss, value)
            assert found.risks[index] == pytest.approx(x.mean(), abs=1e-12)
            match method:
                case "naive":
                    ok = x.mean() < epsilon
                case "crc":
                    ok = x.mean() <= ((rows + 1) * epsilon - largest) / rows
                case "ucb":
                    unbroken = unbroken and plain_betting(x, delta, largest) < epsilon
                    ok = unbroken
                case _:
                    clipped = np.maximum(x, 0) / largest
                    count = round(clipped.sum())
                    binary = loss in ("gap", "consistency")
                    p = plain_binomial(count, rows, epsilon) if binary else plain_hoeffding_bentkus(clipped, epsilon / largest)
                    unbroken = unbroken and p <= delta
                    ok = unbroken
            passing += [value] if ok else []
        assert found.passed == bool(passing)
        assert found.threshold == (min(passing) if passing else 1.0)
        exits = Confidence(found.threshold, strict=True).apply(log_probs)
        assert torch.equal(found.apply(log_probs), exits)
        assert found.mean_exit == pytest.approx(float(exits.double().mean()))


def test_no_passing_threshold_is_the_full_model(some: Callable) -> None:
    log_probs, _ = some(5, 4)
    for method in ("crc", "ucb", "ltt"):
        found = fit_risk_control(log_probs, loss="consistency", epsilon=0.01, method=method, costs=range(1, 6))
        assert (found.threshold, found.passed, found.mean_exit, found.mean_cost) == (1.0, False, 5.0, 5.0)
        assert found.apply(log_probs).tolist() == [5] * 5
        assert "No threshold passed" in found.guarantee


def test_guarantees_state_what_they_rest_on(some: Callable) -> None:
    log_probs, _ = some(400, 5)

    def guarantee(**options: Any) -> str:
        return fit_risk_control(log_probs, loss="consistency", epsilon=0.2, **options).guarantee

    assert "With probability 0.95" in guarantee(method="ucb", delta=0.05)
    assert "With probability 0.9 " in guarantee(method="ltt")
    assert "if stopping earlier never loses less" in guarantee(method="crc")
    assert "if" not in guarantee(method="crc", envelope=True)
    assert "No guarantee" in guarantee(method="naive")


@pytest.mark.parametrize("loss", LOSSES)
def test_the_more_is_promised_the_later_it_stops(some: Callable, loss: Any) -> None:
    log_probs, labels = some(400, 6)

    def chosen(method: Any, epsilon: float = 0.1, **options: Any) -> float:
        return fit_risk_control(log_probs, labels, loss=loss, epsilon=epsilon, method=method, **options).threshold

    assert chosen("naive") <= chosen("crc")
    assert chosen("naive") <= chosen("ltt")
    assert chosen("crc") <= chosen("crc", envelope=True)
    for method in METHODS:
        assert chosen(method, 0.2) <= chosen(method, 0.1) <= chosen(method, 0.05)
    assert chosen("ucb", delta=0.3) <= chosen("ucb", delta=0.01)


def test_one_exit_stops_there(some: Callable) -> None:
    log_probs, _ = some(300, 7, exits=1)
    found = fit_risk_control(log_probs, loss="hellinger", epsilon=0.1)
    assert (found.threshold, found.mean_exit) == (0.0, 1.0)


def test_it_round_trips_and_refuses_damage_and_others(some: Callable, tmp_path: Path) -> None:
    log_probs, labels = some(200, 8)
    found = fit_risk_control(log_probs, labels, loss="brier-gap", epsilon=0.1, costs=range(1, 6))
    path = found.save(tmp_path / "risk.json")
    again = RiskControl.load(path)
    assert again == found
    assert again.policy == Confidence(found.threshold, strict=True)
    for others in (some(3, classes=4)[0], some(3, exits=4)[0]):
        with pytest.raises(ShapeError, match="this RiskControl was fitted"):
            again.apply(others)
    document = again.document()
    document["fields"]["threshold"] = 2.0
    with pytest.raises(FormatError, match="threshold is"):
        RiskControl.from_document(document)
    path.write_text(path.read_text().replace("brier-gap", "gap"))
    with pytest.raises(IntegrityError, match="damaged"):
        RiskControl.load(path)


def test_bad_input_is_refused(some: Callable) -> None:
    log_probs, labels = some(20, 9)
    for loss in ("gap", "brier-gap"):
        with pytest.raises(LabelError, match="no labels"):
            fit_risk_control(log_probs, loss=loss, epsilon=0.1)
    for options in (
        {"loss": "accuracy"},
        {"method": "clt"},
        {"epsilon": 0.0},
        {"epsilon": 1.0},
        {"delta": 0.0},
        {"delta": 1.0},
        {"grid": ()},
        {"grid": (0.5, 1.5)},
    ):
        with pytest.raises(OptionError):
            fit_risk_control(log_probs, labels, **({"loss": "consistency", "epsilon": 0.1} | options))
    with pytest.raises(ShapeError, match="no rows"):
        fit_risk_control(log_probs[:, :0], loss="consistency", epsilon=0.1)
    with pytest.raises(LabelError):
        fit_risk_control(log_probs, labels[:5], loss="gap", epsilon=0.1)
    with pytest.raises(OptionError, match="loss is"):
        exit_losses(log_probs, labels, "accuracy")
    losses = torch.full((4,), 0.5)
    for bad in (lambda: betting_bound(losses, 0.0), lambda: betting_bound(losses, 0.1, largest=0.4)):
        with pytest.raises(OptionError):
            bad()
    for bad in (lambda: hoeffding_bentkus(losses, 1.0), lambda: hoeffding_bentkus(losses * torch.nan, 0.1)):
        with pytest.raises(OptionError):
            bad()
    with pytest.raises(ShapeError):
        betting_bound(losses[:0], 0.1)

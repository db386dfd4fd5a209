"""Nested intervals for regression against the densities they come from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from anytime.conformal import NestedIntervals, fit_nested_intervals
from anytime.conformal.nested_intervals import LinearLayer, fit_linear
from anytime.errors import DtypeError, InputError, IntegrityError, OptionError, ShapeError, StateError


def some(seed: int, rows: int = 60, offset: float = 0.0) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, generator=generator, dtype=torch.float64)
    return [inputs[:, : m + 1] for m in range(3)], offset + inputs @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.5 * noise


def plain_evidence(features: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    inputs = np.hstack((features, np.ones((len(features), 1))))
    a = b = 1e-5
    for _ in range(1000):
        covariance = np.linalg.inv(a * np.eye(inputs.shape[1]) + b * inputs.T @ inputs)
        mean = b * covariance @ inputs.T @ targets
        e = b * np.linalg.eigvalsh(inputs.T @ inputs)
        gamma = (e / (e + a)).sum()
        before, a, b = (a, b), gamma / (mean @ mean), (len(targets) - gamma) / ((targets - inputs @ mean) ** 2).sum()
        if np.allclose(before, (a, b), rtol=1e-5, atol=0):
            break
    covariance = np.linalg.inv(a * np.eye(inputs.shape[1]) + b * inputs.T @ inputs)
    return b * covariance @ inputs.T @ targets, covariance, 1 / b


def test_the_layer_maximises_the_evidence() -> None:
    features, targets = some(0)
    layer = fit_linear(features[2], targets)
    mean, covariance, noise = plain_evidence(features[2].numpy(), targets.numpy())
    assert layer.mean.numpy() == pytest.approx(mean, rel=1e-3, abs=1e-6)
    assert (layer.factor @ layer.factor.T).numpy() == pytest.approx(covariance, rel=1e-3, abs=1e-6)
    assert layer.noise == pytest.approx(noise, rel=1e-3)
    assert layer.noise == pytest.approx(0.25, rel=0.5)


def log_ratio(layers: list[LinearLayer], draws: list[torch.Tensor], row: list[torch.Tensor], y: np.ndarray) -> np.ndarray:
    """ln R_t(y) from the densities, for one input and one draw, `(exits, points)`."""
    total, found = np.zeros_like(y), []
    for layer, weights, h in zip(layers, draws, row, strict=True):
        one = torch.cat((h, torch.ones(1).double()))
        v = float(one @ layer.factor @ layer.factor.T @ one)
        total = total + stats.norm.logpdf(y, float(one @ layer.mean), math.sqrt(layer.noise + v))
        total = total - stats.norm.logpdf(y, float(one @ weights), math.sqrt(layer.noise))
        found.append(total)
    return np.stack(found)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), alpha=st.sampled_from([0.05, 0.5, 0.9]), draws=st.integers(1, 3))
def test_intervals_are_where_the_ratio_never_exceeds_its_limit(seed: int, alpha: float, draws: int) -> None:
    features, targets = some(seed, rows=12)
    fitted = fit_nested_intervals(features, targets, alpha=alpha)
    layers = [LinearLayer(*parts) for parts in zip(fitted.means, fitted.factors, fitted.noises, strict=True)]
    other, _ = some(seed + 1, rows=4)
    answer = fitted(other, seed=seed, draws=draws)
    weights = [layer.draw(draws, [seed, exit]) for exit, layer in enumerate(layers)]
    for n in range(4):
        row = [h[n] for h in other]
        points = np.concatenate((np.linspace(-40, 40, 161), answer.lower[:, n].numpy(), answer.upper[:, n].numpy()))
        points = points[np.abs(points) < 1e3]  # neither NaN nor so far out that differences of densities have no digits
        inside = np.ones((3, len(points)), dtype=bool)
        near = np.zeros((3, len(points)), dtype=bool)
        for s in range(draws):
            over = log_ratio(layers, [w[s] for w in weights], row, points) + math.log(alpha)
            inside &= np.logical_and.accumulate(over <= 0)
            near |= np.logical_or.accumulate(np.abs(over) < 1e-6)
        held = np.stack([answer.holds(torch.full((4,), y).double())[:, n].numpy() for y in points], 1)
        assert np.array_equal(held[~near], inside[~near])


def test_an_end_of_the_first_interval_is_where_the_ratio_is_at_its_limit() -> None:
    features, targets = some(3)
    fitted = fit_nested_intervals(features, targets)
    layer = LinearLayer(fitted.means[0], fitted.factors[0], fitted.noises[0])
    answer = fitted(features, seed=1)
    for ends in (answer.lower, answer.upper):
        ratio = log_ratio([layer], [layer.draw(1, [1, 0])[0]], [features[0][5]], ends[0, 5:6].numpy())
        assert ratio[0, 0] == pytest.approx(math.log(20), rel=1e-6)


def test_stepping_gives_what_the_call_gives_and_intervals_are_nested() -> None:
    features, targets = some(4)
    fitted = fit_nested_intervals(features, targets, alpha=0.9)
    whole, state = fitted(features, seed=2, draws=5), fitted.start(2, draws=5)
    for exit in range(3):
        state, answer = fitted.step(state, features[exit])
        for name in ("lower", "upper", "empty"):
            torch.testing.assert_close(getattr(answer, name), getattr(whole, name)[exit], equal_nan=True)
    left = ~whole.empty[1:]
    assert bool((whole.lower[1:] >= whole.lower[:-1])[left].all())
    assert bool((whole.upper[1:] <= whole.upper[:-1])[left].all())
    assert bool(whole.empty.any()), "such a large alpha leaves some inputs without a target"
    assert bool((whole.empty == whole.lower.isnan()).all())
    assert not bool((whole.empty[:-1] & ~whole.empty[1:]).any()), "empty for good"


def test_more_samples_give_subsets_and_a_weaker_guarantee() -> None:
    features, targets = some(5)
    fitted = fit_nested_intervals(features, targets, alpha=0.05)
    one, five = fitted(features, seed=0), fitted(features, seed=0, draws=5)
    kept = ~five.empty
    assert bool((five.lower >= one.lower - 1e-9)[kept].all())
    assert bool((five.upper <= one.upper + 1e-9)[kept].all())
    assert bool((one.empty <= five.empty).all())
    assert fitted.guarantee() == pytest.approx(0.95)
    assert fitted.guarantee(5) == pytest.approx(0.75)
    assert fitted.guarantee(50) == 0


def test_large_targets_keep_their_digits() -> None:
    features, targets = some(6)
    fitted = fit_nested_intervals(features, targets)
    far = replace(fitted, means=tuple(mean + 1e7 * (torch.arange(len(mean)) == len(mean) - 1) for mean in fitted.means))
    near, moved = fitted(features, seed=1), far(features, seed=1)
    assert (moved.lower - 1e7).numpy() == pytest.approx(near.lower.numpy(), rel=1e-5)


def test_nothing_is_ruled_out_where_the_weights_are_known() -> None:
    layer = LinearLayer(torch.tensor([1.0, 0.0]).double(), torch.zeros(2, 2).double(), 1.0)
    fitted = NestedIntervals(1, None, alpha=0.1, means=(layer.mean,), factors=(layer.factor,), noises=(1.0,), rows=1)
    answer = fitted([torch.zeros(1, 1)])
    assert (answer.lower.item(), answer.upper.item(), answer.empty.item()) == (-math.inf, math.inf, False)


def test_it_round_trips_and_refuses_damage_and_other_features(tmp_path: Path) -> None:
    features, targets = some(0)
    fitted = fit_nested_intervals(features, targets)
    path = fitted.save(tmp_path / "intervals.json")
    loaded = NestedIntervals.load(path)
    torch.testing.assert_close(loaded(features, seed=1).lower, fitted(features, seed=1).lower)
    path.write_text(path.read_text().replace('"alpha": 0.05', '"alpha": 0.06'))
    with pytest.raises(IntegrityError):
        NestedIntervals.load(path)
    with pytest.raises(ShapeError, match="2 exits"):
        fitted(features[:2])
    with pytest.raises(ShapeError, match="columns"):
        fitted(features[::-1])
    state, _ = fitted.step(fitted.start(), features[0])
    with pytest.raises(ShapeError, match="rows"):
        fitted.step(state, features[1][:5])
    with pytest.raises(StateError):
        fitted.step(replace(state, seen=3), features[0])
    with pytest.raises(OptionError, match="draws"):
        fitted.start(draws=0)
    with pytest.raises(OptionError):
        replace(fitted, noises=(1.0,))
    with pytest.raises(OptionError):
        replace(fitted, noises=(1.0, 1.0, -1.0))


def test_rows_that_cannot_be_fitted_are_refused() -> None:
    features, targets = some(0)
    for bad in ([], [features[0][:, 0]], [features[0][:5]]):
        with pytest.raises(ShapeError):
            fit_nested_intervals(bad, targets)
    with pytest.raises(InputError, match="without error"):
        fit_nested_intervals(features, torch.zeros(60).double())
    with pytest.raises(InputError, match="NaN"):
        fit_nested_intervals(features, targets * math.nan)
    with pytest.raises(DtypeError):
        fit_nested_intervals(features, targets.long())

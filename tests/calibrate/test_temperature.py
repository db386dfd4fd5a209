"""Temperatures against another optimiser, at their bounds, with and without caching, and on real logits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytime import Caching, Latest, Mixture, Product
from anytime.calibrate import Temperature, fit_temperature
from anytime.combine import Heaviside, Rule, Scaled, Tempered
from anytime.errors import FormatError, IntegrityError, LabelError, OptionError, ShapeError
from anytime.metrics import ece, histogram
from anytime.metrics.calibration import ECE_BINS

ROWS, CLASSES = 400, 5


def some(seed: int, exits: int = 3, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    logits = torch.randn(exits, ROWS, CLASSES, generator=generator) + torch.nn.functional.one_hot(labels, CLASSES)
    return scale * logits, labels


def real(shared: Path, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(shared / "reference" / f"msdnet-cifar{classes}-val.npz") as file:
        return torch.from_numpy(file["logits"]).float(), torch.from_numpy(file["labels"].astype(np.int64))


def plain_nll(probs: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    """Of probabilities at a temperature, with the floor, written from the formula."""
    raised = probs ** (1 / temperature)
    label = (raised / raised.sum(-1, keepdims=True))[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(label, 1e-12)).mean())


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.floats(-1.5, 1.5))
def test_it_is_the_optimum_of_a_fine_grid(seed: int, size: float) -> None:
    logits, labels = some(seed, exits=1, scale=10**size)
    found = fit_temperature(logits, labels)
    probs = logits[0].double().softmax(-1).numpy()
    grid = found.temperatures[0] * np.exp(np.linspace(-0.5, 0.5, 201))
    losses = [plain_nll(probs, labels.numpy(), float(temperature)) for temperature in grid]
    if not found.at_bound[0]:
        assert int(np.argmin(losses)) == 100
    assert found.nll_after[0] <= min(losses) + 1e-9 or found.at_bound[0]
    assert math.isclose(found.nll_before[0], plain_nll(probs, labels.numpy(), 1.0), rel_tol=1e-9)


def test_it_agrees_with_another_optimiser() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    logits, labels = some(1)
    probs = logits.double().softmax(-1).numpy()
    for exit, temperature in enumerate(fit_temperature(logits, labels).temperatures):
        other = optimize.minimize_scalar(
            lambda value, exit=exit: plain_nll(probs[exit], labels.numpy(), value), bounds=(0.05, 20), method="bounded"
        )
        assert temperature == pytest.approx(other.x, rel=1e-4)


@pytest.mark.parametrize(
    "rule", [Product(), Product(weights="ones"), Mixture(), Caching("later"), Product(Heaviside())], ids=repr
)
def test_the_answers_of_any_rule_have_a_best_temperature(rule: Rule[Any]) -> None:
    logits, labels = some(2)
    found = fit_temperature(logits, labels, rule, bounds=(0.01, 1e4))
    scaled = isinstance(rule, Caching)
    probs = (logits.double().softmax(-1) if scaled else rule(logits.double()).probs).numpy()
    for exit, temperature in enumerate(found.temperatures):
        inside = probs[exit][np.arange(ROWS), labels.numpy()] > 0
        best = plain_nll(probs[exit][inside], labels.numpy()[inside], temperature)
        if not found.at_bound[exit]:
            for other in (0.98, 1.02):
                assert best <= plain_nll(probs[exit][inside], labels.numpy()[inside], other * temperature) + 1e-9
        assert found.nll_after[exit] == pytest.approx(plain_nll(probs[exit], labels.numpy(), temperature), rel=1e-6)
    assert found.rule == (Scaled(rule, found.temperatures) if scaled else Tempered(rule, found.temperatures))


def test_labels_outside_the_support_do_not_move_the_temperature() -> None:
    logits, labels = some(3)
    inside = (Product()(logits).log_probs.gather(-1, labels.expand(3, -1)[..., None])[..., 0] > -math.inf).all(0)
    assert 0 < inside.sum() < ROWS
    all_rows = fit_temperature(logits[:1], labels, Product())
    kept = Product()(logits[:1]).log_probs[0].gather(-1, labels[:, None])[:, 0] > -math.inf
    fewer = fit_temperature(logits[:1, kept], labels[kept], Product())
    assert all_rows.temperatures == pytest.approx(fewer.temperatures, rel=1e-9)
    assert all_rows.nll_after[0] > fewer.nll_after[0]


def test_a_temperature_at_a_bound_is_reported() -> None:
    labels = torch.arange(20) % 4
    right = torch.nn.functional.one_hot(labels, 4).float()[None]
    right_fit, wrong, flat = fit_temperature(right, labels), fit_temperature(-right, labels), fit_temperature(0 * right, labels)
    assert (right_fit.temperatures, right_fit.at_bound) == ((pytest.approx(0.01),), (True,))
    assert (wrong.temperatures, wrong.at_bound) == ((pytest.approx(100.0),), (True,))
    assert (flat.temperatures, flat.at_bound) == ((1.0,), (False,))
    logits, labels = some(4)
    inside = fit_temperature(logits, labels)
    assert not any(inside.at_bound)
    narrow = fit_temperature(logits, labels, bounds=(0.5, inside.temperatures[0] - 0.5))
    assert narrow.at_bound[0]
    assert narrow.temperatures[0] == pytest.approx(inside.temperatures[0] - 0.5)
    above = fit_temperature(logits, labels, bounds=(1.5, 50.0))
    assert above.temperatures == pytest.approx(inside.temperatures, rel=1e-6)


def test_a_known_temperature_is_found_again() -> None:
    generator = torch.Generator().manual_seed(0)
    honest = 2 * torch.randn(40_000, 3, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(honest.softmax(-1), 1, generator=generator)[:, 0]
    found = fit_temperature(torch.stack((honest, 3 * honest, honest / 4)), labels)
    assert found.temperatures == pytest.approx((1.0, 3.0, 0.25), rel=0.03)


@pytest.mark.parametrize("size", [1e-30, 1e8, 1e30, 3e38])
def test_hostile_logits_give_usable_temperatures(size: float) -> None:
    logits, labels = some(5)
    found = fit_temperature((logits / logits.abs().max() * size).float(), labels)
    assert found.rule(logits).probs.isfinite().all()
    assert all(after <= before + 1e-9 for before, after in zip(found.nll_before, found.nll_after, strict=True))


def test_temperatures_of_the_softmax_serve_any_rule_and_those_of_a_rule_only_that() -> None:
    logits, labels = some(6)
    plain, cached = fit_temperature(logits, labels), fit_temperature(logits, labels, Caching())
    assert plain.temperatures == pytest.approx(cached.temperatures)
    assert plain.rule == Scaled(Latest(), plain.temperatures)
    assert plain.rule_for(Caching()) == Scaled(Caching(), plain.temperatures)
    assert cached.rule == Scaled(Caching(), cached.temperatures)
    product = fit_temperature(logits, labels, Product())
    assert product.rule_for(Product()) == product.rule == Tempered(Product(), product.temperatures)
    with pytest.raises(OptionError, match="these temperatures were fitted"):
        product.rule_for(Product(weights="ones"))


def test_it_comes_back_from_its_file_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    logits, labels = some(7)
    for rule in (None, Caching(), Product()):
        found = fit_temperature(logits, labels, rule)
        path = found.save(tmp_path / "temperature.json")
        again = Temperature.load(path)
        assert again == found
        torch.testing.assert_close(again.rule(logits).log_probs, found.rule(logits).log_probs)
    path.write_text(path.read_text().replace("0.", "1.", 1))
    with pytest.raises((IntegrityError, FormatError)):
        Temperature.load(path)


def test_other_sizes_are_refused() -> None:
    logits, labels = some(8)
    found = fit_temperature(logits, labels)
    with pytest.raises(ShapeError, match="2 exits and 5 classes"):
        found.check_fits(2, 5)
    with pytest.raises(ShapeError, match="3 exits and 6 classes"):
        found.check_fits(3, 6)
    with pytest.raises(OptionError, match="fitted for 3 exits and got 2"):
        found.rule(logits[:2])
    with pytest.raises(OptionError, match="fitted for 3 exits and got 4"):
        Temperature(4, 5, "latest", found.temperatures, found.at_bound, found.nll_before, found.nll_after, 10)


def test_wrong_calls_are_refused() -> None:
    logits, labels = some(9)
    for bounds in ((2.0, 1.0), (0.0, 1.0), (1.0, math.inf), (1.0, 1.0), 3, "ab", (1.0, 2.0, 3.0)):
        with pytest.raises(OptionError, match="bounds are"):
            fit_temperature(logits, labels, bounds=bounds)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"Product\(\), not Product"):
        fit_temperature(logits, labels, Product)  # type: ignore[arg-type]
    with pytest.raises(LabelError, match="no rows"):
        fit_temperature(logits[:, :0], labels[:0])
    with pytest.raises(LabelError, match=r"^400 labels for the logits of 399 inputs"):
        fit_temperature(logits[:, 1:], labels)
    never = torch.tensor([[[1.0, -1.0]], [[1.0, -1.0]]])
    with pytest.raises(LabelError, match="at exit 1 the rule gives probability 0 to every label"):
        fit_temperature(never, torch.tensor([1]), Product())


@pytest.mark.parametrize(("classes", "limit"), [(100, 0.03), (10, 0.02)])
def test_every_exit_is_calibrated_on_rows_not_fitted_on(shared: Path, classes: int, limit: float) -> None:
    # On 2,500 rows even labels drawn from the probabilities themselves have an ECE of .017 to .025 (100 classes) and .011 to
    # .015 (10 classes), by the noise of the bins. So each half is measured at the other's temperatures, and both are pooled.
    logits, labels = real(shared, classes)
    for seed in range(3):
        halves = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).chunk(2)
        tables = torch.zeros(3, len(logits), ECE_BINS, 3, dtype=torch.float64)
        for fit, test in (halves, halves[::-1]):
            found = fit_temperature(logits[:, fit], labels[fit])
            for table, rule in zip(tables, (found.rule, found.rule_for(Caching()), Caching()), strict=True):
                given = rule(logits[:, test])
                table += histogram(given.confidence, given.labels == labels[test], ECE_BINS)
        scaled, scaled_caching, caching = ece(tables.flatten(0, 1)).view(3, -1)
        assert scaled.max() <= limit
        assert scaled_caching.mean() < caching.mean()


def test_a_temperature_leaves_the_accuracy_of_the_latest_exit_as_it_was() -> None:
    logits, labels = some(10)
    assert torch.equal(fit_temperature(logits, labels).rule(logits).labels, Latest()(logits).labels)

"""The fitted product: an optimum of its loss, and on real logits the trade that it was made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anytime
from anytime import Caching, Product
from anytime.calibrate import FittedProduct, fit_product, fit_temperature
from anytime.combine import Scaled
from anytime.errors import FormatError, IntegrityError, LabelError, OptionError, ShapeError
from anytime.fitted import _checksum


def some(seed: int, *, exits: int = 4, rows: int = 500, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Exits that err on their own, over a noise they fraction."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    shared = torch.randn(rows, classes, generator=generator) + torch.nn.functional.one_hot(labels, classes)
    return 4 * (shared + torch.randn(exits, rows, classes, generator=generator)), labels


def real(shared: Path, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(shared / "reference" / f"msdnet-cifar{classes}-val.npz") as file:
        return torch.from_numpy(file["logits"]).float(), torch.from_numpy(file["labels"].astype(np.int64))


def plain_loss(
    logits: np.ndarray, labels: np.ndarray, past: Any, now: Any, ignored: float, margin: float | None = None
) -> tuple[float, float]:
    """NLL and penalised drop from the formulas, pair of exits by pair of exits."""
    rows = np.arange(len(labels))
    curves, before = [], np.ones(logits.shape[1:])
    for m, scores in enumerate(logits.astype(np.float64)):
        raised = np.exp(scores - scores.max(-1, keepdims=True))
        softmax = raised / raised.sum(-1, keepdims=True)
        after = (before ** past[m] if m else before) * softmax ** now[m]
        after = after / after.sum(-1, keepdims=True)
        if m and margin is not None:
            odds, was = (np.log(probs.max(-1) / (1 - probs.max(-1))) for probs in (after, before))
            held = (after.argmax(-1) == before.argmax(-1)) & (odds < was + margin)
            after = np.where(held[:, None], before, after)
        before = after
        curves.append(before[rows, labels])
    drops = np.zeros(len(labels))
    for early in range(len(curves)):
        for late in range(early, len(curves)):
            drops = np.maximum(drops, curves[early] - curves[late])
    return float(-np.log(curves).mean()), float(np.maximum(drops - ignored, 0).mean())


@pytest.mark.parametrize(("penalty", "ignored"), [(0.0, 0.0), (3.0, 0.0), (10.0, 0.1)])
def test_what_it_reports_is_the_formula_and_no_neighbour_is_better(penalty: float, ignored: float) -> None:
    logits, labels = some(0)
    found = fit_product(logits, labels, penalty=penalty, ignored=ignored, margin=None)
    nll, drop = plain_loss(logits.numpy(), labels.numpy(), found.past, found.now, ignored)
    assert found.nll == pytest.approx(nll, rel=1e-4)
    assert found.drop == pytest.approx(drop, abs=1e-5)
    assert found.loss == pytest.approx(nll + penalty * drop, rel=1e-4)
    assert found.loss < found.loss_before
    rng = np.random.default_rng(0)
    for size in (0.003, 0.03, 0.3):
        for _ in range(20):
            past, now = (np.array(power) * np.exp(size * rng.standard_normal(4)) for power in (found.past, found.now))
            other_nll, other_drop = plain_loss(logits.numpy(), labels.numpy(), past, now, ignored)
            assert found.loss <= other_nll + penalty * other_drop + 1e-4


@pytest.mark.parametrize("margin", [0.0, 1.0])
@pytest.mark.parametrize(("penalty", "ignored"), [(0.0, 0.0), (1.0, 0.0), (10.0, 0.1)])
def test_with_held_answers_what_it_reports_is_the_formula(penalty: float, ignored: float, margin: float) -> None:
    logits, labels = some(0)
    found = fit_product(logits, labels, penalty=penalty, ignored=ignored, margin=margin)
    nll, drop = plain_loss(logits.numpy(), labels.numpy(), found.past, found.now, ignored, margin)
    assert found.rule.margin == margin
    assert found.loss == pytest.approx(nll + penalty * drop, abs=1e-3)  # in float32 rounding may decide whether a row is held
    assert found.loss < found.loss_before


@pytest.mark.parametrize("initial", [(0.95, 0.05), (0.5, 0.4), (0.1, 0.8)])
def test_with_held_answers_other_initial_powers_end_at_a_similar_loss(
    shared: Path, monkeypatch: pytest.MonkeyPatch, initial: tuple[float, float]
) -> None:
    logits, labels = real(shared, 10)
    first = fit_product(logits, labels, penalty=1.0, margin=1.0)
    monkeypatch.setattr("anytime.calibrate.product._FIRST_PAST", initial[0])
    monkeypatch.setattr("anytime.calibrate.product._FIRST_NOW", initial[1])
    assert fit_product(logits, labels, penalty=1.0, margin=1.0).loss == pytest.approx(first.loss, abs=5e-3)


def test_without_a_penalty_it_is_at_least_as_likely_as_temperatures_alone() -> None:
    logits, labels = some(1)
    temperatures = fit_temperature(logits, labels)
    assert fit_product(logits, labels, penalty=0).nll <= np.mean(temperatures.nll_after) + 1e-6


def test_one_exit_is_temperature_scaling() -> None:
    logits, labels = some(2, exits=1)
    found = fit_product(logits, labels)
    assert found.past == (1.0,)
    assert found.now[0] == pytest.approx(1 / fit_temperature(logits, labels).temperatures[0], rel=1e-2)
    assert found.drop == 0


def test_a_larger_penalty_drops_less_and_is_less_likely() -> None:
    logits, labels = some(3)
    found = [fit_product(logits, labels, penalty=penalty) for penalty in (0.0, 1.0, 10.0)]
    assert found[0].drop > found[1].drop > found[2].drop
    assert found[0].nll < found[1].nll < found[2].nll


def test_the_same_rows_give_the_same_powers_in_any_mode() -> None:
    logits, labels = some(4)
    first = fit_product(logits, labels, margin=None)
    with torch.no_grad():
        again = fit_product(logits.numpy(), labels.numpy(), margin=None)
    with torch.inference_mode():
        inference = fit_product(logits, labels, margin=None)
    for other in (again, inference):  # L-BFGS amplifies rounding in the powers, not in the loss
        assert other.loss == pytest.approx(first.loss, rel=1e-5)
        assert (*other.past, *other.now) == pytest.approx((*first.past, *first.now), abs=1e-2)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    for margin in (None, 1.0):
        one = fit_product(logits, labels, margin=margin)
        shuffled = fit_product(logits[:, order], labels[order], margin=margin)
        assert shuffled.loss == pytest.approx(one.loss, abs=1e-3)


@pytest.mark.parametrize("margin", [None, 1.0])
def test_rows_in_blocks_are_the_rows_at_once(monkeypatch: pytest.MonkeyPatch, margin: float | None) -> None:
    logits, labels = some(5)
    whole = fit_product(logits, labels, margin=margin)
    monkeypatch.setattr("anytime.calibrate.product._BLOCK", 64)
    assert fit_product(logits, labels, margin=margin).loss == pytest.approx(whole.loss, abs=1e-3)


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e8, 1e38])
@pytest.mark.parametrize("rows", [1, 2, 30])
def test_hostile_rows_give_a_usable_rule(size: float, rows: int) -> None:
    logits, labels = some(6, rows=rows)
    hostile = (logits / 20 * size).float()
    for penalty, margin in ((0.0, None), (0.0, 1.0), (3.0, None), (3.0, 0.0), (1e6, None), (1e6, 1e6)):
        found = fit_product(hostile, labels, penalty=penalty, margin=margin)
        assert np.isfinite([found.nll, found.drop, found.loss_before, *found.past, *found.now]).all()
        assert found.rule(logits).probs.isfinite().all()


def test_it_comes_back_from_its_file_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    logits, labels = some(7, rows=50)
    found = fit_product(logits, labels)
    path = found.save(tmp_path / "powers.json")
    again = FittedProduct.load(path)
    assert again == found
    torch.testing.assert_close(again.rule(logits).log_probs, found.rule(logits).log_probs)
    assert anytime.parse_rule(repr(again.rule)) == found.rule
    path.write_text(path.read_text().replace("0.", "1.", 1))
    with pytest.raises((IntegrityError, FormatError)):
        FittedProduct.load(path)


def test_a_file_from_before_answers_could_be_held_is_read(tmp_path: Path) -> None:
    logits, labels = some(7, rows=50)
    found = fit_product(logits, labels, margin=None)
    document = found.document()
    fields = {name: value for name, value in document["fields"].items() if name != "margin"}
    body = {"format": document["format"], "version": 2, "kind": found.kind, "fields": fields}
    path = tmp_path / "powers.json"
    path.write_text(json.dumps({**body, "sha256": _checksum(body)}))
    assert FittedProduct.load(path) == found


def test_other_sizes_are_refused() -> None:
    logits, labels = some(8, rows=50)
    found = fit_product(logits, labels)
    for exits, classes in ((3, 5), (4, 6)):
        with pytest.raises(ShapeError, match=f"{exits} exits and {classes} classes"):
            found.check_fits(exits, classes)
    with pytest.raises(OptionError, match="fitted for 4 exits and got 3"):
        found.rule(logits[:3])


@pytest.mark.parametrize(
    "options",
    [
        {"penalty": -1},
        {"penalty": float("nan")},
        {"penalty": float("inf")},
        {"penalty": "3"},
        {"ignored": 1.0},
        {"ignored": -0.1},
        {"steps": 0},
        {"steps": True},
        {"steps": 2.5},
        {"margin": -1.0},
        {"margin": "1"},
        {"margin": True},
        {"margin": float("nan")},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    logits, labels = some(9, rows=10)
    with pytest.raises(OptionError, match=f"{next(iter(options))} is"):
        fit_product(logits, labels, **options)


def test_no_rows_are_refused() -> None:
    logits, labels = some(9, rows=10)
    with pytest.raises(LabelError, match="no rows"):
        fit_product(logits[:, :0], labels[:0])


def compare(logits: torch.Tensor, labels: torch.Tensor, seed: int) -> dict[str, dict[str, float]]:
    """The fitted product beside its rivals, all fitted on one random half and measured on the other."""
    fit, test = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).chunk(2)
    rules = {
        "fitted": fit_product(logits[:, fit], labels[fit]).rule,
        "caching": Caching(),
        "scaled caching": Scaled(Caching(), fit_temperature(logits[:, fit], labels[fit]).temperatures),
        "product": Product(),
    }
    found = anytime.evaluate(logits[:, test], labels[test], rules=rules).rules
    return {
        name: {
            "accuracy": float(np.mean(metrics.accuracy)),
            "drops": metrics.label_drop_percent["0.1"],
            "ece": float(np.mean(metrics.ece)),
            "worst ece": max(metrics.ece),
            "nll": float(np.mean(metrics.nll)),
        }
        for name, metrics in found.items()
    }


@pytest.mark.parametrize("seed", [0, 1])
def test_on_cifar100_it_dominates_caching_and_scaled_caching_on_rows_not_fitted_on(shared: Path, seed: int) -> None:
    found = compare(*real(shared, 100), seed)
    for rival in ("caching", "scaled caching"):
        assert found["fitted"]["accuracy"] > found[rival]["accuracy"]
        assert found["fitted"]["drops"] < found[rival]["drops"] / 2
        assert found["fitted"]["ece"] < found[rival]["ece"] * 0.7
        assert found["fitted"]["nll"] < found[rival]["nll"] - 0.05
    assert found["fitted"]["worst ece"] < 0.14
    assert found["fitted"]["drops"] < 6
    assert found["fitted"]["ece"] < found["product"]["ece"] / 5


def test_on_cifar10_it_halves_the_drops_of_caching_and_of_the_product(shared: Path) -> None:
    found = compare(*real(shared, 10), 0)
    for rival in ("caching", "product"):
        assert found["fitted"]["drops"] < found[rival]["drops"] * 0.65
        assert found["fitted"]["ece"] < found[rival]["ece"] / 2
        assert found["fitted"]["nll"] < found[rival]["nll"]
        assert found["fitted"]["accuracy"] > found[rival]["accuracy"] - 0.01


def test_on_cifar10_held_answers_drop_less_than_without_and_than_scaled_caching_at_its_accuracy(shared: Path) -> None:
    logits, labels = real(shared, 10)
    fit, test = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).chunk(2)
    rules = {
        "holding": fit_product(logits[:, fit], labels[fit], penalty=1.0, margin=1.0).rule,
        "fitted": fit_product(logits[:, fit], labels[fit], penalty=1.0).rule,
        "scaled caching": fit_temperature(logits[:, fit], labels[fit]).rule_for(Caching()),
    }
    found = anytime.evaluate(logits[:, test], labels[test], rules=rules).rules
    holding = found.pop("holding")
    for name, share in (("fitted", 0.8), ("scaled caching", 1.0)):
        assert holding.label_drop_percent["0.05"] < share * found[name].label_drop_percent["0.05"]
        assert np.mean(holding.accuracy) > np.mean(found[name].accuracy) - 0.003
    assert np.mean(holding.ece) < np.mean(found["scaled caching"].ece)
    assert np.mean(holding.nll) < np.mean(found["scaled caching"].nll)

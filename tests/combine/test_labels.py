"""Labels are named before anything rounds, and log-odds order confidences that round to one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anytime
from anytime.combine import Arithmetic, Cached, Geometric, Powers, Rule, Scaled, Tempered
from anytime.metrics import follow
from anytime.testing import check_rule

EXITS, CLASSES = 4, 30
NUMBERS = (0.5, 1.0, 1.5, 2.0)
RULES: list[Rule[Any]] = [
    anytime.Latest(),
    anytime.Caching(),
    anytime.Product(),
    anytime.Product(anytime.combine.Sigmoid()),
    anytime.Product(anytime.combine.Softplus(), weights="ones"),
    anytime.Product(anytime.combine.Exponential()),
    anytime.Mixture(anytime.combine.Sigmoid()),
    anytime.Mixture(anytime.combine.Exponential()),
    Powers(NUMBERS, NUMBERS),
    Powers(NUMBERS, NUMBERS, margin=0.5),
    Geometric.plain(EXITS),
    Arithmetic.plain(EXITS),
    Scaled(anytime.Product(anytime.combine.Sigmoid()), NUMBERS),
    Tempered(anytime.Product(anytime.combine.Sigmoid()), NUMBERS),
    Cached(anytime.Product(anytime.combine.Sigmoid())),
]


def logits_of(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(EXITS, 400, CLASSES, generator=generator)
    match kind:
        case "saturated":  # what a trained network gives: many classes with large logits
            return 6 * logits + 14
        case "tiny":  # what an untrained network gives
            return 1e-6 * logits
        case "huge":
            return 1e3 * logits
    return logits


@pytest.mark.parametrize("kind", ["usual", "saturated"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_float32_names_the_labels_of_float64(rule: Rule[Any], kind: str) -> None:
    logits = logits_of(kind)
    assert float((rule(logits).labels != rule(logits.double()).labels).double().mean()) < 0.002


@pytest.mark.parametrize("kind", ["tiny", "huge"])
@pytest.mark.parametrize("rule", [RULES[place] for place in (0, 2, 3, 5, 8, 9)], ids=repr)
def test_logits_that_normalising_would_round_to_ties_keep_their_order(rule: Rule[Any], kind: str) -> None:
    logits = logits_of(kind)
    assert float((rule(logits).labels != rule(logits.double()).labels).double().mean()) < 0.002


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_the_label_is_a_most_probable_class_everywhere_it_is_read(rule: Rule[Any]) -> None:
    logits = logits_of("saturated")
    prediction = rule(logits)
    assert torch.equal(prediction.log_probs.gather(-1, prediction.labels[..., None])[..., 0], prediction.log_probs.amax(-1))
    assert torch.equal(follow(prediction).answer, prediction.labels)
    assert torch.equal(rule.after(logits[:2], EXITS).labels, prediction.labels[1])
    state = rule.start(EXITS)
    for exit, now in enumerate(logits):
        state, step = rule.step(state, now)
        assert torch.equal(step.labels, prediction.labels[exit])


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
def test_the_sigmoid_product_loses_no_accuracy_to_rounding_on_the_reference_logits(shared: Path, dataset: str) -> None:
    with np.load(shared / "reference" / f"msdnet-{dataset}-val.npz") as file:
        logits, labels = torch.from_numpy(file["logits"]), torch.from_numpy(file["labels"].astype(np.int64))
    for rule in (anytime.Product(anytime.combine.Sigmoid()), anytime.Mixture(anytime.combine.Sigmoid())):
        right = [(rule(given).labels == labels).double().mean(1) for given in (logits.float(), logits.double())]
        torch.testing.assert_close(right[0], right[1], rtol=0, atol=5e-4)
        found = anytime.evaluate(logits, labels, rules=[rule], sets=None)
        assert next(iter(found.rules.values())).accuracy == pytest.approx(right[0].tolist())


def test_a_prediction_without_labels_names_the_most_probable_class() -> None:
    log_probs = torch.tensor([[[0.2, 0.5, 0.3]]]).log()
    assert anytime.Prediction(log_probs, torch.zeros(1, 1, dtype=torch.bool)).labels.tolist() == [[1]]
    many = torch.randn(3, 500, 20).log_softmax(-1)
    assert torch.equal(anytime.Prediction(many, torch.zeros(3, 500, dtype=torch.bool)).labels, many.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_odds_are_those_of_exact_arithmetic_and_never_saturate(dtype: torch.dtype) -> None:
    gaps = [0.0, 1e-3, 0.5, 5.0, 20.0, 60.0, 90.0, 104.0, 500.0, 1e4, 1e30]
    logits = torch.tensor([[[gap, 0.0, -1.0] for gap in gaps]], dtype=dtype)
    odds = anytime.Latest()(logits).log_odds[0]
    wanted = [gap - math.log1p(math.exp(-1)) for gap in gaps]
    assert odds.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    assert bool((odds.diff() > 0).all())
    alone = anytime.Prediction(torch.tensor([[[0.0, -torch.inf]]]), torch.zeros(1, 1, dtype=torch.bool)).log_odds
    assert bool(alone.isfinite().all())
    assert float(alone) > 1e38


def test_log_odds_do_not_depend_on_the_order_of_the_classes() -> None:
    logits = logits_of("usual")
    order = torch.randperm(CLASSES, generator=torch.Generator().manual_seed(1))
    for rule in (anytime.Latest(), anytime.Caching()):
        torch.testing.assert_close(rule(logits).log_odds, rule(logits[..., order]).log_odds, rtol=1e-6, atol=1e-6)


def test_caching_tells_confidences_apart_that_are_one_in_float32() -> None:
    logits = torch.tensor([[[150.0, 0.0]], [[0.0, 200.0]], [[180.0, 0.0]]])
    assert anytime.Caching()(logits).labels[:, 0].tolist() == [0, 1, 1]
    assert Cached(anytime.Latest())(logits).labels[:, 0].tolist() == [0, 1, 1]


def test_the_battery_finds_a_label_that_is_not_the_most_probable() -> None:
    class Contrary(anytime.Latest):
        def _update(self, state: Any, logits: torch.Tensor) -> Any:
            after, answer = super()._update(state, logits)
            return after, anytime.Prediction(answer.log_probs, answer.fell_back, logits.argmin(-1))

    with pytest.raises(anytime.errors.CheckError, match="not a most probable class"):
        check_rule(Contrary())

"""Laws of the rules, over shapes, element types and hostile values."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anytime
from anytime.combine import Rule
from anytime.testing import check_rule
from anytime.testing.rules import steps
from anytime.testing.strategies import logits

RULES = [
    anytime.parse_rule(text)
    for text in (
        "latest",
        "caching",
        "caching(ties=later)",
        "product",
        "product(weights=ones)",
        "product(shift='1/K')",
        "product(heaviside)",
        "product(heaviside(-1.5))",
        "product(clipped(2))",
        "product(clipped(1e-6))",
        "product(softplus, weights=ones)",
        "product(sigmoid)",
        "product(exponential)",
        "product(threshold(1.5))",
        "product(threshold(1.5, mode=clamp))",
        "product(adaptive(2, (1.0,), 0.5))",
        "product(adaptive(2, (1.0,), 0.5, mode=clamp))",
        "mixture",
        "mixture(softplus)",
        "mixture(heaviside, weights=linear)",
        "mixture(exponential)",
    )
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)


@every_rule
def test_rule_passes_the_battery(rule: Rule) -> None:
    check_rule(rule)


@every_rule
@settings(max_examples=40)
@given(logits())
def test_outputs_are_distributions_and_input_is_unchanged(rule: Rule, values: torch.Tensor) -> None:
    kept = values.clone()
    prediction = rule(values)
    assert torch.equal(values, kept)
    assert prediction.log_probs.shape == values.shape
    assert not prediction.log_probs.isnan().any()
    assert (prediction.log_probs <= 1e-6).all()
    assert torch.allclose(
        prediction.log_probs.double().exp().sum(-1), torch.ones(values.shape[:2], dtype=torch.float64), atol=1e-4
    )


@every_rule
@settings(max_examples=25)
@given(logits())
def test_stepping_equals_the_call(rule: Rule, values: torch.Tensor) -> None:
    whole = rule(values)
    for exit, prediction in enumerate(steps(rule, values)):
        torch.testing.assert_close(prediction.log_probs, whole.log_probs[exit])
        assert torch.equal(prediction.fell_back, whole.fell_back[exit])


@every_rule
def test_state_is_a_few_times_batch_by_classes(rule: Rule) -> None:
    state = rule.start(8)
    for _ in range(8):
        state, _ = rule.step(state, torch.randn(5, 40))
    held = [getattr(state, field.name) for field in fields(state)]
    assert sum(value.numel() for value in held if isinstance(value, torch.Tensor)) <= 2 * 5 * 40


@pytest.mark.parametrize("text", ["relu", "heaviside", "clipped(2)", "threshold(1)", "adaptive(2, (1.0,), 0.5)"])
@settings(max_examples=60)
@given(values=logits(max_classes=50))
def test_product_support_never_grows(text: str, values: torch.Tensor) -> None:
    prediction = anytime.parse_rule(f"product({text})")(values)
    inside = prediction.log_probs > -math.inf
    stays = prediction.fell_back[1:, :, None] | inside[:-1] | ~inside[1:]
    assert stays.all()
    assert (prediction.fell_back[:-1] <= prediction.fell_back[1:]).all()


def test_hard_product_is_monotone_on_its_final_support_by_enumeration() -> None:
    # Every pattern of votes: 4 exits, 3 classes, no tolerance.
    votes = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=12))).reshape(-1, 4, 3).permute(1, 0, 2)
    for weights in ("linear", "ones", (0.3, 7.0, 0.0, 1.1)):
        prediction = anytime.Product(anytime.combine.Heaviside(), weights=weights)(votes)
        final = ~prediction.fell_back[-1][:, None] & (prediction.log_probs[-1] > -math.inf)
        rises = prediction.log_probs[1:] >= prediction.log_probs[:-1]
        assert rises.all(0)[final].all()
        assert final.any()


@settings(max_examples=80)
@given(logits(max_classes=30), st.floats(-3, 3))
def test_hard_product_is_monotone_on_its_final_support(values: torch.Tensor, threshold: float) -> None:
    prediction = anytime.Product(anytime.combine.Heaviside(threshold))(values)
    final = ~prediction.fell_back[-1][:, None] & (prediction.log_probs[-1] > -math.inf)
    rises = (prediction.log_probs[1:] >= prediction.log_probs[:-1]).all(0)
    assert rises[final].all()


@settings(max_examples=40)
@given(logits(max_classes=40))
def test_caching_confidence_never_falls(values: torch.Tensor) -> None:
    confidence = anytime.Caching()(values).log_probs.amax(-1)
    assert (confidence[1:] >= confidence[:-1] - 1e-6).all()


@settings(max_examples=40)
@given(logits(max_classes=40))
def test_first_product_answers_as_the_softmax(values: torch.Tensor) -> None:
    first = values[0].float()
    prediction = anytime.Product()(values)
    chosen = first.gather(-1, prediction.labels[0][:, None])[:, 0]
    best = first.amax(-1)
    # Up to the rounding of the logarithm, which may merge neighbouring floats.
    assert torch.where(best > 0, chosen >= best * (1 - 1e-5), True).all()


@settings(max_examples=30)
@given(logits(max_exits=5, max_classes=30))
def test_an_exit_of_weight_zero_changes_nothing(values: torch.Tensor) -> None:
    exits = len(values)
    weights = tuple((exit + 1) / exits for exit in range(exits))
    extra = torch.cat((values, torch.randn_like(values[:1].float()).to(values.dtype)))
    with_extra = anytime.Product(weights=(*weights, 0.0))(extra)
    without = anytime.Product(weights=weights)(values)
    kept = ~with_extra.fell_back[-1]
    torch.testing.assert_close(with_extra.log_probs[-1][kept], without.log_probs[-1][kept])


@settings(max_examples=30)
@given(logits(max_classes=30))
def test_softplus_product_has_full_support(values: torch.Tensor) -> None:
    prediction = anytime.Product(anytime.combine.Softplus(), weights="ones")(values.clamp(-1e4, 1e4))
    assert not prediction.fell_back.any()
    assert (prediction.log_probs > -math.inf).all()


@settings(max_examples=30)
@given(logits(max_classes=30))
def test_a_vast_clip_limit_is_the_relu_and_a_tiny_one_the_heaviside(values: torch.Tensor) -> None:
    moderate = values.double().clamp(-1e30, 1e30)
    torch.testing.assert_close(
        anytime.parse_rule("product(clipped(1e38))")(moderate).log_probs, anytime.Product()(moderate).log_probs
    )
    apart = torch.where(moderate.abs() < 0.1, -1.0, moderate)
    tiny = anytime.parse_rule("product(clipped(1e-3))")(apart)
    hard = anytime.Product(anytime.combine.Heaviside())(apart)
    assert torch.allclose(tiny.probs, hard.probs, atol=1e-6)


@every_rule
def test_a_rule_survives_being_written_down(rule: Rule) -> None:
    assert anytime.parse_rule(repr(rule)) == rule


def test_members_of_an_ensemble_in_any_order_reach_the_same_product() -> None:
    members = torch.randn(5, 60, 10) * 3
    rule = anytime.Product(weights="ones")
    whole = rule(members)
    agreed = ~whole.fell_back[-1]
    assert agreed.any()
    for order in itertools.islice(itertools.permutations(range(5)), 20):
        other = rule(members[list(order)])
        assert torch.equal(other.fell_back[-1], whole.fell_back[-1])
        assert torch.allclose(other.probs[-1][agreed], whole.probs[-1][agreed], atol=1e-5)

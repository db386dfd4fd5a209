"""The fitted product against its formula, computed the plain way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytime import Caching, Latest, Product
from anytime.combine import Exponential, Powers, Scaled
from anytime.errors import OptionError
from anytime.testing import check_rule
from anytime.testing.strategies import logits

LOGITS = 3 * torch.randn(4, 50, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
CLOSE = LOGITS[0] + 0.2 * LOGITS
"""Exits that mostly agree."""
PAST, NOW = (1.0, 0.4, 1.3, 0.9), (0.5, 0.7, 0.1, 2.0)


def test_it_is_the_formula() -> None:
    given = Powers(PAST, NOW)(LOGITS)
    before = np.ones((50, 6))
    for m, scores in enumerate(LOGITS.numpy()):
        softmax = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        before = before ** (1.0 if m == 0 else PAST[m]) * softmax ** NOW[m]
        before = before / before.sum(-1, keepdims=True)
        np.testing.assert_allclose(given.probs[m], before, rtol=1e-9)
    assert not given.fell_back.any()


def test_the_first_power_of_the_past_is_not_used() -> None:
    torch.testing.assert_close(Powers((9.0, *PAST[1:]), NOW)(LOGITS).log_probs, Powers(PAST, NOW)(LOGITS).log_probs)


def test_powers_of_one_are_the_product_of_softmaxes() -> None:
    ones = (1.0,) * 4
    assert torch.allclose(Powers(ones, ones)(LOGITS).probs, Product(Exponential(), weights="ones")(LOGITS).probs)


def test_a_forgotten_past_is_the_latest_exit_at_a_temperature() -> None:
    forgetful = Powers((1e-6,) * 4, NOW)(LOGITS).probs
    scaled = Scaled(Latest(), tuple(1 / power for power in NOW))(LOGITS).probs
    assert torch.allclose(forgetful, scaled, atol=1e-4)


@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_a_held_answer_is_the_previous_one_where_the_new_one_is_not_more_certain_of_its_label(margin: float) -> None:
    past, powers = (1.0, 0.4, 0.7, 0.5), (0.5, 0.4, 0.2, 0.2)
    given = Powers(past, powers, margin)(CLOSE)
    before, kept = np.ones((50, 6)), 0
    for m, scores in enumerate(CLOSE.numpy()):
        softmax = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        now = before ** (1.0 if m == 0 else past[m]) * softmax ** powers[m]
        now = now / now.sum(-1, keepdims=True)
        if m > 0:
            held = (now.argmax(-1) == before.argmax(-1)) & (log_odds(now) < log_odds(before) + margin)
            kept += held.sum()
            now = np.where(held[:, None], before, now)
        before = now
        np.testing.assert_allclose(given.probs[m], before, rtol=1e-9)
    assert 10 < kept < 140


def log_odds(probs: np.ndarray) -> np.ndarray:
    return np.log(probs.max(-1) / (1 - probs.max(-1)))


@settings(max_examples=60)
@given(logits(max_exits=4), st.floats(0.01, 100), st.floats(0.01, 100), st.floats(0, 10))
def test_with_held_answers_a_label_that_stays_never_becomes_less_certain(
    values: torch.Tensor, past: float, now: float, margin: float
) -> None:
    prediction = Powers((past,) * len(values), (now,) * len(values), margin)(values)
    same = prediction.labels[1:] == prediction.labels[:-1]
    odds = prediction.log_odds.clamp(max=1e20)  # the state is clamped further out
    assert (odds[1:] >= odds[:-1] - 1e-4 * odds[:-1].abs().clamp(min=1))[same].all()


def test_where_the_exits_agree_a_forgotten_past_with_held_answers_is_caching_at_temperatures() -> None:
    agree = (CLOSE.argmax(-1) == CLOSE[0].argmax(-1)).all(0)
    held = Powers((1e-6,) * 4, NOW, margin=0.0)(CLOSE[:, agree]).probs
    cached = Scaled(Caching(), tuple(1 / power for power in NOW))(CLOSE[:, agree]).probs
    assert agree.sum() > 20
    torch.testing.assert_close(held, cached, atol=1e-4, rtol=1e-4)


@settings(max_examples=60)
@given(logits(max_exits=4), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.sampled_from([None, 0.0, 1.0, 1e6]))
def test_it_has_full_support_and_never_collapses(values: torch.Tensor, past: float, now: float, margin: float | None) -> None:
    exits = len(values)
    prediction = Powers((past,) * exits, (now,) * exits, margin)(values)
    assert (prediction.log_probs > -math.inf).all()
    assert not prediction.fell_back.any()


def test_where_every_class_is_ruled_out_by_some_exit_it_stays_a_distribution() -> None:
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([[[largest, -largest]], [[-largest, largest]]])
    assert torch.allclose(Powers((1.0, 1.0), (1.0, 1.0))(values).probs[1], torch.tensor([[0.5, 0.5]]))


@pytest.mark.parametrize("margin", [None, 0.5])
@pytest.mark.parametrize("exits", [1, 2, 8])
def test_it_passes_the_battery_for_its_number_of_exits(exits: int, margin: float | None) -> None:
    check_rule(Powers((0.7,) * exits, (0.4,) * exits, margin), exits=[exits])


@pytest.mark.parametrize("margin", [None, 0.5])
def test_its_state_is_as_large_as_the_products(margin: float | None) -> None:
    rule = Powers(PAST, NOW, margin)
    state, _ = rule.step(rule.start(4), LOGITS[0])
    theirs, _ = Product().step(Product().start(4), LOGITS[0])
    assert type(state) is type(theirs)
    assert state.memory is not None
    assert theirs.memory is not None
    assert state.memory.shape == theirs.memory.shape


@pytest.mark.parametrize(
    ("past", "now"), [((), ()), ((1.0,), (0.0,)), ((-1.0,), (1.0,)), ((math.nan,), (1.0,)), (1.0, (1.0,)), (("a",), (1.0,))]
)
def test_powers_that_make_no_sense_are_refused(past: Any, now: Any) -> None:
    with pytest.raises(OptionError, match=r"(past|now) is"):
        Powers(past, now)


@pytest.mark.parametrize("margin", [-0.1, math.nan, math.inf, "1", True])
def test_margins_that_make_no_sense_are_refused(margin: Any) -> None:
    with pytest.raises(OptionError, match="margin is"):
        Powers(PAST, NOW, margin)


def test_numbers_that_do_not_match_are_refused() -> None:
    with pytest.raises(OptionError, match="got 2 powers in past and 1"):
        Powers((1.0, 1.0), (1.0,))
    with pytest.raises(OptionError, match="Powers was fitted for 4 exits and got 3"):
        Powers(PAST, NOW)(LOGITS[:3])

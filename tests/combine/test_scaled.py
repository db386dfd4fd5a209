"""Rules around a rule, against their formulas computed the plain way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import anytime
from anytime import Caching, Latest, Mixture, Product
from anytime.combine import Cached, Powers, Rule, Scaled, Softplus, Tempered
from anytime.combine.named import name_of
from anytime.errors import OptionError, StateError
from anytime.testing import check_rule
from anytime.testing.rules import steps
from anytime.testing.strategies import logits

LOGITS = 3 * torch.randn(3, 200, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
T = (2.0, 0.5, 1.7)
INNER = [Latest(), Caching(), Product(), Product(Softplus(), weights="ones"), Mixture(), Cached(Product())]
AT_TEMPERATURE = pytest.mark.parametrize("kind", [Scaled, Tempered])


@pytest.mark.parametrize("inner", INNER, ids=repr)
def test_scaled_is_the_rule_on_divided_logits(inner: Rule[Any]) -> None:
    divided = LOGITS / torch.tensor(T, dtype=torch.float64)[:, None, None]
    given, wanted = Scaled(inner, T)(LOGITS), inner(divided)
    torch.testing.assert_close(given.log_probs, wanted.log_probs)
    assert torch.equal(given.fell_back, wanted.fell_back)


@pytest.mark.parametrize("inner", INNER, ids=repr)
def test_tempered_is_a_power_of_the_rules_answer(inner: Rule[Any]) -> None:
    given, plain = Tempered(inner, T)(LOGITS), inner(LOGITS)
    probs = plain.probs.numpy()
    for m in range(3):
        raised = probs[m] ** (1 / T[m])
        np.testing.assert_allclose(given.probs[m], raised / raised.sum(-1, keepdims=True), rtol=1e-9, atol=1e-12)
    assert torch.equal(given.fell_back, plain.fell_back)
    best, second = plain.probs.topk(2).values.unbind(-1)
    apart = best > second + 1e-9  # two exits that are sure of different classes tie in a mixture
    assert torch.equal(given.labels[apart], plain.labels[apart])
    assert torch.equal(given.log_probs == -math.inf, plain.log_probs == -math.inf)


@pytest.mark.parametrize("inner", INNER, ids=repr)
@pytest.mark.parametrize("ties", ["earlier", "later"])
def test_cached_is_the_most_confident_answer_so_far(inner: Rule[Any], ties: Any) -> None:
    # Soft enough that no two confidences round to one, so that plain probabilities can be compared.
    soft = LOGITS / 10
    given, plain = Cached(inner, ties)(soft), inner(soft)
    for row in range(soft.shape[1]):
        best = 0
        for m in range(3):
            newer = plain.confidence[m, row] - plain.confidence[best, row]
            if newer > 0 or (newer == 0 and ties == "later"):
                best = m
            torch.testing.assert_close(given.probs[m, row], plain.probs[best, row])
            assert given.fell_back[m, row] == plain.fell_back[best, row]


@settings(max_examples=60)
@given(logits())
def test_caching_is_cached_latest(values: torch.Tensor) -> None:
    odds = Latest()(values.double()).log_odds
    # Where two exits are equally confident but for rounding, which of them is kept is decided by it.
    gaps = (odds[:, None] - odds[None]).abs() + torch.eye(len(odds))[:, :, None] * odds.abs().add(1).amax(0)
    apart = gaps.amin((0, 1)) > 1e-4 * odds.abs().add(1).amax(0)
    for ties in ("earlier", "later"):
        one, other = Cached(Latest(), ties)(values), Caching(ties)(values)
        torch.testing.assert_close(one.log_probs[:, apart], other.log_probs[:, apart])


@settings(max_examples=60)
@given(logits())
def test_cached_confidence_never_falls(values: torch.Tensor) -> None:
    confidence = Cached(Product())(values).confidence
    assert (confidence.diff(dim=0) >= -1e-6).all()


@settings(max_examples=60)
@given(logits(max_classes=12))
def test_any_finite_logits_and_usable_temperatures_give_distributions(values: torch.Tensor) -> None:
    exits = len(values)
    rules: list[Rule[Any]] = [
        Powers(past, now, margin)
        for past in ((1e-6,) * exits, (1e6,) * exits)
        for now in ((1e-6,) * exits, (1e6,) * exits)
        for margin in (None, 0.0, 1e6)
    ]
    for temperature in (1e-6, 1.0, 1e6):
        rules += [kind(inner, (temperature,) * exits) for kind in (Scaled, Tempered) for inner in (Latest(), Product())]
    for rule in rules:
        prediction = rule(values)
        assert not prediction.log_probs.isnan().any()
        assert torch.allclose(prediction.probs.double().sum(-1), torch.ones(values.shape[:2], dtype=torch.float64), atol=1e-4)
        for exit, step in enumerate(steps(rule, values)):
            torch.testing.assert_close(step.log_probs, prediction.log_probs[exit])


@AT_TEMPERATURE
@pytest.mark.parametrize("inner", INNER, ids=repr)
def test_temperature_one_changes_nothing(kind: Any, inner: Rule[Any]) -> None:
    assert torch.allclose(kind(inner, (1.0,) * 3)(LOGITS).probs, inner(LOGITS).probs, atol=1e-12)


@pytest.mark.parametrize("inner", INNER, ids=repr)
def test_wrapped_rules_pass_the_battery(inner: Rule[Any]) -> None:
    check_rule(Scaled(inner, T), exits=[3])
    check_rule(Tempered(inner, T), exits=[3])
    check_rule(Cached(inner))
    check_rule(Cached(Tempered(Scaled(inner, T), T), ties="later"), exits=[3])


def test_the_state_is_the_inner_rules() -> None:
    for inner in INNER:
        for rule in (Scaled(inner, T), Tempered(inner, T)):
            assert type(rule.start(3)) is type(inner.start(3))
    with pytest.raises(StateError, match="expected: a CachingState"):
        Scaled(Caching(), T).step(Latest().start(3), LOGITS[0])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("scaled(caching, (1.2, 1.3))", Scaled(Caching(), (1.2, 1.3))),
        ("tempered(product, [0.5, 2])", Tempered(Product(), (0.5, 2.0))),
        ("cached(product)", Cached(Product())),
        ("Cached(inner=Mixture(), ties=later)", Cached(Mixture(), "later")),
        ("powers((1, 0.5), (0.5, 0.25))", Powers((1.0, 0.5), (0.5, 0.25))),
        ("powers((1, 0.5), (0.5, 0.25), margin=0.5)", Powers((1.0, 0.5), (0.5, 0.25), margin=0.5)),
        ("cached(tempered(product(softplus), (0.3,)))", Cached(Tempered(Product(Softplus()), (0.3,)))),
    ],
)
def test_they_are_written_and_read(text: str, wanted: Rule[Any]) -> None:
    assert anytime.parse_rule(text) == wanted
    assert anytime.parse_rule(repr(wanted)) == wanted
    assert anytime.parse_rule(name_of(wanted)) == wanted
    assert hash(anytime.parse_rule(text)) == hash(wanted)


@AT_TEMPERATURE
@pytest.mark.parametrize(
    "numbers", [(), 2.0, "12", (0.0,), (-1.0,), (math.nan,), (math.inf,), (True,), ("1",), (1e-9,), (1e9,)]
)
def test_temperatures_that_make_no_sense_are_refused(kind: Any, numbers: Any) -> None:
    with pytest.raises(OptionError, match="temperatures is"):
        kind(Latest(), numbers)


def test_tensors_and_lists_become_tuples() -> None:
    assert Scaled(Latest(), torch.tensor([1.0, 2.0])) == Scaled(Latest(), [1, 2]) == Scaled(Latest(), (1.0, 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("inner", ["product", Product, None, 3])
def test_what_is_no_rule_cannot_be_wrapped(inner: Any) -> None:
    for make in (lambda: Scaled(inner, T), lambda: Tempered(inner, T), lambda: Cached(inner)):
        with pytest.raises(OptionError, match="the inner rule is"):
            make()
    with pytest.raises(OptionError, match="the inner rule is 'nonsense'"):
        anytime.parse_rule("cached(nonsense)")
    with pytest.raises(OptionError, match="ties is 'never'"):
        Cached(Product(), "never")  # type: ignore[arg-type]


@AT_TEMPERATURE
def test_another_number_of_exits_is_refused(kind: Any) -> None:
    for exits in (2, 4):
        with pytest.raises(OptionError, match=f"{kind.__name__} was fitted for 3 exits and got {exits}"):
            kind(Product(), T).start(exits)
        with pytest.raises(OptionError, match=f"got {exits}"):
            Cached(kind(Product(), T)).start(exits)

"""Hostile magnitudes and gradients: every rule gives distributions and finite gradients, whatever finite numbers it gets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import anytime
from anytime.combine import AdaptiveReLU, Arithmetic, Cached, Geometric, Powers, Rule, Scaled, Tempered
from anytime.errors import OptionError

EXITS, ROWS, CLASSES = 3, 4, 5
ACTIVATIONS = [
    anytime.ReLU(),
    anytime.combine.Heaviside(),
    anytime.combine.ClippedReLU(0.5),
    anytime.combine.ClippedReLU(1e-300),
    anytime.combine.Softplus(),
    anytime.combine.Sigmoid(),
    anytime.combine.Exponential(),
    anytime.combine.ThresholdReLU(0.5),
    anytime.combine.ThresholdReLU(0.0, "clamp"),
    anytime.combine.ThresholdReLU(0.5, "clamp"),
    anytime.combine.ThresholdReLU(1e30),
    AdaptiveReLU(2.0, (0.5, -0.25, 1.0), 0.1),
    AdaptiveReLU(2.0, (1e6, -1e6, 1e6), 1e30, "clamp"),
    AdaptiveReLU(0.0, (0.5,), 0.1, "clamp"),
]
INNER: list[Rule[Any]] = [
    anytime.Latest(),
    anytime.Caching(),
    *(anytime.Product(activation) for activation in ACTIVATIONS),
    *(anytime.Mixture(activation) for activation in ACTIVATIONS),
    anytime.Product(shift="1/K"),
    anytime.Product(anytime.combine.Exponential(), weights=(1e6, 1e-6, 1e6)),
    anytime.Mixture(weights=(1e308, 1e308, 1e308)),
    anytime.Mixture(anytime.combine.Exponential(), weights=(1e-300, 1e308, 0.0)),
    anytime.Mixture(anytime.combine.Exponential(), weights=(5e-324, 1.0, 1e-300)),
    Powers((1.0, 1e6, 1e-6), (1e6, 1e6, 1e-6)),
    Powers((1.0, 1e6, 1e-6), (1e6, 1e6, 1e-6), margin=0.5),
    Powers((1.0, 1e-6, 1.0), (1.0, 1.0, 1e-6), margin=0.5),
    Geometric(((80.0,), (80.0, -80.0), (80.0, 80.0, 80.0))),
    Arithmetic(((80.0,), (-80.0, 80.0), (80.0, 80.0, -80.0))),
]
RULES = [
    *INNER,
    *(Scaled(rule, (1e-6, 1.0, 1e6)) for rule in (anytime.Latest(), anytime.Caching(), anytime.Product())),
    *(Tempered(rule, (1e-6, 1.0, 1e6)) for rule in (anytime.Latest(), anytime.Product(), anytime.Mixture())),
    *(Cached(rule) for rule in (anytime.Latest(), anytime.Product(), anytime.Product(anytime.combine.Sigmoid()))),
]


def special(dtype: torch.dtype) -> list[float]:
    """Numbers at the ends of what logits may be."""
    info, most = torch.finfo(dtype), 3e38 if dtype == torch.float32 else 1e300
    sizes = [0.0, info.smallest_normal, 5e-324, 1e-45, 1e-40, 1e-30, 1e-9, 1.0, 37.0, 104.0, 800.0, 1e8, 1e30, most, info.max]
    return [sign * size for size in sizes for sign in (1.0, -1.0)]


@st.composite
def hostile(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    values = st.sampled_from(special(dtype)) | st.floats(-20, 20)
    kind = draw(st.sampled_from(["any", "equal", "negative", "zero"]))
    if kind == "any":
        numbers = draw(st.lists(values, min_size=EXITS * ROWS * CLASSES, max_size=EXITS * ROWS * CLASSES))
    else:
        numbers = [{"equal": draw(values), "negative": -abs(draw(values)), "zero": 0.0}[kind]] * (EXITS * ROWS * CLASSES)
    return (
        torch.tensor(numbers, dtype=torch.float64)
        .clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        .to(dtype)
        .view(EXITS, ROWS, CLASSES)
    )


def check(prediction: anytime.Prediction, dtype: torch.dtype) -> None:
    log_probs = prediction.log_probs
    assert log_probs.dtype == dtype
    assert not log_probs.isnan().any()
    assert bool((log_probs <= 1e-6).all())
    assert bool((log_probs.amax(-1) > -math.inf).all()), "no class is left"
    torch.testing.assert_close(log_probs.double().exp().sum(-1), torch.ones(log_probs.shape[:-1]).double(), rtol=0, atol=1e-4)
    named = log_probs.gather(-1, prediction.labels[..., None])[..., 0]
    assert torch.equal(named, log_probs.amax(-1))
    assert bool(prediction.log_odds.isfinite().all())


@pytest.mark.parametrize("rule", RULES, ids=repr)
@settings(max_examples=25)
@given(logits=hostile())
def test_every_rule_gives_distributions(rule: Rule[Any], logits: Tensor) -> None:
    prediction = rule.combine(logits)
    check(prediction, logits.dtype)
    if isinstance(rule, anytime.Product) and isinstance(
        rule.activation, anytime.combine.Sigmoid | anytime.combine.Exponential | anytime.combine.Softplus
    ):
        assert not prediction.fell_back.any(), "evidence that is never zero was lost"


@pytest.mark.parametrize("rule", RULES, ids=repr)
@settings(max_examples=25)
@given(logits=hostile(), loss=st.sampled_from(["finite", "label", "sum"]))
def test_every_gradient_is_finite(rule: Rule[Any], logits: Tensor, loss: str) -> None:
    given_logits = logits.clamp(-1e8, 1e8).requires_grad_()
    log_probs = rule.combine(given_logits).log_probs
    match loss:
        case "finite":
            value = log_probs[log_probs.isfinite()].sum()
        case "label":
            value = -log_probs[..., 0].sum()
        case _:
            value = log_probs.exp().sum()
    if value.requires_grad:  # a Heaviside has none
        value.backward()  # type: ignore[no-untyped-call]
        assert given_logits.grad is None or bool(given_logits.grad.isfinite().all())


def test_a_collapsed_row_has_the_gradient_of_the_softmax_that_stands_in() -> None:
    logits = torch.tensor([[[-1.0, -2.0]], [[-3.0, -1.0]]], requires_grad=True)
    anytime.Product()(logits).log_probs[1, 0, 0].backward()  # type: ignore[no-untyped-call]
    plain = logits.detach().clone().requires_grad_()
    plain[1, 0].log_softmax(-1)[0].backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(logits.grad, plain.grad)


def test_gradients_of_survivors_are_as_they_were() -> None:
    logits = torch.tensor([[[2.0, 1.0, -1.0]], [[3.0, 0.5, 2.0]]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda values: anytime.Product()(values).probs, (logits,))  # type: ignore[no-untyped-call]
    assert torch.autograd.gradcheck(lambda values: anytime.Mixture()(values).probs, (logits,))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("weights", [(1e-50, 1.0), (1e308, 1.0), (5e-324, 1.0), (1e7, 1.0), (1.0, 1e-7)])
def test_a_product_refuses_weights_that_cannot_be_powers(weights: tuple[float, ...]) -> None:
    with pytest.raises(OptionError, match="weights") as caught:
        anytime.Product(weights=weights)
    assert "use 0" in caught.value.fix


def test_a_mixture_only_reads_the_ratios_of_its_weights() -> None:
    logits = 3 * torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    plain = anytime.Mixture(weights=(1.0, 2.0))(logits)
    for scale in (1e-300, 1e-30, 1e30, 5e307):
        found = anytime.Mixture(weights=(scale, 2 * scale))(logits)
        torch.testing.assert_close(found.probs, plain.probs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: anytime.Product(shift=1e308),
        lambda: anytime.combine.ThresholdReLU(1e39),
        lambda: anytime.combine.ThresholdReLU(1e39, "clamp"),
        lambda: anytime.combine.Heaviside(-1e39),
        lambda: AdaptiveReLU(1e308, (1.0,), 0.0),
        lambda: AdaptiveReLU(1.0, (1e308,), 0.0),
        lambda: AdaptiveReLU(1.0, (1.0,), 1e308),
    ],
)
def test_numbers_that_are_no_float32_are_refused(make: Any) -> None:
    with pytest.raises(OptionError):
        make()

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from anytime.combine import Product, Softplus
from anytime.errors import LabelError, OptionError
from anytime.train import TrainConfig, joint_cross_entropy, phases, product_likelihood

LOGITS = torch.tensor([[[0.0, 0.0], [1.0, -1.0]], [[2.0, 0.0], [0.0, 3.0]]], dtype=torch.float64)
LABELS = torch.tensor([0, 1])


def test_joint_cross_entropy_by_hand() -> None:
    first = (math.log(2) + math.log(1 + math.e**2)) / 2
    second = (math.log(1 + math.e**-2) + math.log(1 + math.e**-3)) / 2
    assert joint_cross_entropy(LOGITS, LABELS).tolist() == pytest.approx([first, second])
    assert joint_cross_entropy(LOGITS, LABELS, weights=(0.5, 2)).tolist() == pytest.approx([first / 2, 2 * second])


def softplus(value: float) -> float:
    return math.log(1 + math.exp(value))


def test_product_likelihood_by_hand() -> None:
    rows = [((0.0, 0.0), (2.0, 0.0), 0), ((1.0, -1.0), (0.0, 3.0), 1)]
    first = [-math.log(softplus(a[y]) / (softplus(a[0]) + softplus(a[1]))) for a, _, y in rows]
    evidence = [[softplus(a[c]) * softplus(b[c]) for c in (0, 1)] for a, b, _ in rows]
    second = [-math.log(e[y] / sum(e)) for e, (_, _, y) in zip(evidence, rows, strict=True)]
    assert product_likelihood(LOGITS, LABELS).tolist() == pytest.approx([sum(first) / 2, sum(second) / 2])


def test_product_likelihood_is_that_of_the_rule() -> None:
    logits, labels = 5 * torch.randn(4, 9, 6), torch.randint(0, 6, (9,))
    log_probs = Product(Softplus(), weights="ones")(logits).log_probs
    expected = [F.nll_loss(exit, labels) for exit in log_probs]
    torch.testing.assert_close(product_likelihood(logits, labels), torch.stack(expected))


@pytest.mark.parametrize("loss", [joint_cross_entropy, product_likelihood])
def test_gradients_agree_with_finite_differences(loss: object) -> None:
    logits = (3 * torch.randn(3, 4, 5, dtype=torch.float64)).requires_grad_()
    labels = torch.randint(0, 5, (4,))
    assert torch.autograd.gradcheck(lambda f: loss(f, labels, weights=(1.0, 0.5, 2.0)), (logits,))  # type: ignore[operator]


@pytest.mark.parametrize("loss", [joint_cross_entropy, product_likelihood])
def test_half_precision_logits_give_float32_losses_and_extremes_stay_finite(loss: object) -> None:
    logits = torch.tensor([[[300.0, -300.0]], [[-300.0, -300.0]]], dtype=torch.bfloat16, requires_grad=True)
    losses = loss(logits, torch.tensor([1]))  # type: ignore[operator]
    assert losses.dtype == torch.float32
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_finetuning_takes_the_product_for_the_last_third() -> None:
    plan = phases(TrainConfig(epochs=300, objective="joint-then-product"), exits=3, steps_per_epoch=10)
    assert [(phase.start, phase.name) for phase in plan] == [(0, "joint"), (2000, "product")]


@pytest.mark.parametrize("share", [0, 0.01])
def test_a_product_from_the_first_epoch_on_has_no_joint_phase(share: float) -> None:
    config = TrainConfig(epochs=10, objective="joint-then-product", product_from=share)
    assert [(phase.start, phase.name) for phase in phases(config, exits=3, steps_per_epoch=10)] == [(0, "product")]


@pytest.mark.parametrize("label", [-1, -100, 2])
@pytest.mark.parametrize("loss", [joint_cross_entropy, product_likelihood])
def test_a_label_that_is_not_a_class_is_an_error(loss: Any, label: int) -> None:
    """Also -100, which losses of torch leave out by default."""
    with pytest.raises(LabelError, match=str(label)):
        loss(LOGITS, torch.tensor([0, label]))


def test_exit_weights_must_fit_the_exits() -> None:
    with pytest.raises(OptionError, match="exit_weights"):
        phases(TrainConfig(exit_weights=(1.0, 1.0)), exits=3, steps_per_epoch=1)

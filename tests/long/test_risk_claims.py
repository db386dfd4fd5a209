"""The guarantees of risk control, checked by thousands of samples with known truth.

A population of rows is fixed. Calibration rows are drawn from it with replacement, so the true risk of a threshold is the mean
loss over the population, exactly. A test fails on a sound method with a probability of at most `ALARM`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import binom, norm
from torch import Tensor

import anytime
from anytime.policy import Confidence, exit_losses, fit_risk_control

ALARM = 1e-4
DELTA = 0.1
CALIBRATION = 150
DRAWS = [pytest.param(100, id="short"), pytest.param(2000, id="2000", marks=pytest.mark.long)]


def mixed() -> tuple[Tensor, Tensor]:
    """Rows whose answers change back and forth and whose confidences mislead: losses are not monotone in the threshold."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (3000,), generator=generator)
    ease = 3 * torch.rand(3000, 1, generator=generator)
    logits = 1.5 * torch.randn(4, 3000, 3, generator=generator, dtype=torch.float64)
    for exit, skill in enumerate((0.3, 0.6, 0.9, 1.2)):
        logits[exit] += skill * ease * torch.nn.functional.one_hot(labels, 3)
    return logits.log_softmax(-1), labels


def settling() -> tuple[Tensor, Tensor]:
    """Rows that change their answer once, for the last one: stopping earlier never loses less."""
    generator = torch.Generator().manual_seed(1)
    change = torch.randint(0, 4, (3000,), generator=generator) * (torch.rand(3000, generator=generator) < 0.5)
    settled = torch.arange(4)[:, None] >= change
    confidence = 0.5 + 0.5 * torch.rand(4, 3000, generator=generator, dtype=torch.float64) * (0.5 + 0.5 * settled)
    probs = torch.stack(
        (torch.where(settled, confidence, 1 - confidence), torch.where(settled, 1 - confidence, confidence)), -1
    )
    return probs.log(), torch.zeros(3000, dtype=torch.long)


def real() -> tuple[Tensor, Tensor]:
    """An MSDNet on images of CIFAR-100."""
    sample = anytime.samples.cifar100_msdnet()
    assert sample.labels is not None
    return anytime.Caching()(sample.logits[:]).log_probs, sample.labels


POPULATIONS = {"mixed": mixed(), "settling": settling(), "real": real()}


def true_risks(population: str, loss: Any, method: Any, epsilon: float, draws: int, **options: Any) -> Tensor:
    """The true risk of the threshold chosen on each draw."""
    log_probs, labels = POPULATIONS[population]
    losses, rows = exit_losses(log_probs, labels, loss), torch.arange(len(labels))
    generator = torch.Generator().manual_seed(2)
    known: dict[float, float] = {}
    risks = []
    for _ in range(draws):
        drawn = torch.randint(0, len(labels), (CALIBRATION,), generator=generator)
        found = fit_risk_control(
            log_probs[:, drawn], labels[drawn], loss=loss, epsilon=epsilon, delta=DELTA, method=method, **options
        )
        if found.threshold not in known:
            exits = Confidence(found.threshold, strict=True).apply(log_probs)
            known[found.threshold] = float(losses[exits - 1, rows].mean())
        risks.append(known[found.threshold])
    return torch.tensor(risks, dtype=torch.float64)


CLAIMS = [
    ("mixed", "gap", 0.05),
    ("mixed", "consistency", 0.15),
    ("mixed", "brier-gap", 0.1),
    ("mixed", "brier-consistency", 0.3),
    ("mixed", "hellinger", 0.15),
    ("settling", "consistency", 0.1),
    ("real", "consistency", 0.1),
]


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize(("population", "loss", "epsilon"), CLAIMS)
@pytest.mark.parametrize("method", ["ucb", "ltt"])
def test_the_risk_is_exceeded_no_more_often_than_guaranteed(
    method: str, population: str, loss: str, epsilon: float, draws: int
) -> None:
    exceeded = int((true_risks(population, loss, method, epsilon, draws) > epsilon).sum())
    assert exceeded <= binom.ppf(1 - ALARM, draws, DELTA)


def seems_above(values: Tensor, limit: float) -> bool:
    """Whether the mean of so many independent values speaks against an expectation of at most `limit`."""
    error = values.std() / len(values) ** 0.5
    return bool(values.mean() > limit + float(norm.isf(ALARM)) * error)


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize(("population", "loss", "epsilon"), CLAIMS)
def test_the_expected_risk_is_at_most_as_guaranteed(population: str, loss: str, epsilon: float, draws: int) -> None:
    envelope = population != "settling"
    assert not seems_above(true_risks(population, loss, "crc", epsilon, draws, envelope=envelope), epsilon)


def test_these_tests_notice_a_method_without_a_promise() -> None:
    """The naive threshold exceeds the risk about every other time, and on average too."""
    risks = true_risks("mixed", "gap", "naive", 0.05, 2000)
    assert int((risks > 0.05).sum()) > binom.ppf(1 - ALARM, 2000, DELTA)
    assert seems_above(risks, 0.05)


def test_the_bounds_are_not_idle() -> None:
    """The populations are hard enough that the exact test uses up a good part of the chance it is given."""
    exceeded = (true_risks("settling", "consistency", "ltt", 0.1, 300) > 0.1).double().mean()
    assert float(exceeded) > DELTA / 5

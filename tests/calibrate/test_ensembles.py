"""Fitting the learned ensembles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anytime
from anytime.calibrate.ensembles import fit_arithmetic, fit_geometric
from anytime.errors import InputError, OptionError

FITS = pytest.mark.parametrize("fit", [fit_geometric, fit_arithmetic])


def rows(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three exits: the first is good, the second is noise, the third is good in another way and biased to class 0."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (count,), generator=random)
    truth = torch.nn.functional.one_hot(labels, 5).float()
    noise = torch.randn(3, count, 5, generator=random)
    logits = torch.stack((2 * truth + noise[0], 2 * noise[1], 2 * truth + noise[2]))
    logits[2, :, 0] += 2.0
    return logits, labels


def loss(rule: Any, logits: Tensor, labels: Tensor) -> Tensor:
    return -rule(logits).log_probs[:, torch.arange(len(labels)), labels].mean(-1)


@FITS
def test_a_fitted_ensemble_beats_the_plain_one_on_other_rows(fit: Any) -> None:
    rule = fit(*rows(1000, 0), epochs=300, lr=0.03)
    plain, test = type(rule).plain(3), rows(1000, 1)
    fitted = loss(rule, *test)
    assert bool((fitted <= loss(plain, *test) + 0.01).all())
    assert fitted[1] < loss(plain, *test)[1] - 0.05
    assert fitted[2] < loss(anytime.Latest(), *test)[2] - 0.1


@FITS
def test_noise_is_weighed_down_and_bias_taken_back(fit: Any) -> None:
    rule = fit(*rows(1000, 0), epochs=200, lr=0.01)
    assert rule.log_weights[1][0] > rule.log_weights[1][1]
    if fit is fit_geometric:
        assert rule.biases[2][0] == min(rule.biases[2])


@FITS
def test_the_same_seed_gives_the_same_numbers(fit: Any) -> None:
    data = rows(100, 0)
    one, same, other = (torch.tensor(fit(*data, epochs=3, seed=seed).log_weights[2]) for seed in (0, 0, 1))
    torch.testing.assert_close(same, one)
    assert float((other - one).abs().max()) > 1e-3


@FITS
def test_it_begins_near_weights_of_one(fit: Any) -> None:
    rule = fit(*rows(100, 0), epochs=1, lr=1e-9)
    assert max(abs(v) for row in rule.log_weights for v in row) < 0.05
    assert max(abs(b) for row in rule.biases for b in row) < 1e-6


@FITS
def test_without_biases_any_number_of_classes_goes(fit: Any) -> None:
    rule = fit(*rows(100, 0), epochs=3, biases=False)
    assert rule.biases == ()
    assert rule(torch.randn(3, 2, 9)).probs.shape == (3, 2, 9)


@FITS
def test_training_and_rule_are_the_same_function(fit: Any) -> None:
    """A long fit ends where the loss of the rule itself is least."""
    logits, labels = rows(300, 0)
    rule = fit(logits, labels, epochs=800, batch=300, lr=0.03)
    best = loss(rule, logits, labels).sum()
    for m, row in enumerate(rule.log_weights):
        for step in (-0.3, 0.3):
            changed = list(rule.log_weights)
            changed[m] = (row[0] + step, *row[1:])
            assert best <= loss(type(rule)(tuple(changed), rule.biases), logits, labels).sum() + 1e-3


@FITS
def test_the_random_state_and_gradients_are_left_alone(fit: Any) -> None:
    state = torch.get_rng_state()
    with torch.no_grad():
        fit(*rows(50, 0), epochs=2)
    assert torch.equal(state, torch.get_rng_state())


@FITS
@pytest.mark.parametrize("options", [{"epochs": 0}, {"batch": 0}, {"batch": 1.5}, {"lr": 0.0}, {"lr": float("nan")}], ids=str)
def test_a_wrong_setting_is_named(fit: Any, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        fit(*rows(10, 0), **options)


@FITS
def test_rows_that_do_not_fit_are_refused(fit: Any) -> None:
    logits, labels = rows(10, 0)
    for wrong in ((logits[0], labels), (logits, labels[:5]), (logits, labels + 9), (logits[:, :0], labels[:0])):
        with pytest.raises(InputError):
            fit(*wrong)

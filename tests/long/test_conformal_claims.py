"""The guarantees of prediction sets, simulated: known truth, many samples, a stated probability of a false alarm.

Each assertion compares a count with the binomial distribution that the claim allows at worst, and fails with probability
`FALSE_ALARM` at most where the claim is true.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

import anytime
from anytime.conformal import (
    Raps,
    fit_conformal_sets,
    fit_nested_intervals,
    fit_nested_sets,
    rank_of,
    running_intersection,
    sort_rows,
)
from anytime.conformal.nested import log_gammas, log_ratio
from anytime.conformal.nested_intervals import LinearLayer, quadratic

FALSE_ALARM = 1e-6
ALPHA = 0.1


def several(short: int, long: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("draws", [short, pytest.param(long, marks=pytest.mark.long)])


def assert_fraction(hits: int, draws: int, *, least: float = 0.0, most: float = 1.0) -> None:
    """Refuse a count that is too rare for any fraction between `least` and `most`."""
    assert stats.binom.cdf(hits, draws, least) > FALSE_ALARM / 2, f"{hits / draws:.4f} of {draws}, at least {least} guaranteed"
    assert stats.binom.sf(hits - 1, draws, most) > FALSE_ALARM / 2, f"{hits / draws:.4f} of {draws}, at most {most} guaranteed"


def draw_rows(rng: np.random.Generator, *shape: int, classes: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of an overconfident model and labels of the truth behind it, `(..., classes)` and `(...)`."""
    truth = rng.normal(size=(*shape, classes)) * 1.5
    model = 2 * truth + rng.normal(size=(*shape, classes))
    labels = (truth + rng.gumbel(size=(*shape, classes))).argmax(-1)
    return torch.from_numpy(model).log_softmax(-1), torch.from_numpy(labels)


CLAIMS = {
    # (settings, calibration rows): the range of coverage, by the rank of the threshold among the scores.
    "raps, exact": (Raps(ALPHA, k_reg=2, quantile="exact"), 57, 1 - ALPHA, 1 - ALPHA + 1 / 58),
    "aps, exact": (Raps(ALPHA, lam_reg=0.0, quantile="exact"), 57, 1 - ALPHA, 1 - ALPHA + 1 / 58),
    "aps, original, exact": (
        Raps(ALPHA, lam_reg=0.0, variant="original", quantile="exact", empty=True),
        57,
        1 - ALPHA,
        1 - ALPHA + 1 / 58,
    ),
    "raps, paper": (Raps(ALPHA, k_reg=2), 57, 1 - ALPHA, 1 - ALPHA + 2 / 58),
    "raps, paper, few rows": (Raps(ALPHA, k_reg=2), 10, 10 / 11, 10 / 11),
    "raps, original, zero sets": (Raps(ALPHA, k_reg=2, variant="original", quantile="plain", empty=True), 57, 52 / 58, 52 / 58),
    "raps, original": (Raps(ALPHA, k_reg=2, variant="original"), 57, 52 / 58, 1.0),
    "raps, not randomised": (Raps(ALPHA, k_reg=2, randomised=False), 57, 1 - ALPHA, 1.0),
    "aps, all classes for want of rows": (Raps(ALPHA, lam_reg=0.0, quantile="exact"), 8, 1.0, 1.0),
}


@several(2_000, 40_000)
@pytest.mark.parametrize("claim", CLAIMS)
def test_coverage_of_a_new_row_is_as_guaranteed(claim: str, draws: int) -> None:
    raps, rows, least, most = CLAIMS[claim]
    rng = np.random.default_rng([draws, *claim.encode()])
    covered = 0
    for _ in range(draws // 2_000):
        log_probs, labels = draw_rows(rng, 2_000, rows + 1)  # each draw stands where an exit does
        uniform = torch.from_numpy(rng.random((2_000, rows + 1)))
        ascending = sort_rows(log_probs)
        rank = torch.cat([rank_of(log_probs[d, None], ascending[d, None], labels[d]) for d in range(2_000)])
        threshold = raps.threshold(raps.label_score(ascending, rank, uniform)[:, :-1])
        size = raps.size(ascending[:, -1:], threshold, uniform[:, -1:])
        covered += int((rank[:, -1:] < size).sum())
    assert_fraction(covered, draws, least=least, most=most)


@several(150, 4_000)
@pytest.mark.parametrize("shared", [False, True])
def test_the_label_is_in_all_sets_at_once_where_exits_are_calibrated_together(draws: int, shared: bool) -> None:
    rng = np.random.default_rng([draws, shared])
    covered = 0
    raps = Raps(ALPHA, k_reg=2, quantile="exact")
    for draw in range(draws):
        first, labels = draw_rows(rng, 101)
        noise = torch.from_numpy(rng.normal(size=(3, 101, 6)))
        log_probs = (first + noise).log_softmax(-1)
        fitted = fit_conformal_sets(
            log_probs[:, :100], labels[:100], rule=None, raps=raps, simultaneous=True, shared=shared, seed=draw
        )
        sets = running_intersection(fitted.sets(log_probs[:, 100:], seed=draw))
        covered += int(sets[-1, 0, labels[100]])
    assert_fraction(covered, draws, least=1 - ALPHA)


@several(2_000, 40_000)
@pytest.mark.parametrize("alpha", [0.05, 0.5])
def test_nested_sets_hold_the_label_at_all_exits_where_draws_have_seen_it(draws: int, alpha: float) -> None:
    """The case in which Ville's inequality is a proof: π_l ~ Dirichlet(α_l + e_y), whatever the label."""
    rng = np.random.default_rng([draws, int(100 * alpha)])
    logits = torch.from_numpy(rng.normal(size=(5, draws, 6)) + 1)
    labels = torch.from_numpy(rng.integers(0, 6, draws))
    index = torch.arange(draws)
    logits[:, index, labels] = logits[:, index, labels].abs() + 0.1  # labels with evidence; others may have none
    seen = torch.zeros(draws, 6, dtype=torch.float64)
    seen[index, labels] = 1
    ratio = torch.zeros(draws, dtype=torch.float64)
    inside = torch.ones(draws, dtype=torch.bool)
    for exit, now in enumerate(logits):
        drawn = log_gammas(now.clamp(min=0) + seen, [draws, exit])
        ratio = ratio + log_ratio(now, 0.0, drawn)[index, labels]
        inside &= ratio <= -math.log(alpha)
    assert_fraction(int(inside.sum()), draws, least=1 - alpha)


@several(40, 2_000)
def test_nested_sets_hold_new_labels_about_as_often_as_those_they_were_fitted_on(draws: int) -> None:
    """By calibration only: the thresholds' choice costs some coverage, here less than two points in the mean."""
    rng = np.random.default_rng(draws)
    covered = []
    for draw in range(draws):
        first, labels = draw_rows(rng, 1_000)
        logits = first + 10 + torch.from_numpy(rng.normal(size=(3, 1_000, 6)))
        fitted = fit_nested_sets(logits[:, :500], labels[:500], alpha=ALPHA, seed=draw)
        assert fitted.reached
        sets = fitted(logits[:, 500:], seed=draw).members
        covered.append(float(sets[-1, torch.arange(500), labels[500:]].double().mean()))
    error = stats.norm.isf(FALSE_ALARM / 2) * np.std(covered) / draws**0.5
    assert abs(np.mean(covered) - (1 - ALPHA)) < 0.02 + error


def posterior(inputs: torch.Tensor, targets: torch.Tensor) -> LinearLayer:
    """The layer of prior precision 1 and noise 1/4, in closed form."""
    precision = torch.eye(inputs.shape[1]).double() + 4 * inputs.T @ inputs
    covariance = torch.linalg.inv(precision)
    return LinearLayer(4 * covariance @ inputs.T @ targets, torch.linalg.cholesky(covariance), 0.25)


@several(300, 4_000)
@pytest.mark.parametrize("alpha", [0.05, 0.5])
def test_nested_intervals_hold_the_target_at_all_exits_where_draws_have_seen_it(draws: int, alpha: float) -> None:
    """The case in which Ville's inequality is a proof: w_l from the posterior that has seen the new target too."""
    rng = np.random.default_rng([draws, int(100 * alpha)])
    held = 0
    for draw in range(draws):
        features = torch.from_numpy(rng.normal(size=(9, 4)))
        features[:, 0] = 1
        targets = features @ torch.from_numpy(rng.normal(size=4)) + 0.5 * torch.from_numpy(rng.normal(size=9))
        ratio, worst = 0.0, -math.inf
        for exit in range(3):
            inputs = features[:, : exit + 2]
            layer, after = posterior(inputs[:8], targets[:8]), posterior(inputs, targets)
            drawn = inputs[8:] @ after.draw(1, [draws, draw, exit]).T
            square, slope, constant = (float(part) for part in quadratic(layer, inputs[8:], drawn.T, torch.zeros(1).double()))
            y = float(targets[8])
            ratio += square * y**2 + slope * y + constant
            worst = max(worst, ratio)
        held += worst <= -math.log(alpha)
    assert_fraction(held, draws, least=1 - alpha)


@several(40, 2_000)
@pytest.mark.parametrize("intersected", [1, 5])
def test_fitted_intervals_hold_the_target_at_all_exits_where_the_model_is_right(draws: int, intersected: int) -> None:
    """As it is used: evidence, draws that have not seen the target. Each exit's line, with Gaussian noise about it, is true."""
    rng = np.random.default_rng([draws, intersected])
    held, guaranteed = 0, 0.0
    for draw in range(draws):
        inputs = torch.from_numpy(rng.normal(size=(121, 4)))
        targets = inputs @ torch.from_numpy(rng.normal(size=4)) + 0.5 * torch.from_numpy(rng.normal(size=121))
        features = [inputs[:, : exit + 2] for exit in range(3)]
        fitted = fit_nested_intervals([each[:120] for each in features], targets[:120])
        answer = fitted([each[120:] for each in features], seed=draw, draws=intersected)
        held += bool(answer.holds(targets[120:]).all())
        guaranteed = fitted.guarantee(intersected)
    assert_fraction(held, draws, least=guaranteed)


def test_the_sample_of_cifar_100_is_covered_as_guaranteed() -> None:
    """Real logits: half of the rows fit, the others are covered within five deviations at every exit."""
    file = anytime.samples.cifar100_msdnet()
    log_probs = anytime.Product()(file.logits[:]).log_probs
    assert file.labels is not None
    fit, test = torch.randperm(1_000, generator=torch.Generator().manual_seed(0)).chunk(2)
    fitted = fit_conformal_sets(log_probs[:, fit], file.labels[fit], rule=None)
    found = fitted.measure(log_probs[:, test], file.labels[test])
    error = 5 * (0.95 * 0.05 * (1 / 500 + 1 / 500)) ** 0.5
    assert all(abs(fraction - 0.95) < error for fraction in found.coverage)

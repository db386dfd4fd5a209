"""The guarantees of certificates, simulated: many samples with known truth, and how often the guarantee is violated.

A population of rows is fixed, so the true fraction of drops under each rule is known; each sample takes rows from it with
replacement, like independent future inputs. A guarantee of confidence 1 - δ may be violated in a fraction of at most δ
of the samples. The number of violations must be within the binomial quantile that is exceeded with probability `FALSE_ALARM`:
over the choice of the seeds, a valid certificate fails such a test with at most that probability.
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import binom
from torch import Tensor

from anytime.calibrate import certify, certify_choice
from anytime.combine import parse_rule
from anytime.metrics import drop, follow, is_monotone

FALSE_ALARM = 1e-4
POPULATION = 4000
SIZES = [pytest.param(300, id="short"), pytest.param(2500, id="long", marks=pytest.mark.long)]
# The softmax at temperatures from hot, where confidences are low and nothing drops, to 1, where half of the inputs do.
RULES = tuple(f"scaled(latest, ({heat}, {heat}, {heat}))" for heat in (12.0, 8.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.5, 1.0))


def population(exits: int = 3, classes: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(0, classes, (POPULATION,), generator=generator)
    noise = 1.5 * torch.randn(exits, POPULATION, classes, generator=generator)
    return noise + 3 * torch.nn.functional.one_hot(labels, classes), labels


LOGITS, LABELS = population()


def outcomes(text: str) -> tuple[Tensor, Tensor]:
    """For each row of the population: whether it drops by 0.2, and whether it never goes from right to wrong."""
    seen = follow(parse_rule(text).combine(LOGITS), LABELS)
    assert seen.correct is not None
    return drop(seen.label_probability).double() >= 0.2, is_monotone(seen.correct)


def draw(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, POPULATION, (rows,), generator=generator)


def allowed(draws: int, error: float) -> int:
    return int(binom.ppf(1 - FALSE_ALARM, draws, error))


@pytest.mark.parametrize("draws", SIZES)
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_bounds_are_broken_no_more_often_than_stated(draws: int, confidence: float) -> None:
    drops, monotone = outcomes("product")
    fraction, kept = float(drops.double().mean()), float(monotone.double().mean())
    generator = torch.Generator().manual_seed(1)
    broken = dict.fromkeys(("drop", "monotone", "joint"), 0)
    for _ in range(draws):
        rows = draw(150, generator)
        found = certify(LOGITS[:, rows], LABELS[rows], "product", drop=0.2, confidence=confidence)
        broken["drop"] += fraction > found.drop_bound
        broken["monotone"] += kept < found.monotone_bound
        broken["joint"] += fraction > found.joint_drop_bound or kept < found.joint_monotone_bound
    assert max(broken.values()) <= allowed(draws, 1 - confidence)
    # The bound is not merely loose: the probability of a violation is known exactly.
    exact = sum(
        float(binom.pmf(count, 150, fraction)) for count in range(151) if binom.cdf(count, 150, fraction) < 1 - confidence
    )
    low, high = binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], draws, exact)
    assert low <= broken["drop"] <= high


@pytest.mark.parametrize("draws", SIZES)
@pytest.mark.parametrize("control", ["sequence", "holm", "bonferroni"])
def test_a_guarantee_holds_after_the_choice(draws: int, control: str) -> None:
    table = torch.stack([outcomes(text)[0] for text in RULES])
    truth = table.double().mean(1)
    # The hardest bound: just below the truth of a rule in the middle, so that certifying it is just false.
    at_most = float(truth.sort().values[len(RULES) // 2]) - 1e-6
    generator = torch.Generator().manual_seed(2)
    broken = any_broken = certified = 0
    for _ in range(draws):
        tuning, rows = draw(200, generator), draw(150, generator)
        # The order, and which rule is liked best, are found on the tuning rows: another choice in every draw.
        fractions = table[:, tuning].double().mean(1)
        order = fractions.argsort(stable=True).tolist()
        found = certify_choice(
            LOGITS[:, rows],
            LABELS[rows],
            [RULES[index] for index in order],
            drop=0.2,
            at_most=at_most,
            confidence=0.9,
            control=control,  # type: ignore[arg-type]
            scores=[-float(fractions[index]) for index in order],
        )
        true = {text: float(fraction) for text, fraction in zip(RULES, truth, strict=True)}
        certified += found.chosen is not None
        broken += found.chosen is not None and true[found.chosen] > at_most
        any_broken += any(true[text] > at_most for text in found.certified)
    # All certified rules at once, which is more than the chosen one alone.
    assert broken <= any_broken <= allowed(draws, 0.1)
    assert certified > draws / 2


@pytest.mark.parametrize("draws", SIZES)
def test_without_that_care_the_choice_would_break_it(draws: int) -> None:
    """Why Learn then Test is needed: of many equally good rules, the best-looking one looks better than it is."""
    generator = torch.Generator().manual_seed(3)
    fraction, rules, rows, confidence = 0.1, 20, 150, 0.9
    careless = careful = 0
    for _ in range(draws):
        # Twenty rules that each drop on a tenth of inputs, independently: all violate the bound "under a tenth".
        counts = (torch.rand(rules, rows, generator=generator) < fraction).sum(1)
        chances = binom.cdf(counts.numpy(), rows, fraction - 1e-9)
        careless += bool(chances.min() <= 1 - confidence)
        careful += bool(chances.min() <= (1 - confidence) / rules)
    assert careless > allowed(draws, 1 - confidence)
    assert careful <= allowed(draws, 1 - confidence)

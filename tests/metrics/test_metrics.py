"""Every figure against a plain reference: Python loops, float64, straight from the definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytime.combine import Caching, Latest, Product
from anytime.errors import OptionError, ShapeError
from anytime.metrics import (
    Summary,
    concavity_gap,
    concordance,
    drop,
    error_against_cost,
    follow,
    is_monotone,
    oracle_auroc_as_released,
    reach,
    rise,
)
from anytime.metrics.calibration import ece, histogram, oracle_accuracy

RULES = {"latest": Latest(), "caching": Caching(), "product": Product()}
COSTS = torch.tensor([1.0, 3.0, 4.0, 9.0], dtype=torch.float64)


def some_logits(rows: int = 60, classes: int = 7, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    logits = 2 * torch.randn(4, rows, classes, generator=generator, dtype=torch.float64)
    logits.scatter_add_(2, labels.expand(4, rows)[..., None], torch.full((4, rows, 1), 2.0, dtype=torch.float64))
    return logits, labels


def figures_of(rule, logits, labels) -> dict:
    summary = Summary(COSTS)
    summary.add(follow(rule(logits), labels))
    return summary.metrics().to_json()


def plain_figures(probs: np.ndarray, labels: np.ndarray) -> dict:
    """The definitions of the paper, one input at a time."""
    exits, rows, classes = probs.shape
    answer = probs.argmax(-1)
    right = answer == labels
    label = probs[:, np.arange(rows), labels]
    final = probs[:, np.arange(rows), answer[-1]]

    def largest(curve, sign):
        return max([max(sign * (curve[j] - curve[i]), 0.0) for i in range(exits) for j in range(i + 1, exits)])

    drops = [largest(label[:, n], -1) for n in range(rows)]
    final_drops = [largest(final[:, n], -1) for n in range(rows)]
    entropy = np.array([[-sum(p * math.log(p) for p in probs[m, n] if p > 0) for n in range(rows)] for m in range(exits)])
    rises = [largest(entropy[:, n], 1) for n in range(rows)]
    learned, forgot = [0] * exits, [0] * exits
    for n in range(rows):
        seen = False
        lost = False
        for m in range(exits):
            if right[m, n] and not seen:
                learned[m] += 1
                seen = True
            if seen and not right[m, n] and not lost:
                forgot[m] += 1
                lost = True
    improvable = []
    for m in range(exits):
        wrong = [n for n in range(rows) if not right[m, n]]
        improvable.append(100 * sum(right[:m, n].any() for n in wrong) / max(1, len(wrong)))
    errors = []
    for m in range(exits):
        total = 0.0
        for b in range(15):
            inside = [n for n in range(rows) if min(int(probs[m, n].max() * 15), 14) == b]
            if inside:
                total += abs(np.mean([probs[m, n].max() for n in inside]) - right[m, inside].mean()) * len(inside)
        errors.append(total / rows)
    percent = lambda values, limits: {str(t): 100 * sum(v >= t for v in values) / rows for t in limits}  # noqa: E731
    return {
        "accuracy": right.mean(1).tolist(),
        "label_probability": label.mean(1).tolist(),
        "label_drop_percent": percent(drops, (0.01, 0.05, 0.1, 0.2, 0.25, 0.33, 0.5)),
        "final_drop_percent": percent(final_drops, (0.01, 0.05, 0.1, 0.2, 0.25, 0.33, 0.5)),
        "mean_label_drop": float(np.mean(drops)),
        "correct_monotone_percent": 100
        * np.mean([all(right[m, n] <= right[m + 1, n] for m in range(exits - 1)) for n in range(rows)]),
        "never_correct_percent": 100 * np.mean(~right.any(0)),
        "ever_correct_percent": 100 * np.mean(right.any(0)),
        "overthinking_percent": 100 * (right.any(0).mean() - right[-1].mean()),
        "hindsight_improvability_percent": improvable,
        "learned": learned,
        "forgot": forgot,
        "agreement": (answer == answer[-1]).mean(1).tolist(),
        "confidence": probs.max(-1).mean(1).tolist(),
        "entropy": entropy.mean(1).tolist(),
        "entropy_rise_percent": percent(rises, (0.01, 0.1, 0.5, 1.0)),
        "ece": errors,
        "nll": [float(np.mean([-math.log(max(label[m, n], 1e-12)) for n in range(rows)])) for m in range(exits)],
        "brier": [
            float(np.mean([((probs[m, n] - np.eye(classes)[labels[n]]) ** 2).sum() for n in range(rows)])) for m in range(exits)
        ],
        "support_size": (probs > 0).sum(-1).mean(1).tolist(),
        "support_coverage": (label > 0).mean(1).tolist(),
    }


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(5))
def test_figures_are_their_definitions(name: str, seed: int) -> None:
    logits, labels = some_logits(seed=seed)
    prediction = RULES[name](logits)
    given, wanted = figures_of(RULES[name], logits, labels), plain_figures(prediction.probs.numpy(), labels.numpy())
    for key, value in wanted.items():
        assert given[key] == pytest.approx(value, abs=1e-9), key
    assert given["collapsed_percent"] == pytest.approx((100 * prediction.fell_back.double().mean(1)).tolist())


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_drop_is_zero_exactly_when_a_trajectory_never_falls(values) -> None:
    curve = torch.tensor(values, dtype=torch.float64)[:, None]
    pairs = [max(values[i] - values[j], 0) for i in range(len(values)) for j in range(i, len(values))]
    assert drop(curve).item() == max(pairs)
    assert (drop(curve).item() == 0) == all(a <= b for a, b in itertools.pairwise(values))
    assert rise(curve).item() == pytest.approx(drop(-curve).item())


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(0, 10_000))
def test_merged_summaries_equal_one_summary(cut: int, seed: int) -> None:
    logits, labels = some_logits(rows=41, seed=seed)
    seen = [follow(Product()(logits[:, part]), labels[part]) for part in (slice(0, cut), slice(cut, None))]
    parts = []
    for each in seen:
        parts.append(Summary(COSTS))
        parts[-1].add(each)
    parts[0].merge(parts[1])
    given, wanted = parts[0].metrics().to_json(), figures_of(Product(), logits, labels)
    for key in wanted:
        if isinstance(wanted[key], float | list) and key != "reliability":
            assert given[key] == pytest.approx(wanted[key], rel=1e-12), key


def test_summaries_with_other_settings_do_not_merge() -> None:
    with pytest.raises(OptionError):
        Summary(COSTS).merge(Summary(COSTS, strict=True))
    with pytest.raises(OptionError, match="no inputs"):
        Summary(COSTS).metrics()


def test_without_labels_only_what_needs_none_is_given() -> None:
    logits, _ = some_logits()
    summary = Summary(COSTS, labelled=False)
    summary.add(follow(Product()(logits)))
    found = summary.metrics()
    assert found.accuracy is None
    assert found.ece is None
    assert found.final_drop_percent["0.01"] >= 0
    with pytest.raises(ShapeError):
        _ = follow(Product()(logits)).label_probability


def test_certain_predictions_fall_into_the_last_bin() -> None:
    table = histogram(torch.ones(1, 4), torch.tensor([[True, True, True, False]]), 15)
    assert table[0, -1].tolist() == [4.0, 4.0, 3.0]
    assert ece(table).item() == pytest.approx(0.25)


def test_strict_counting_leaves_equality_out() -> None:
    assert reach(torch.tensor([0.5, 0.25]), (0.25, 0.5)).tolist() == [2, 1]
    assert reach(torch.tensor([0.5, 0.25]), (0.25, 0.5), strict=True).tolist() == [1, 0]
    # A set that grows by exactly 2 classes.
    for strict, wanted in ((False, 100.0), (True, 0.0)):
        summary = Summary(torch.tensor([1.0, 2.0]), strict=strict)
        summary.add(follow(Latest()(torch.zeros(2, 1, 3)), torch.tensor([0])))
        summary.add_sets(torch.tensor([[1], [3]]))
        assert summary.metrics().set_size_rise_percent["2"] == wanted
        assert summary.metrics().set_size_rise_percent["1"] == 100.0


def test_oracle_mends_the_least_confident_errors() -> None:
    confidence = torch.linspace(0.0005, 0.9995, 1000)[None]
    correct = torch.rand(1, 1000, generator=torch.Generator().manual_seed(0)) < 0.7
    table = histogram(confidence, correct, 10_000)
    for fraction in (0.0, 0.005, 0.1, 1.0):
        helped = correct.clone()
        helped[0, : round(1000 * fraction)] = True
        assert oracle_accuracy(table, fraction=fraction).item() == pytest.approx(helped.double().mean().item())
    with pytest.raises(OptionError):
        oracle_accuracy(table, fraction=2)


def test_released_oracle_figure_is_about_the_recall_of_class_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 100, (10_000,), generator=generator)
    noise = torch.randint(0, 100, (1, 10_000), generator=generator)
    answer = torch.where(torch.rand(1, 10_000, generator=generator) < 0.75, labels, noise)
    confidence = torch.rand(1, 10_000, generator=generator)
    helped = answer.clone()
    rows = confidence[0].argsort()[:50]
    helped[0, rows] = labels[rows]
    recall = (helped[0, labels == 0] == 0).double().mean().item()
    assert oracle_auroc_as_released(confidence, answer, labels).item() == pytest.approx(recall, abs=0.01)


def test_released_oracle_figure_is_the_area_under_its_three_points() -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (500,), generator=generator)
    answer = torch.randint(0, 4, (1, 500), generator=generator)
    points = []
    for threshold in (-1e-7, 0.5, 1 + 1e-7):
        said = answer[0].double() > threshold
        points.append(((said & (labels == 0)).sum() / (labels == 0).sum(), (said & (labels != 0)).sum() / (labels != 0).sum()))
    area = sum((a[0] - b[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
    assert oracle_auroc_as_released(torch.rand(1, 500), answer, labels, fraction=0).item() == pytest.approx(float(area))


def test_consistency_of_error_in_proportion_to_cost() -> None:
    correlation, exponent = error_against_cost(1 - 0.9 / COSTS, COSTS)
    assert correlation == pytest.approx(1.0)
    assert exponent == pytest.approx(1.0)
    assert error_against_cost(torch.ones(4), COSTS) == (None, None)
    assert error_against_cost(torch.full((4,), 0.5), COSTS) == (None, None)


def test_concordance_counts_pairs_by_their_distance_in_cost() -> None:
    curves = torch.tensor([[0.1, 0.9, 0.5, 0.5], [0.2, 0.8, 0.5, 0.9], [0.3, 0.7, 0.5, 0.9], [0.4, 0.6, 0.505, 0.5]])
    score, moves = concordance(curves, COSTS)
    assert score[:3].tolist() == pytest.approx([1.0, -1.0, 0.0])
    assert moves.tolist() == [True, True, False, True]
    # pairs (1,2) (1,3) rise, (2,4) (3,4) fall, (1,4) (2,3) stay; gaps 2 3 | 6 5 | 8 1
    assert score[3].item() == pytest.approx((2 + 3 - 6 - 5) / 25)


@given(st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_concavity_gap_is_the_distance_to_the_hull(values) -> None:
    quality = torch.tensor(values, dtype=torch.float64)[:, None]
    x, gap = COSTS.tolist(), 0.0
    for i in range(4):
        for j in range(i + 1, 4):
            for k in range(i + 1, j):
                line = values[i] + (values[j] - values[i]) * (x[k] - x[i]) / (x[j] - x[i])
                gap = max(gap, line - values[k])
    assert concavity_gap(quality, COSTS).item() == pytest.approx(gap, abs=1e-12)


def test_monotone_inputs_may_be_wrong_throughout() -> None:
    right = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0], [0, 1, 1, 1]]).bool()
    assert is_monotone(right).tolist() == [True, True, True, False]


def test_counts_over_no_thresholds_are_empty() -> None:
    assert reach(torch.rand(3), ()).shape == (0,)

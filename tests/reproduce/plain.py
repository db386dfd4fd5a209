"""The paper's equations once more, written from our notes on it: NumPy, float64, and nothing of the library.

Shapes: logits, probabilities and evidence are `(exits, rows, classes)`, curves `(exits, rows)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
DROPS = (0.01, 0.05, 0.1, 0.2, 0.25, 0.33, 0.5)
ENTROPY_RISES = (0.01, 0.1, 0.5, 1.0)


def softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def log_odds(probs: Array) -> Array:
    """Of the largest probability; the others are added up, since 1 - p rounds to 0."""
    ordered = np.sort(probs, -1)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(ordered[..., -1]) - np.log(ordered[..., :-1].sum(-1)))


@dataclass(frozen=True)
class Answers:
    probs: Array
    labels: Array
    """The answer, taken before rounding."""
    collapsed: Array

    @property
    def confidence(self) -> Array:
        return np.asarray(self.probs.max(-1))


def latest(logits: Array) -> Answers:
    return Answers(softmax(logits), logits.argmax(-1), np.zeros(logits.shape[:2], bool))


def caching(probs: Array) -> Answers:
    """Keep the most confident distribution so far; on a tie the earlier one."""
    kept, odds = probs.copy(), log_odds(probs)
    best = odds[0].copy()
    for exit in range(1, len(probs)):
        later = odds[exit] > best
        kept[exit] = np.where(later[:, None], probs[exit], kept[exit - 1])
        best = np.where(later, odds[exit], best)
    return Answers(kept, kept.argmax(-1), np.zeros(probs.shape[:2], bool))


def linear(exits: int) -> Array:
    return np.arange(1, exits + 1) / exits


def log_relu(values: Array) -> Array:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.maximum(values, 0)))


def log_sigmoid(values: Array) -> Array:
    return -np.logaddexp(0, -values)


def log_softplus(values: Array) -> Array:
    return np.asarray(np.log(np.logaddexp(0, values)))


def product(logits: Array, log_activation: Callable[[Array], Array] = log_relu, weights: Array | None = None) -> Answers:
    """Π a(f_i)^{w_i}; a row whose evidence is zero for every class falls back to the current exit's softmax."""
    power = linear(len(logits)) if weights is None else weights
    evidence = np.cumsum(power[:, None, None] * log_activation(logits), 0)
    collapsed = ~np.isfinite(evidence).any(-1)
    evidence = np.where(collapsed[..., None], logits, evidence)
    return Answers(softmax(evidence), evidence.argmax(-1), collapsed)


def mixture(logits: Array, log_activation: Callable[[Array], Array]) -> Answers:
    """The mean of the normalised a(f_i) so far."""
    evidence = log_activation(logits)
    empty = ~np.isfinite(evidence).any(-1)
    each = softmax(np.where(empty[..., None], logits, evidence))
    probs = np.cumsum(each, 0) / np.arange(1, len(logits) + 1)[:, None, None]
    return Answers(probs, probs.argmax(-1), np.zeros(logits.shape[:2], bool))


def powers(logits: Array, past: Sequence[float], now: Sequence[float]) -> Answers:
    """p_m ∝ p_{m-1}^{a_m} · softmax(f_m)^{b_m}."""
    found = [softmax(now[0] * logits[0])]
    for exit in range(1, len(logits)):
        found.append(softmax(past[exit] * np.log(found[-1]) + now[exit] * logits[exit]))
    probs = np.stack(found)
    return Answers(probs, probs.argmax(-1), np.zeros(logits.shape[:2], bool))


def drop(curve: Array) -> Array:
    """The largest decrease between any two exits, pair by pair."""
    most = np.zeros(curve.shape[1:])
    for first in range(len(curve)):
        for later in range(first + 1, len(curve)):
            most = np.maximum(most, curve[first] - curve[later])
    return most


def percent_from(values: Array, limits: Sequence[float]) -> Array:
    return np.array([100 * np.mean(values >= limit - 1e-6) for limit in limits])


def ece(confidence: Array, right: Array, bins: int = 15) -> float:
    place, total = np.minimum((confidence * bins).astype(int), bins - 1), 0.0
    for each in range(bins):
        inside = place == each
        if inside.any():
            total += abs(confidence[inside].mean() - right[inside].mean()) * inside.mean()
    return total


def measure(answers: Answers, labels: Array) -> dict[str, Array]:
    """Every metric that the page shows, by its name in `anytime evaluate --json`."""
    probs, right = answers.probs, answers.labels == labels
    rows = np.arange(len(labels))
    true, final = probs[:, rows, labels], probs[:, rows, answers.labels[-1]]
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(probs > 0, probs * np.log(probs), 0).sum(-1)
    before = np.zeros_like(right)
    for exit in range(1, len(right)):
        before[exit] = before[exit - 1] | right[exit - 1]
    lost = ~right & before
    first_lost = lost & ~np.concatenate((np.zeros_like(lost[:1]), np.logical_or.accumulate(lost)[:-1]))
    ever = right.any(0)
    support = (probs > 0).sum(-1)
    return {
        "accuracy": right.mean(1),
        "label_probability": true.mean(1),
        "label_drop_percent": percent_from(drop(true), DROPS),
        "final_drop_percent": percent_from(drop(final), DROPS),
        "correct_monotone_percent": 100 * np.mean(~lost.any(0)),
        "never_correct_percent": 100 * np.mean(~ever),
        "ever_correct_percent": 100 * np.mean(ever),
        "overthinking_percent": 100 * (np.mean(ever) - np.mean(right[-1])),
        "hindsight_improvability_percent": 100 * lost.sum(1) / np.maximum((~right).sum(1), 1),
        "learned": (right & ~before).sum(1),
        "forgot": first_lost.sum(1),
        "entropy": entropy.mean(1),
        "entropy_rise_percent": percent_from(drop(-entropy), ENTROPY_RISES),
        "ece": np.array([ece(each, ok) for each, ok in zip(answers.confidence, right, strict=True)]),
        "nll": -np.log(np.maximum(true, 1e-12)).mean(1),
        "nll_deviation": np.log(np.maximum(true, 1e-12)).std(1),
        "confidence": answers.confidence.mean(1),
        "collapsed_percent": 100 * answers.collapsed.mean(1),
        "support_size": support.mean(1),
    }


def auroc(high: Array, low: Array) -> float:
    """How often a value of `high` exceeds one of `low`; equal ones count half. By ranks."""
    every = np.concatenate((high, low))
    _, place, counts = np.unique(every, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[: len(high)].sum() - len(high) * (len(high) + 1) / 2) / (len(high) * len(low)))


def as_released(answers: Answers, labels: Array) -> Array:
    """The 'OC-AUROC' of the released code at each exit.

    An oracle answers the .5 % with the least confidence. The class index is taken for a probability, and every class but 0 for
    positive: at the threshold 0 all are predicted to be positive, at those in between the answers from 1, at 1 those from 2.
    """
    areas = []
    for labelled, odds in zip(answers.labels, log_odds(answers.probs), strict=True):
        given, helped = labelled.copy(), np.argsort(odds, kind="stable")[: round(0.005 * len(labels))]
        given[helped] = labels[helped]
        (a, b), (c, d), (e, f) = [
            ((given >= least)[labels == 0].mean(), (given >= least)[labels > 0].mean()) for least in (0, 1, 2)
        ]
        areas.append((a - c) * (b + d) / 2 + (c - e) * (d + f) / 2)
    return np.array(areas)


def with_oracle(answers: Answers, labels: Array) -> Array:
    """The accuracy at each exit if an oracle answers the .5 % with the least confidence."""
    wrong = answers.labels != labels
    least = np.argsort(log_odds(answers.probs), -1, kind="stable")[:, : round(0.005 * len(labels))]
    return 1 - wrong.mean(1) + np.take_along_axis(wrong, least, 1).sum(1) / len(labels)


def raps(probs: Array, labels: Array, held: Array, rest: Array, uniform: Array) -> tuple[Array, Array]:
    """Sizes `(exits, rest)` and whether they cover the label: the released code's scores, α = .05, λ = .01, k = 5."""
    order = np.argsort(-probs, -1, kind="stable")
    values = np.take_along_axis(probs, order, -1)
    penalty = 0.01 * (np.arange(1, probs.shape[-1] + 1) > 5)
    score = np.cumsum(values + penalty, -1) - uniform[..., None] * (values + penalty)
    rank = (order == labels[:, None]).argmax(-1)
    own = np.take_along_axis(score, rank[..., None], -1)[..., 0][:, held]
    level = min(1.0, np.ceil((len(held) + 1) * 0.95 - 1e-9) / len(held))
    limit = np.quantile(own, level, axis=-1, method="higher")
    size = (score[:, rest] <= limit[:, None, None] + 1e-6).sum(-1)
    return size, rank[:, rest] < size


def random_splits(probs: Array, labels: Array, splits: int = 20) -> dict[str, Array]:
    """Mean size and coverage per split and exit, and the percentages of rows whose set grows by 1, 2, 5 and 10."""
    sizes, covered, rises, alike, rows = [], [], [], [], len(labels)
    for split in range(splits):
        random = np.random.default_rng(split)
        order, uniform = random.permutation(rows), random.random((len(probs), rows))
        cut = min(2000, rows // 2)
        size, inside = raps(probs, labels, order[:cut], order[cut:], uniform)
        sizes.append(size.mean(1))
        covered.append(inside.mean(1))
        rises.append(percent_from(drop(-size), (1, 2, 5, 10)))
        modes = [np.bincount(each).argmax() for each in size]
        alike.append((np.abs(size - np.array(modes)[:, None]) <= 1).mean())
    return {"size": np.array(sizes), "coverage": np.array(covered), "rises": np.array(rises), "alike": np.array(alike)}


def budget(held: Answers, answers: Answers, labels: Array, costs: Array) -> tuple[Array, Array]:
    """Mean cost and accuracy for q = 1/20 … 39/20 by MSDNet's protocol; confidences are compared as log-odds."""
    known, odds, right = log_odds(held.probs), log_odds(answers.probs), answers.labels == labels
    exits, cost, accuracy = len(known), [], []
    for point in range(1, 40):
        fractions = (point / 20) ** np.arange(1, exits + 1)
        fractions /= fractions.sum()
        left, limits = np.ones(known.shape[1], bool), np.full(exits, np.inf)
        for exit in range(exits - 1):
            count = int(np.floor(known.shape[1] * fractions[exit] + 1e-9))
            ordered = np.sort(known[exit][left])[::-1]
            if count and len(ordered):
                limits[exit] = ordered[min(count, len(ordered)) - 1]
            left &= known[exit] < limits[exit]
        limits[-1] = -np.inf
        stop = (odds >= limits[:, None]).argmax(0)
        cost.append(costs[stop].mean())
        accuracy.append(right[stop, np.arange(len(labels))].mean())
    return np.array(cost), np.array(accuracy)

"""The section of docs/reproduction.md on the released code, recomputed: see test_page_main_text.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from . import plain, plain_fits
from .plain import Answers, Array
from .stored import C100, cells_of, check, claim, kept, rows

Pair = tuple[Array, Array]
"""By the text and by the code, one number per seed."""


def shown(topic: str, name: str) -> list[str]:
    (found,) = (line[4:7] for line in cells_of("deviations") if line[0].startswith(topic) and line[3] == name)
    return found


def compare(topic: str, name: str, pair: Pair, slack: float = 0.011) -> None:
    """Mean and deviation over seeds of both, and the mean change."""
    *both, change = shown(topic, name)
    for text, values in zip(both, pair, strict=True):
        check(text.replace("%", ""), values.mean(), values.std(ddof=1), slack=slack)
    check(change, (pair[1] - pair[0]).mean(), slack=2 * slack)


def each(make: Callable[[Array, Array], Any]) -> Any:
    """What a function of logits and labels gives for each seed, one array per result."""
    found = [make(*rows(name)) for name in C100]
    return np.array(found).T


def accuracy(answers: Answers, labels: Array) -> float:
    return float(100 * (answers.labels[-1] == labels).mean())


def true_drop(answers: Answers, labels: Array) -> Array:
    return plain.drop(answers.probs[:, np.arange(len(labels)), labels])


def test_weights_and_thresholds() -> None:
    ones = np.ones(7)
    weights = kept(C100, plain.product), kept(C100, lambda logits: plain.product(logits, weights=ones))
    gates = (lambda values: plain.log_relu(np.where(values > 2, values, 0))), (lambda values: np.log(np.maximum(values, 2)))
    gated = [kept(C100, lambda logits, a=a: plain.product(logits, a)) for a in gates]  # type: ignore[misc]

    def both(found: Any, metric: str, at: int, factor: float = 1.0) -> Pair:
        one, other = (factor * every[metric][:, at] for every in found)
        return one, other

    compare("weights (1)", "product accuracy, last exit", both(weights, "accuracy", -1, 100))
    compare("weights (1)", "product drops by .01", both(weights, "label_drop_percent", 0))
    compare("weights (1)", "product drops by .1", both(weights, "label_drop_percent", 2))
    compare("weights (1)", "product ECE, last exit", both(weights, "ece", -1))
    compare("static threshold (4)", "mean support, last exit", both(gated, "support_size", -1))
    compare("static threshold (4)", "accuracy, last exit", both(gated, "accuracy", -1, 100))
    compare("static threshold (4)", "drops by .05", both(gated, "label_drop_percent", 1))
    compare("static threshold (4)", "ECE, last exit", both(gated, "ece", -1))
    ends = [found["label_drop_percent"][:, 0].mean() for found in weights]
    what = (
        "the paper's figures were made with the weights of its text, not with its code's default: its drops by .01 are nearer"
    )
    check(claim("deviations", what), *ends, 10)


def test_adaptive_threshold() -> None:
    def measured(name: str) -> list[tuple[float, float, float]]:
        found, (logits, labels) = [], rows(name)
        for mode in ("gate", "clamp"):
            evidence, _ = plain_fits.adaptive_threshold(*rows(name, "val"), mode)
            ours = plain.measure(plain.product(logits, evidence), labels)
            found.append((100 * ours["accuracy"][-1], ours["label_drop_percent"][2], ours["ece"][0]))
        return found

    found = np.array([measured(name) for name in C100])  # (seeds, text and code, metrics)
    for at, name in enumerate(("accuracy, last exit", "drops by .1", "ECE, first exit")):
        compare("adaptive threshold (5)", name, (found[:, 0, at], found[:, 1, at]), slack=0.03)


def test_numbers_collapse_and_clipping() -> None:
    def collapse(logits: Array, labels: Array) -> tuple[float, ...]:
        answers = plain.product(logits)
        lost, dropped = answers.collapsed, true_drop(answers, labels) >= 0.5
        right = np.where(lost[-1], labels == 0, answers.labels[-1] == labels)
        drops = 100 * dropped.mean(), 100 * (dropped | lost.any(0)).mean()
        return (*drops, accuracy(answers, labels), 100 * right.mean(), 100 * lost.any(0).mean())

    before, after, right, without, gone = each(collapse)
    compare("collapse (3)", "product drops by .5", (before, after))
    compare("collapse (3)", "product accuracy, last exit", (right, without))
    check(claim("deviations", "without the fallback hardly any input is lost (less than 0.1 %)"), gone.mean())

    def multiplied(logits: Array, labels: Array) -> tuple[float, float]:
        powers = plain.linear(len(logits)).astype(np.float32)[:, None, None]
        answers = np.cumprod(np.maximum(logits, 0).astype(np.float32) ** powers, 0).argmax(-1)
        return 0.0, 100 * float((answers != plain.product(logits).labels).any(0).mean())

    compare("number format (2)", "inputs with another answer at some exit", each(multiplied), slack=0.05)

    def scaled(logits: Array, labels: Array) -> tuple[float, float]:
        one, other = (plain.product(logits, lambda f, c=c: plain.log_relu(c * np.minimum(f, 0.5))) for c in (1, 2))  # type: ignore[misc]
        return 0.0, float(np.abs(one.probs - other.probs)[~one.collapsed].max())

    compare("clip (6)", "largest change of a probability", each(scaled))


def test_ties_and_strict_drops() -> None:
    def ties(logits: Array, labels: Array) -> tuple[float, ...]:
        probs = plain.softmax(logits.astype(np.float32))
        kept_probs, tied = [probs[0]], np.zeros(len(labels), bool)
        for now in probs[1:]:
            new, old = now.max(-1), kept_probs[-1].max(-1)
            tied |= new == old
            kept_probs.append(np.where((new >= old)[:, None], now, kept_probs[-1]))
        code = Answers(np.array(kept_probs), np.array(kept_probs).argmax(-1), np.zeros(probs.shape[:2], bool))
        text = plain.caching(plain.softmax(logits))
        drops = (100 * (true_drop(answers, labels) >= 0.01).mean() for answers in (text, code))
        return 100 * tied.mean(), accuracy(text, labels), accuracy(code, labels), *drops

    tied, right, later, drops, more = each(ties)
    compare("ties of caching (8)", "inputs with a tie", (0 * tied, tied), slack=0.3)  # the last bit of float32 decides
    compare("ties of caching (8)", "caching accuracy, last exit", (right, later), slack=0.03)
    compare("ties of caching (8)", "caching drops by .01", (drops, more), slack=0.03)

    def strict(logits: Array, labels: Array) -> tuple[float, ...]:
        found = []
        for make, limit in ((plain.product, 0.01), (plain.latest, 0.5)):
            size = true_drop(make(logits), labels)  # type: ignore[operator]
            found += [100 * (size >= limit).mean(), 100 * (size > limit).mean()]
        return tuple(found)

    one, other, base, above = each(strict)
    compare("> or ≥ (9)", "product drops by .01", (one, other))
    compare("> or ≥ (9)", "latest drops by .5", (base, above))


def ranked(probs: Array) -> tuple[Array, Array, Array]:
    """The ranking, its probabilities, and their sums with the penalty of .01 from the sixth rank on."""
    order = np.argsort(-probs, -1, kind="stable")
    values = np.take_along_axis(probs, order, -1)
    return order, values, np.cumsum(values + 0.01 * (np.arange(1, probs.shape[-1] + 1) > 5), -1)


def one_split(logits: Array, labels: Array, seed: int = 0, *, original: bool = False) -> tuple[Array, Array]:
    """Mean size and coverage per exit of the product's sets, calibrated on a fifth of the rows."""
    probs = plain.product(logits).probs
    exits, count, classes = probs.shape
    held = np.sort(np.random.default_rng([seed, 0]).permutation(count)[: count // 5])
    rest = np.setdiff1d(np.arange(count), held)
    uniform = np.random.default_rng([seed, 2]).random((count, exits), dtype=np.float32).T
    uniform[:, held] = np.random.default_rng([seed, 1]).random((len(held), exits), dtype=np.float32).T
    order, values, whole = ranked(probs)
    penalty = 0.01 * (np.arange(1, classes + 1) > 5)
    part = (1 - uniform[..., None]) * values if original else uniform[..., None] * (values + penalty)
    rank = (order == labels[:, None]).argmax(-1)
    own = np.take_along_axis(whole - part, rank[..., None], -1)[..., 0][:, held]
    level = 0.95 if original else np.ceil((len(held) + 1) * 0.95 - 1e-9) / len(held)
    limit = np.quantile(own, level, axis=-1, method="higher")
    size = ((whole - part)[:, rest] <= limit[:, None, None] + 1e-6).sum(-1)
    size = np.maximum(size, 1) if original else size
    return size.mean(1), (rank[:, rest] < size).mean(1)


def test_prediction_sets() -> None:
    text, code = (
        each(lambda *one, o=original: np.array(one_split(*one, original=o))[:, [0, -1]].ravel()) for original in (True, False)
    )
    for name, at, factor in (("size, first exit", 0, 1), ("size, last exit", 1, 1), ("coverage, last exit", 3, 100)):
        what = f"product {'set ' if 'size' in name else ''}{name}"
        compare("RAPS (17)", what, (factor * text[at], factor * code[at]), slack=0.06)
    spread = np.array([np.std([one_split(*rows(name), seed)[0][-1] for seed in range(10)], ddof=1) for name in C100])
    compare("RAPS seeds (18)", "deviation of the last exit's set size", (0 * spread, spread), slack=0.03)

    def unrandomised(logits: Array, labels: Array) -> tuple[float, ...]:
        probs, cut = plain.product(logits).probs[-1], len(labels) // 5
        order, values, whole = ranked(probs)
        rank = (order == labels[:, None]).argmax(-1)
        draws = torch.rand(1, len(labels), generator=torch.Generator().manual_seed(0)).double().numpy()[0]
        rows_, level, found = np.arange(cut), np.ceil((cut + 1) * 0.95 - 1e-9) / cut, []
        for part in (0, draws[:, None] * (values + 0.01 * (np.arange(1, probs.shape[-1] + 1) > 5))):
            limit = np.quantile((whole - part)[rows_, rank[:cut]], level, method="higher")
            size = (whole[cut:] <= limit + 1e-6).sum(-1)
            found += [size.mean(), 100 * (rank[cut:] < size).mean()]
        return tuple(found)

    size, covered, smaller, less = each(unrandomised)
    compare("deterministic RAPS (19)", "set size, last exit", (size, smaller), slack=0.03)
    compare("deterministic RAPS (19)", "coverage, last exit", (covered, less), slack=0.06)


def test_bins_and_the_oracle() -> None:
    def bins(logits: Array, labels: Array) -> tuple[float, ...]:
        answers = plain.latest(logits[-1:])
        confidence, right = answers.confidence[0], answers.labels[0] == labels
        below = confidence.astype(np.float32) < 1
        dropped = plain.ece(confidence[below], right[below]) * below.mean()
        return plain.ece(confidence, right), plain.ece(confidence, right, 10), dropped

    error, ten, dropped = each(bins)
    compare("ECE bins (20)", "latest ECE, last exit, 10 bins", (error, ten))
    compare("ECE bins (20)", "latest ECE, last exit, 15 bins, 1.0 dropped", (error, dropped))

    def leads(logits: Array, labels: Array) -> Array:
        base, ours = plain.latest(logits), plain.product(logits)
        found = [
            100 * (metric(ours, labels) - metric(base, labels))[[0, -1]] for metric in (plain.with_oracle, plain.as_released)
        ]
        return np.ravel(found)

    first, last, released, at_last = each(leads)
    compare("OC-AUROC (21)", "product's lead over latest, first exit", (first, released), slack=0.06)
    compare("OC-AUROC (21)", "product's lead over latest, last exit", (last, at_last), slack=0.06)

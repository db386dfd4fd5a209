"""A rule's metrics on held-out rows in memory, in blocks that fit the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anytime.combine import Rule
from anytime.metrics import RuleMetrics, Summary, Trajectories, drop, ece, follow, histogram, nll, reach
from anytime.metrics.calibration import ECE_BINS

_BLOCK = 1 << 17
"""Numbers per exit that are combined at once."""


def follow_blocks(rule: Rule[Any], logits: Tensor, labels: Tensor) -> Iterator[Trajectories]:
    """The trajectories of checked logits under a rule, some rows at a time."""
    step = max(1, _BLOCK // logits.shape[2])
    for first in range(0, logits.shape[1], step):
        part = slice(first, first + step)
        yield follow(rule.combine(logits[:, part]), labels[part])


def rule_metrics(rule: Rule[Any], logits: Tensor, labels: Tensor) -> RuleMetrics:
    """All metrics of a rule on checked logits."""
    summary = Summary(torch.arange(1.0, len(logits) + 1))
    for seen in follow_blocks(rule, logits, labels):
        summary.add(seen)
    return summary.metrics()


def measure(
    rule: Rule[Any], logits: Tensor, labels: Tensor, *, drops: Sequence[float], strict: bool = False
) -> dict[str, float]:
    """Mean accuracy, ECE and NLL over the exits, and the fraction of inputs with each of these drops, on checked logits."""
    exits, rows, _ = logits.shape
    correct = total_nll = 0.0
    table = torch.zeros(exits, ECE_BINS, 3, dtype=torch.float64, device=logits.device)
    counts = torch.zeros(len(drops), dtype=torch.int64, device=logits.device)
    for seen in follow_blocks(rule, logits, labels):
        assert seen.correct is not None
        assert seen.label is not None
        correct += float(seen.correct.double().sum())
        total_nll += float(nll(seen.label).double().sum())
        table += histogram(seen.confidence, seen.correct, ECE_BINS)
        counts += reach(drop(seen.label_probability), drops, strict=strict)
    means = {"accuracy": correct / (exits * rows), "ece": float(ece(table).mean()), "nll": total_nll / (exits * rows)}
    return means | {drop_name(limit): count / rows for limit, count in zip(drops, counts.tolist(), strict=True)}


def drop_name(limit: float) -> str:
    """The name of the metric "fraction of inputs that drop by `limit`".

    >>> drop_name(0.1)
    'drop_0.1'
    """
    return f"drop_{limit:g}"

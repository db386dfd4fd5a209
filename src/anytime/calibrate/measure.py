"""A rule's metrics on held-out rows in memory, in blocks that fit the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anytime.combine import Rule
from anytime.metrics import RuleMetrics, Summary, Trajectories, follow

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

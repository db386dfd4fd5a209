"""A sweep over static thresholds: what b in f·[f > b] does to the product (appendix B.3.1 of the paper).

A larger b lets more classes leave the support: sets become smaller and hold the label less often. The sweep shows size,
coverage and accuracy of every exit over b, on rows of the caller's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anytime.checks import check_labels, check_logits
from anytime.combine import Product, ThresholdReLU
from anytime.combine.rules import Weights
from anytime.errors import LabelError, OptionError
from anytime.metrics import Summary, follow

THRESHOLDS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_BLOCK = 1024


@dataclass(frozen=True)
class StaticTrial:
    """What one threshold does. The set of a row is the product's support; where that is empty, all classes.

    Attributes:
        threshold: b.
        accuracy: Share of right answers, one an exit, as all below.
        set_size: Mean number of classes in the set.
        coverage: Share of rows whose set holds the label.
        collapsed: Share of rows with an empty support.
        ece: Expected calibration error.
        drops: Share of rows whose label's probability drops by .1 or more between any two exits; one number.
    """

    threshold: float
    accuracy: tuple[float, ...]
    set_size: tuple[float, ...]
    coverage: tuple[float, ...]
    collapsed: tuple[float, ...]
    ece: tuple[float, ...]
    drops: float


def sweep_static_thresholds(
    logits: Any, labels: Any, *, thresholds: Sequence[float] = THRESHOLDS, weights: Weights = "linear"
) -> tuple[StaticTrial, ...]:
    """Try static thresholds of the product's ReLU.

    Args:
        logits: `(exits, rows, classes)`.
        labels: `(rows,)`.
        thresholds: The values of b to try, each at least 0; 0 is the plain product.
        weights: Of the product.

    Example:
        >>> logits = torch.tensor([[[3.0, 1.0, -1.0]], [[3.0, 1.0, 1.0]]])
        >>> for trial in sweep_static_thresholds(logits, torch.tensor([0]), thresholds=[0.0, 2.0]):
        ...     print(trial.threshold, trial.set_size)
        0.0 (2.0, 2.0)
        2.0 (1.0, 1.0)
    """
    given = check_logits(logits)
    wanted = check_labels(labels, batch=given.shape[1], classes=given.shape[2], device=given.device)
    if not len(wanted):
        raise LabelError("there are no rows", expected="rows to measure on", fix="give logits with labels")
    if not thresholds:
        raise OptionError("no thresholds to try", expected="at least one", fix="leave thresholds out")
    rules = [Product(ThresholdReLU(float(value)), weights) for value in thresholds]
    return tuple(_try(float(value), rule, given, wanted) for value, rule in zip(thresholds, rules, strict=True))


def _try(threshold: float, rule: Product, logits: Tensor, labels: Tensor) -> StaticTrial:
    summary = Summary(torch.arange(1.0, len(logits) + 1))
    for now, wanted in zip(torch.split(logits, _BLOCK, 1), torch.split(labels, _BLOCK), strict=True):
        summary.add(follow(rule.combine(now), wanted))
    found = summary.metrics()
    return StaticTrial(
        threshold,
        accuracy=found.accuracy or (),
        set_size=found.support_size,
        coverage=found.support_coverage or (),
        collapsed=tuple(share / 100 for share in found.collapsed_percent),
        ece=found.ece or (),
        drops=(found.label_drop_percent or {})["0.1"] / 100,
    )

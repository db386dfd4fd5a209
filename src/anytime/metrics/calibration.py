"""Calibration metrics (section 5.3 and appendix B.3 of the paper).

Histograms over confidence are sums over inputs, so they can be computed block by block and added.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anytime.checks import check_number
from anytime.metrics.monotonicity import rounding

ECE_BINS = 15
ORACLE_BINS = 10_000
FEW_IN_BIN = 10
"""The accuracy of a bin with fewer inputs says little; charts leave it out or pale."""
NLL_FLOOR = 1e-12
ORACLE_FRACTION = 0.005


def nll(label: Tensor) -> Tensor:
    """Negative log-likelihood from the logarithm of the label's probability, which is floored at 1e-12.

    Without the floor one label outside a product's support would make the mean infinite; support coverage counts these.
    """
    return -label.clamp(min=math.log(NLL_FLOOR))


def brier(square: Tensor, label_probability: Tensor) -> Tensor:
    """Squared distance between the distribution and the label's one-hot vector, in [0, 2]."""
    return square - 2 * label_probability + 1


def histogram(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Count, sum of confidences and number of correct answers in equal-width bins of confidence.

    Bins are closed on the left; a confidence of exactly 1 belongs to the last, and one that differs from an edge only by
    rounding is on it: 1/3 has the same bin on any processor. From `(exits, batch)` confidences in [0, 1] and
    booleans, the result is `(exits, bins, 3)` in float64; other dimensions before the last one are kept.
    """
    given = confidence.double()
    index = ((given + rounding(confidence)) * bins).long().clamp(0, bins - 1)
    values = torch.stack((torch.ones_like(given), given, correct.double()))
    table = values.new_zeros(*values.shape[:-1], bins)
    return table.scatter_add_(-1, index.expand(values.shape), values).movedim(0, -1)


def ece(table: Tensor) -> Tensor:
    """Expected calibration error per exit from a histogram: mean |accuracy - confidence| of a bin, weighted by its count."""
    count, confidence, right = table.unbind(-1)
    return (confidence - right).abs().sum(-1) / count.sum(-1).clamp(min=1)


def oracle_accuracy(table: Tensor, *, fraction: float = ORACLE_FRACTION) -> Tensor:
    """Accuracy per exit if an oracle answers the least confident `fraction` of inputs correctly.

    This is the sound form of the paper's oracle-collaborative metric: deferral depends only on the order of confidences. In
    a bin that is deferred in part, errors count in proportion. `table` is a histogram with many bins, `(exits, bins, 3)`.
    """
    check_number(fraction, "fraction", low=0, most=1)
    count, _, right = table.unbind(-1)
    total = count.sum(-1, keepdim=True).clamp(min=1)
    before = count.cumsum(-1) - count
    taken = (fraction * total - before).clamp(min=0).minimum(count) / count.clamp(min=1)
    corrected = ((count - right) * taken).sum(-1)
    return (right.sum(-1) + corrected) / total.squeeze(-1)


def mean_iou(correct: Tensor, answered: Tensor, labelled: Tensor) -> Tensor:
    """Mean intersection over union per exit, the mean over the classes that were answered or are labels.

    Args:
        correct: How often each class was answered correctly, `(exits, classes)`.
        answered: How often it was answered, `(exits, classes)`.
        labelled: How often it is the label, `(classes,)`.

    Example:
        >>> mean_iou(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([3.0, 2.0, 0.0])).tolist()
        [0.5]
    """
    union = answered + labelled - correct
    found = union > 0
    return torch.where(found, correct / union.clamp(min=1), 0.0).sum(-1) / found.sum(-1).clamp(min=1)


def oracle_auroc_as_released(
    confidence: Tensor, answer: Tensor, labels: Tensor, *, fraction: float = ORACLE_FRACTION
) -> Tensor:
    """The metric that the paper's released code plots as oracle-collaborative AUROC, for comparison only.

    That code passes class indices to a metric for binary problems: a "positive" is any label but class 0, a "score" is the
    index of the answer. All thresholds inside (0, 1) give one point of the curve, the ends give two more, and the area
    is close to the recall of class 0 after the oracle's help. Confidences and answers are `(exits, batch)`.
    """
    helped = round(fraction * labels.shape[0])
    given = answer.clone()
    rows = confidence.argsort(dim=1, stable=True)[:, :helped]
    given.scatter_(1, rows, labels.expand(answer.shape).gather(1, rows))
    positive = labels != 0
    true_rate, false_rate = _rates(given >= 1, positive)
    true_last, false_last = _rates(given >= 2, positive)
    return (1 - false_rate) * (1 + true_rate) / 2 + (false_rate - false_last) * (true_rate + true_last) / 2


def _rates(predicted: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    hits = (predicted & positive).sum(1) / positive.sum().clamp(min=1)
    alarms = (predicted & ~positive).sum(1) / (~positive).sum().clamp(min=1)
    return hits, alarms

"""Trajectories: quantities over the exits, `(exits, batch)`.

`follow` reduces the predictions of a rule, `(exits, batch, classes)`, to a few numbers per exit and input, from which every
metric is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from anytime.checks import INDICES, as_tensor, check_label_shape, check_labels
from anytime.combine import Prediction
from anytime.errors import ShapeError


@dataclass(frozen=True, eq=False)
class Trajectories:
    """Quantities per input at each exit; every tensor is `(exits, batch)`, or of joined rules `(exits, rules, batch)`.

    Attributes:
        answer: The rule's label.
        confidence: Its probability.
        final: The probability, at each exit, of the answer given at the last exit.
        entropy: Of the distribution, in nats.
        square: The sum of the squared probabilities, which the Brier score needs.
        support: The number of classes with positive probability.
        fell_back: Whether the rule fell back to the softmax.
        label: The logarithm of the label's probability, or None without labels.
        correct: Whether the answer is the label, or None without labels.
    """

    answer: Tensor
    confidence: Tensor
    final: Tensor
    entropy: Tensor
    square: Tensor
    support: Tensor
    fell_back: Tensor
    label: Tensor | None
    correct: Tensor | None

    @cached_property
    def label_probability(self) -> Tensor:
        """The paper's main measure of quality, γ^p."""
        if self.label is None:
            raise ShapeError("trajectories without labels", expected="labels", fix="pass labels to follow")
        return self.label.exp()


def follow(prediction: Prediction, labels: Any = None, *, ignore_index: int | None = None) -> Trajectories:
    """Trajectories of a rule's prediction at all exits.

    Args:
        prediction: The result of `rule(logits)`, `(exits, batch, classes)`, or of dense logits, whose positions are followed as
            one batch.
        labels: `(batch,)` class indices, if there are any; of a dense prediction `(batch, ...)`.
        ignore_index: The label of rows to leave out.
    """
    labels = None if labels is None else as_tensor(labels, "labels", fix=INDICES)
    if prediction.log_probs.ndim > 3:
        prediction, labels = prediction.flat, None if labels is None else labels.reshape(-1)
    if ignore_index is not None and labels is not None:
        used = labels.long() != ignore_index
        prediction, labels = prediction.at(slice(None), used), labels[used]
    log_probs = prediction.log_probs
    if log_probs.ndim != 3:
        raise ShapeError(
            f"a prediction of shape {tuple(log_probs.shape)}",
            expected="a prediction at all exits, (exits, batch, classes)",
            fix="call the rule on the logits of all exits: rule(logits)",
        )
    _, batch, classes = log_probs.shape
    if labels is not None and log_probs.device.type == "cpu":
        labels = check_labels(labels, batch=batch, classes=classes, device=log_probs.device)
    elif labels is not None:  # without waiting for a GPU
        labels = check_label_shape(labels, batch=batch, device=log_probs.device)
    answer = prediction.labels
    label = None if labels is None else _pick(log_probs, labels.expand(answer.shape))
    floored = above_zero(log_probs)
    probs = floored.exp()
    return Trajectories(
        answer=answer,
        confidence=_pick(log_probs, answer).exp(),
        final=_pick(log_probs, answer[-1].expand(answer.shape)).exp(),
        entropy=-torch.linalg.vecdot(probs, floored).clamp(max=0),
        square=torch.linalg.vecdot(probs, probs),
        support=_support(log_probs),
        fell_back=prediction.fell_back,
        label=label,
        correct=None if labels is None else answer == labels,
    )


def above_zero(log_probs: Tensor) -> Tensor:
    """Log-probabilities whose exponentials are normal numbers: zeros and denormals are ten times slower.

    For sums only: what is raised, to about 1e-38, adds nothing to them.
    """
    return log_probs.clamp(min=math.log(torch.finfo(log_probs.dtype).tiny) + 1)


def _pick(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _support(log_probs: Tensor) -> Tensor:
    # On other devices than a CPU, `any` would wait for the device.
    if log_probs.device.type == "cpu" and not bool((log_probs.amin(-1) == -math.inf).any()):
        return torch.full(log_probs.shape[:-1], log_probs.shape[-1])
    # A sum of floats is vectorised, one of booleans is not.
    return (log_probs > -math.inf).to(log_probs.dtype).sum(-1).long()

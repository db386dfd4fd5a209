"""Trajectories: quantities followed over the exits, one column an input.

`follow` reduces what a rule predicts, `(exits, batch, classes)`, to a handful of numbers an exit and input. Every figure
of the paper is computed from these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from anytime.combine import Prediction
from anytime.errors import ShapeError


@dataclass(frozen=True)
class Trajectories:
    """What happened to each input at each exit; every tensor is `(exits, batch)`.

    Attributes:
        answer: The label that the rule names.
        confidence: Its probability.
        final: The probability, at each exit, of the answer given at the last exit.
        entropy: Of the distribution, in nats.
        square: The sum of the squared probabilities, which the Brier score needs.
        support: How many classes have positive probability.
        fell_back: Whether the rule had to fall back on the softmax.
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

    @property
    def label_probability(self) -> Tensor:
        """The paper's main measure of quality, γ^p."""
        if self.label is None:
            raise ShapeError("trajectories without labels", expected="labels", fix="pass labels to follow")
        return self.label.exp()

    def empty_like(self, rows: int) -> Trajectories:
        """Uninitialised trajectories of the same kinds for `rows` inputs, on the CPU."""

        def empty(name: str) -> Any:
            values = getattr(self, name)
            return None if values is None else torch.empty(values.shape[0], rows, dtype=values.dtype)

        return Trajectories(**{field.name: empty(field.name) for field in fields(self)})

    def write(self, first: int, part: Trajectories) -> None:
        """Copy the trajectories of some inputs into these, from input `first` on."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(part, field.name)
            if mine is not None:
                mine[:, first : first + theirs.shape[1]] = theirs


def follow(prediction: Prediction, labels: Tensor | None = None) -> Trajectories:
    """Trajectories of a rule's prediction at all exits.

    Args:
        prediction: What `rule(logits)` gives, `(exits, batch, classes)`.
        labels: `(batch,)` class indices, if there are any.
    """
    log_probs = prediction.log_probs
    if log_probs.ndim != 3:
        raise ShapeError(
            f"a prediction of shape {tuple(log_probs.shape)}",
            expected="a prediction at all exits, (exits, batch, classes)",
            fix="call the rule on the logits of all exits: rule(logits)",
        )
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
    """Log-probabilities whose exponentials are normal numbers: zeros and denormals cost ten times the rest to compute with.

    For sums only: what is lifted, to about 1e-38, adds nothing to them.
    """
    return log_probs.clamp(min=math.log(torch.finfo(log_probs.dtype).tiny) + 1)


def _pick(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _support(log_probs: Tensor) -> Tensor:
    full = torch.full(log_probs.shape[:-1], log_probs.shape[-1], device=log_probs.device)
    if not bool((log_probs.amin(-1) == -math.inf).any()):
        return full
    # A sum of floats is vectorised, one of booleans is not.
    return (log_probs > -math.inf).to(log_probs.dtype).sum(-1).long()

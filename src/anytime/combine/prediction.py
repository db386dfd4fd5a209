"""What a rule gives and keeps: the prediction at one exit or at all of them, and the streaming state."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

CERTAIN = float(torch.finfo(torch.float32).max)
"""The log-odds of the only class in the support: finite, so that a threshold of infinity is never reached."""
_FAR = 1e-30
_MANY = 4096


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a rule answers at one exit, or at all of them with one more dimension in front.

    Of dense logits, such as `(batch, classes, height, width)`, the log-probabilities have the shape of the logits, and what is
    `(..., batch)` below is `(..., batch, height, width)`.

    Attributes:
        log_probs: `(..., batch, classes)`, normalised; `-inf` for classes outside the support.
        fell_back: `(..., batch)`, true where the rule had no evidence left for any class (a collapse) and gave the
            softmax of the current exit instead.
        labels: `(..., batch)`, the class with the most evidence, the first one of ties. A rule takes it before normalising,
            which can round different evidence to equal probabilities. By default the most probable class.
        class_dim: The dimension of the classes in `log_probs`, counted from the end.
    """

    log_probs: Tensor
    fell_back: Tensor
    labels: Tensor = None  # type: ignore[assignment]  # filled in below
    class_dim: int = -1

    def __post_init__(self) -> None:
        if self.labels is None:
            object.__setattr__(self, "labels", top_class(self._classes_last))

    def at(self, *index: Any) -> Prediction:
        """A part of it: `at(exit)` of a prediction at all exits, `at(rows)` or `at(slice(None), rows)` for some inputs."""
        return Prediction(self.log_probs[index], self.fell_back[index], self.labels[index], self.class_dim)

    def clone(self) -> Prediction:
        """A copy that shares no memory with this one."""
        return Prediction(self.log_probs.clone(), self.fell_back.clone(), self.labels.clone(), self.class_dim)

    def write(self, index: Any, other: Prediction) -> None:
        """Replace the part at `index`, an exit or rows, by another prediction."""
        self.log_probs[index], self.fell_back[index], self.labels[index] = other.log_probs, other.fell_back, other.labels

    @property
    def flat(self) -> Prediction:
        """Of a dense prediction at all exits, that of its positions as rows, `(exits, rows, classes)`."""
        return Prediction(self._classes_last.flatten(1, -2), self.fell_back.flatten(1), self.labels.flatten(1))

    @property
    def probs(self) -> Tensor:
        """Probabilities, `(..., batch, classes)`."""
        return self.log_probs.exp()

    @property
    def confidence(self) -> Tensor:
        """The probability of the label, `(..., batch)`. In float32 it rounds to 1 from log-odds of 17 on."""
        return self.log_probs.amax(self.class_dim).exp()

    @property
    def log_odds(self) -> Tensor:
        """The confidence as log p/(1 - p), `(..., batch)`, without cancellation: different confidences do not round to ties."""
        return log_odds(self._classes_last, self.labels)

    @property
    def _classes_last(self) -> Tensor:
        return self.log_probs if self.class_dim == -1 else self.log_probs.movedim(self.class_dim, -1)


@dataclass(frozen=True)
class State:
    """The state of a rule after `seen` of `exits` exits; `memory`, `(batch, classes)`, belongs to the rule.

    Every tensor of a state has the batch first, so that inputs can leave a running batch.
    """

    exits: int
    seen: int = 0
    memory: Tensor | None = None

    def select(self, rows: Tensor) -> Self:
        """The state of some inputs, by their indices in the batch or by a mask."""
        return replace(self, **{part.name: _select(getattr(self, part.name), rows) for part in fields(self)})


def empty_prediction(exits: int, rows: int, classes: int, like: Tensor) -> Prediction:
    """A prediction at all exits to write into, on the device and of the element type of `like`."""
    return Prediction(
        torch.empty(exits, rows, classes, dtype=like.dtype, device=like.device),
        torch.empty(exits, rows, dtype=torch.bool, device=like.device),
        torch.empty(exits, rows, dtype=torch.long, device=like.device),
    )


def top_class(scores: Tensor) -> Tensor:
    """The class with the largest score, `(..., batch)`; the first one of ties."""
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    if traced or scores.device.type != "cpu" or scores.numel() < _MANY:
        return scores.argmax(-1)
    return torch.from_numpy(scores.detach().numpy().argmax(-1))  # vectorised: ten to thirty times faster here


def log_odds(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Log-odds of the labels, `(..., batch)`: they order confidences that round to one."""
    index = labels.unsqueeze(-1)
    below = log_probs - log_probs.gather(-1, index)
    # In float64 the order of the classes does not change the sum: equally confident rows stay equal.
    others = below.exp().scatter_(-1, index, 0.0).sum(-1, dtype=torch.float64)
    odds = -others.log()
    far = others < _FAR  # here terms of the sum lose digits, or underflow
    # On other devices than a CPU, `any` would wait for the device.
    if far.device.type != "cpu" or bool(far.any()):
        odds = torch.where(far, -below.scatter(-1, index, -CERTAIN).logsumexp(-1).double(), odds)
    return odds.to(log_probs.dtype).clamp(max=CERTAIN)


def _select(value: Any, rows: Tensor) -> Any:
    match value:
        case Tensor():
            return value[rows]
        case State():
            return value.select(rows)
        case tuple():
            return tuple(_select(part, rows) for part in value)
    return value

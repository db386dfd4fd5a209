"""What a caller gets: a distribution (or an interval), how far the network got, and whether it was in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from anytime.combine import Interval, Prediction
from anytime.errors import ShapeError, StateError

Reason = Literal["finished", "deadline", "forecast", "exits", "macs", "interrupted", "policy"]
"""Why a request stopped: all exits are done; time was up; the next stage would not have been done in time; the exits or the
MACs of the budget are spent; somebody interrupted it; a policy wanted no more."""


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to a batch of inputs. Every tensor has the batch first.

    Attributes:
        prediction: What the rule says: log-probabilities, or for regression an interval, and `fell_back`.
        exit: How many exits were used: 1 after the first exit, 0 for the prior alone. Where a policy lets inputs stop, a
            tensor with one number an input.
        exits: How many there are.
        elapsed: Seconds from the call to this answer.
        deadline_met: Whether that was within the time allowed and the runner's `grace`; None where no time was given.
        reason: Why it stopped there; None for an answer after which others may come.
        cost: MACs (multiply-accumulates) for one input up to its exit, where they are known; with a policy, one per input.
        prediction_set: Booleans `(batch, classes)`, where sets were calibrated.
    """

    prediction: Prediction | Interval
    exit: int | Tensor
    exits: int
    elapsed: float
    deadline_met: bool | None
    reason: Reason | None
    cost: float | Tensor | None = None
    prediction_set: Tensor | None = None

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities, `(batch, classes)`; `-inf` for classes outside the support."""
        return self._distribution().log_probs

    @property
    def probs(self) -> Tensor:
        """Probabilities, `(batch, classes)`."""
        return self._distribution().probs

    @property
    def labels(self) -> Tensor:
        """The most probable class of each input, `(batch,)`; the first of equals."""
        return self._distribution().labels

    @property
    def label(self) -> int:
        """The most probable class of the one input there is."""
        labels = self.labels
        if len(labels) != 1:
            raise ShapeError(f"an answer to {len(labels)} inputs", expected="one input", fix="use labels")
        return int(labels)

    @property
    def confidence(self) -> Tensor:
        """The probability of that class, `(batch,)`."""
        return self._distribution().confidence

    @property
    def fell_back(self) -> Tensor:
        """Where the rule had no evidence left and gave the current exit's own answer, `(batch,)`."""
        return self.prediction.fell_back

    @property
    def lower(self) -> Tensor:
        """The lower ends of the intervals of a regression, `(batch,)`."""
        return self._interval().lower

    @property
    def upper(self) -> Tensor:
        """The upper ends of the intervals of a regression, `(batch,)`."""
        return self._interval().upper

    def _distribution(self) -> Prediction:
        if isinstance(self.prediction, Prediction):
            return self.prediction
        raise StateError(
            "a distribution over classes was asked for", expected="lower and upper: this is a regression", fix="use those"
        )

    def _interval(self) -> Interval:
        if isinstance(self.prediction, Interval):
            return self.prediction
        raise StateError("an interval was asked for", expected="probs: this is a classification", fix="use Intersection()")

"""The result of a request: a distribution (or an interval), the exit that was reached, and whether it was on time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from anytime.checks import check_count
from anytime.combine import Interval, Prediction
from anytime.display.table import Displayed, Table
from anytime.errors import ShapeError, StateError
from anytime.run.answer_figures import answer_table, plot_answer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Reason = Literal["finished", "deadline", "forecast", "exits", "macs", "confidence", "interrupted", "policy"]
"""Why a request stopped: all exits were computed; the deadline passed; the next stage was not expected to end in time; the
budget's exits or MACs are used up; its confidence was reached; it was interrupted; the policy stopped it."""


@dataclass(frozen=True, eq=False, repr=False)
class Answer(Displayed):
    """The answer to a batch of inputs. Every tensor has the batch first.

    Of a model with dense logits (`Runner(model, class_dim=1)`) log-probabilities are `(batch, classes, height, width)`, and
    what is `(batch,)` below is `(batch, height, width)`.

    Attributes:
        prediction: The rule's output: log-probabilities, or for regression an interval, and `fell_back`.
        exit: How many exits were used: 1 after the first exit, 0 for the prior alone. With a policy, a tensor with one number
            per input.
        exits: The number of exits of the model.
        elapsed: Seconds from the call to this answer.
        deadline_met: Whether that was within the time budget plus the runner's `grace`; None without a time budget.
        reason: Why it stopped there; None if further answers may follow.
        macs: MACs (multiply-accumulates) per input up to its exit, if known; with a policy, one number per input.
        make_set: Makes the prediction set, if prediction sets were calibrated.
        outputs: What each exit used so far returned, as the engine has it; empty with a policy, and for stages with a rule
            inside. See `logits`.
    """

    prediction: Prediction | Interval
    exit: int | Tensor
    exits: int
    elapsed: float
    deadline_met: bool | None
    reason: Reason | None
    macs: float | Tensor | None = None
    make_set: Callable[[], Tensor] | None = None
    outputs: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        parts = {"inputs": len(self.fell_back)} if self.fell_back.numel() > 1 else self._single()
        first, last = int(torch.as_tensor(self.exit).min()), int(torch.as_tensor(self.exit).max())
        exit = first if first == last else f"{first} to {last}"
        met = {} if self.deadline_met is None else {"deadline_met": self.deadline_met}
        parts |= {"exit": f"{exit} of {self.exits}", "elapsed": f"{1e3 * self.elapsed:.3g} ms", **met, "reason": self.reason}
        return f"Answer({', '.join(f'{name}={value}' for name, value in parts.items())})"

    def table(self, rows: int = 10) -> Table:
        """The answer for each of the first inputs.

        Args:
            rows: The largest number of inputs.
        """
        return answer_table(self, check_count(rows, "rows"))

    def plot(self, row: int = 0, *, ax: Axes | None = None) -> Axes:
        """Draw the answer for an input with matplotlib (extra `plot`): its most probable classes, or of an image its labels.

        Args:
            row: The input, counted from 0.
            ax: Axes to draw into; new ones by default.
        """
        most = len(self.fell_back) - 1
        return plot_answer(self, check_count(row, "row", low=0, most=most, fix="pass the index of an input: row=0"), ax)

    @cached_property
    def prediction_set(self) -> Tensor | None:
        """Booleans `(batch, classes)`, if prediction sets were calibrated; computed when first asked for."""
        return None if self.make_set is None else self.make_set()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: with the prediction set, and without the runner that makes it."""
        return {**self.__dict__, "prediction_set": self.prediction_set, "make_set": None}

    @property
    def last_exit(self) -> int:
        """The exit, of a batch with a policy the largest one."""
        return self.exit if isinstance(self.exit, int) else int(self.exit.max())

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities, `(batch, classes)`; `-inf` for classes outside the support."""
        return self._distribution.log_probs

    @property
    def probs(self) -> Tensor:
        """Probabilities, `(batch, classes)`."""
        return self._distribution.probs

    @property
    def labels(self) -> Tensor:
        """The most probable class of each input, `(batch,)`; the first one among equals."""
        return self._distribution.labels

    @property
    def label(self) -> int:
        """The most probable class of a single input."""
        labels = self.labels
        if labels.numel() != 1:
            what = f"{len(labels)} inputs" if labels.ndim == 1 else f"{labels.numel():,} positions"
            raise ShapeError(f"label of an answer to {what}", expected="one input", fix="use answer.labels")
        return int(labels)

    @property
    def confidence(self) -> Tensor:
        """The probability of the most probable class, `(batch,)`."""
        return self._distribution.confidence

    @property
    def logits(self) -> Tensor | None:
        """The logits of the exits used, `(exits, batch, classes)`; None with a policy, and for stages with a rule inside."""
        if not self.outputs:
            return None
        logits = torch.stack([torch.as_tensor(each) for each in self.outputs])
        # An engine with the rule inside returns further columns, see anytime.run.engines.cuda.rule.
        plain = logits.ndim != 3 or isinstance(self.prediction, Interval)
        return logits if plain else logits[..., : self.log_probs.shape[-1]]

    @property
    def fell_back(self) -> Tensor:
        """Where the rule collapsed and fell back to the current exit's own prediction, `(batch,)`."""
        return self.prediction.fell_back

    @property
    def lower(self) -> Tensor:
        """The lower bounds of regression intervals, `(batch,)`."""
        return self._interval.lower

    @property
    def upper(self) -> Tensor:
        """The upper bounds of regression intervals, `(batch,)`."""
        return self._interval.upper

    def _single(self) -> dict[str, Any]:
        if isinstance(self.prediction, Interval):
            return {"lower": f"{float(self.lower):.4g}", "upper": f"{float(self.upper):.4g}"}
        return {"label": self.label, "confidence": f"{float(self.confidence):.3f}"}

    @property
    def _distribution(self) -> Prediction:
        if isinstance(self.prediction, Prediction):
            return self.prediction
        raise StateError(
            "probabilities were requested of a regression", expected="a classification", fix="use answer.lower and answer.upper"
        )

    @property
    def _interval(self) -> Interval:
        if isinstance(self.prediction, Interval):
            return self.prediction
        raise StateError(
            "an interval was requested of a classification",
            expected="a regression",
            fix="use answer.probs, or a Runner with rule=Intersection() for a regression model",
        )

"""Stopping policies: after each exit they read the rule's predictions and decide which inputs stop there.

`policy.apply(prediction)` gives the exit at which each input stops, and `policy.answer(prediction)` its answer too, from the
predictions at all exits: `Confidence(0.9).apply(Product()(logits))`. Log-probabilities, `(exits, batch, classes)`, work too.
The last exit always stops. Confidences are compared as log-odds, because probabilities round to 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from anytime.checks import check_choice, check_count, check_log_probs
from anytime.combine import Prediction
from anytime.combine.prediction import CERTAIN
from anytime.errors import OptionError, ShapeError
from anytime.fitted import Fitted

PolicyState = tuple[Tensor, ...]
"""What a policy keeps of earlier exits: tensors with the batch first."""

Numbers = float | tuple[float, ...]
"""One number for all exits, or one per exit."""

Scale = Literal["probability", "log-odds"]
"""Whether a threshold on the confidence p is p itself or log p/(1 - p), as fitted thresholds are."""

Otherwise = Literal["last", "most_confident"]


@dataclass(frozen=True, eq=False)
class Stopped:
    """Where each input stopped and its answer; every tensor has the batch first.

    Attributes:
        exit: The last exit that was computed for the input, counted from 1.
        source: The exit of the answer, counted from 1; it differs from `exit` only under `otherwise="most_confident"`.
        prediction: The answer.
    """

    exit: Tensor
    source: Tensor
    prediction: Prediction

    @property
    def log_probs(self) -> Tensor:
        """Log-probabilities of the answer, `(batch, classes)`."""
        return self.prediction.log_probs

    @property
    def fell_back(self) -> Tensor:
        """Whether the rule fell back to the softmax at the exit of the answer, `(batch,)`."""
        return self.prediction.fell_back

    @property
    def labels(self) -> Tensor:
        """The predicted class, `(batch,)`."""
        return self.prediction.labels


@dataclass(frozen=True)
class Policy(ABC):
    """Base of all policies: a subclass implements `stop`, and `start` if it keeps a state.

    Args:
        otherwise: The answer of an input that no exit before the last stops: `last` for the prediction of the last exit,
            `most_confident` for that of the most confident exit (the first of equals), as in shallow-deep networks.
    """

    per_exit: ClassVar[tuple[str, ...]] = ()
    """The fields that hold one number, or one per exit."""

    otherwise: Otherwise = field(default="last", kw_only=True)

    def __post_init__(self) -> None:
        for name in self.per_exit:
            object.__setattr__(self, name, _check_numbers(name, getattr(self, name)))
        check_choice(self.otherwise, "otherwise", get_args(Otherwise))

    def start(self, batch: int, device: torch.device | None = None) -> PolicyState:
        """The state before the first exit of `batch` inputs."""
        return ()

    @abstractmethod
    def stop(self, state: PolicyState, exit: int, prediction: Prediction) -> tuple[PolicyState, Tensor]:
        """Return the new state and which inputs stop at this exit, `(batch,)`.

        Args:
            state: From `start`, or from the exit before.
            exit: The index of the exit, from 0.
            prediction: The rule's predictions there.
        """

    def check_fits(self, exits: int, classes: int) -> None:
        """Raise if the policy has numbers for another number of exits."""
        for name in self.per_exit:
            numbers = getattr(self, name)
            if isinstance(numbers, tuple) and len(numbers) != exits:
                raise OptionError(
                    f"{type(self).__name__} has {len(numbers)} numbers in {name}, and there are {exits} exits",
                    expected=f"{exits} numbers, one per exit, or a single number for all",
                    fix=f"pass {exits} numbers; the one of the last exit is not used",
                )

    def apply(self, prediction: Any) -> Tensor:
        """The exit at which each input stops, `(batch,)`, counted from 1.

        Args:
            prediction: A rule's predictions at all exits, `rule(logits)`, or their log-probabilities.
        """
        return self._decide(check_prediction(prediction)).exit

    def answer(self, prediction: Any) -> Stopped:
        """The exit at which each input stops and its answer, from a rule's predictions at all exits: `rule(logits)`."""
        answers = check_prediction(prediction)
        found = self._decide(answers)
        rows = torch.arange(len(found.exit), device=found.exit.device)
        return Stopped(found.exit, found.source, answers.at(found.source - 1, rows))

    def _decide(self, answers: Prediction) -> Decisions:
        exits, batch, classes = answers.log_probs.shape
        self.check_fits(exits, classes)
        decisions = Decisions(self, batch, exits, answers.log_probs.device)
        for exit in range(exits):
            decisions.take(answers.at(exit))
        return decisions


class Decisions:
    """Where the inputs of a batch stop, decided exit by exit; inputs that stopped may be dropped from the running batch.

    Attributes:
        exit: The latest exit computed for each input, from 1.
        source: The exit of each input's answer so far, from 1.
        rows: The index of the input that each row of the running batch is.
        running: Which rows of the running batch have not stopped.
    """

    def __init__(self, policy: Policy, batch: int, exits: int, device: torch.device | None = None) -> None:
        self._policy, self._exits, self._seen = policy, exits, 0
        self._state = policy.start(batch, device)
        self._best = torch.full((batch,), -torch.inf, dtype=torch.float64, device=device)
        self.rows = torch.arange(batch, device=device)
        self.running = torch.ones(batch, dtype=torch.bool, device=device)
        self.exit, self.source = torch.zeros_like(self.rows), torch.zeros_like(self.rows)

    def take(self, prediction: Prediction) -> Tensor:
        """Take the running batch's predictions at the next exit; return the rows whose answer they are, as a mask."""
        last = self._seen + 1 == self._exits
        if last:
            stopped = torch.ones_like(self.running)
        else:
            self._state, stopped = self._policy.stop(self._state, self._seen, prediction)
        self._seen += 1
        taken = self.running
        if self._policy.otherwise == "most_confident":
            confidence = prediction.log_odds.double()
            better = confidence > self._best[self.rows]
            taken = self.running & (better if last else better | stopped)
            self._best[self.rows] = torch.maximum(confidence, self._best[self.rows])
        self.exit[self.rows[self.running]] = self._seen
        self.source[self.rows[taken]] = self._seen
        self.running = self.running & ~stopped
        return taken

    def drop_stopped(self, when: float) -> Tensor | None:
        """Drop stopped rows if at most this fraction of the running batch goes on; return the indices of the rows kept."""
        left, size = int(self.running.sum()), len(self.running)
        if not 0 < left < size or left > when * size:
            return None
        keep = self.running.nonzero()[:, 0]
        self._state = tuple(part[keep] for part in self._state)
        self.rows, self.running = self.rows[keep], self.running[keep]
        return keep


@dataclass(frozen=True)
class _Threshold(Policy):
    """Stop when a value reaches a threshold: one number, or one per exit; the last exit's is not used.

    Args:
        threshold: One number, or one per exit.
        strict: Whether the threshold must be exceeded (>) rather than reached (≥).
    """

    per_exit: ClassVar[tuple[str, ...]] = ("threshold",)
    threshold: Numbers
    strict: bool = False

    def stop(self, state: PolicyState, exit: int, prediction: Prediction) -> tuple[PolicyState, Tensor]:
        values, limit = self._compare(prediction, _number(self.threshold, exit))
        return state, values > limit if self.strict else values >= limit

    @abstractmethod
    def _compare(self, prediction: Prediction, threshold: float) -> tuple[Tensor, float]:
        """The value of each input, and the limit it is compared with."""


@dataclass(frozen=True)
class Confidence(_Threshold):
    """Stop when the probability of the most probable class reaches a threshold; above 1, no input stops.

    Args:
        threshold: One number, or one per exit; the last exit's is not used.
        strict: Whether the threshold must be exceeded (>) rather than reached (≥).
        scale: Whether thresholds are probabilities or log-odds.

    Example:
        >>> log_probs = torch.tensor([[[0.6, 0.4], [0.9, 0.1]], [[0.5, 0.5], [0.2, 0.8]]]).log()
        >>> Confidence(0.7).apply(log_probs).tolist()
        [2, 1]
    """

    scale: Scale = field(default="probability", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.scale, "scale", get_args(Scale))

    def _compare(self, prediction: Prediction, threshold: float) -> tuple[Tensor, float]:
        return prediction.log_odds.double(), as_log_odds(threshold, self.scale)


@dataclass(frozen=True)
class Margin(_Threshold):
    """Stop when the difference between the two largest probabilities reaches a threshold; arguments as for `Confidence`."""

    def _compare(self, prediction: Prediction, threshold: float) -> tuple[Tensor, float]:
        top = prediction.log_probs.topk(min(2, prediction.log_probs.shape[-1]), dim=-1).values.double().exp()
        return top[..., 0] - top[..., 1:].sum(-1), threshold


@dataclass(frozen=True)
class Entropy(_Threshold):
    """Stop when the entropy, in nats, is below (<) a threshold, as BranchyNet does; at most (≤) with `strict=False`."""

    strict: bool = True

    def _compare(self, prediction: Prediction, threshold: float) -> tuple[Tensor, float]:
        return -torch.special.entr(prediction.log_probs.double().exp()).sum(-1), -threshold


@dataclass(frozen=True)
class Patience(Policy):
    """Stop when `count` exits in a row predict the same class. The first exit is a run of one.

    Args:
        count: The length of the run.
        strict: Whether the run must be longer (>) rather than as long (≥).

    Example:
        >>> log_probs = torch.tensor([[[0.9, 0.1]], [[0.4, 0.6]], [[0.3, 0.7]], [[0.2, 0.8]]]).log()
        >>> Patience(2).apply(log_probs).tolist(), Patience(2, strict=True).apply(log_probs).tolist()
        ([3], [4])
    """

    count: int
    strict: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.count, "count", fix="pass count=2 to stop when two exits agree")

    def start(self, batch: int, device: torch.device | None = None) -> PolicyState:
        nothing = torch.full((batch,), -1, device=device)
        return nothing, torch.zeros_like(nothing)

    def stop(self, state: PolicyState, exit: int, prediction: Prediction) -> tuple[PolicyState, Tensor]:
        before, run = state
        run = torch.where(prediction.labels == before, run + 1, 1)
        return (prediction.labels, run), run > self.count if self.strict else run >= self.count


@dataclass(frozen=True)
class DecisionWindow(Policy):
    """Stop unless the confidence is within a window around the threshold of a later decision; the bounds are inside.

    If a later decision only asks whether the confidence is above a threshold (accept, or refer to a person), inputs far from it
    on either side gain nothing from another exit. `fit_window_policy` finds the bounds.

    Args:
        lower: One number, or one per exit; the last exit's is not used.
        upper: Likewise.
        scale: Whether bounds are probabilities or log-odds.
    """

    per_exit: ClassVar[tuple[str, ...]] = ("lower", "upper")
    lower: Numbers
    upper: Numbers
    scale: Scale = field(default="probability", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.scale, "scale", get_args(Scale))

    def stop(self, state: PolicyState, exit: int, prediction: Prediction) -> tuple[PolicyState, Tensor]:
        odds = prediction.log_odds.double()
        lower, upper = (as_log_odds(_number(bound, exit), self.scale) for bound in (self.lower, self.upper))
        return state, (odds < lower) | (odds > upper)


@dataclass(frozen=True)
class FittedPolicy(Fitted, ABC):
    """Base of policies fitted on held-out rows: `policy` makes the decisions, the other fields record the fit."""

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """The policy that was fitted."""

    def apply(self, prediction: Any) -> Tensor:
        """The exit at which each input stops, counted from 1; see `Policy.apply`."""
        return self.policy.apply(self._check_prediction(prediction))

    def answer(self, prediction: Any) -> Stopped:
        """The exit at which each input stops and its answer; see `Policy.answer`."""
        return self.policy.answer(self._check_prediction(prediction))

    def _check_prediction(self, prediction: Any) -> Prediction:
        checked = check_prediction(prediction)
        self.check_fits(checked.log_probs.shape[0], checked.log_probs.shape[2])
        return checked

    def _check_lengths(self, *names: str) -> None:
        """Raise unless these fields have one number per exit, and the policy accepts them."""
        for name in names:
            if len(getattr(self, name)) != self.exits:
                raise OptionError(
                    f"{name} is {getattr(self, name)}", expected=f"{self.exits} numbers, one per exit", fix="fit it again"
                )
        self.policy.check_fits(self.exits, self.classes or 1)


def as_log_odds(threshold: float, scale: Scale = "probability") -> float:
    """A threshold on the confidence as log-odds: only a class alone in the support reaches 1, and none exceeds it.

    >>> as_log_odds(0.5), as_log_odds(1.5), as_log_odds(2.0, "log-odds")
    (0.0, inf, 2.0)
    """
    if scale == "log-odds":
        return threshold
    if not 0 < threshold < 1:
        return -math.inf if threshold <= 0 else CERTAIN if threshold == 1 else math.inf
    return math.log(threshold) - math.log1p(-threshold)


def as_probability(log_odds: float) -> float:
    """The probability of log-odds; `inf` and `-inf`, which all or no inputs are below, stay as they are.

    >>> as_probability(0.0), as_probability(math.inf)
    (0.5, inf)
    """
    if math.isinf(log_odds):
        return log_odds
    return 1 / (1 + math.exp(-log_odds)) if log_odds > 0 else math.exp(log_odds) / (1 + math.exp(log_odds))


def check_prediction(values: Any, *, name: str = "log_probs", rows: bool = False) -> Prediction:
    """Predictions at all exits, from a `Prediction` or log-probabilities, `(exits, batch, classes)`; `rows` refuses none."""
    log_probs = check_log_probs(values.log_probs if isinstance(values, Prediction) else values, name=name)
    if rows and log_probs.shape[1] == 0:
        raise ShapeError(f"{name} has no rows", expected="at least one row", fix="pass the predictions of held-out rows")
    if isinstance(values, Prediction):
        return values
    return Prediction(log_probs, torch.zeros(log_probs.shape[:2], dtype=torch.bool, device=log_probs.device))


def _number(numbers: Numbers, exit: int) -> float:
    return numbers[exit] if isinstance(numbers, tuple) else numbers


def _check_numbers(name: str, values: Any) -> Numbers:
    numbers = values.tolist() if hasattr(values, "tolist") else values
    if _is_number(numbers):
        return float(numbers)
    if isinstance(numbers, Sequence) and numbers and all(map(_is_number, numbers)):
        return tuple(float(number) for number in numbers)
    raise OptionError(
        f"{name} is {values!r}", expected="a number, or one per exit; not NaN", fix=f"pass {name}=0.9, or a tuple of numbers"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)

"""When to stop by oneself: small policies that look at a rule's answer after each exit and say which inputs need no more.

`policy.start(batch)` and `policy.stop(state, exit, prediction)` decide exit by exit; the state is a tuple of tensors with the
batch first. `policy.apply(prediction)` is the loop over the steps, on the answers of all exits, and gives the exit at which
each input stops. The last exit always stops.

A policy reads predictions, so it works on what any rule says: `Confidence(0.9).apply(Product()(logits))`. Log-probabilities,
`(exits, batch, classes)`, will do as well. Confidences are compared as log-odds: probabilities round to 1, and rounding must
not decide who stops.
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
from anytime.combine.base import CERTAIN
from anytime.errors import OptionError
from anytime.fitted import Fitted

PolicyState = tuple[Tensor, ...]
"""What a policy remembers of the exits before: tensors with the batch first."""

Numbers = float | tuple[float, ...]
"""One number for all exits, or one per exit."""

Scale = Literal["probability", "log-odds"]
"""What a threshold on the confidence p is given as: p, or log p/(1 - p), which fitted thresholds are."""


@dataclass(frozen=True)
class Stopped:
    """Where each input stopped and what it was answered; every tensor has the batch first.

    Attributes:
        exit: The last exit that was computed for the input, from 1: what it cost.
        source: The exit that the answer is from; another one only under `otherwise="surest"`.
        prediction: The answer.
    """

    exit: Tensor
    source: Tensor
    prediction: Prediction

    @property
    def log_probs(self) -> Tensor:
        """The answer, `(batch, classes)`."""
        return self.prediction.log_probs

    @property
    def fell_back(self) -> Tensor:
        """Whether the rule had to fall back at the exit that the answer is from, `(batch,)`."""
        return self.prediction.fell_back

    @property
    def labels(self) -> Tensor:
        """The label that the rule names, `(batch,)`."""
        return self.prediction.labels


@dataclass(frozen=True)
class Policy(ABC):
    """Base of all policies: subclass it and give `stop`, and `start` where there is something to remember.

    Args:
        otherwise: What an input is answered that passes at no exit before the last: `last` for the last exit's answer,
            `surest` for the most confident of all exits, the first of equals, as shallow-deep networks do.
    """

    per_exit: ClassVar[tuple[str, ...]] = ()
    """The fields that hold one number, or one per exit."""

    otherwise: Literal["last", "surest"] = field(default="last", kw_only=True)

    def __post_init__(self) -> None:
        for name in self.per_exit:
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        check_choice(self.otherwise, "otherwise", ("last", "surest"))

    def start(self, batch: int, device: torch.device | None = None) -> PolicyState:
        """What is remembered before the first exit of `batch` inputs."""
        return ()

    @abstractmethod
    def stop(self, state: PolicyState, exit: int, prediction: Prediction) -> tuple[PolicyState, Tensor]:
        """Look at the answers of one exit; give the new state and which inputs need no more, `(batch,)`.

        Args:
            state: From `start`, or from the exit before.
            exit: The index of the exit, from 0.
            prediction: The rule's answers there, of `batch` inputs.
        """

    def check_fits(self, exits: int, classes: int) -> None:
        """Refuse a number of exits or classes that the policy has no numbers for."""
        for name in self.per_exit:
            numbers = getattr(self, name)
            if isinstance(numbers, tuple) and len(numbers) != exits:
                raise OptionError(
                    f"{type(self).__name__} has {len(numbers)} numbers in {name}, and there are {exits} exits",
                    expected=f"{exits} numbers, one per exit, or one for all",
                    fix="give the last exit a number too; it is not used",
                )

    def apply(self, prediction: Any) -> Tensor:
        """The exit at which each input stops, `(batch,)` from 1.

        Args:
            prediction: A rule's answers at all exits, `rule(logits)`, or their log-probabilities.
        """
        return self._first(check_prediction(prediction))[0] + 1

    def answer(self, prediction: Any) -> Stopped:
        """Where each input stops and what it is answered, from a rule's answers at all exits: `rule(logits)`."""
        answers = check_prediction(prediction)
        exit, passed = self._first(answers)
        source = exit
        if self.otherwise == "surest":
            source = torch.where(passed, exit, answers.log_odds.argmax(0))
        rows = torch.arange(len(exit), device=exit.device)
        return Stopped(exit + 1, source + 1, answers.at(source, rows))

    def _first(self, answers: Prediction) -> tuple[Tensor, Tensor]:
        """The index of the exit at which each input stops, and whether it passed there or only got to the end."""
        exits, batch, classes = answers.log_probs.shape
        device = answers.log_probs.device
        self.check_fits(exits, classes)
        state = self.start(batch, device)
        found = torch.full((batch,), exits - 1, device=device)
        passed = torch.zeros(batch, dtype=torch.bool, device=device)
        for exit in range(exits - 1):
            state, stop = self.stop(state, exit, answers.at(exit))
            found = torch.where(stop & ~passed, exit, found)
            passed = passed | stop
        return found, passed


@dataclass(frozen=True)
class _Threshold(Policy):
    """What policies with one number to pass share: one for all exits or one per exit."""

    per_exit: ClassVar[tuple[str, ...]] = ("threshold",)
    threshold: Numbers
    strict: bool = False


@dataclass(frozen=True)
class Confidence(_Threshold):
    """Stop when the probability of the most probable class reaches a threshold.

    Args:
        threshold: One number, or one per exit; that of the last exit is not used. Nobody stops above 1.
        strict: Whether it must be exceeded (>), not only reached (≥).
        scale: Whether thresholds are probabilities or log-odds.

    Example:
        >>> log_probs = torch.tensor([[[0.6, 0.4], [0.9, 0.1]], [[0.5, 0.5], [0.2, 0.8]]]).log()
        >>> Confidence(0.7).apply(log_probs).tolist()
        [2, 1]
    """

    scale: Scale = field(default="probability", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_scale(self.scale)

    def stop(self, state: PolicyState, exit: int, prediction: Prediction) -> tuple[PolicyState, Tensor]:
        limit = as_log_odds(_number(self.threshold, exit), self.scale)
        odds = prediction.log_odds.double()
        return state, odds > limit if self.strict else odds >= limit


@dataclass(frozen=True)
class Margin(_Threshold):
    """Stop when the two most probable classes lie so far apart.

    Args:
        threshold: One number, or one per exit; that of the last exit is not used.
        strict: Whether it must be exceeded (>), not only reached (≥).
    """

    def stop(self, state: PolicyState, exit: int, prediction: Prediction) -> tuple[PolicyState, Tensor]:
        values, limit = margin(prediction.log_probs), _number(self.threshold, exit)
        return state, values > limit if self.strict else values >= limit


@dataclass(frozen=True)
class Entropy(_Threshold):
    """Stop when the entropy, in nats, is below a threshold, as BranchyNet does.

    Args:
        threshold: One number, or one per exit; that of the last exit is not used.
        strict: Whether it must lie below (<); if not, at most at the threshold (≤).
    """

    strict: bool = True

    def stop(self, state: PolicyState, exit: int, prediction: Prediction) -> tuple[PolicyState, Tensor]:
        values, limit = torch.special.entr(prediction.log_probs.double().exp()).sum(-1), _number(self.threshold, exit)
        return state, values < limit if self.strict else values <= limit


@dataclass(frozen=True)
class Patience(Policy):
    """Stop when so many exits in a row have given the same answer. The first exit's answer is a run of one.

    Args:
        count: How many.
        strict: Whether the run must be longer (>), not only as long (≥).

    Example:
        >>> log_probs = torch.tensor([[[0.9, 0.1]], [[0.4, 0.6]], [[0.3, 0.7]], [[0.2, 0.8]]]).log()
        >>> Patience(2).apply(log_probs).tolist(), Patience(2, strict=True).apply(log_probs).tolist()
        ([3], [4])
    """

    count: int
    strict: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.count, "count", fix="pass Patience(2) to stop when two exits agree")

    def start(self, batch: int, device: torch.device | None = None) -> PolicyState:
        nothing = torch.full((batch,), -1, device=device)
        return nothing, torch.zeros_like(nothing)

    def stop(self, state: PolicyState, exit: int, prediction: Prediction) -> tuple[PolicyState, Tensor]:
        before, run = state
        answer = prediction.labels
        run = torch.where(answer == before, run + 1, 1)
        return (answer, run), run > self.count if self.strict else run >= self.count


@dataclass(frozen=True)
class Window(Policy):
    """Stop unless the confidence lies in a window around a decision's threshold; the bounds belong to the window.

    Where a later decision only asks whether the confidence is above a threshold (accept or hand over to a person), inputs far
    from it on either side gain nothing from another exit. `fit_window` finds the bounds.

    Args:
        lower: One number, or one per exit; that of the last exit is not used.
        upper: As many.
        scale: Whether bounds are probabilities or log-odds.
    """

    per_exit: ClassVar[tuple[str, ...]] = ("lower", "upper")
    lower: Numbers
    upper: Numbers
    scale: Scale = field(default="probability", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_scale(self.scale)

    def stop(self, state: PolicyState, exit: int, prediction: Prediction) -> tuple[PolicyState, Tensor]:
        odds = prediction.log_odds.double()
        lower, upper = (as_log_odds(_number(bound, exit), self.scale) for bound in (self.lower, self.upper))
        return state, (odds < lower) | (odds > upper)


@dataclass(frozen=True)
class FittedPolicy(Fitted, ABC):
    """Base of what was fitted on held-out rows to say when to stop: `policy` says it, this remembers where it is from."""

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """The policy that was fitted."""

    def apply(self, prediction: Any) -> Tensor:
        """The exit at which each input stops, from 1, see `Policy.apply`."""
        return self.policy.apply(self._fitting(prediction))

    def answer(self, prediction: Any) -> Stopped:
        """Where each input stops and what it is answered, see `Policy.answer`."""
        return self.policy.answer(self._fitting(prediction))

    def _fitting(self, prediction: Any) -> Prediction:
        checked = check_prediction(prediction)
        self.check_fits(checked.log_probs.shape[0], checked.log_probs.shape[2])
        return checked


def as_log_odds(threshold: float, scale: Scale = "probability") -> float:
    """A threshold on the confidence as log-odds: 1 is reached by a class that is alone in the support, above 1 by none.

    >>> as_log_odds(0.5), as_log_odds(1.5), as_log_odds(2.0, "log-odds")
    (0.0, inf, 2.0)
    """
    if scale == "log-odds":
        return threshold
    if not 0 < threshold < 1:
        return -math.inf if threshold <= 0 else CERTAIN if threshold == 1 else math.inf
    return math.log(threshold) - math.log1p(-threshold)


def as_probability(log_odds: float) -> float:
    """The probability that log-odds belong to; `inf`, which nobody reaches, stays as it is, and so does `-inf`.

    >>> as_probability(0.0), as_probability(math.inf)
    (0.5, inf)
    """
    if math.isinf(log_odds):
        return log_odds
    return 1 / (1 + math.exp(-log_odds)) if log_odds > 0 else math.exp(log_odds) / (1 + math.exp(log_odds))


def margin(log_probs: Tensor) -> Tensor:
    """How much more probable the most probable class is than the next, as float64; 1 where there is but one class."""
    if log_probs.shape[-1] == 1:
        return log_probs[..., 0].double().exp()
    top = log_probs.topk(2, dim=-1).values.double().exp()
    return top[..., 0] - top[..., 1]


def check_prediction(values: Any, *, name: str = "log_probs") -> Prediction:
    """A rule's answers at all exits, from a prediction or from log-probabilities, `(exits, batch, classes)`."""
    if isinstance(values, Prediction):
        check_log_probs(values.log_probs, name=name)
        return values
    log_probs = check_log_probs(values, name=name)
    return Prediction(log_probs, torch.zeros(log_probs.shape[:2], dtype=torch.bool, device=log_probs.device))


def _number(numbers: Numbers, exit: int) -> float:
    """The number of one exit."""
    return numbers[exit] if isinstance(numbers, tuple) else numbers


def _numbers(name: str, values: Any) -> Numbers:
    numbers = values.tolist() if hasattr(values, "tolist") else values
    if _is_number(numbers):
        return float(numbers)
    if isinstance(numbers, Sequence) and numbers and all(map(_is_number, numbers)):
        return tuple(float(number) for number in numbers)
    raise OptionError(f"{name} is {values!r}", expected="a number, or one per exit", fix="give numbers: NaN and texts are not")


def _check_scale(scale: str) -> None:
    check_choice(scale, "scale", get_args(Scale))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)

"""When to stop by oneself: small policies that look at a rule's answer after each exit and say which inputs need no more.

`policy.start(batch)` and `policy.stop(state, exit, log_probs)` decide exit by exit; the state is a tuple of tensors with the
batch first. `policy.apply(log_probs)` is the loop over the steps, on the answers of all exits, and gives the exit at which
each input stops. The last exit always stops.

A policy reads log-probabilities, so it works on what any rule says: `Confidence(0.9).apply(Product()(logits).log_probs)`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from anytime.checks import as_tensor
from anytime.combine import Prediction
from anytime.errors import DtypeError, OptionError, ScaleError, ShapeError
from anytime.fitted import Fitted

PolicyState = tuple[Tensor, ...]
"""What a policy remembers of the exits before: tensors with the batch first."""

Numbers = float | tuple[float, ...]
"""One number for all exits, or one an exit."""

_ROUNDING = 0.01


@dataclass(frozen=True)
class Stopped:
    """Where each input stopped and what it was answered; every tensor has the batch first.

    Attributes:
        exit: The last exit that was computed for the input, from 0: what it cost.
        source: The exit that the answer is from; another one only under `otherwise="surest"`.
        log_probs: The answer, `(batch, classes)`.
        fell_back: Whether the rule had to fall back at the exit that the answer is from.
    """

    exit: Tensor
    source: Tensor
    log_probs: Tensor
    fell_back: Tensor

    @property
    def labels(self) -> Tensor:
        """The most probable class, `(batch,)`; the first of equals."""
        return self.log_probs.argmax(-1)


@dataclass(frozen=True)
class Policy(ABC):
    """Base of all policies: subclass it and give `stop`, and `start` where there is something to remember.

    Args:
        otherwise: What an input is answered that passes at no exit before the last: `last` for the last exit's answer,
            `surest` for the most confident of all exits, the first of equals, as shallow-deep networks do.
    """

    per_exit: ClassVar[tuple[str, ...]] = ()
    """The fields that hold one number, or one an exit."""

    otherwise: Literal["last", "surest"] = field(default="last", kw_only=True)

    def __post_init__(self) -> None:
        for name in self.per_exit:
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        if self.otherwise not in ("last", "surest"):
            raise OptionError(
                f"otherwise is {self.otherwise!r}", expected="'last' or 'surest'", fix="'last' is the last exit's answer"
            )

    def start(self, batch: int, device: torch.device | None = None) -> PolicyState:
        """What is remembered before the first exit of `batch` inputs."""
        return ()

    @abstractmethod
    def stop(self, state: PolicyState, exit: int, log_probs: Tensor) -> tuple[PolicyState, Tensor]:
        """Look at the answers of one exit, `(batch, classes)`; give the new state and which inputs need no more, `(batch,)`."""

    def check_fits(self, exits: int, classes: int) -> None:
        """Refuse a number of exits or classes that the policy has no numbers for."""
        for name in self.per_exit:
            numbers = getattr(self, name)
            if isinstance(numbers, tuple) and len(numbers) != exits:
                raise OptionError(
                    f"{type(self).__name__} has {len(numbers)} numbers in {name} and came with {exits} exits",
                    expected=f"{exits} numbers, one an exit, or one for all",
                    fix="give the last exit a number too; it is not used",
                )

    def apply(self, log_probs: Any) -> Tensor:
        """The exit at which each input stops, `(batch,)` from 0.

        Args:
            log_probs: A rule's answers at all exits, `(exits, batch, classes)`: `rule(logits).log_probs`.
        """
        return self._first(check_log_probs(log_probs))[0]

    def answer(self, prediction: Prediction) -> Stopped:
        """Where each input stops and what it is answered, from a rule's prediction at all exits: `rule(logits)`."""
        log_probs = check_log_probs(prediction.log_probs)
        exit, passed = self._first(log_probs)
        source = exit
        if self.otherwise == "surest":
            source = torch.where(passed, exit, confidence(log_probs).argmax(0))
        rows = torch.arange(log_probs.shape[1], device=log_probs.device)
        return Stopped(exit, source, log_probs[source, rows], prediction.fell_back[source, rows])

    def _first(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """The exit at which each input stops, and whether it passed there or only came to the end."""
        exits, batch, classes = log_probs.shape
        self.check_fits(exits, classes)
        state = self.start(batch, log_probs.device)
        found = torch.full((batch,), exits - 1, device=log_probs.device)
        passed = torch.zeros(batch, dtype=torch.bool, device=log_probs.device)
        for exit in range(exits - 1):
            state, stop = self.stop(state, exit, log_probs[exit])
            found = torch.where(stop & ~passed, exit, found)
            passed = passed | stop
        return found, passed


@dataclass(frozen=True)
class _Threshold(Policy):
    """What policies with one number to pass share: one for all exits or one an exit."""

    per_exit: ClassVar[tuple[str, ...]] = ("threshold",)
    threshold: Numbers
    strict: bool = False

    def _reached(self, values: Tensor, exit: int) -> Tensor:
        limit = _number(self.threshold, exit)
        return values > limit if self.strict else values >= limit


@dataclass(frozen=True)
class Confidence(_Threshold):
    """Stop when the probability of the most probable class reaches a threshold.

    Args:
        threshold: One number, or one an exit; that of the last exit is not used.
        strict: Whether it must be exceeded (>), not only reached (≥).

    Example:
        >>> log_probs = torch.tensor([[[0.6, 0.4], [0.9, 0.1]], [[0.5, 0.5], [0.2, 0.8]]]).log()
        >>> Confidence(0.7).apply(log_probs).tolist()
        [1, 0]
    """

    def stop(self, state: PolicyState, exit: int, log_probs: Tensor) -> tuple[PolicyState, Tensor]:
        return state, self._reached(confidence(log_probs), exit)


@dataclass(frozen=True)
class Margin(_Threshold):
    """Stop when the two most probable classes lie so far apart.

    Args:
        threshold: One number, or one an exit; that of the last exit is not used.
        strict: Whether it must be exceeded (>), not only reached (≥).
    """

    def stop(self, state: PolicyState, exit: int, log_probs: Tensor) -> tuple[PolicyState, Tensor]:
        return state, self._reached(margin(log_probs), exit)


@dataclass(frozen=True)
class Entropy(_Threshold):
    """Stop when the entropy, in nats, is below a threshold, as BranchyNet does.

    Args:
        threshold: One number, or one an exit; that of the last exit is not used.
        strict: Whether it must lie below (<); if not, at most at the threshold (≤).
    """

    strict: bool = True

    def stop(self, state: PolicyState, exit: int, log_probs: Tensor) -> tuple[PolicyState, Tensor]:
        values, limit = torch.special.entr(log_probs.double().exp()).sum(-1), _number(self.threshold, exit)
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
        ([2], [3])
    """

    count: int
    strict: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise OptionError(f"count is {self.count!r}", expected="a whole number, at least 1", fix="2: two exits agree")

    def start(self, batch: int, device: torch.device | None = None) -> PolicyState:
        nothing = torch.full((batch,), -1, device=device)
        return nothing, torch.zeros_like(nothing)

    def stop(self, state: PolicyState, exit: int, log_probs: Tensor) -> tuple[PolicyState, Tensor]:
        before, run = state
        answer = log_probs.argmax(-1)
        run = torch.where(answer == before, run + 1, 1)
        return (answer, run), run > self.count if self.strict else run >= self.count


@dataclass(frozen=True)
class Window(Policy):
    """Stop unless the confidence lies in a window around a decision's threshold; the bounds belong to the window.

    Where a later decision only asks whether the confidence is above a threshold (accept or hand over to a person), inputs far
    from it on either side gain nothing from another exit. `fit_window` finds the bounds.

    Args:
        lower: One number, or one an exit; that of the last exit is not used.
        upper: As many.
    """

    per_exit: ClassVar[tuple[str, ...]] = ("lower", "upper")
    lower: Numbers
    upper: Numbers

    def stop(self, state: PolicyState, exit: int, log_probs: Tensor) -> tuple[PolicyState, Tensor]:
        sure = confidence(log_probs)
        return state, (sure < _number(self.lower, exit)) | (sure > _number(self.upper, exit))


@dataclass(frozen=True)
class FittedPolicy(Fitted, ABC):
    """Base of what was fitted on held-out rows to say when to stop: `policy` says it, this remembers where it is from."""

    @property
    @abstractmethod
    def policy(self) -> Policy:
        """The policy that was fitted."""

    def apply(self, log_probs: Any) -> Tensor:
        """The exit at which each input stops, see `Policy.apply`."""
        checked = check_log_probs(log_probs)
        self.check_fits(checked.shape[0], checked.shape[2])
        return self.policy.apply(checked)

    def answer(self, prediction: Prediction) -> Stopped:
        """Where each input stops and what it is answered, see `Policy.answer`."""
        checked = check_log_probs(prediction.log_probs)
        self.check_fits(checked.shape[0], checked.shape[2])
        return self.policy.answer(prediction)


def confidence(log_probs: Tensor) -> Tensor:
    """The probability of the most probable class, as float64, so that it is compared with a threshold as it is written."""
    return log_probs.amax(-1).exp().clamp(max=1.0).double()


def margin(log_probs: Tensor) -> Tensor:
    """How much more probable the most probable class is than the next, as float64; 1 where there is but one class."""
    if log_probs.shape[-1] == 1:
        return confidence(log_probs)
    top = log_probs.topk(2, dim=-1).values.exp().double()
    return top[..., 0] - top[..., 1]


def check_log_probs(values: Any, *, name: str = "log_probs") -> Tensor:
    """A rule's answers at all exits, `(exits, batch, classes)`: logarithms of rows that sum to one, `-inf` for zero."""
    log_probs = as_tensor(values, name)
    if log_probs.ndim != 3 or log_probs.shape[0] == 0 or log_probs.shape[2] == 0:
        raise ShapeError(
            f"{name} has shape {tuple(log_probs.shape)}",
            expected="a rule's answers at all exits, (exits, batch, classes)",
            fix="call the rule on the logits of all exits: rule(logits).log_probs",
        )
    if not log_probs.is_floating_point():
        raise DtypeError(
            f"{name} have element type {log_probs.dtype}", expected="floating point numbers", fix="give rule(logits).log_probs"
        )
    log_probs = log_probs if log_probs.dtype in (torch.float32, torch.float64) else log_probs.float()
    if log_probs.shape[1]:
        off = (log_probs.logsumexp(-1).exp() - 1.0).abs()
        if not bool((off < _ROUNDING).all()):  # NaN is refused too
            exit, row = (int(place) for place in (~(off < _ROUNDING)).nonzero()[0])
            raise ScaleError(
                f"{name} of exit {exit}, row {row} are no logarithms of a distribution",
                expected="log-probabilities, whose exponentials sum to 1",
                fix="give rule(logits).log_probs; for plain softmax, anytime.Latest()(logits).log_probs",
            )
    return log_probs


def _number(numbers: Numbers, exit: int) -> float:
    """The number of one exit."""
    return numbers[exit] if isinstance(numbers, tuple) else numbers


def _numbers(name: str, values: Any) -> Numbers:
    numbers = values.tolist() if hasattr(values, "tolist") else values
    if _is_number(numbers):
        return float(numbers)
    if isinstance(numbers, Sequence) and numbers and all(map(_is_number, numbers)):
        return tuple(float(number) for number in numbers)
    raise OptionError(f"{name} is {values!r}", expected="a number, or one an exit", fix="NaN and texts are no numbers")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)

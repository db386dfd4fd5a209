"""Rules around a rule: at a temperature, before it or after it, or with caching on top.

`Scaled` divides the logits before the inner rule sees them, `Tempered` takes its answers to a power and normalises them
again, `Cached` keeps the most confident of them. They stream as the inner rule does. The temperatures belong to one number of
exits; `anytime.calibrate.fit_temperature` finds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from anytime.combine.rules import LARGEST, SMALLEST, CachingState, Prediction, Rule, State, Ties, check_ties, keep_surer
from anytime.errors import OptionError


@dataclass(frozen=True)
class _AtTemperature(Rule[State]):
    """What both temperatures share: the state is the inner rule's."""

    inner: Rule[Any]
    temperatures: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_inner(self.inner)
        fix = "let anytime.calibrate.fit_temperature find them"
        object.__setattr__(self, "temperatures", positive_numbers("temperatures", self.temperatures, fix=fix))
        object.__setattr__(self, "state_type", self.inner.state_type)

    @property
    def exits(self) -> int:
        """How many exits it was fitted for."""
        return len(self.temperatures)

    @property
    def reads_scale(self) -> bool:
        """As the inner rule."""
        return self.inner.reads_scale

    def start(self, exits: int) -> State:
        """The state before the first of `exits` exits."""
        state: State = self.inner.start(exits)
        check_exits(self, self.exits, exits)
        return state


@dataclass(frozen=True)
class Scaled(_AtTemperature):
    """The inner rule on logits divided by a temperature an exit: f_m / T_m.

    Args:
        inner: The rule.
        temperatures: T, one an exit. Above 1 makes an exit less sure of itself.

    Example:
        >>> from anytime import Latest
        >>> Scaled(Latest(), temperatures=(2.0,))(torch.tensor([[[2.0, 0.0]]])).log_probs.diff().item()
        -1.0
    """

    def _update(self, state: State, logits: Tensor) -> tuple[State, Prediction]:
        largest = torch.finfo(logits.dtype).max
        # Logits near the largest number must stay finite at a temperature below 1.
        scaled = (logits / self.temperatures[state.seen]).clamp(-largest, largest)
        return self.inner._update(state, scaled)


@dataclass(frozen=True)
class Tempered(_AtTemperature):
    """The inner rule's distribution at a temperature an exit: p_m^(1/T_m), normalised.

    Classes outside the inner rule's support stay outside, and where it fell back this rule has fallen back too, with the
    softmax that stood in at the same temperature.

    Args:
        inner: The rule.
        temperatures: T, one an exit. Below 1 makes its answers surer.

    Example:
        >>> from anytime import Latest
        >>> Tempered(Latest(), temperatures=(0.5,))(torch.tensor([[[2.0, 0.0]]])).log_probs.diff().item()
        -4.0
    """

    def _update(self, state: State, logits: Tensor) -> tuple[State, Prediction]:
        temperature = self.temperatures[state.seen]
        after, inner = self.inner._update(state, logits)
        # The best class at zero: it then stays finite at any temperature.
        above = inner.log_probs - inner.log_probs.amax(-1, keepdim=True)
        return after, Prediction((above / temperature).log_softmax(-1), inner.fell_back, inner.labels)


@dataclass(frozen=True)
class CachedState(CachingState):
    """Of the cached answer, and `inner`, the rule's own state."""

    fell_back: Tensor | None = None
    inner: State | None = None


@dataclass(frozen=True)
class Cached(Rule[CachedState]):
    """The most confident of the inner rule's answers so far: caching on top of any rule.

    `Cached(Latest())` is `Caching()`. `fell_back` tells whether the answer kept is one that had to fall back.

    Args:
        inner: The rule.
        ties: Which of two equally confident answers to keep, `earlier` or `later`.

    Example:
        >>> from anytime import Product
        >>> logits = torch.tensor([[[9.0, 1.0]], [[1.0, 1.0]]])
        >>> cached, plain = Cached(Product(weights="ones"))(logits), Product(weights="ones")(logits)
        >>> torch.allclose(cached.probs[1], plain.probs[0])
        True
    """

    state_type: ClassVar[type[State]] = CachedState
    inner: Rule[Any]
    ties: Ties = "earlier"

    def __post_init__(self) -> None:
        _check_inner(self.inner)
        check_ties(self.ties)

    @property
    def reads_scale(self) -> bool:
        """As the inner rule."""
        return self.inner.reads_scale

    def start(self, exits: int) -> CachedState:
        """The state before the first of `exits` exits."""
        return CachedState(exits, inner=self.inner.start(exits))

    def _update(self, state: CachedState, logits: Tensor) -> tuple[CachedState, Prediction]:
        inner, answer = self.inner._update(state.inner, logits)
        answer, margin = keep_surer(answer, state, self.ties)
        after = CachedState(state.exits, state.seen + 1, answer.log_probs, margin, answer.labels, answer.fell_back, inner)
        return after, answer


def positive_numbers(name: str, values: Any, *, fix: str) -> tuple[float, ...]:
    """One usable positive number an exit, as a tuple."""
    numbers = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(numbers, Sequence) and numbers and all(_is_usable(number) for number in numbers):
        return tuple(float(number) for number in numbers)
    raise OptionError(f"{name} are {values!r}", expected=f"one number an exit, from {SMALLEST:g} to {LARGEST:g}", fix=fix)


def check_exits(rule: Rule[Any], known: int, exits: int) -> None:
    """Refuse another number of exits than the rule has numbers for."""
    if exits != known:
        raise OptionError(
            f"{type(rule).__name__} was fitted for {known} exits and came with {exits}",
            expected=f"{known} exits",
            fix="fit it anew on logits of this model; to stop early, start with all exits and take fewer steps",
        )


def _check_inner(inner: Any) -> None:
    if not isinstance(inner, Rule):
        raise OptionError(
            f"the inner rule is {inner!r}",
            expected="a rule, such as anytime.Product() or anytime.Caching()",
            fix="write Product() with parentheses; from a name, use anytime.parse_rule('cached(product)')",
        )


def _is_usable(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return number and SMALLEST <= value <= LARGEST

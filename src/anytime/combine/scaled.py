"""Rules around a rule: with temperatures before or after it, or with caching on top.

`Scaled` divides the logits before the inner rule sees them, `Tempered` takes its answers to a power and normalises again,
`Cached` keeps the most confident of them. `anytime.calibrate.fit_temperature` finds the temperatures, one per exit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from anytime.checks import check_choice
from anytime.combine.base import Rule, check_inner, positive_numbers
from anytime.combine.prediction import Prediction, State
from anytime.combine.rules import CachingState, Ties, keep_more_confident


@dataclass(frozen=True)
class _AtTemperature(Rule[State]):
    """What both temperature rules share: the state is that of the inner rule."""

    inner: Rule[Any]
    temperatures: tuple[float, ...]

    def __post_init__(self) -> None:
        check_inner(self.inner)
        numbers = positive_numbers("temperatures", self.temperatures, fix="find them with anytime.fit_temperature")
        object.__setattr__(self, "temperatures", numbers)
        object.__setattr__(self, "state_type", self.inner.state_type)

    @property
    def exits(self) -> int:
        """The number of exits that the rule was fitted for."""
        return len(self.temperatures)

    @property
    def reads_scale(self) -> bool:
        """As the inner rule."""
        return self.inner.reads_scale

    def start(self, exits: int) -> State:
        """The state before the first of `exits` exits."""
        state: State = self.inner.start(exits)
        self.check_exits(exits)
        return state


@dataclass(frozen=True)
class Scaled(_AtTemperature):
    """The inner rule on logits divided by one temperature per exit: f_m / T_m.

    Args:
        inner: The rule.
        temperatures: T, one per exit. Above 1 makes an exit less confident.

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
    """The inner rule's distribution at one temperature per exit: p_m^(1/T_m), normalised.

    Classes outside the inner rule's support stay outside. Where the inner rule fell back, so does this one.

    Args:
        inner: The rule.
        temperatures: T, one per exit. Below 1 makes the answers more confident.

    Example:
        >>> from anytime import Latest
        >>> Tempered(Latest(), temperatures=(0.5,))(torch.tensor([[[2.0, 0.0]]])).log_probs.diff().item()
        -4.0
    """

    def _update(self, state: State, logits: Tensor) -> tuple[State, Prediction]:
        temperature = self.temperatures[state.seen]
        after, inner = self.inner._update(state, logits)
        # With the best class at zero it stays finite at any temperature.
        above = inner.log_probs - inner.log_probs.amax(-1, keepdim=True)
        return after, Prediction((above / temperature).log_softmax(-1), inner.fell_back, inner.labels)


@dataclass(frozen=True)
class CachedState(CachingState):
    """The cached answer, and the state of the inner rule."""

    fell_back: Tensor | None = None
    inner: State | None = None


@dataclass(frozen=True)
class Cached(Rule[CachedState]):
    """The most confident of the inner rule's answers so far: caching on top of any rule.

    `Cached(Latest())` is `Caching()`, except where exits are equally confident up to rounding. `fell_back` is that of the
    cached answer.

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
        check_inner(self.inner)
        check_choice(self.ties, "ties", ("earlier", "later"))

    @property
    def reads_scale(self) -> bool:
        """As the inner rule."""
        return self.inner.reads_scale

    def start(self, exits: int) -> CachedState:
        """The state before the first of `exits` exits."""
        return CachedState(exits, inner=self.inner.start(exits))

    def _update(self, state: CachedState, logits: Tensor) -> tuple[CachedState, Prediction]:
        inner, answer = self.inner._update(state.inner, logits)
        answer, margin = keep_more_confident(answer, answer.log_odds, state, self.ties)
        after = CachedState(state.exits, state.seen + 1, answer.log_probs, margin, answer.labels, answer.fell_back, inner)
        return after, answer

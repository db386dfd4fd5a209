"""Learned ensembles of the exits, as in Zero Time Waste: weights and biases fitted for each exit on its own.

Exit m weighs what it and all exits before it say. `Geometric` adds weighted log-probabilities, `Arithmetic` weighted
probabilities. Both hold the fitted numbers, v and b of the method; `anytime.calibrate.ensembles` finds them. They
belong to one number of exits and, where they have biases, to one number of classes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from anytime.combine.activations import above_overflow, below_best
from anytime.combine.rules import Prediction, Rule, State, decide
from anytime.errors import OptionError, ShapeError

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class LearnedState(State):
    """`past` holds what the rule keeps of each exit so far, `(batch, classes)` each; `memory` are the last logits."""

    past: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class _Learned(Rule[LearnedState]):
    """What both ensembles share.

    Args:
        log_weights: v; row m has one number for each exit up to m.
        biases: b; one row an exit with one number a class, or no rows for none.
    """

    state_type: ClassVar[type[State]] = LearnedState
    log_weights: Rows
    biases: Rows = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "log_weights", _rows("log_weights", self.log_weights))
        object.__setattr__(self, "biases", _rows("biases", self.biases))
        lengths = [len(row) for row in self.log_weights]
        if not lengths or lengths != list(range(1, len(lengths) + 1)):
            raise OptionError(
                f"log_weights have rows of {lengths} numbers", expected="rows of 1, 2, … M numbers", fix=_FIT.format(type(self))
            )
        classes = {len(row) for row in self.biases}
        if self.biases and (len(self.biases) != len(lengths) or len(classes) != 1 or 0 in classes):
            raise OptionError(
                f"biases have {len(self.biases)} rows of {sorted(classes)} numbers",
                expected=f"{len(lengths)} rows, one an exit, with one number a class, or none",
                fix="fit log_weights and biases together",
            )

    @classmethod
    def plain(cls, exits: int) -> Self:
        """The ensemble with weights of one and without biases, for any number of classes."""
        return cls(tuple((0.0,) * exit for exit in range(1, exits + 1)))

    @property
    def exits(self) -> int:
        """How many exits it was fitted for."""
        return len(self.log_weights)

    def start(self, exits: int) -> LearnedState:
        """The state before the first of `exits` exits."""
        state = super().start(exits)
        if exits != self.exits:
            raise OptionError(
                f"{type(self).__name__} was fitted for {self.exits} exits and came with {exits}",
                expected=f"{self.exits} exits",
                fix="fit it anew on logits of this model; to stop early, start with all exits and take fewer steps",
            )
        return state

    def _update(self, state: LearnedState, logits: Tensor) -> tuple[LearnedState, Prediction]:
        past = (*state.past, self._kept(logits))
        bias = self._bias(state.seen, logits)
        evidence = self._evidence(past, self.log_weights[state.seen], bias)
        after = LearnedState(state.exits, state.seen + 1, logits, past)
        return after, decide(evidence, logits)

    def _bias(self, exit: int, logits: Tensor) -> Tensor | None:
        if not self.biases:
            return None
        classes = len(self.biases[exit])
        if logits.shape[-1] != classes:
            raise ShapeError(
                f"{type(self).__name__} was fitted for {classes} classes and came with {logits.shape[-1]}",
                expected=f"{classes} classes",
                fix="fit it anew on logits of this model",
            )
        return torch.tensor(self.biases[exit], dtype=logits.dtype, device=logits.device)

    @abstractmethod
    def _kept(self, logits: Tensor) -> Tensor:
        """What is kept of an exit: log-probabilities, up to a number for each row where that cancels."""

    @abstractmethod
    def _evidence(self, past: tuple[Tensor, ...], log_weights: tuple[float, ...], bias: Tensor | None) -> Tensor:
        """The logarithm of the evidence for each class, `(batch, classes)`."""


@dataclass(frozen=True)
class Geometric(_Learned):
    """log q_m(y) = (1/m) Σ_{i≤m} exp(v_{m,i}) log p_i(y) + b_{m,y}, then normalised: ZTW's ensemble.

    Args:
        log_weights: v; row m has one number for each exit up to m.
        biases: b; one row an exit with one number a class, or no rows for none.

    Example:
        >>> rule = Geometric(log_weights=((0.0,), (0.0, 0.0)))
        >>> rule(torch.tensor([[[0.0, 2.0]], [[2.0, 0.0]]])).probs[1].round(decimals=4).tolist()
        [[0.5, 0.5]]
    """

    def _kept(self, logits: Tensor) -> Tensor:
        return below_best(logits)

    def _evidence(self, past: tuple[Tensor, ...], log_weights: tuple[float, ...], bias: Tensor | None) -> Tensor:
        least = torch.finfo(past[0].dtype).min / 1e3 / len(past)  # so that their sum is finite
        terms = (math.exp(v) / len(past) * log_probs for v, log_probs in zip(log_weights, past, strict=True))
        total = sum(term.clamp(min=least) for term in terms)
        assert isinstance(total, Tensor)
        return total if bias is None else total + bias


@dataclass(frozen=True)
class Arithmetic(_Learned):
    """q_m(y) ∝ Σ_{i≤m} exp(v_{m,i}) p_i(y) + exp(b_{m,y}): the variant with sums of probabilities.

    Args:
        log_weights: v; row m has one number for each exit up to m.
        biases: b; one row an exit with one number a class, or no rows for none.

    Example:
        >>> rule = Arithmetic(log_weights=((0.0,), (0.0, 0.0)))
        >>> rule(torch.tensor([[[0.0, 2.0]], [[2.0, 0.0]]])).probs[1].round(decimals=4).tolist()
        [[0.5, 0.5]]
    """

    def _kept(self, logits: Tensor) -> Tensor:
        return above_overflow(logits.log_softmax(-1))

    def _evidence(self, past: tuple[Tensor, ...], log_weights: tuple[float, ...], bias: Tensor | None) -> Tensor:
        terms = [log_probs + v for v, log_probs in zip(log_weights, past, strict=True)]
        total = torch.stack(terms).logsumexp(0)
        return total if bias is None else torch.logaddexp(total, bias)


_FIT = "let anytime.calibrate.ensembles fit a {0.__name__}"
# Beyond this a weight is no finite float32 any more, or none at all.
_LARGEST = 80.0


def _rows(name: str, values: Any) -> Rows:
    rows = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(rows, Sequence) and all(isinstance(row, Sequence) and not isinstance(row, str) for row in rows):
        numbers = [number for row in rows for number in row]
        if all(_is_number(number) for number in numbers):
            return tuple(tuple(float(number) for number in row) for row in rows)
    raise OptionError(
        f"{name} are {values!r}",
        expected=f"rows of numbers between -{_LARGEST:g} and {_LARGEST:g}",
        fix="fit the ensemble anew",
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST

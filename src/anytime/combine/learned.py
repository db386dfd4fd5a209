"""Learned ensembles of the exits, as in Zero Time Waste: weights and biases fitted for each exit on its own.

Exit m weights its own prediction and those of all exits before it. `Geometric` adds weighted log-probabilities, `Arithmetic`
weighted probabilities. Both hold the fitted numbers, v and b of the method; `anytime.calibrate.ensembles` finds them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from anytime.checks import check_number
from anytime.combine.activations import above_overflow, below_best
from anytime.combine.base import Rule, decide
from anytime.combine.prediction import Prediction, State
from anytime.errors import OptionError, ShapeError

Rows = tuple[tuple[float, ...], ...]
_LARGEST = 80.0
"""The exponential of larger numbers overflows float32."""
_FIX = "fit log_weights and biases together with anytime.calibrate.fit_geometric or fit_arithmetic"


@dataclass(frozen=True)
class LearnedState(State):
    """`past` holds what the rule keeps of each exit so far, `(batch, classes)` each; `memory` are the last logits."""

    past: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class _Learned(Rule[LearnedState]):
    """What both ensembles share: v and b, the state, and their checks."""

    state_type: ClassVar[type[State]] = LearnedState
    log_weights: Rows
    biases: Rows = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "log_weights", _rows("log_weights", self.log_weights))
        object.__setattr__(self, "biases", _rows("biases", self.biases))
        lengths = [len(row) for row in self.log_weights]
        if not lengths or lengths != list(range(1, len(lengths) + 1)):
            raise OptionError(f"log_weights have rows of {lengths} numbers", expected="rows of 1, 2, … M numbers", fix=_FIX)
        classes = {len(row) for row in self.biases}
        if self.biases and (len(self.biases) != len(lengths) or len(classes) != 1 or 0 in classes):
            raise OptionError(
                f"biases have {len(self.biases)} rows of {sorted(classes)} numbers",
                expected=f"{len(lengths)} rows, one per exit, with one number per class, or no rows",
                fix=_FIX,
            )

    @classmethod
    def plain(cls, exits: int) -> Self:
        """The ensemble with weights of one and without biases, for any number of classes."""
        return cls(tuple((0.0,) * exit for exit in range(1, exits + 1)))

    @property
    def exits(self) -> int:
        """The number of exits that the rule was fitted for."""
        return len(self.log_weights)

    def _update(self, state: LearnedState, logits: Tensor) -> tuple[LearnedState, Prediction]:
        past = (*state.past, self._kept(logits))
        evidence = self._evidence(past, self.log_weights[state.seen], self._bias(state.seen, logits))
        return LearnedState(state.exits, state.seen + 1, logits, past), decide(evidence, logits)

    def _bias(self, exit: int, logits: Tensor) -> Tensor | None:
        if not self.biases:
            return None
        classes = len(self.biases[exit])
        if logits.shape[-1] != classes:
            raise ShapeError(
                f"{type(self).__name__} was fitted for {classes} classes and got {logits.shape[-1]}",
                expected=f"{classes} classes",
                fix="fit the rule on logits of this model",
            )
        return torch.tensor(self.biases[exit], dtype=logits.dtype, device=logits.device)

    @abstractmethod
    def _kept(self, logits: Tensor) -> Tensor:
        """What is kept of an exit: log-probabilities, up to a constant per row where that cancels."""

    @abstractmethod
    def _evidence(self, past: tuple[Tensor, ...], log_weights: tuple[float, ...], bias: Tensor | None) -> Tensor:
        """The logarithm of the evidence for each class, `(batch, classes)`."""


@dataclass(frozen=True)
class Geometric(_Learned):
    """log q_m(y) = (1/m) Σ_{i≤m} exp(v_{m,i}) log p_i(y) + b_{m,y}, then normalised: ZTW's ensemble.

    Args:
        log_weights: v; row m has one number for each exit up to m.
        biases: b; one row per exit with one number per class, or no rows.

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

    Arguments and use are those of `Geometric`.
    """

    def _kept(self, logits: Tensor) -> Tensor:
        return above_overflow(logits.log_softmax(-1))

    def _evidence(self, past: tuple[Tensor, ...], log_weights: tuple[float, ...], bias: Tensor | None) -> Tensor:
        terms = [log_probs + v for v, log_probs in zip(log_weights, past, strict=True)]
        total = torch.stack(terms).logsumexp(0)
        return total if bias is None else torch.logaddexp(total, bias)


def _rows(name: str, values: Any) -> Rows:
    rows = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(rows, Sequence) or not all(isinstance(row, Sequence) and not isinstance(row, str) for row in rows):
        raise OptionError(f"{name} are {values!r}", expected="rows of numbers", fix=_FIX)
    return tuple(tuple(check_number(number, name, low=-_LARGEST, most=_LARGEST, fix=_FIX) for number in row) for row in rows)

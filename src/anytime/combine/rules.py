"""Rules: what to answer, given the logits of the exits seen so far (section 4 of the paper).

A rule is a small frozen object. `rule(logits)` takes `(exits, batch, classes)` and gives a prediction at every exit;
`rule.start(exits)` and `rule.step(state, logits)` do the same one exit at a time with a state of size
`(batch, classes)`. The call is the loop over the steps, so both give the same numbers.

Everything is computed on logarithms, in float32 or, for float64 logits, in float64.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor

from anytime.checks import check_logits, check_step
from anytime.combine.activations import Activation, ReLU
from anytime.errors import OptionError, StateError

Weights = Literal["linear", "ones"] | tuple[float, ...]
Shift = float | Literal["1/K"]
Ties = Literal["earlier", "later"]


@dataclass(frozen=True)
class Prediction:
    """What a rule answers at one exit, or at all of them with one more dimension in front.

    Attributes:
        log_probs: `(..., batch, classes)`, normalised; `-inf` for classes outside the support.
        fell_back: `(..., batch)`, true where the rule had no evidence left for any class (a collapse) and gave the
            softmax of the current exit instead.
    """

    log_probs: Tensor
    fell_back: Tensor

    @property
    def probs(self) -> Tensor:
        """Probabilities, `(..., batch, classes)`."""
        return self.log_probs.exp()

    @property
    def labels(self) -> Tensor:
        """The most probable class, `(..., batch)`; the first of equals."""
        return self.log_probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """The probability of that class, `(..., batch)`."""
        return self.log_probs.amax(-1).exp()


@dataclass(frozen=True)
class State:
    """Where a rule stands after `seen` of `exits` exits. `memory` is the rule's own, `(batch, classes)`.

    Every tensor of a state has the batch first, so that inputs can leave a running batch.
    """

    exits: int
    seen: int = 0
    memory: Tensor | None = None

    def select(self, rows: Tensor) -> Self:
        """The state of some inputs only, by their places in the batch or by a mask, for a step on those alone."""
        return replace(self, **{part.name: _select(getattr(self, part.name), rows) for part in fields(self)})


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Rule(ABC, Generic[S]):
    """Base of all rules: subclass it, give `_first` and `_update`, and `anytime.testing.check_rule` does the rest."""

    state_type: ClassVar[type[State]] = State

    def start(self, exits: int) -> S:
        """The state before the first of `exits` exits."""
        if isinstance(exits, bool) or not isinstance(exits, int) or exits < 1:
            raise OptionError(
                f"exits is {exits!r}", expected="a whole number, at least 1", fix="pass model.num_exits or len(logits)"
            )
        return self.state_type(exits=exits)  # type: ignore[return-value]

    def step(self, state: S, logits: Any) -> tuple[S, Prediction]:
        """Take the logits of the next exit, `(batch, classes)`; give the new state and the prediction so far."""
        if not isinstance(state, self.state_type):
            raise StateError(
                f"{type(self).__name__} was given a {type(state).__name__}",
                expected=f"a {self.state_type.__name__}",
                fix="begin with this rule's own start(exits)",
            )
        if state.seen >= state.exits:
            raise StateError(
                f"a step after the last of {state.exits} exits",
                expected=f"at most {state.exits} steps",
                fix="begin the next inputs with rule.start(exits), or start with the true number of exits",
            )
        return self._update(state, check_step(logits, exit=state.seen, like=state.memory))

    def __call__(self, logits: Any) -> Prediction:
        """The prediction at every exit from logits of shape `(exits, batch, classes)`."""
        return self.combine(check_logits(logits))

    def combine(self, logits: Tensor) -> Prediction:
        """As the call, for logits that are known to be finite floats of the right shape."""
        state = self.start(logits.shape[0])
        log_probs = torch.empty_like(logits, memory_format=torch.contiguous_format)
        fell_back = torch.empty(logits.shape[:2], dtype=torch.bool, device=logits.device)
        for exit, now in enumerate(logits):
            state, prediction = self._update(state, now)
            log_probs[exit] = prediction.log_probs
            fell_back[exit] = prediction.fell_back
        return Prediction(log_probs, fell_back)

    def after(self, logits: Tensor, exits: int) -> Prediction:
        """The prediction after the first of `exits` exits, for logits `(seen, batch, classes)` that are known to be right.

        It is what stepping over them gives in the end, up to rounding.
        """
        state = self.start(exits)
        for now in logits:
            state, prediction = self._update(state, now)
        return prediction

    @abstractmethod
    def _update(self, state: S, logits: Tensor) -> tuple[S, Prediction]:
        """One step on checked logits. Must not change `state` or `logits`."""


@dataclass(frozen=True)
class Latest(Rule[State]):
    """The softmax of the current exit: what an early-exit network does without care."""

    def _update(self, state: State, logits: Tensor) -> tuple[State, Prediction]:
        # The memory only pins shape and device, so that a wrong batch is noticed.
        after = State(state.exits, state.seen + 1, logits)
        return after, Prediction(logits.log_softmax(-1), _no(logits))


@dataclass(frozen=True)
class CachingState(State):
    """`memory` is the cached distribution (its logarithm), `margin` its confidence as log-odds, `(batch, 1)`."""

    margin: Tensor | None = None


@dataclass(frozen=True)
class Caching(Rule[CachingState]):
    """The most confident softmax so far (Caching Anytime).

    Args:
        ties: Which answer to keep between equally confident exits: `earlier` as in the paper's text, or `later` as in
            its released code.
    """

    state_type: ClassVar[type[State]] = CachingState
    ties: Ties = "earlier"

    def __post_init__(self) -> None:
        check_ties(self.ties)

    def _update(self, state: CachingState, logits: Tensor) -> tuple[CachingState, Prediction]:
        log_probs = logits.log_softmax(-1)
        margin = log_odds(log_probs)
        if state.memory is not None and state.margin is not None:
            newer = is_surer(margin, state.margin, self.ties)
            log_probs = torch.where(newer, log_probs, state.memory)
            margin = torch.where(newer, margin, state.margin)
        after = CachingState(state.exits, state.seen + 1, log_probs, margin)
        return after, Prediction(log_probs, _no(logits))


@dataclass(frozen=True)
class Product(Rule[State]):
    """The product of experts over the exits (Product Anytime): p_m(y) ∝ Π_{i≤m} a(f_i(y))^{w_i}.

    A class without evidence at one exit has left the support for good. Where no class is left the row has collapsed:
    the prediction is the softmax of the current exit, there and at all later exits, and `fell_back` says so.

    Args:
        activation: a; the ReLU by default.
        weights: `linear` is w_i = i/M, `ones` is 1, or one number an exit. An exit of weight 0 changes nothing.
        shift: Added to the logits first; `1/K` is the paper's choice for few classes.

    Example:
        >>> logits = torch.tensor([[[2.0, 1.0, -1.0]], [[3.0, -1.0, 1.0]]])
        >>> Product()(logits).probs[-1, 0].tolist()  # the second class has left at the second exit, the third at the first
        [1.0, 0.0, 0.0]
    """

    activation: Activation = field(default_factory=ReLU)
    weights: Weights = "linear"
    shift: Shift = 0.0

    def __post_init__(self) -> None:
        _check_evidence(self.activation, self.shift)
        object.__setattr__(self, "weights", _check_weights(self.weights))

    def start(self, exits: int) -> State:
        """The state before the first of `exits` exits."""
        state = super().start(exits)
        _weights(self.weights, exits)
        return state

    def after(self, logits: Tensor, exits: int) -> Prediction:
        """The prediction after the first of `exits` exits, the evidence of all of them taken in one go."""
        weights, taken = _taken(self.weights, exits, len(logits), logits.dtype, logits.device)
        if not taken:
            return Prediction(*normalise_evidence(torch.zeros_like(logits[0]), logits[-1]))
        given = logits if len(taken) == len(logits) else logits[list(taken)]
        evidence = self.activation.log_evidence(_shifted(given, self.shift))
        return Prediction(*normalise_evidence((evidence * weights).sum(0), logits[-1]))

    def _update(self, state: State, logits: Tensor) -> tuple[State, Prediction]:
        weight = _weights(self.weights, state.exits)[state.seen]
        total = torch.zeros_like(logits) if state.memory is None else state.memory
        if weight > 0:  # 0 · -inf is not zero evidence but no evidence taken
            total = total + weight * self.activation.log_evidence(_shifted(logits, self.shift))
        log_probs, fell_back = normalise_evidence(total, logits)
        return State(state.exits, state.seen + 1, total), Prediction(log_probs, fell_back)


@dataclass(frozen=True)
class MixtureState(State):
    """`memory` is the logarithm of the weighted sum so far, `fell_back` the rows where an exit had no evidence."""

    fell_back: Tensor | None = None


@dataclass(frozen=True)
class Mixture(Rule[MixtureState]):
    """The mean over the exits so far of each exit's normalised evidence: the paper's ablation.

    An exit without evidence for any class takes part with its softmax, and `fell_back` says so from there on.

    Args:
        activation: a; the ReLU by default.
        weights: `ones` for the plain mean, `linear` for i/M, or one number an exit; the first must be positive.
        shift: Added to the logits first.
    """

    state_type: ClassVar[type[State]] = MixtureState
    activation: Activation = field(default_factory=ReLU)
    weights: Weights = "ones"
    shift: Shift = 0.0

    def __post_init__(self) -> None:
        _check_evidence(self.activation, self.shift)
        weights = _check_weights(self.weights)
        if not isinstance(weights, str) and weights[0] == 0:
            raise OptionError(
                f"weights are {weights}",
                expected="a positive first weight, so that there is a mean at the first exit",
                fix="leave the exit out of the logits, or give it a small weight",
            )
        object.__setattr__(self, "weights", weights)

    def start(self, exits: int) -> MixtureState:
        """The state before the first of `exits` exits."""
        state = super().start(exits)
        _weights(self.weights, exits)
        return state

    def _update(self, state: MixtureState, logits: Tensor) -> tuple[MixtureState, Prediction]:
        weights = _weights(self.weights, state.exits)
        weight = weights[state.seen]
        total, fell_back = state.memory, state.fell_back
        if weight > 0:
            expert, lost = normalise_evidence(self.activation.log_evidence(_shifted(logits, self.shift)), logits)
            expert = expert + math.log(weight)
            total = expert if total is None else torch.logaddexp(total, expert)
            fell_back = lost if fell_back is None else fell_back | lost
        assert total is not None  # the first weight is positive
        assert fell_back is not None
        log_probs = (total - math.log(sum(weights[: state.seen + 1]))).clamp(max=0)
        return MixtureState(state.exits, state.seen + 1, total, fell_back), Prediction(log_probs, fell_back)


def normalise_evidence(log_evidence: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities from log-evidence; rows without any take the softmax of `logits` and are marked."""
    log_probs = log_evidence.log_softmax(-1)
    fell_back = log_probs[:, 0].isnan()  # -inf less -inf, which no other row has
    # Elsewhere than on a CPU, looking whether there are any would wait for the device.
    if fell_back.device.type != "cpu" or bool(fell_back.any()):
        log_probs = torch.where(fell_back[:, None], logits.log_softmax(-1), log_probs)
    return log_probs, fell_back


def log_odds(log_probs: Tensor) -> Tensor:
    """Log-odds of the top class, `(batch, 1)`: orders confidences where they all round to one."""
    top, index = log_probs.max(-1, keepdim=True)
    others = log_probs.exp().scatter_(-1, index, 0.0).sum(-1, keepdim=True)
    return top - others.log()


def is_surer(margin: Tensor, cached: Tensor, ties: Ties) -> Tensor:
    """Where an answer with these log-odds takes the place of the cached one."""
    return margin > cached if ties == "earlier" else margin >= cached


def check_ties(value: str) -> None:
    """Refuse anything but `earlier` and `later`."""
    if value not in ("earlier", "later"):
        raise OptionError(f"ties is {value!r}", expected="'earlier' or 'later'", fix="'earlier' is the paper's definition")


def _select(value: Any, rows: Tensor) -> Any:
    match value:
        case Tensor():
            return value[rows]
        case State():
            return value.select(rows)
        case tuple():
            return tuple(_select(part, rows) for part in value)
    return value


def _no(logits: Tensor) -> Tensor:
    return torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)


def _shifted(logits: Tensor, shift: Shift) -> Tensor:
    amount = 1.0 / logits.shape[-1] if isinstance(shift, str) else shift
    return logits + amount if amount else logits


def _weights(weights: Weights, exits: int) -> tuple[float, ...]:
    if weights == "linear":
        return tuple(exit / exits for exit in range(1, exits + 1))
    if weights == "ones":
        return (1.0,) * exits
    if len(weights) != exits:
        raise OptionError(
            f"{len(weights)} weights came with {exits} exits",
            expected=f"{exits} weights, one an exit",
            fix="give as many weights as exits, or 'linear' or 'ones'",
        )
    return tuple(float(weight) for weight in weights)


@cache
def _taken(weights: Weights, exits: int, seen: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """The positive weights among those of the first exits, `(taken, 1, 1)`, and which exits they belong to."""
    taken = [(exit, weight) for exit, weight in enumerate(_weights(weights, exits)[:seen]) if weight > 0]
    with torch.inference_mode(False):  # it is kept, and may be asked for with gradients another time
        numbers = torch.tensor([weight for _, weight in taken], dtype=dtype, device=device)
    return numbers[:, None, None], tuple(exit for exit, _ in taken)


def _check_weights(weights: Any) -> Weights:
    if isinstance(weights, str):
        if weights in ("linear", "ones"):
            return weights  # type: ignore[return-value]
    elif isinstance(weights, Sequence) or hasattr(weights, "tolist"):
        values = tuple(float(weight) for weight in (weights.tolist() if hasattr(weights, "tolist") else weights))
        if values and all(math.isfinite(weight) and weight >= 0 for weight in values):
            return values
    raise OptionError(
        f"weights are {weights!r}",
        expected="'linear' (i/M), 'ones', or one finite number of at least 0 an exit",
        fix="'linear' is the paper's choice",
    )


def _check_evidence(activation: Any, shift: Any) -> None:
    if isinstance(activation, type) or not isinstance(activation, Activation):
        raise OptionError(
            f"activation is {activation!r}",
            expected="an activation, such as anytime.ReLU() or anytime.ClippedReLU(limit=2.0)",
            fix="write ReLU() with parentheses; from a name, use anytime.rule('product(softplus)')",
        )
    if shift != "1/K" and not (isinstance(shift, int | float) and math.isfinite(shift)):
        raise OptionError(f"shift is {shift!r}", expected="a finite number or '1/K'", fix="0 is no shift")

"""Rules: what to answer, given the logits of the exits seen so far (section 4 of the paper).

A rule is a small frozen object. `rule(logits)` takes `(exits, batch, classes)` and gives a prediction at every exit;
`rule.start(exits)` and `rule.step(state, logits)` do the same one exit at a time with a state of size
`(batch, classes)`. The call is the loop over the steps, so both give the same numbers.

Everything is computed on logarithms, in float32 or, for float64 logits, in float64. Normalising rounds, so a rule names the
label from its evidence before that, and confidences are compared as log-odds, which do not round to 1.
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

from anytime.checks import check_choice, check_count, check_logits, check_probabilities, check_scale, check_step
from anytime.combine.activations import Activation, Exponential, ReLU
from anytime.errors import OptionError, StateError

Weights = Literal["linear", "ones"] | tuple[float, ...]
Shift = float | Literal["1/K"]
Ties = Literal["earlier", "later"]

SMALLEST, LARGEST = 1e-6, 1e6
"""Weights, temperatures and powers outside of these are no use, and 1/T must be a float32."""
CERTAIN = float(torch.finfo(torch.float32).max)
"""The log-odds of a class that is alone in the support: finite, so that a threshold of infinity is out of reach."""
_FAR = 1e-30
_MANY = 4096


@dataclass(frozen=True)
class Prediction:
    """What a rule answers at one exit, or at all of them with one more dimension in front.

    Attributes:
        log_probs: `(..., batch, classes)`, normalised; `-inf` for classes outside the support.
        fell_back: `(..., batch)`, true where the rule had no evidence left for any class (a collapse) and gave the
            softmax of the current exit instead.
        labels: The class with the most evidence, `(..., batch)`; the first of equals. A rule names it before normalising,
            which can round different evidence to equal probabilities. Left out, it is the most probable class.
    """

    log_probs: Tensor
    fell_back: Tensor
    labels: Tensor = None  # type: ignore[assignment]  # filled in below

    def __post_init__(self) -> None:
        if self.labels is None:
            object.__setattr__(self, "labels", top_class(self.log_probs))

    def at(self, *index: Any) -> Prediction:
        """A part of it: `at(exit)` of a prediction at all exits, `at(rows)` or `at(slice(None), rows)` of some inputs."""
        return Prediction(self.log_probs[index], self.fell_back[index], self.labels[index])

    def clone(self) -> Prediction:
        """A copy that shares no memory with this one."""
        return Prediction(self.log_probs.clone(), self.fell_back.clone(), self.labels.clone())

    def put(self, rows: Tensor, other: Prediction) -> None:
        """Write the answers of other inputs in the place of these."""
        self.log_probs[rows], self.fell_back[rows], self.labels[rows] = other.log_probs, other.fell_back, other.labels

    @property
    def probs(self) -> Tensor:
        """Probabilities, `(..., batch, classes)`."""
        return self.log_probs.exp()

    @property
    def confidence(self) -> Tensor:
        """The probability of the label, `(..., batch)`. In float32 it rounds to 1 from log-odds of 17 on."""
        return self.log_probs.amax(-1).exp()

    @property
    def log_odds(self) -> Tensor:
        """The confidence as log p/(1 - p), `(..., batch)`: computed without a cancellation, so it never rounds to a tie."""
        return log_odds(self.log_probs, self.labels)


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
    """Base of all rules: subclass it, give it `_update`, and hold it against the laws with `anytime.testing.check_rule`."""

    state_type: ClassVar[type[State]] = State

    @property
    def reads_scale(self) -> bool:
        """Whether a number that is added to all logits of a row changes the answer.

        Log-probabilities are logits up to such a number. A rule that reads the scale refuses them unless they are said to be
        log-probabilities: `rule(log_probs, probabilities=True)`.
        """
        return False

    def start(self, exits: int) -> S:
        """The state before the first of `exits` exits."""
        exits = check_count(exits, "exits", fix="pass model.num_exits or len(logits)")
        return self.state_type(exits=exits)  # type: ignore[return-value]

    def step(self, state: S, logits: Any, *, probabilities: bool = False) -> tuple[S, Prediction]:
        """Take the logits of the next exit, `(batch, classes)`; give the new state and the prediction so far.

        Args:
            state: From `start`, or from the step before.
            logits: Of this exit.
            probabilities: Whether they are probabilities or log-probabilities. The first step refuses such input otherwise.
        """
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
        given = check_step(logits, exit=state.seen, like=state.memory)
        if probabilities:
            given = check_probabilities(given)
        elif state.seen == 0:
            check_scale(given[None], log_probs=not self.reads_scale)
        return self._update(state, given)

    def __call__(self, logits: Any, *, probabilities: bool = False) -> Prediction:
        """The prediction at every exit.

        Args:
            logits: `(exits, batch, classes)`.
            probabilities: Whether they are probabilities or log-probabilities, which are refused otherwise: probabilities by
                every rule, log-probabilities by rules that read the sign and size of a logit.
        """
        given = check_logits(logits)
        if probabilities:
            return self.combine(check_probabilities(given))
        check_scale(given, log_probs=not self.reads_scale)
        return self.combine(given)

    def combine(self, logits: Tensor) -> Prediction:
        """As the call, for logits that are known to be finite floats of the right shape."""
        state = self.start(logits.shape[0])
        log_probs = torch.empty_like(logits, memory_format=torch.contiguous_format)
        fell_back = torch.empty(logits.shape[:2], dtype=torch.bool, device=logits.device)
        labels = torch.empty(logits.shape[:2], dtype=torch.long, device=logits.device)
        for exit, now in enumerate(logits):
            state, prediction = self._update(state, now)
            log_probs[exit] = prediction.log_probs
            fell_back[exit] = prediction.fell_back
            labels[exit] = prediction.labels
        return Prediction(log_probs, fell_back, labels)

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
        return after, _softmax(logits)


@dataclass(frozen=True)
class CachingState(State):
    """`memory` is the cached distribution (its logarithm), `labels` its labels, `margin` its confidence as log-odds."""

    margin: Tensor | None = None
    labels: Tensor | None = None


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
        answer, margin = keep_surer(_softmax(logits), state, self.ties)
        return CachingState(state.exits, state.seen + 1, answer.log_probs, margin, answer.labels), answer


@dataclass(frozen=True)
class Product(Rule[State]):
    """The product of experts over the exits (Product Anytime): p_m(y) ∝ Π_{i≤m} a(f_i(y))^{w_i}.

    A class without evidence at one exit has left the support for good. Where no class is left the row has collapsed:
    the prediction is the softmax of the current exit, there and at all later exits, and `fell_back` says so.

    Args:
        activation: a; the ReLU by default.
        weights: `linear` is w_i = i/M, `ones` is 1, or one number per exit: 0, which leaves the exit out, or 1e-6 to 1e6.
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
        weights = _check_weights(self.weights)
        if not isinstance(weights, str) and not all(weight == 0 or SMALLEST <= weight <= LARGEST for weight in weights):
            raise OptionError(
                f"weights are {weights}",
                expected=f"0, or {SMALLEST:g} to {LARGEST:g}, for each exit: evidence to other powers overflows",
                fix="divide the weights by the largest; give an exit that is not to count the weight 0",
            )
        object.__setattr__(self, "weights", weights)

    @property
    def reads_scale(self) -> bool:
        """Whether a number that is added to all logits of a row changes the answer: only not for a product of softmaxes."""
        return not isinstance(self.activation, Exponential)

    def start(self, exits: int) -> State:
        """The state before the first of `exits` exits."""
        state = super().start(exits)
        _weights(self.weights, exits)
        return state

    def after(self, logits: Tensor, exits: int) -> Prediction:
        """The prediction after the first of `exits` exits, the evidence of all of them taken in one go."""
        weights, taken = _taken(self.weights, exits, len(logits), logits.dtype, logits.device)
        if not taken:
            return decide(torch.zeros_like(logits[0]), logits[-1])
        given = logits if len(taken) == len(logits) else logits[list(taken)]
        evidence = self.activation.log_evidence(_shifted(given, self.shift))
        return decide((evidence * weights).sum(0), logits[-1])

    def _update(self, state: State, logits: Tensor) -> tuple[State, Prediction]:
        weight = _weights(self.weights, state.exits)[state.seen]
        total = torch.zeros_like(logits) if state.memory is None else state.memory
        if weight > 0:  # 0 · -inf is not zero evidence but no evidence taken
            total = total + weight * self.activation.log_evidence(_shifted(logits, self.shift))
        return State(state.exits, state.seen + 1, total), decide(total, logits)


@dataclass(frozen=True)
class MixtureState(State):
    """`memory` is the logarithm of the mean so far, `fell_back` the rows where an exit had no evidence."""

    fell_back: Tensor | None = None


@dataclass(frozen=True)
class Mixture(Rule[MixtureState]):
    """The mean over the exits so far of each exit's normalised evidence: the paper's ablation.

    An exit without evidence for any class takes part with its softmax, and `fell_back` says so from there on.

    Args:
        activation: a; the ReLU by default.
        weights: `ones` for the plain mean, `linear` for i/M, or one number per exit, of which only the ratios count; the
            first must be positive.
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

    @property
    def reads_scale(self) -> bool:
        """Whether a number that is added to all logits of a row changes the answer: only not for a mean of softmaxes."""
        return not isinstance(self.activation, Exponential)

    def start(self, exits: int) -> MixtureState:
        """The state before the first of `exits` exits."""
        state = super().start(exits)
        _weights(self.weights, exits)
        return state

    def _update(self, state: MixtureState, logits: Tensor) -> tuple[MixtureState, Prediction]:
        kept, added = _log_fractions(_weights(self.weights, state.exits), state.seen)
        total, fell_back, ranking = state.memory, state.fell_back, state.memory
        if added > -math.inf:
            evidence, lost = _or_logits(self.activation.log_evidence(_shifted(logits, self.shift)), logits)
            expert = evidence.log_softmax(-1)
            if total is None or fell_back is None:
                total, fell_back, ranking = expert, lost, evidence
            else:
                total = ranking = _log_add(total + kept, expert + added)
                fell_back = fell_back | lost
        assert total is not None  # the first weight is positive
        assert fell_back is not None
        assert ranking is not None
        prediction = Prediction(total.clamp(max=0).to(logits.dtype), fell_back, top_class(ranking))
        return MixtureState(state.exits, state.seen + 1, total, fell_back), prediction


def decide(log_evidence: Tensor, logits: Tensor) -> Prediction:
    """The prediction that log-evidence leads to; rows without any take the softmax of `logits` and are marked."""
    evidence, fell_back = _or_logits(log_evidence, logits)
    return Prediction(evidence.log_softmax(-1).to(logits.dtype), fell_back, top_class(evidence))


def top_class(scores: Tensor) -> Tensor:
    """The class with the largest score, `(..., batch)`; the first of equals."""
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    if traced or scores.device.type != "cpu" or scores.numel() < _MANY:
        return scores.argmax(-1)
    return torch.from_numpy(scores.detach().numpy().argmax(-1))  # vectorised, ten to thirty times faster here


def log_odds(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Log-odds of the most probable classes, `(..., batch)`: they order confidences where those round to one."""
    index = labels.unsqueeze(-1)
    below = log_probs - log_probs.gather(-1, index)
    # In float64 the order of the classes does not change the sum: rows that are equally sure stay so.
    others = below.exp().scatter_(-1, index, 0.0).sum(-1, dtype=torch.float64)
    odds = -others.log()
    far = others < _FAR  # here terms of the sum lose digits, or underflow
    # Elsewhere than on a CPU, looking whether there are any would wait for the device.
    if far.device.type != "cpu" or bool(far.any()):
        odds = torch.where(far, -below.scatter(-1, index, -CERTAIN).logsumexp(-1).double(), odds)
    return odds.to(log_probs.dtype).clamp(max=CERTAIN)


def keep_surer(answer: Prediction, state: CachingState, ties: Ties) -> tuple[Prediction, Tensor]:
    """The surer of an answer and the cached one in each row, and its log-odds."""
    margin = answer.log_odds
    if state.memory is None or state.margin is None or state.labels is None:
        return answer, margin
    newer = margin > state.margin if ties == "earlier" else margin >= state.margin
    fell_back: Tensor | None = getattr(state, "fell_back", None)
    kept = Prediction(
        torch.where(newer[:, None], answer.log_probs, state.memory),
        answer.fell_back if fell_back is None else torch.where(newer, answer.fell_back, fell_back),
        torch.where(newer, answer.labels, state.labels),
    )
    return kept, torch.where(newer, margin, state.margin)


def check_ties(value: str) -> None:
    """Refuse anything but `earlier` and `later`."""
    check_choice(value, "ties", ("earlier", "later"))


def _select(value: Any, rows: Tensor) -> Any:
    match value:
        case Tensor():
            return value[rows]
        case State():
            return value.select(rows)
        case tuple():
            return tuple(_select(part, rows) for part in value)
    return value


def _softmax(logits: Tensor) -> Prediction:
    never = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
    return Prediction(logits.log_softmax(-1), never, top_class(logits))


def _or_logits(log_evidence: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The evidence, with the logits in its place in rows without any, and which rows these are."""
    fell_back = log_evidence.amax(-1) == -math.inf
    # Elsewhere than on a CPU, looking whether there are any would wait for the device.
    if fell_back.device.type != "cpu" or bool(fell_back.any()):
        log_evidence = torch.where(fell_back[:, None], logits, log_evidence)
    return log_evidence, fell_back


def _log_add(one: Tensor, other: Tensor) -> Tensor:
    """log(e^one + e^other), whose gradient is zero, not NaN, where both are zero evidence."""
    if not (one.requires_grad or other.requires_grad):
        return torch.logaddexp(one, other)
    nothing = (one == -math.inf) & (other == -math.inf)
    return torch.where(nothing, -math.inf, torch.logaddexp(torch.where(nothing, 0.0, one), other))


def _shifted(logits: Tensor, shift: Shift) -> Tensor:
    amount = 1.0 / logits.shape[-1] if isinstance(shift, str) else shift
    return logits + amount if amount else logits


@cache
def _log_fractions(weights: tuple[float, ...], exit: int) -> tuple[float, float]:
    """Logarithms of the fractions of the mean that the exits before and this one have."""
    logarithms = [math.log(weight) if weight > 0 else -math.inf for weight in weights[: exit + 1]]
    highest = max(logarithms)
    totals = [math.fsum(math.exp(each - highest) for each in part) for part in (logarithms[:-1], logarithms)]
    before, total = (highest + math.log(each) if each else -math.inf for each in totals)
    return before - total, logarithms[-1] - total


def _weights(weights: Weights, exits: int) -> tuple[float, ...]:
    if weights == "linear":
        return tuple(exit / exits for exit in range(1, exits + 1))
    if weights == "ones":
        return (1.0,) * exits
    if len(weights) != exits:
        raise OptionError(
            f"got {len(weights)} weights for {exits} exits",
            expected=f"{exits} weights, one per exit",
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
        expected="'linear' (i/M), 'ones', or one finite number of at least 0 per exit",
        fix="'linear' is the paper's choice",
    )


def _check_evidence(activation: Any, shift: Any) -> None:
    if isinstance(activation, type) or not isinstance(activation, Activation):
        raise OptionError(
            f"activation is {activation!r}",
            expected="an activation, such as anytime.ReLU() or anytime.ClippedReLU(limit=2.0)",
            fix="write ReLU() with parentheses; from a name, use anytime.parse_rule('product(softplus)')",
        )
    if shift != "1/K" and not (isinstance(shift, int | float) and abs(shift) <= LARGEST):
        raise OptionError(
            f"shift is {shift!r}", expected=f"a number from -{LARGEST:g} to {LARGEST:g}, or '1/K'", fix="0 is no shift"
        )

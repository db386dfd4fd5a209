"""What all rules share: the prediction, the streaming state and the base class.

A rule is a small frozen object. `rule(logits)` takes `(exits, batch, classes)` and gives a prediction at every exit;
`rule.start(exits)` and `rule.step(state, logits)` do the same one exit at a time with a state of size `(batch, classes)`.
The call is the loop over the steps, so both give the same numbers.

Everything is computed on logarithms, in float32 or, for float64 logits, in float64. Normalising rounds, so a rule takes the
label from its evidence before that, and confidences are compared as log-odds, which do not round to 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor

from anytime.checks import check_count, check_logits, check_number, check_probabilities, check_scale, check_step
from anytime.errors import OptionError, StateError

SMALLEST, LARGEST = 1e-6, 1e6
"""The range of weights, temperatures and powers: beyond it evidence overflows float32."""
CERTAIN = float(torch.finfo(torch.float32).max)
"""The log-odds of the only class in the support: finite, so that a threshold of infinity is never reached."""
_FAR = 1e-30
_MANY = 4096


@dataclass(frozen=True)
class Prediction:
    """What a rule answers at one exit, or at all of them with one more dimension in front.

    Attributes:
        log_probs: `(..., batch, classes)`, normalised; `-inf` for classes outside the support.
        fell_back: `(..., batch)`, true where the rule had no evidence left for any class (a collapse) and gave the
            softmax of the current exit instead.
        labels: `(..., batch)`, the class with the most evidence, the first one of ties. A rule takes it before normalising,
            which can round different evidence to equal probabilities. By default the most probable class.
    """

    log_probs: Tensor
    fell_back: Tensor
    labels: Tensor = None  # type: ignore[assignment]  # filled in below

    def __post_init__(self) -> None:
        if self.labels is None:
            object.__setattr__(self, "labels", top_class(self.log_probs))

    def at(self, *index: Any) -> Prediction:
        """A part of it: `at(exit)` of a prediction at all exits, `at(rows)` or `at(slice(None), rows)` for some inputs."""
        return Prediction(self.log_probs[index], self.fell_back[index], self.labels[index])

    def clone(self) -> Prediction:
        """A copy that shares no memory with this one."""
        return Prediction(self.log_probs.clone(), self.fell_back.clone(), self.labels.clone())

    def write(self, index: Any, other: Prediction) -> None:
        """Replace the part at `index`, an exit or rows, by another prediction."""
        self.log_probs[index], self.fell_back[index], self.labels[index] = other.log_probs, other.fell_back, other.labels

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
        """The confidence as log p/(1 - p), `(..., batch)`, without cancellation: different confidences do not round to ties."""
        return log_odds(self.log_probs, self.labels)


@dataclass(frozen=True)
class State:
    """The state of a rule after `seen` of `exits` exits; `memory`, `(batch, classes)`, belongs to the rule.

    Every tensor of a state has the batch first, so that inputs can leave a running batch.
    """

    exits: int
    seen: int = 0
    memory: Tensor | None = None

    def select(self, rows: Tensor) -> Self:
        """The state of some inputs, by their indices in the batch or by a mask."""
        return replace(self, **{part.name: _select(getattr(self, part.name), rows) for part in fields(self)})


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Rule(ABC, Generic[S]):
    """Base of all rules: subclass it, implement `_update`, and test it with `anytime.testing.check_rule`."""

    state_type: ClassVar[type[State]] = State

    @property
    def reads_scale(self) -> bool:
        """Whether adding a constant to all logits of a row changes the prediction.

        Log-probabilities are logits up to such a constant. A rule that reads the scale refuses them, unless the caller passes
        `rule(log_probs, probabilities=True)`.
        """
        return False

    def check_exits(self, exits: int) -> None:
        """Refuse another number of exits than the rule's own `exits`, which fitted rules have."""
        known: int = getattr(self, "exits", exits)
        if exits != known:
            raise OptionError(
                f"{type(self).__name__} was fitted for {known} exits and got {exits}",
                expected=f"{known} exits",
                fix="fit the rule on logits of this model; to stop early, start with all exits and take fewer steps",
            )

    def start(self, exits: int) -> S:
        """The state before the first of `exits` exits."""
        exits = check_count(exits, "exits", fix="pass model.num_exits or len(logits)")
        self.check_exits(exits)
        return self.state_type(exits=exits)  # type: ignore[return-value]

    def step(self, state: S, logits: Any, *, probabilities: bool = False) -> tuple[S, Prediction]:
        """Process the logits of the next exit, `(batch, classes)`; return the new state and the prediction so far.

        Args:
            state: From `start`, or from the previous step.
            logits: Of this exit.
            probabilities: Whether they are probabilities or log-probabilities, which the first step refuses otherwise.
        """
        if not isinstance(state, self.state_type):
            raise StateError(
                f"{type(self).__name__} got a {type(state).__name__}",
                expected=f"a {self.state_type.__name__}",
                fix="begin with the start(exits) of this rule",
            )
        if state.seen >= state.exits:
            raise StateError(
                f"a step after the last of {state.exits} exits",
                expected=f"at most {state.exits} steps",
                fix="call rule.start(exits) for the next inputs, or start with the true number of exits",
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
            probabilities: Whether they are probabilities or log-probabilities. Otherwise every rule refuses probabilities, and
                rules that read the sign and size of a logit refuse log-probabilities.
        """
        given = check_logits(logits)
        if probabilities:
            return self.combine(check_probabilities(given))
        check_scale(given, log_probs=not self.reads_scale)
        return self.combine(given)

    def combine(self, logits: Tensor) -> Prediction:
        """As the call, for logits that are known to be finite floats of the right shape."""
        state, size = self.start(logits.shape[0]), logits.shape[:2]
        answers = Prediction(
            torch.empty_like(logits, memory_format=torch.contiguous_format),
            torch.empty(size, dtype=torch.bool, device=logits.device),
            torch.empty(size, dtype=torch.long, device=logits.device),
        )
        for exit, now in enumerate(logits):
            state, prediction = self._update(state, now)
            answers.write(exit, prediction)
        return answers

    def after(self, logits: Tensor, exits: int) -> Prediction:
        """The prediction after some of `exits` exits, for checked logits `(seen, batch, classes)`: the last of the steps."""
        state = self.start(exits)
        for now in logits:
            state, prediction = self._update(state, now)
        return prediction

    @abstractmethod
    def _update(self, state: S, logits: Tensor) -> tuple[S, Prediction]:
        """One step on checked logits. Must not change `state` or `logits`."""


def decide(log_evidence: Tensor, logits: Tensor) -> Prediction:
    """The prediction from log-evidence; rows without evidence get the softmax of `logits` and are marked in `fell_back`."""
    evidence, fell_back = evidence_or_logits(log_evidence, logits)
    return Prediction(evidence.log_softmax(-1).to(logits.dtype), fell_back, top_class(evidence))


def evidence_or_logits(log_evidence: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The log-evidence, with the logits in rows without any, and a mask of these rows."""
    fell_back = log_evidence.amax(-1) == -math.inf
    # On other devices than a CPU, `any` would wait for the device.
    if fell_back.device.type != "cpu" or bool(fell_back.any()):
        log_evidence = torch.where(fell_back[:, None], logits, log_evidence)
    return log_evidence, fell_back


def never_fell_back(logits: Tensor) -> Tensor:
    """`fell_back` of a rule that cannot collapse."""
    return torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)


def top_class(scores: Tensor) -> Tensor:
    """The class with the largest score, `(..., batch)`; the first one of ties."""
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    if traced or scores.device.type != "cpu" or scores.numel() < _MANY:
        return scores.argmax(-1)
    return torch.from_numpy(scores.detach().numpy().argmax(-1))  # vectorised: ten to thirty times faster here


def log_odds(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Log-odds of the labels, `(..., batch)`: they order confidences that round to one."""
    index = labels.unsqueeze(-1)
    below = log_probs - log_probs.gather(-1, index)
    # In float64 the order of the classes does not change the sum: equally confident rows stay equal.
    others = below.exp().scatter_(-1, index, 0.0).sum(-1, dtype=torch.float64)
    odds = -others.log()
    far = others < _FAR  # here terms of the sum lose digits, or underflow
    # On other devices than a CPU, `any` would wait for the device.
    if far.device.type != "cpu" or bool(far.any()):
        odds = torch.where(far, -below.scatter(-1, index, -CERTAIN).logsumexp(-1).double(), odds)
    return odds.to(log_probs.dtype).clamp(max=CERTAIN)


def positive_numbers(name: str, values: Any, *, fix: str) -> tuple[float, ...]:
    """One number per exit from `SMALLEST` to `LARGEST`, as a tuple."""
    numbers = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(numbers, Sequence) or not numbers:
        raise OptionError(f"{name} is {values!r}", expected="one number per exit", fix=fix)
    return tuple(check_number(number, name, low=SMALLEST, most=LARGEST, fix=fix) for number in numbers)


def check_inner(inner: Any) -> None:
    """Refuse an inner rule that is not a rule."""
    if not isinstance(inner, Rule):
        raise OptionError(
            f"the inner rule is {inner!r}",
            expected="a rule, such as anytime.Product() or anytime.Caching()",
            fix="write Product() with parentheses; from a name, use anytime.parse_rule('cached(product)')",
        )


def _select(value: Any, rows: Tensor) -> Any:
    match value:
        case Tensor():
            return value[rows]
        case State():
            return value.select(rows)
        case tuple():
            return tuple(_select(part, rows) for part in value)
    return value

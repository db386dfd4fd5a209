"""What all rules share: the prediction, the streaming state and the base class.

A rule is a small frozen object. `rule(logits)` takes `(exits, batch, classes)` and gives a prediction at every exit;
`rule.start(exits)` and `rule.step(state, logits)` do the same one exit at a time with a state of size `(batch, classes)`.
The call is the loop over the steps, so both give the same numbers. With `class_dim` both take dense logits, such as one
distribution per pixel; see `anytime.combine.dense`.

Everything is computed on logarithms, in float32 or, for float64 logits, in float64. Normalising rounds, so a rule takes the
label from its evidence before that, and confidences are compared as log-odds, which do not round to 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from anytime.checks import (
    as_float,
    as_tensor,
    check_count,
    check_logits,
    check_number,
    check_probabilities,
    check_scale,
    check_step,
)
from anytime.combine.dense import DenseRows, DenseState, Layout
from anytime.combine.prediction import Prediction, State, empty_prediction, top_class
from anytime.errors import OptionError, ShapeError, StateError

SMALLEST, LARGEST = 1e-6, 1e6
"""The range of weights, temperatures and powers: beyond it evidence overflows float32."""


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

    def step(self, state: S, logits: Any, *, probabilities: bool = False, class_dim: int | None = None) -> tuple[S, Prediction]:
        """Process the logits of the next exit, `(batch, classes)`; return the new state and the prediction so far.

        Args:
            state: From `start`, or from the previous step.
            logits: Of this exit.
            probabilities: Whether they are probabilities or log-probabilities, which the first step refuses otherwise.
            class_dim: For dense logits, the dimension of the classes in these logits: 1 for `(batch, classes, height, width)`.
                Later steps may omit it.
        """
        if class_dim is None and not isinstance(state, DenseState):
            return self._step(state, logits, probabilities)
        given = as_tensor(logits, "logits")
        before = state if isinstance(state, DenseState) else None
        layout = Layout.of(given.shape, before.layout.class_dim if class_dim is None and before else class_dim, lead=0)
        if before is not None and layout != before.layout:
            raise ShapeError(
                f"logits of exit {state.seen + 1} have shape {tuple(given.shape)}",
                expected=f"{before.layout.batch} inputs, {before.layout.positions} positions and {before.layout.classes} "
                f"classes in dimension {before.layout.class_dim}, as at earlier exits",
                fix="step all exits of the same inputs; call rule.start(exits) for other inputs",
            )
        inner: Any = state if before is None else before.inner
        after, answer = self._step(inner, layout.flatten(given, lead=0), probabilities, layout.place)
        dense: Any = DenseState(after.exits, after.seen, inner=after, layout=layout)
        return dense, layout.shaped(answer)

    def _step(
        self, state: S, logits: Any, probabilities: bool, place: Callable[[int], str] | None = None
    ) -> tuple[S, Prediction]:
        """A step for rows, `(rows, classes)`."""
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
        given = check_step(logits, exit=state.seen, like=state.memory, place=place)
        if probabilities:
            given = check_probabilities(given)
        elif state.seen == 0:
            check_scale(given[None], log_probs=not self.reads_scale)
        return self._update(state, given)

    def __call__(self, logits: Any, *, probabilities: bool = False, class_dim: int | None = None) -> Prediction:
        """The prediction at every exit.

        Args:
            logits: `(exits, batch, classes)`, or with `class_dim` dense ones, such as `(exits, batch, classes, height, width)`.
            probabilities: Whether they are probabilities or log-probabilities. Otherwise every rule refuses probabilities, and
                rules that read the sign and size of a logit refuse log-probabilities.
            class_dim: The dimension of the classes in dense logits: 2 for segmentation, -1 for tokens
                `(exits, batch, length, classes)`.
        """
        if class_dim is None:
            return self.combine(self._scaled(check_logits(logits), probabilities))
        values = as_tensor(logits, "logits")
        rows = DenseRows(values, class_dim)
        answers = empty_prediction(*rows.shape, like=as_float(values[:0], "logits"))
        for block in rows.blocks():
            given = check_logits(rows[:, block], first_row=block.start, place=rows.place)
            given = self._scaled(given, probabilities, checked=block.start > 0)
            answers.write((slice(None), block), self.combine(given))
        return rows.layout.shaped(answers)

    def _scaled(self, given: Tensor, probabilities: bool, *, checked: bool = False) -> Tensor:
        """Checked logits, after a check of their scale, or log-probabilities."""
        if probabilities:
            return check_probabilities(given)
        if not checked:
            check_scale(given, log_probs=not self.reads_scale)
        return given

    def combine(self, logits: Tensor) -> Prediction:
        """As the call, for logits that are known to be finite floats of the right shape."""
        state = self.start(logits.shape[0])
        exits, rows, classes = logits.shape
        answers = empty_prediction(exits, rows, classes, logits)
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

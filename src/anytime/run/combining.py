"""Rules as the runner uses them: one stage at a time, or all stages so far at once when only the last answer is wanted.

A step costs some ten calls of small tensor functions, so a request that will show nobody its answers on the way keeps the
logits and combines them at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from anytime.calibrate import Temperature
from anytime.checks import check_logits, check_probabilities, check_scale
from anytime.combine import Intersection, Interval, IntervalState, Prediction, Rule, State, parse_rule
from anytime.combine.advice import default_rule
from anytime.combine.named import as_rule
from anytime.conformal import ConformalSets
from anytime.errors import InputError, OptionError, ShapeError
from anytime.fitted import Fitted

_FLOATS = (torch.float32, torch.float64)


class Combiner(Protocol):
    """What the runner needs of a rule."""

    def start(self, exits: int) -> Any:
        """The state before the first exit."""
        ...

    def step(self, state: Any, logits: Tensor) -> tuple[Any, Prediction | Interval]:
        """Take the logits of the next exit."""
        ...

    def after(self, logits: Sequence[Tensor], exits: int) -> Prediction | Interval:
        """The answer after these of `exits` exits."""
        ...


class ByRule:
    """A rule over distributions.

    Args:
        rule: The rule.
        probabilities: Whether the exits yield probabilities or log-probabilities; otherwise the first batch refuses them.
    """

    def __init__(self, rule: Rule[Any], *, probabilities: bool = False) -> None:
        self.rule, self.probabilities = rule, probabilities
        self.unchecked = not probabilities

    def start(self, exits: int) -> State:
        """The state before the first exit."""
        state: State = self.rule.start(exits)
        return state

    def step(self, state: Any, logits: Tensor) -> tuple[State, Prediction]:
        """Take the logits of the next exit, `(batch, classes)`."""
        return self.rule.step(state, logits, probabilities=self.probabilities)

    def after(self, logits: Sequence[Tensor], exits: int) -> Prediction:
        """The answer after these of `exits` exits: what stepping over them gives."""
        try:
            given = torch.stack(tuple(logits))
        except RuntimeError as error:
            raise ShapeError(
                f"the exits gave shapes {', '.join(str(tuple(now.shape)) for now in logits)}",
                expected="the same classes at every exit, (batch, classes)",
                fix="correct the model's exits",
            ) from error
        # What is finite has a finite sum; the whole check says what is wrong, and where.
        if given.dtype not in _FLOATS or given.ndim != 3 or not math.isfinite(given.sum()):
            given = check_logits(given)
        if self.unchecked:
            check_scale(given, log_probs=not self.rule.reads_scale)
            self.unchecked = False
        return self.rule.after(check_probabilities(given) if self.probabilities else given, exits)


class AsGiven:
    """Stages with a rule inside, as `anytime.run.export` writes them: what they give is the answer already."""

    def start(self, exits: int) -> State:
        """The state before the first exit; the stages keep their own."""
        return State(exits)

    def step(self, state: Any, given: Any) -> tuple[State, Prediction]:
        """Take what the next stage gave."""
        return state, _check_given(given)

    def after(self, given: Sequence[Any], exits: int) -> Prediction:
        """What the last of these stages gave."""
        return _check_given(given[-1])


class ByIntersection:
    """Anytime regression: each exit gives a lower and an upper end, `(batch, 2)`."""

    def __init__(self, rule: Intersection) -> None:
        self.rule = rule

    def start(self, exits: int) -> IntervalState:
        """The state before the first exit."""
        return self.rule.start(exits)

    def step(self, state: Any, logits: Tensor) -> tuple[IntervalState, Interval]:
        """Take the ends of the next exit, `(batch, 2)`."""
        if logits.ndim != 2 or logits.shape[1] != 2:
            raise ShapeError(
                f"an exit gave shape {tuple(logits.shape)}",
                expected="(batch, 2): a lower and an upper end each",
                fix="use a model for regression, such as anytime.models.IntervalMLP, or a rule for classes",
            )
        return self.rule.step(state, *logits.unbind(-1))

    def after(self, logits: Sequence[Tensor], exits: int) -> Interval:
        """The intersection after these of `exits` exits."""
        state = self.rule.start(exits)
        for now in logits:
            state, interval = self.step(state, now)
        return interval


def _check_given(prediction: Prediction) -> Prediction:
    if math.isfinite(prediction.log_probs.amax(-1).sum()):  # the largest of a distribution is never minus infinity
        return prediction
    row = int((~prediction.log_probs.amax(-1).isfinite()).nonzero()[0])
    raise InputError(
        f"exported stages gave no distribution for row {row} (counted from 0)",
        expected="finite inputs, and logits that stay so",
        fix="look for NaN or infinity in that input",
    )


def choose_rule(
    rule: Any, calibration: Any, classes: int | None = None
) -> tuple[Rule[Any] | Intersection, ConformalSets | None]:
    """The rule to use and the sets to give, from what the caller said and what was fitted.

    Args:
        rule: A rule, its text, or None for what the calibration was fitted for, or else the default.
        calibration: None, or one or several fitted objects: temperatures, any fitted rule, `ConformalSets`.
        classes: How many there are, where that is known.
    """
    chosen = parse_rule(rule) if isinstance(rule, str) else rule
    sets: ConformalSets | None = None
    for fitted in calibration if isinstance(calibration, tuple | list) else (calibration,):
        if fitted is None:
            continue
        if not isinstance(fitted, Fitted) or not hasattr(fitted, "rule"):
            raise OptionError(
                f"calibration is {fitted!r}",
                expected="a fitted rule, Temperature or ConformalSets, or a tuple of these",
                fix="fit one on held-out logits, or read a saved one with anytime.load(path)",
            )
        sets = fitted if isinstance(fitted, ConformalSets) else sets
        if isinstance(fitted, Temperature):
            chosen = fitted.rule_for(chosen)
        elif fitted.rule is not None:
            chosen = _same(chosen, as_rule(fitted))
    chosen = default_rule(classes) if chosen is None else chosen
    if not isinstance(chosen, Rule | Intersection):
        raise OptionError(
            f"rule is {chosen!r}",
            expected="a rule, such as anytime.Product(), or anytime.Intersection() for regression",
            fix="write Product() with parentheses",
        )
    return chosen, sets


def _same(chosen: Any, fitted: Rule[Any]) -> Rule[Any]:
    if chosen is not None and chosen != fitted:
        raise OptionError(
            f"the rule is {chosen!r}",
            expected=f"{fitted!r}, for which the calibration was fitted",
            fix="leave rule out, or fit the calibration for this rule",
        )
    return fitted

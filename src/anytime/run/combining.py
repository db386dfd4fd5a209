"""Rules as the runner uses them: one stage at a time, or all stages so far at once if only the last answer is needed.

A step costs some ten calls of small tensor functions, so a request that returns no intermediate answers keeps the logits and
combines them at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anytime.calibrate import Temperature
from anytime.checks import check_logits, check_probabilities, check_scale
from anytime.combine import Intersection, Interval, IntervalState, Prediction, Rule, State, parse_rule
from anytime.combine.advice import default_rule
from anytime.combine.dense import Layout
from anytime.combine.named import as_rule
from anytime.conformal import ConformalSets
from anytime.errors import InputError, OptionError, ShapeError
from anytime.fitted import Fitted
from anytime.policy.stopping import FittedPolicy

_FLOATS = (torch.float32, torch.float64)


class ByRule:
    """A rule over distributions.

    Args:
        rule: The rule.
        probabilities: Whether the exits yield probabilities or log-probabilities; otherwise these are refused.
        class_dim: The dimension of the classes in the dense logits of an exit; None for `(batch, classes)`.

    Attributes:
        why: What evaluates the rule, and why.
    """

    def __init__(self, rule: Rule[Any], *, probabilities: bool = False, class_dim: int | None = None) -> None:
        self.rule, self.probabilities, self.class_dim = rule, probabilities, class_dim
        self.unchecked = not probabilities
        self.why = "torch"

    def start(self, exits: int) -> State:
        """The state before the first exit."""
        state: State = self.rule.start(exits)
        return state

    def step(self, state: Any, logits: Tensor) -> tuple[State, Prediction]:
        """Take the logits of the next exit, `(batch, classes)` or dense."""
        return self.rule.step(state, logits, probabilities=self.probabilities, class_dim=self.class_dim)

    def after(self, logits: Sequence[Tensor], exits: int) -> Prediction:
        """The answer after these of `exits` exits, equal to stepping over them."""
        try:
            given = torch.stack(tuple(logits))
        except RuntimeError as error:
            raise ShapeError(
                f"the exits returned shapes {', '.join(str(tuple(now.shape)) for now in logits)}",
                expected="the same shape (batch, classes) at every exit",
                fix="give all classifiers of the model the same number of classes",
            ) from error
        layout = None if self.class_dim is None else Layout.of(given.shape[1:], self.class_dim, lead=0)
        if layout is not None:
            given = layout.flatten(given)
        elif given.ndim > 3:
            raise ShapeError(
                f"exits returned logits of shape {tuple(given.shape[1:])}",
                expected="(batch, classes), or dense logits whose dimension of the classes is known",
                fix="name it: Runner(model, class_dim=1) for (batch, classes, height, width)",
            )
        # Finite logits have a finite sum; the full check reports what is wrong, and where.
        if given.dtype not in _FLOATS or given.ndim != 3 or not math.isfinite(given.sum()):
            given = check_logits(given, place=None if layout is None else layout.place)
        if self.unchecked:
            check_scale(given, log_probs=not self.rule.reads_scale)
            self.unchecked = False
        answer = self.rule.after(check_probabilities(given) if self.probabilities else given, exits)
        return answer if layout is None else layout.shaped(answer)


class AsGiven:
    """Stages with a rule inside, as `anytime.run.export` writes them: their output is the answer."""

    def start(self, exits: int) -> State:
        """The state before the first exit; the stages keep their own."""
        return State(exits)

    def step(self, state: Any, given: Any) -> tuple[State, Prediction]:
        """Take the output of the next stage."""
        return state, _check_given(given)

    def after(self, given: Sequence[Any], exits: int) -> Prediction:
        """The output of the last of these stages."""
        return _check_given(given[-1])


class ByIntersection:
    """Anytime regression: each exit returns a lower and an upper bound, `(batch, 2)`."""

    def __init__(self, rule: Intersection) -> None:
        self.rule = rule

    def start(self, exits: int) -> IntervalState:
        """The state before the first exit."""
        return self.rule.start(exits)

    def step(self, state: Any, logits: Tensor) -> tuple[IntervalState, Interval]:
        """Take the bounds of the next exit, `(batch, 2)`."""
        if logits.ndim != 2 or logits.shape[1] != 2:
            raise ShapeError(
                f"an exit returned shape {tuple(logits.shape)}",
                expected="(batch, 2): a lower and an upper bound per input",
                fix="use a regression model, such as anytime.models.IntervalMLP, or a rule for classes, such as Product()",
            )
        return self.rule.step(state, *logits.unbind(-1))

    def after(self, logits: Sequence[Tensor], exits: int) -> Interval:
        """The intersection after these of `exits` exits."""
        state = self.rule.start(exits)
        for now in logits:
            state, interval = self.step(state, now)
        return interval


Combiner = ByRule | AsGiven | ByIntersection
"""The interface that the runner uses: `start`, `step` and `after`."""


def confidences(prediction: Prediction) -> list[float]:
    """The confidence of each input; of a dense prediction, the mean over the input's positions."""
    found = prediction.confidence
    each: list[float] = (found if found.ndim == 1 else found.flatten(1).mean(1)).tolist()
    return each


def _check_given(prediction: Prediction) -> Prediction:
    if math.isfinite(prediction.log_probs.amax(-1).sum()):  # the largest log-probability is never -inf
        return prediction
    row = int((~prediction.log_probs.amax(-1).isfinite()).nonzero()[0])
    raise InputError(
        f"exported stages returned no distribution for row {row} (counted from 0)",
        expected="finite inputs and finite logits",
        fix="remove NaN and infinity from that input; if there are none, its logits overflow: scale the input as in training",
    )


def choose_rule(
    rule: Any, calibration: Any, classes: int | None = None, policy: Any = None
) -> tuple[Rule[Any] | Intersection, ConformalSets | None]:
    """The rule and the prediction sets to use, from the arguments and what was fitted.

    Args:
        rule: A rule, its text, or None for the rule of the calibration, or else of the policy, or else the default.
        calibration: None, or one or several fitted objects: temperatures, any fitted rule, `ConformalSets`.
        classes: The number of classes, if known.
        policy: A policy, whose rule is used if no other was given.
    """
    chosen = parse_rule(rule) if isinstance(rule, str) else rule
    sets: ConformalSets | None = None
    for fitted in calibration if isinstance(calibration, tuple | list) else (calibration,):
        if fitted is None:
            continue
        is_policy = isinstance(fitted, FittedPolicy)
        if not isinstance(fitted, Fitted) or not hasattr(fitted, "rule") or is_policy:
            raise OptionError(
                f"calibration is {fitted!r}",
                expected="a fitted rule, Temperature or ConformalSets, or a tuple of these",
                fix="pass it as policy=, which stops early"
                if is_policy
                else "fit one on held-out logits, or read a saved one with anytime.load(path)",
            )
        sets = fitted if isinstance(fitted, ConformalSets) else sets
        if isinstance(fitted, Temperature):
            chosen = fitted.rule_for(chosen)
        elif fitted.rule is not None:
            chosen = _same(chosen, as_rule(fitted))
    if chosen is None:
        chosen = getattr(policy, "rule", None) or default_rule(classes)
    if not isinstance(chosen, Rule | Intersection):
        raise OptionError(
            f"rule is {chosen!r}",
            expected="a rule, such as anytime.Product(), or anytime.Intersection() for regression",
            fix="pass an instance with parentheses, such as Product(), or a text such as 'product'",
        )
    return chosen, sets


def _same(chosen: Any, fitted: Rule[Any]) -> Rule[Any]:
    if chosen is not None and chosen != fitted:
        raise OptionError(
            f"the rule is {chosen!r}",
            expected=f"{fitted!r}, for which the calibration was fitted",
            fix="omit rule, or fit the calibration for this rule",
        )
    return fitted

"""The report card: four properties of an anytime model, each graded for each rule.

The properties are Zilberstein's, as section 2 of the paper sums them up. A grade is `good`, `fair` or `poor`, or `unknown`
where the figures it needs are missing. The limits, also printed in every report by `LIMITS`:

* interruptible: the first exit is right at least 75 % (fair: 50 %) as often as the last, or without labels agrees with it
  that often; and at most 1 % (fair: 10 %) of the inputs collapse at any exit;
* monotone: at most 0.5 % (fair: 5 %) of the inputs lose 0.5 or more of the followed probability on the way, and at most 5 %
  (fair: 20 %) lose 0.1 or more;
* consistent: the mean concordance of cost and quality, input by input, is at least 0.6 (fair: 0.3), and the mean error falls
  with the cost (a correlation of at least 0.5);
* diminishing returns: the mean curve lies at most 0.02 (fair: 0.05) under its concave hull.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from anytime.report.numbers import percent, share
from anytime.report.pages.rules import base, drops, followed, reaching

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation

Grade = Literal["good", "fair", "poor", "unknown"]

FIRST_ANSWER = (0.75, 0.5)
COLLAPSED = (1.0, 10.0)
BIG_DROP = (0.5, 5.0)
SMALL_DROP = (5.0, 20.0)
CONCORDANCE = (0.6, 0.3)
CORRELATION = 0.5
HULL_GAP = (0.02, 0.05)

LIMITS: Mapping[str, str] = {
    "Interruptible": (
        f"good: the first exit is right at least {FIRST_ANSWER[0]:.0%} as often as the last and at most {COLLAPSED[0]:g} % of "
        f"inputs collapse at any exit; fair: {FIRST_ANSWER[1]:.0%} and {COLLAPSED[1]:g} %; else poor. "
        "Without labels, how often the first answer equals the last stands in."
    ),
    "Monotone": (
        f"good: at most {BIG_DROP[0]:g} % of inputs lose 0.5 or more on the way and at most {SMALL_DROP[0]:g} % lose 0.1 or "
        f"more; fair: {BIG_DROP[1]:g} % and {SMALL_DROP[1]:g} %; else poor."
    ),
    "Consistent": (
        f"good: a mean concordance of at least {CONCORDANCE[0]:g}, with a correlation of at least {CORRELATION:g} between "
        f"computation and the fall of the error; fair: a concordance of at least {CONCORDANCE[1]:g}; else poor."
    ),
    "Diminishing returns": (
        f"good: the mean probability lies at most {HULL_GAP[0]:g} under the concave hull of its curve over cost; "
        f"fair: {HULL_GAP[1]:g}; else poor."
    ),
}


@dataclass(frozen=True)
class Mark:
    """One rule's grade in one property, with the number behind it and what that means."""

    rule: str
    grade: Grade
    number: str
    meaning: str


@dataclass(frozen=True)
class Property:
    """One property: its name, the question it answers, what its number is, and the rules' marks."""

    name: str
    question: str
    scale: str
    marks: tuple[Mark, ...]


def card(evaluation: Evaluation) -> tuple[Property, ...]:
    """The report card of an evaluation."""
    first = "right, as a share of the last" if evaluation.labelled else "already the final one"
    properties = (
        (
            "Interruptible",
            "Is there a useful answer whenever one is asked for?",
            f"How often the first answer is {first}.",
            interruptible,
        ),
        (
            "Monotone",
            "Does more time never make an answer worse?",
            f"Inputs that lose that much of the {followed(evaluation)}'s probability on the way.",
            monotone,
        ),
        (
            "Consistent",
            "Is more time worth more, for each input?",
            "Concordance is 1 if more computation always helps, −1 if it always hurts.",
            consistent,
        ),
        (
            "Diminishing returns",
            "Do the big gains come early?",
            "The gap is how far the mean curve lies under its concave hull.",
            diminishing,
        ),
    )
    return tuple(
        Property(name, question, scale, tuple(judge(evaluation, rule) for rule in evaluation.rules))
        for name, question, scale, judge in properties
    )


def interruptible(evaluation: Evaluation, rule: str) -> Mark:
    """How good the first answer is beside the last, and whether the rule has answers of its own."""
    found = evaluation.rules[rule]
    collapsed = max(found.collapsed_percent)
    if found.accuracy is not None:
        first, last = found.accuracy[0], found.accuracy[-1]
        kept = first / last if last else 0.0
        meaning = f"Right on {share(first, digits=1)} of inputs at the first exit, {share(last, digits=1)} at the last."
    else:
        kept = found.agreement[0]
        meaning = f"The other {share(1 - kept, digits=1)} of inputs get another answer later."
    if collapsed > COLLAPSED[0]:
        meaning += f" It has no answer of its own for up to {percent(collapsed)} of inputs."
    grade = _worse(_at_least(kept, FIRST_ANSWER), _at_most(collapsed, COLLAPSED))
    return Mark(rule, grade, percent(100 * kept), meaning)


def monotone(evaluation: Evaluation, rule: str) -> Mark:
    """How many inputs lose much, or something, of the followed probability on the way."""
    big, small = (drops(evaluation, rule)[limit] for limit in ("0.5", "0.1"))
    grade = _worse(_at_most(big, BIG_DROP), _at_most(small, SMALL_DROP))
    lead = {"good": "More time hardly ever hurts", "fair": "More time sometimes hurts"}.get(grade, "More time often hurts")
    meaning = f"{lead}: {percent(small)} lose {reaching(evaluation, '0.1')}."
    return Mark(rule, grade, f"{percent(big)} lose {reaching(evaluation, '0.5')}", meaning)


def consistent(evaluation: Evaluation, rule: str) -> Mark:
    """How well quality follows computation, for each input and for the mean."""
    found = evaluation.rules[rule].consistency
    if found is None or found.concordance is None:
        return Mark(rule, "unknown", "not measured", _why_unknown(evaluation))
    grade = _at_least(found.concordance, CONCORDANCE)
    if grade == "good" and (found.correlation or 0.0) < CORRELATION:
        grade = "fair"
    words = {"good": "More time nearly always pays", "fair": "More time pays more often than it hurts"}
    meaning = words.get(grade, "More time hurts almost as often as it pays")
    if found.exponent is not None:
        fall = 1 - 2**-found.exponent
        meaning += f"; twice the cost {'cuts' if fall >= 0 else 'raises'} the mean error by {percent(100 * abs(fall))}"
    return Mark(rule, grade, f"concordance {found.concordance:.2f}".replace("-", "−"), f"{meaning}.")


def diminishing(evaluation: Evaluation, rule: str) -> Mark:
    """How far the mean quality falls short of a curve that rises early and then flattens."""
    found = evaluation.rules[rule].diminishing_returns
    if found is None or evaluation.exits < 3:
        why = _why_unknown(evaluation) if evaluation.exits >= 3 else "This takes at least three exits."
        return Mark(rule, "unknown", "not measured", why)
    grade = _at_most(found.concavity_gap, HULL_GAP)
    words = {"good": "The gain comes early", "fair": "Some of the gain comes late"}
    meaning = words.get(grade, "Much of the gain comes late")
    meaning += f" on average; input by input, it comes early for {percent(found.concave_percent)}"
    return Mark(rule, grade, f"gap {found.concavity_gap:.3f}", f"{meaning}.")


def grades(evaluation: Evaluation) -> dict[str, Grade]:
    """The monotonicity of each rule, the property that decides the verdict."""
    return {rule: monotone(evaluation, rule).grade for rule in evaluation.rules}


def accuracy_change(evaluation: Evaluation, rule: str) -> float:
    """Points of accuracy at the last exit that a rule gains over the base; 0 without labels."""
    ours, theirs = evaluation.rules[rule].accuracy, evaluation.rules[base(evaluation)].accuracy
    return 0.0 if ours is None or theirs is None else 100 * (ours[-1] - theirs[-1])


def _why_unknown(evaluation: Evaluation) -> str:
    return "No input changes enough over the exits to tell." if evaluation.labelled else "This takes labels."


def _at_most(value: float, limits: tuple[float, float]) -> Grade:
    return "good" if value <= limits[0] else "fair" if value <= limits[1] else "poor"


def _at_least(value: float, limits: tuple[float, float]) -> Grade:
    return _at_most(-value, (-limits[0], -limits[1]))


def _worse(one: Grade, other: Grade) -> Grade:
    order: tuple[Grade, ...] = ("good", "fair", "poor")
    return max(one, other, key=order.index)

"""The report card: four properties of an anytime model, graded for each rule.

The properties are Zilberstein's, as section 2 of the paper summarises them. A grade is `good`, `fair` or `poor`, or `unknown`
if its metrics are missing. `LIMITS` has the limits in words; every report prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from anytime.display.numbers import fraction, percent
from anytime.evaluation.rules import base, drops, followed, reaching

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation

Grade = Literal["good", "fair", "poor", "unknown"]

# The limits of a good and of a fair grade.
FIRST_ANSWER = (0.75, 0.5)
COLLAPSED = (1.0, 10.0)
BIG_DROP = (0.5, 5.0)
SMALL_DROP = (5.0, 20.0)
CONCORDANCE = (0.6, 0.3)
CORRELATION = 0.5
HULL_GAP = (0.02, 0.05)
_UNKNOWN = "No input changes enough over the exits."

LIMITS: Mapping[str, str] = {
    "Interruptible": (
        f"good: the first exit has at least {FIRST_ANSWER[0]:.0%} of the accuracy of the last and at most {COLLAPSED[0]:g} % "
        f"of inputs collapse at any exit; fair: {FIRST_ANSWER[1]:.0%} and {COLLAPSED[1]:g} %; otherwise poor. "
        "Without labels, the agreement of the first answer with the last replaces the accuracy."
    ),
    "Monotone": (
        f"good: the probability drops by 0.5 or more for at most {BIG_DROP[0]:g} % of inputs and by 0.1 or more for at most "
        f"{SMALL_DROP[0]:g} %; fair: {BIG_DROP[1]:g} % and {SMALL_DROP[1]:g} %; otherwise poor."
    ),
    "Consistent": (
        f"good: a mean concordance of at least {CONCORDANCE[0]:g} and a correlation of at least {CORRELATION:g} between log "
        f"cost and −log mean error; fair: a concordance of at least {CONCORDANCE[1]:g}; otherwise poor. "
        "Without labels, the probability of the final answer is followed, which is high at the last exit by definition."
    ),
    "Diminishing returns": (
        f"good: the mean probability over cost is at most {HULL_GAP[0]:g} below the concave hull of its curve; "
        f"fair: {HULL_GAP[1]:g}; otherwise poor."
    ),
}


@dataclass(frozen=True)
class Mark:
    """The grade of one rule in one property, with its number and what it means."""

    rule: str
    grade: Grade
    number: str
    meaning: str


@dataclass(frozen=True)
class Property:
    """A property: its name, the question it answers, what its number is, and the marks of the rules."""

    name: str
    question: str
    scale: str
    marks: tuple[Mark, ...]


def card(evaluation: Evaluation) -> tuple[Property, ...]:
    """The report card of an evaluation."""
    first = "The accuracy of the first exit relative to the last." if evaluation.labelled else "Answers that never change."
    properties = (
        ("Interruptible", "Is there a useful answer at any time?", first, interruptible),
        (
            "Monotone",
            "Does more time never make an answer worse?",
            f"Inputs for which the {followed(evaluation)}'s probability drops by that much.",
            monotone,
        ),
        (
            "Consistent",
            "Does more computation help, for each input?",
            "Concordance is 1 if more computation always helps, −1 if it always hurts.",
            consistent,
        ),
        (
            "Diminishing returns",
            "Are the early gains the largest?",
            "The largest distance of the mean curve below its concave hull.",
            diminishing,
        ),
    )
    return tuple(
        Property(name, question, scale, tuple(judge(evaluation, rule) for rule in evaluation.rules))
        for name, question, scale, judge in properties
    )


def interruptible(evaluation: Evaluation, rule: str) -> Mark:
    """The quality of the first answer relative to the last, and how often the rule collapses."""
    found = evaluation.rules[rule]
    collapsed = max(found.collapsed_percent)
    if found.accuracy is not None:
        first, last = found.accuracy[0], found.accuracy[-1]
        kept = first / last if last else 0.0
        meaning = f"Correct on {fraction(first, digits=1)} of inputs at the first exit, {fraction(last, digits=1)} at the last."
    else:
        kept = found.agreement[0]
        meaning = f"For the other {fraction(1 - kept, digits=1)} of inputs the final answer differs from the first."
    if collapsed > COLLAPSED[0]:
        meaning += f" It collapses on up to {percent(collapsed)} of inputs."
    grade = _worse(_at_least(kept, FIRST_ANSWER), _at_most(collapsed, COLLAPSED))
    return Mark(rule, grade, percent(100 * kept), meaning)


def monotone(evaluation: Evaluation, rule: str) -> Mark:
    """How many inputs have a large or a small drop of the probability."""
    big, small = (drops(evaluation, rule)[limit] for limit in ("0.5", "0.1"))
    grade = _worse(_at_most(big, BIG_DROP), _at_most(small, SMALL_DROP))
    lead = {"good": "More time hardly ever hurts", "fair": "More time sometimes hurts"}.get(grade, "More time often hurts")
    meaning = f"{lead}: {percent(small)} drop by {reaching(evaluation, '0.1')}."
    return Mark(rule, grade, f"{percent(big)} drop by {reaching(evaluation, '0.5')}", meaning)


def consistent(evaluation: Evaluation, rule: str) -> Mark:
    """How well quality follows computation, per input and on average."""
    found = evaluation.rules[rule].consistency
    if found is None or found.concordance is None:
        return Mark(rule, "unknown", "not measured", _UNKNOWN)
    grade = _at_least(found.concordance, CONCORDANCE)
    if grade == "good" and (found.correlation or 0.0) < CORRELATION:
        grade = "fair"
    words = {"good": "More time nearly always helps", "fair": "More time helps more often than it hurts"}
    meaning = words.get(grade, "More time hurts almost as often as it helps")
    if found.exponent is not None and evaluation.labelled:
        cut = 1 - 2**-found.exponent
        meaning += f"; twice the cost {'reduces' if cut >= 0 else 'raises'} the mean error by {percent(100 * abs(cut))}"
    return Mark(rule, grade, f"concordance {found.concordance:.2f}".replace("-", "−"), f"{meaning}.")


def diminishing(evaluation: Evaluation, rule: str) -> Mark:
    """How close the mean quality is to a curve that rises early and then flattens."""
    found = evaluation.rules[rule].diminishing_returns
    if found is None or evaluation.exits < 3:
        why = _UNKNOWN if evaluation.exits >= 3 else "This needs at least three exits."
        return Mark(rule, "unknown", "not measured", why)
    grade = _at_most(found.concavity_gap, HULL_GAP)
    words = {"good": "The gain comes early", "fair": "Some of the gain comes late"}
    meaning = words.get(grade, "Much of the gain comes late")
    meaning += f" on average; per input, it comes early for {percent(found.concave_percent)}"
    return Mark(rule, grade, f"gap {found.concavity_gap:.3f}", f"{meaning}.")


def accuracy_change(evaluation: Evaluation, rule: str) -> float:
    """The accuracy at the last exit, in points, that a rule gains over the base; 0 without labels."""
    ours, theirs = evaluation.rules[rule].accuracy, evaluation.rules[base(evaluation)].accuracy
    return 0.0 if ours is None or theirs is None else 100 * (ours[-1] - theirs[-1])


def _at_most(value: float, limits: tuple[float, float]) -> Grade:
    return "good" if value <= limits[0] else "fair" if value <= limits[1] else "poor"


def _at_least(value: float, limits: tuple[float, float]) -> Grade:
    return _at_most(-value, (-limits[0], -limits[1]))


def _worse(one: Grade, other: Grade) -> Grade:
    order: tuple[Grade, ...] = ("good", "fair", "poor")
    return max(one, other, key=order.index)

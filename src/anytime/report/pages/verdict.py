"""The verdict: can this model be stopped at any time, and what does each rule change?

The headline is based on the grade for monotonicity, see `DECISION` and `anytime.report.pages.card`. Without labels the final
answer's probability replaces the true class's, and the question is only whether the model is stable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anytime.combine.advice import FEW_CLASSES
from anytime.display.numbers import fraction, number, percent, plural, points
from anytime.evaluation.rules import base, drops, followed, like, reaching, shown
from anytime.report.pages.card import COLLAPSED, Grade, accuracy_change, monotone

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation

PRICE = 1.0  # points of accuracy that a rule may cost and still be recommended
SAME_PERCENT = 0.005
SAME_POINTS = 0.05
ECE_GAP = 0.05
FEW_INPUTS = 300

DECISION = (
    "The headline is based on the grade for monotonicity. “Yes, as it is” needs a good grade for the model itself. “With …, "
    f"yes” needs a rule with a good grade that costs at most {PRICE:g} point of accuracy at the last exit and collapses on at "
    f"most {COLLAPSED[1]:g} % of inputs; Product is considered first, then Caching, then the others in order. “Only in part” "
    "is a fair grade, or a good one at a higher price. Anything else is “No”."
)


@dataclass(frozen=True)
class Verdict:
    """The question, the answer in a few words, its grade, and the sentences that explain it."""

    question: str
    headline: str
    grade: Grade
    sentences: tuple[str, ...]


def verdict(evaluation: Evaluation) -> Verdict:
    """The verdict on an evaluation."""
    headline, grade = _headline(evaluation)
    question = "Can this model be stopped at any time?" if evaluation.labelled else "Is this model stable at any time?"
    return Verdict(question, headline, grade, sentences(evaluation))


def sentences(evaluation: Evaluation) -> tuple[str, ...]:
    """The verdict in full, the most important sentence first."""
    rule = best_rule(evaluation)
    found = [_first(evaluation, rule), _smaller(evaluation), _forgetting(evaluation, rule), _average(evaluation)]
    found.append(_caching_is_better(evaluation))
    for other in _distinct(rule, like(evaluation, "product")):
        found += [_collapse(evaluation, other), _calibration(evaluation, other)]
    found += [_no_labels(evaluation), _few_inputs(evaluation)]
    return tuple(sentence for sentence in found if sentence)


def best_rule(evaluation: Evaluation) -> str | None:
    """The rule of the first sentence: Product if it is among the rules, otherwise the most monotone of the others."""
    others = [rule for rule in evaluation.rules if rule != base(evaluation)]
    if not others:
        return None
    return like(evaluation, "product") or min(others, key=lambda rule: _depth(evaluation, rule))


def advice_on_few_classes(evaluation: Evaluation) -> str:
    """The drops of product and caching for fewer than five classes, where the paper advises caching; otherwise empty."""
    rules = [like(evaluation, name) for name in ("product", "caching")]
    if evaluation.classes >= FEW_CLASSES or None in rules:
        return ""
    found = {rule: drops(evaluation, rule) for rule in rules if rule is not None}
    parts = [f"{percent(each['0.1'])} and {percent(each['0.5'])} with {shown(rule)}" for rule, each in found.items()]
    return (
        f"The paper advises {shown('caching')} for fewer than {FEW_CLASSES} classes; here there are {evaluation.classes}. "
        f"Drops of {reaching(evaluation, '0.1')}, and of {reaching(evaluation, '0.5')}: {'; '.join(parts)}. "
        "`anytime tune` chooses a rule by such metrics."
    )


def _headline(evaluation: Evaluation) -> tuple[str, Grade]:
    found, first = {rule: monotone(evaluation, rule).grade for rule in evaluation.rules}, base(evaluation)
    asked = [like(evaluation, "product"), like(evaluation, "caching"), *evaluation.rules]
    order = [rule for rule in _distinct(*asked) if rule != first]
    if found[first] == "good":
        return "Yes, as it is.", "good"
    rule = next((rule for rule in order if found[rule] == "good" and _affordable(evaluation, rule)), None)
    if rule is not None:
        lead = "In part as it is" if found[first] == "fair" else "Not as it is"
        return f"{lead}; with {shown(rule)}, yes.", "good"
    if found[first] == "fair":
        return "Only in part.", "fair"
    partly = [other for other in order if found[other] in ("good", "fair")]
    if partly:
        best = min(partly, key=lambda other: (not _affordable(evaluation, other), _depth(evaluation, other)))
        return f"Only in part, with {shown(best)}.", "fair"
    return ("No." if len(found) == 1 else "No, with none of these rules."), "poor"


def _affordable(evaluation: Evaluation, rule: str) -> bool:
    collapsed = max(evaluation.rules[rule].collapsed_percent)
    return accuracy_change(evaluation, rule) >= -PRICE and collapsed <= COLLAPSED[1]


def _depth(evaluation: Evaluation, rule: str) -> tuple[float, float]:
    found = drops(evaluation, rule)
    return found["0.5"], found["0.1"]


def _first(evaluation: Evaluation, rule: str | None) -> str:
    before = drops(evaluation, base(evaluation))["0.5"]
    amount = f"{reaching(evaluation, '0.5')} of the {followed(evaluation)}'s probability between two exits"
    start = f"{percent(before)} of inputs lose {amount}" if before > 0 else f"No input loses {amount}"
    return f"{start}." if rule is None else f"{start}; {shown(rule)} {_effect(evaluation, rule, before)}."


def _effect(evaluation: Evaluation, rule: str, before: float) -> str:
    after = drops(evaluation, rule)["0.5"]
    change = accuracy_change(evaluation, rule)
    same_drop, same_accuracy = abs(after - before) < SAME_PERCENT, abs(change) < SAME_POINTS
    if same_drop and same_accuracy:
        return "changes neither this nor the accuracy at the last exit" if evaluation.labelled else "does not change this"
    drop = "does not change this" if same_drop else f"{'reduces' if after < before else 'raises'} this to {percent(after)}"
    if not evaluation.labelled:
        return drop
    if same_accuracy:
        return f"{drop} and keeps the accuracy at the last exit"
    return f"{drop} and {'gains' if change > 0 else 'costs'} {points(change)} of accuracy at the last exit"


def _smaller(evaluation: Evaluation) -> str:
    parts = [f"{percent(drops(evaluation, rule)['0.1'])} with {shown(rule)}" for rule in evaluation.rules]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"Inputs with a drop of {reaching(evaluation, '0.1')}: {listed}."


def _forgetting(evaluation: Evaluation, rule: str | None) -> str:
    kept = {name: evaluation.rules[name].correct_monotone_percent for name in _distinct(base(evaluation), rule)}
    lost = {name: 100 - each for name, each in kept.items() if each is not None}
    if not lost:
        return ""
    first, *rest = lost.items()
    text = f"{percent(first[1])} of inputs are correct at some exit and wrong at a later one"
    return text + "".join(f"; with {shown(name)}, {percent(value)}" for name, value in rest) + "."


def _average(evaluation: Evaluation) -> str:
    """A warning if the model gets worse even on average."""
    accuracy = evaluation.rules[base(evaluation)].accuracy
    if not accuracy or 100 * (max(accuracy) - accuracy[-1]) <= PRICE:
        return ""
    exit = accuracy.index(max(accuracy)) + 1
    return (
        f"Even on average the model gets worse: the accuracy is {fraction(max(accuracy), digits=1)} at exit {exit} and "
        f"{fraction(accuracy[-1], digits=1)} at the last."
    )


def _caching_is_better(evaluation: Evaluation) -> str:
    product, caching = like(evaluation, "product"), like(evaluation, "caching")
    if product is None or caching is None or _depth(evaluation, caching) >= _depth(evaluation, product):
        return ""
    ours, theirs = (drops(evaluation, rule) for rule in (caching, product))
    at = "0.5" if ours["0.5"] < theirs["0.5"] else "0.1"
    text = (
        f"{shown(caching)} does better than {shown(product)} here: {percent(ours[at])} of inputs drop by "
        f"{reaching(evaluation, at)}, against {percent(theirs[at])}."
    )
    few = f" The paper advises {shown('caching')} for fewer than {FEW_CLASSES} classes; here there are {evaluation.classes}."
    return text + few if evaluation.classes < FEW_CLASSES else text


def _collapse(evaluation: Evaluation, rule: str) -> str:
    found = evaluation.rules[rule].collapsed_percent
    most = max(found)
    if most <= COLLAPSED[0]:
        return ""
    return (
        f"{shown(rule)} collapses on {percent(most)} of inputs by exit {found.index(most) + 1}: no class is left, and the "
        "answer falls back to the current exit alone. A shift of 1/K, softplus instead of ReLU, or Caching avoids this."
    )


def _calibration(evaluation: Evaluation, rule: str) -> str:
    ours, theirs = evaluation.rules[rule].ece, evaluation.rules[base(evaluation)].ece
    if not ours or not theirs:
        return ""
    exit = max(range(len(ours)), key=lambda index: ours[index] - theirs[index])
    if ours[exit] - theirs[exit] <= ECE_GAP:
        return ""
    ends = f"{number(round(ours[-1], 2))} against {number(round(theirs[-1], 2))}"
    last = "" if exit == len(ours) - 1 else f", and {ends} at the last"
    late = ours[-1] - theirs[-1] > ECE_GAP
    return (
        f"{shown(rule)}'s confidence is less calibrated: at exit {exit + 1} its ECE is {number(round(ours[exit], 2))} against "
        f"{number(round(theirs[exit], 2))} for {shown(base(evaluation))}{last}. "
        f"{'Do' if late else 'Before the last exits, do'} not read it as a probability of being correct; prediction sets "
        "express the uncertainty better."
    )


def _no_labels(evaluation: Evaluation) -> str:
    if evaluation.labelled:
        return ""
    return (
        "There are no labels, so each input is compared with the answer of the last exit: this shows how stable the model is, "
        "not how often it is correct."
    )


def _few_inputs(evaluation: Evaluation) -> str:
    if evaluation.samples >= FEW_INPUTS:
        return ""
    unseen = 100 * (1 - 0.05 ** (1 / evaluation.samples))
    count = plural(evaluation.samples, "input") + ("" if evaluation.positions is None else ", whose positions are alike")
    return f"With only {count}, an observed 0 % can mean up to {percent(unseen)} (at 95 % confidence)."


def _distinct(*rules: str | None) -> list[str]:
    return list(dict.fromkeys(rule for rule in rules if rule is not None))

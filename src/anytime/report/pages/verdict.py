"""The plain words: can this model be trusted at any time, and what does each rule change?

The headline rests on monotonicity, graded as `anytime.report.pages.card` says:

* "Yes, as it is." if the model itself (`latest`) is good;
* "Not as it is; with Product, yes." if a rule is good, costs at most 1 point of accuracy at the last exit and collapses on
  at most 10 % of the inputs; Product is asked first, then Caching, then the others as listed;
* "Only in part." if the best that remains is fair, or good at a higher price;
* "No." else.

Without labels the final answer's probability stands in for the true class's, and the question is only whether the model is
steady.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anytime.combine.advice import FEW_CLASSES
from anytime.report.numbers import number, percent, plural, points, share
from anytime.report.pages.card import COLLAPSED, Grade, accuracy_change, grades
from anytime.report.pages.rules import base, drops, followed, like, reaching, shown

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation

PRICE = 1.0  # points of accuracy a rule may cost and still mend the model
SAME_PERCENT = 0.005
SAME_POINTS = 0.05
ECE_GAP = 0.05
FEW_INPUTS = 300

DECISION = (
    "The headline rests on the grade for monotonicity. “Yes, as it is” takes a good grade for the model itself. “With …, yes” "
    f"takes a rule with a good grade that costs at most {PRICE:g} point of accuracy at the last exit and collapses on at most "
    f"{COLLAPSED[1]:g} % of inputs. “Only in part” is a fair grade, or a good one at a higher price; “No” is everything else."
)


@dataclass(frozen=True)
class Verdict:
    """The question, the answer in a few words, its grade, and the sentences that explain it."""

    question: str
    headline: str
    grade: Grade
    sentences: tuple[str, ...]


def verdict(evaluation: Evaluation) -> Verdict:
    """What to say first about an evaluation."""
    headline, grade = _headline(evaluation)
    question = "Can this model be trusted at any time?" if evaluation.labelled else "Is this model steady at any time?"
    return Verdict(question, headline, grade, sentences(evaluation))


def sentences(evaluation: Evaluation) -> tuple[str, ...]:
    """The verdict in full, the most important first."""
    rule = mender(evaluation)
    found = [_first(evaluation, rule), _smaller(evaluation), _forgetting(evaluation, rule), _average(evaluation)]
    found.append(_caching_is_better(evaluation))
    for other in _distinct(rule, like(evaluation, "product")):
        found += [_collapse(evaluation, other), _calibration(evaluation, other)]
    found += [_no_labels(evaluation), _few_inputs(evaluation)]
    return tuple(sentence for sentence in found if sentence)


def mender(evaluation: Evaluation) -> str | None:
    """The rule the first sentence is about: Product where it is among the rules, else the most monotone of the others."""
    others = [rule for rule in evaluation.rules if rule != base(evaluation)]
    if not others:
        return None
    return like(evaluation, "product") or min(others, key=lambda rule: _depth(evaluation, rule))


def mended_by(evaluation: Evaluation) -> str | None:
    """The rule that makes the model monotone at an acceptable price, if there is one."""
    found = grades(evaluation)
    return next((rule for rule in _order(evaluation) if found[rule] == "good" and _affordable(evaluation, rule)), None)


def advice_on_few_classes(evaluation: Evaluation) -> str:
    """What these rows say of the product and caching where the paper advises the latter; nothing from five classes on."""
    rules = [like(evaluation, name) for name in ("product", "caching")]
    if evaluation.classes >= FEW_CLASSES or None in rules:
        return ""
    falls = {rule: drops(evaluation, rule) for rule in rules if rule is not None}
    parts = [f"{percent(each['0.1'])} and {percent(each['0.5'])} with {shown(rule)}" for rule, each in falls.items()]
    return (
        f"The paper advises {shown('caching')} for fewer than {FEW_CLASSES} classes; here there are {evaluation.classes}. "
        f"Falls of {reaching(evaluation, '0.1')}, and of {reaching(evaluation, '0.5')}: {'; '.join(parts)}. "
        "`anytime tune` chooses by such figures."
    )


def _headline(evaluation: Evaluation) -> tuple[str, Grade]:
    found, first = grades(evaluation), base(evaluation)
    rule = mended_by(evaluation)
    if found[first] == "good":
        return "Yes, as it is.", "good"
    if rule is not None:
        lead = "In part as it is" if found[first] == "fair" else "Not as it is"
        return f"{lead}; with {shown(rule)}, yes.", "good"
    if found[first] == "fair":
        return "Only in part.", "fair"
    partly = [other for other in _order(evaluation) if found[other] in ("good", "fair")]
    if partly:
        best = min(partly, key=lambda other: (not _affordable(evaluation, other), _depth(evaluation, other)))
        return f"Only in part, with {shown(best)}.", "fair"
    return ("No." if len(found) == 1 else "No, with none of these rules."), "poor"


def _order(evaluation: Evaluation) -> list[str]:
    """The rules other than the base, in the order in which they are asked."""
    asked = [like(evaluation, "product"), like(evaluation, "caching"), *evaluation.rules]
    return [rule for rule in _distinct(*asked) if rule != base(evaluation)]


def _affordable(evaluation: Evaluation, rule: str) -> bool:
    collapsed = max(evaluation.rules[rule].collapsed_percent)
    return accuracy_change(evaluation, rule) >= -PRICE and collapsed <= COLLAPSED[1]


def _depth(evaluation: Evaluation, rule: str) -> tuple[float, float]:
    found = drops(evaluation, rule)
    return found["0.5"], found["0.1"]


def _first(evaluation: Evaluation, rule: str | None) -> str:
    before = drops(evaluation, base(evaluation))["0.5"]
    whose = f"{reaching(evaluation, '0.5')} of the {followed(evaluation)}'s probability on the way"
    start = f"{percent(before)} of inputs lose {whose}" if before > 0 else f"No input loses {whose}"
    return f"{start}." if rule is None else f"{start}; {shown(rule)} {_effect(evaluation, rule, before)}."


def _effect(evaluation: Evaluation, rule: str, before: float) -> str:
    after = drops(evaluation, rule)["0.5"]
    change = accuracy_change(evaluation, rule)
    same_drop, same_accuracy = abs(after - before) < SAME_PERCENT, abs(change) < SAME_POINTS
    if same_drop and same_accuracy:
        return (
            "changes nothing in this, nor in the accuracy at the last exit"
            if evaluation.labelled
            else "changes nothing in this"
        )
    drop = "leaves this as it is" if same_drop else f"{'brings' if after < before else 'raises'} this to {percent(after)}"
    return f"{drop} and {_accuracy(change)}" if evaluation.labelled else drop


def _accuracy(change: float) -> str:
    if abs(change) < SAME_POINTS:
        return "leaves the accuracy at the last exit as it is"
    return f"{'gains' if change > 0 else 'costs'} {points(change)} of accuracy at the last exit"


def _smaller(evaluation: Evaluation) -> str:
    parts = [f"{percent(drops(evaluation, rule)['0.1'])} with {shown(rule)}" for rule in evaluation.rules]
    return f"Falls of {reaching(evaluation, '0.1')}, by rule: {_listed(parts)}."


def _forgetting(evaluation: Evaluation, rule: str | None) -> str:
    kept = {name: evaluation.rules[name].correct_monotone_percent for name in _distinct(base(evaluation), rule)}
    lost = {name: 100 - each for name, each in kept.items() if each is not None}
    if not lost:
        return ""
    first, *rest = lost.items()
    text = f"{percent(first[1])} of inputs are answered right at some exit and wrong at a later one"
    return text + "".join(f"; with {shown(name)}, {percent(value)}" for name, value in rest) + "."


def _average(evaluation: Evaluation) -> str:
    """A word of warning where the model gets worse even on average."""
    accuracy = evaluation.rules[base(evaluation)].accuracy
    if not accuracy or 100 * (max(accuracy) - accuracy[-1]) <= PRICE:
        return ""
    exit = accuracy.index(max(accuracy)) + 1
    return (
        f"Even on average the model gets worse: {share(max(accuracy), digits=1)} of inputs are right at exit {exit}, "
        f"{share(accuracy[-1], digits=1)} at the last."
    )


def _caching_is_better(evaluation: Evaluation) -> str:
    product, caching = like(evaluation, "product"), like(evaluation, "caching")
    if product is None or caching is None or _depth(evaluation, caching) >= _depth(evaluation, product):
        return ""
    ours, theirs = (drops(evaluation, rule) for rule in (caching, product))
    at = "0.5" if ours["0.5"] < theirs["0.5"] else "0.1"
    text = (
        f"{shown(caching)} does better than {shown(product)} here: {percent(ours[at])} of inputs lose "
        f"{reaching(evaluation, at)}, against {percent(theirs[at])}."
    )
    few = f" The paper advises {shown('caching')} for fewer than {FEW_CLASSES} classes; here there are {evaluation.classes}."
    return text + few if evaluation.classes < FEW_CLASSES else text


def _collapse(evaluation: Evaluation, rule: str) -> str:
    shares = evaluation.rules[rule].collapsed_percent
    most = max(shares)
    if most <= COLLAPSED[0]:
        return ""
    return (
        f"{shown(rule)} collapses on {percent(most)} of inputs by exit {shares.index(most) + 1}: no class is left, and the "
        "answer falls back on the current exit alone. A shift of 1/K, softplus in place of the ReLU, or Caching avoids this."
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
        f"{shown(rule)}'s confidence says less: at exit {exit + 1} it is off by {number(round(ours[exit], 2))} on average "
        f"(ECE), {shown(base(evaluation))}'s by {number(round(theirs[exit], 2))}{last}. "
        f"{'Do' if late else 'Before the last exits, do'} not read it as a chance of being right; prediction sets are the "
        "better measure of doubt."
    )


def _no_labels(evaluation: Evaluation) -> str:
    if evaluation.labelled:
        return ""
    return (
        "No labels came with these logits, so each input is measured against the last exit's own answer: this shows how steady "
        "the model is, not how often it is right."
    )


def _few_inputs(evaluation: Evaluation) -> str:
    if evaluation.samples >= FEW_INPUTS:
        return ""
    unseen = 100 * (1 - 0.05 ** (1 / evaluation.samples))
    count = plural(evaluation.samples, "input")
    return f"With only {count}, a share of 0 % here can still be up to {percent(unseen)} in truth (at 95 % confidence)."


def _distinct(*rules: str | None) -> list[str]:
    return list(dict.fromkeys(rule for rule in rules if rule is not None))


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"

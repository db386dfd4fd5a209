"""All metrics of an evaluation as tables: those over all exits, and per rule those of each exit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from anytime.metrics import RuleMetrics
from anytime.report.numbers import ABSENT, Number, exact, number
from anytime.report.pages.figure import Table, exit_table
from anytime.report.pages.measures import MEASURES
from anytime.report.pages.rules import shown, sign

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation

_OVER_ALL: Mapping[str, tuple[Callable[[RuleMetrics], Number], Callable[[Number], str]]] = {
    "Mean drop of the true class's probability": (lambda rule: rule.mean_label_drop, number),
    "Never correct first and wrong later": (lambda rule: rule.correct_monotone_percent, exact),
    "Correct at some exit": (lambda rule: rule.ever_correct_percent, exact),
    "Correct at no exit": (lambda rule: rule.never_correct_percent, exact),
    "Overthinking: correct at some exit but not at the last": (lambda rule: rule.overthinking_percent, exact),
    "Consistency: correlation of log cost and −log mean error": (
        lambda rule: rule.consistency.correlation if rule.consistency else None,
        number,
    ),
    "Consistency: exponent of the mean error over cost": (
        lambda rule: rule.consistency.exponent if rule.consistency else None,
        number,
    ),
    "Consistency: mean concordance per input": (
        lambda rule: rule.consistency.concordance if rule.consistency else None,
        number,
    ),
    "Diminishing returns: gap to the concave hull": (
        lambda rule: rule.diminishing_returns.concavity_gap if rule.diminishing_returns else None,
        number,
    ),
    "Diminishing returns: inputs with a concave curve": (
        lambda rule: rule.diminishing_returns.concave_percent if rule.diminishing_returns else None,
        exact,
    ),
}
_BY_THRESHOLD: Mapping[str, Callable[[RuleMetrics], Mapping[str, float] | None]] = {
    "The true class's probability drops by {}": lambda rule: rule.label_drop_percent,
    "The final answer's probability drops by {}": lambda rule: rule.final_drop_percent,
    "Entropy rises by {} nats": lambda rule: rule.entropy_rise_percent,
    "The prediction set grows by {}": lambda rule: rule.set_size_rise_percent,
}


def over_all(evaluation: Evaluation) -> Table:
    """The metrics with one value per rule."""
    rows = [row for row in _rows(evaluation) if set(row[1:]) != {ABSENT}]
    return Table("Over all exits", ("metric", *(shown(rule) for rule in evaluation.rules)), tuple(rows))


def exit_by_exit(evaluation: Evaluation) -> list[Table]:
    """Per rule, its metrics at each exit."""
    return [
        exit_table(f"{shown(rule)} at each exit", evaluation.exits, list(_exit_rows(evaluation, found)), heading="metric")
        for rule, found in evaluation.rules.items()
    ]


def _rows(evaluation: Evaluation) -> Iterator[tuple[str, ...]]:
    rules = evaluation.rules.values()
    for title, (value, text) in _OVER_ALL.items():
        yield (title, *(text(value(rule)) for rule in rules))
    for title, values in _BY_THRESHOLD.items():
        found = [values(rule) or {} for rule in rules]
        for limit in max(found, key=len):
            yield (title.format(f"{sign(evaluation)} {limit}"), *(exact(each.get(limit)) for each in found))


def _exit_rows(evaluation: Evaluation, found: RuleMetrics) -> Iterator[tuple[str, ...]]:
    for measure in MEASURES.values():
        if texts := measure.texts(found):
            yield (measure.title, *texts)
    if found.diminishing_returns is not None:
        gains = found.diminishing_returns.gains
        yield ("Mean probability gained per unit of cost", ABSENT, *(number(gain) for gain in gains))
    if evaluation.costs_given:
        yield ("Cumulative cost", *(number(cost) for cost in evaluation.costs))

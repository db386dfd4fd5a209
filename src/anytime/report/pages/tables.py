"""All numbers of an evaluation as tables: once over all inputs, and for each rule exit by exit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from anytime.report.numbers import ABSENT, Number, exact, number
from anytime.report.pages.figures import Table
from anytime.report.pages.measures import MEASURES
from anytime.report.pages.rules import shown, sign

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation

_SINGLE: Mapping[str, tuple[str, Callable[[Number], str]]] = {
    "mean_label_drop": ("Mean fall of the true class's probability", number),
    "correct_monotone_percent": ("Never right first and wrong later", exact),
    "ever_correct_percent": ("Right at some exit", exact),
    "never_correct_percent": ("Right at no exit", exact),
    "overthinking_percent": ("Overthinking: right at some exit, less right at the last", exact),
}
_BY_LIMIT = {
    "label_drop_percent": "The true class's probability falls by {}",
    "final_drop_percent": "The final answer's probability falls by {}",
    "entropy_rise_percent": "Entropy rises by {} nats",
    "set_size_rise_percent": "The prediction set grows by {}",
}
_NESTED: Mapping[tuple[str, str], tuple[str, Callable[[Number], str]]] = {
    ("consistency", "correlation"): ("Consistency: correlation of log cost and −log mean error", number),
    ("consistency", "exponent"): ("Consistency: exponent of the mean error over cost", number),
    ("consistency", "concordance"): ("Consistency: mean concordance an input", number),
    ("diminishing_returns", "concavity_gap"): ("Diminishing returns: gap to the concave hull", number),
    ("diminishing_returns", "concave_percent"): ("Diminishing returns: inputs with a concave curve", exact),
}


def over_all(evaluation: Evaluation) -> Table:
    """The figures that are one number a rule."""
    rows = [row for row in _rows(evaluation) if set(row[1:]) != {ABSENT}]
    return Table("Over all exits", ("figure", *(shown(rule) for rule in evaluation.rules)), tuple(rows))


def exit_by_exit(evaluation: Evaluation) -> list[Table]:
    """For each rule, its figures at each exit."""
    columns = ("figure", *(f"exit {exit}" for exit in range(1, evaluation.exits + 1)))
    return [Table(f"{shown(rule)} at each exit", columns, tuple(_exit_rows(evaluation, rule))) for rule in evaluation.rules]


def _rows(evaluation: Evaluation) -> Iterator[tuple[str, ...]]:
    rules = evaluation.rules.values()
    for key, (title, text) in _SINGLE.items():
        yield (title, *(text(getattr(found, key)) for found in rules))
    for key, title in _BY_LIMIT.items():
        shares = [getattr(found, key) or {} for found in rules]
        for limit in max(shares, key=len):
            yield (title.format(f"{sign(evaluation)} {limit}"), *(exact(each.get(limit)) for each in shares))
    for (group, key), (title, text) in _NESTED.items():
        yield (title, *(text(getattr(getattr(found, group), key, None)) for found in rules))


def _exit_rows(evaluation: Evaluation, rule: str) -> Iterator[tuple[str, ...]]:
    found = evaluation.rules[rule]
    for measure in MEASURES.values():
        values = measure.values(found)
        if values is not None:
            yield (measure.title, *(measure.text(value) for value in values))
    if found.diminishing_returns is not None:
        gains = found.diminishing_returns.gains
        yield ("Mean probability gained a unit of cost", ABSENT, *(number(gain) for gain in gains))
    if evaluation.costs_given:
        yield ("Cumulative cost", *(number(cost) for cost in evaluation.costs))

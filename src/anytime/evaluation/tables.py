"""All metrics of an evaluation as tables: those over all exits, and per rule those of each exit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from anytime.display.numbers import ABSENT, Number, exact, number
from anytime.display.table import Table, exit_table
from anytime.evaluation.measures import MEASURES
from anytime.evaluation.rules import shown, sign
from anytime.metrics import RuleMetrics

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


def overview(evaluation: Evaluation) -> Table:
    """The metrics to look at first, one column per rule."""
    inputs = f"{evaluation.samples:,} inputs" + ("" if evaluation.rows is None else f" ({evaluation.rows:,} positions)")
    labels = "" if evaluation.labelled else ", no labels"
    columns = [_cells(metrics, sign(evaluation)) for metrics in evaluation.rules.values()]
    return Table(
        f"{evaluation.exits} exits, {inputs}, {evaluation.classes} classes{labels}",
        ("", *evaluation.rules),
        tuple((name, *(column[name] for column in columns)) for name in columns[0]),
    )


def over_all(evaluation: Evaluation) -> Table:
    """The metrics with one value per rule."""
    rows = [row for row in _rows(evaluation) if set(row[1:]) != {ABSENT}]
    return Table("Over all exits", ("metric", *(shown(rule) for rule in evaluation.rules)), tuple(rows))


def at_each_exit(evaluation: Evaluation, rule: str) -> Table:
    """The metrics of a rule at each exit."""
    rows = list(_exit_rows(evaluation, evaluation.rules[rule]))
    return exit_table(f"{shown(rule)} at each exit", evaluation.exits, rows, heading="metric")


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


def _cells(metrics: RuleMetrics, sign: str) -> dict[str, str]:
    """The metrics to show, by their names; those that need labels or sets only if there are any."""
    cells: dict[str, str] = {}
    if metrics.accuracy and metrics.label_drop_percent and metrics.ece:
        cells |= {
            "accuracy, first exit %": f"{100 * metrics.accuracy[0]:.2f}",
            "accuracy, last exit %": f"{100 * metrics.accuracy[-1]:.2f}",
            **({} if metrics.mean_iou is None else {"mean IoU, last exit %": f"{100 * metrics.mean_iou[-1]:.2f}"}),
            f"label drops by {sign} .1, %": f"{metrics.label_drop_percent['0.1']:.2f}",
            f"label drops by {sign} .5, %": f"{metrics.label_drop_percent['0.5']:.2f}",
            "correct stays correct, %": f"{metrics.correct_monotone_percent:.2f}",
            "overthinking, %": f"{metrics.overthinking_percent:.2f}",
            "ECE, mean": f"{sum(metrics.ece) / len(metrics.ece):.3f}",
        }
    cells |= {
        f"final answer drops by {sign} .1, %": f"{metrics.final_drop_percent['0.1']:.2f}",
        "entropy, first → last": f"{metrics.entropy[0]:.2f} → {metrics.entropy[-1]:.2f}",
        "collapsed, last exit %": f"{metrics.collapsed_percent[-1]:.2f}",
    }
    if metrics.set_size:
        cells["set size, first → last"] = f"{metrics.set_size[0]:.1f} → {metrics.set_size[-1]:.1f}"
    return cells

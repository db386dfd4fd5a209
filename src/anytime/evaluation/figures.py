"""The charts of the report. A chart whose metrics are missing (no labels, no prediction sets) is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from anytime.display.chart import Axis, Chart, Guide, Look, Series, values
from anytime.display.figure import Figure, exit_axis
from anytime.display.numbers import compact, exact, fraction, number, percent
from anytime.display.scale import linear, symlog
from anytime.display.table import Table, exit_table
from anytime.evaluation.measures import MEASURES, Measure
from anytime.evaluation.rules import looks, reaching, shown, sign
from anytime.metrics.calibration import FEW_IN_BIN

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation
    from anytime.metrics.rule_metrics import ReliabilityBins

# The sections of the report and the measures that they draw over the exits.
_BY_EXIT = (
    ("average", ("accuracy", "mean_iou", "label_probability")),
    ("uncertainty", ("entropy", "set_size")),
    ("calibration", ("ece", "nll", "brier", "oracle_accuracy")),
    ("learning", ("learned", "forgot", "hindsight_improvability_percent", "agreement")),
)
_SUPPORT = ("support_size", "support_coverage", "collapsed_percent")
_IDEAL = "The dashed line at zero is an ideal model."
# The metrics drawn over thresholds: section, title, how to read it, and the title of the axis.
_BY_THRESHOLD = {
    "label_drop_percent": (
        "drops",
        "Drops of the true class's probability",
        f"For each size of drop, how many inputs lose at least that much of the true class's probability. {_IDEAL}",
        "drops by at least",
    ),
    "final_drop_percent": (
        "drops",
        "Drops of the final answer's probability",
        f"The same for the class that the rule answers at the last exit; this needs no labels. {_IDEAL}",
        "drops by at least",
    ),
    "entropy_rise_percent": (
        "uncertainty",
        "Rises of entropy",
        "How many inputs become less certain between any two exits, by size of the rise. Ideal is 0.",
        "rises by at least, nats",
    ),
    "set_size_rise_percent": (
        "uncertainty",
        "Rises of the prediction set's size",
        "For how many inputs the prediction set grows between any two exits, by number of classes.",
        "grows by at least, classes",
    ),
}


def figures(evaluation: Evaluation) -> list[Figure]:
    """All charts of the report, in order, each with its table."""
    found = [by_exit(evaluation, section, key) for section, keys in _BY_EXIT for key in keys]
    found += [by_exit(evaluation, "support", key, rules=_with_support(evaluation)) for key in _SUPPORT]
    found += [against_cost(evaluation), *(by_threshold(evaluation, key) for key in _BY_THRESHOLD)]
    found += [reliability(evaluation, exit) for exit in sorted({0, evaluation.exits - 1})]
    return [figure for figure in found if figure is not None]


def by_exit(evaluation: Evaluation, section: str, key: str, *, rules: Sequence[str] | None = None) -> Figure | None:
    """A measure over the exits, one line per rule; None if no rule has it."""
    measure = MEASURES[key]
    names = [rule for rule in (evaluation.rules if rules is None else rules) if measure.values(evaluation.rules[rule])]
    if not names:
        return None
    series = _series(evaluation, names, key, [float(exit) for exit in range(1, evaluation.exits + 1)])
    summary = _summary(measure.title, "at each exit", series, measure)
    chart = Chart(summary, exit_axis(evaluation.exits), _value_axis(measure, series), series)
    rows = [(shown(rule), *measure.texts(evaluation.rules[rule])) for rule in names]
    if key == "set_size":
        coverage = MEASURES["set_coverage"]
        rows += [(f"{shown(rule)}, coverage", *coverage.texts(evaluation.rules[rule])) for rule in names]
    table = exit_table(f"{measure.title} at each exit", evaluation.exits, rows)
    return Figure(key, section, measure.title, measure.reading, chart, table)


def against_cost(evaluation: Evaluation) -> Figure | None:
    """Accuracy over the cumulative cost; None without costs or labels."""
    accuracy = by_exit(evaluation, "average", "accuracy")
    if accuracy is None or not evaluation.costs_given:
        return None
    measure = MEASURES["accuracy"]
    series = tuple(replace(line, x=evaluation.costs) for line in accuracy.chart.series)
    summary = _summary("Accuracy", "over cumulative cost", series, measure)
    costs = ("cumulative cost", *(number(cost) for cost in evaluation.costs))
    return Figure(
        "accuracy_cost",
        "average",
        "Accuracy over cost",
        "The same accuracies over the cost of each exit. The earlier a line rises, the more an early answer is worth.",
        Chart(summary, Axis("cumulative cost", linear((0, *evaluation.costs))), accuracy.chart.y, series),
        replace(accuracy.table, rows=(costs, *accuracy.table.rows)),
    )


def by_threshold(evaluation: Evaluation, key: str) -> Figure | None:
    """Percent of inputs over a threshold, on a symlog axis that includes zero."""
    section, title, reading, x_title = _BY_THRESHOLD[key]
    found = {rule: each for rule, metrics in evaluation.rules.items() if (each := getattr(metrics, key))}
    if not found:
        return None
    limits = list(next(iter(found.values())))
    series = tuple(
        Series(
            shown(rule),
            tuple(float(limit) for limit in limits),
            tuple(found[rule][limit] for limit in limits),
            look,
            tuple(f"{shown(rule)}, {reaching(evaluation, limit)}: {exact(found[rule][limit])}" for limit in limits),
        )
        for rule, look in looks(evaluation.rules, found).items()
    )
    x = Axis(x_title if sign(evaluation) == "≥" else x_title.replace("at least", "more than"), linear((0.0, *series[0].x)))
    y = Axis("% of inputs", symlog(values(series)))
    guide = Guide((0.0, 0.0), (series[0].x[-1], 0.0), "ideal")
    words = "; ".join(f"{line.name} from {percent(line.y[0])} to {percent(line.y[-1])}" for line in series)
    chart = Chart(f"{title}: percent of inputs by size. {words}.", x, y, series, (guide,))
    rows = tuple((shown(rule), *(exact(each[limit]) for limit in limits)) for rule, each in found.items())
    table = Table(f"{title}, % of inputs", ("rule", *(f"{sign(evaluation)} {limit}" for limit in limits)), rows)
    return Figure(key.removesuffix("_percent"), section, title, reading, chart, table)


def reliability(evaluation: Evaluation, exit: int) -> Figure | None:
    """Accuracy over confidence at one exit, counted from 0; None without labels."""
    bins = {rule: filled_bins(found.reliability[exit]) for rule, found in evaluation.rules.items() if found.reliability}
    if not bins:
        return None
    series = tuple(_reliability_line(rule, look, bins[rule]) for rule, look in looks(evaluation.rules, bins).items())
    scale = linear((0.0, 100.0))
    guide = Guide((0.0, 0.0), (100.0, 100.0), "confidence = accuracy")
    title = f"Reliability at exit {exit + 1}"
    summary = f"{title}: accuracy over confidence."
    chart = Chart(summary, Axis("confidence, %", scale), Axis("accuracy, %", scale), series, (guide,))
    rows = tuple((shown(rule), fraction(c), fraction(a), number(n)) for rule in bins for c, a, n in bins[rule])
    table = Table(title, ("rule", "mean confidence", "accuracy", "inputs"), rows)
    reading = (
        "On the dashed line, confidence equals accuracy. Below it the rule is overconfident, above it underconfident. "
        f"Bins with fewer than {FEW_IN_BIN} inputs are in the table only."
    )
    return Figure(f"reliability_{exit + 1}", "calibration", title, reading, chart, table)


def filled_bins(bins: ReliabilityBins, *, empty: bool = False) -> list[tuple[float, float, int]]:
    """Mean confidence, accuracy and number of inputs of each bin that has any, or with `empty` of all bins."""
    found = zip(bins.confidence, bins.accuracy, bins.count, strict=True)
    return [(confidence, accuracy, int(count)) for confidence, accuracy, count in found if count or empty]


def _reliability_line(rule: str, look: Look, bins: Sequence[tuple[float, float, int]]) -> Series:
    drawn = [found for found in bins if found[2] >= FEW_IN_BIN] or bins
    return Series(
        shown(rule),
        tuple(100 * confidence for confidence, _, _ in drawn),
        tuple(100 * accuracy for _, accuracy, _ in drawn),
        look,
        tuple(f"{shown(rule)}: confidence {fraction(c)}, accuracy {fraction(a)}, {count} inputs" for c, a, count in drawn),
    )


def _with_support(evaluation: Evaluation) -> list[str]:
    """The rules that can exclude classes; a softmax never does."""
    return [
        rule
        for rule, found in evaluation.rules.items()
        if min(found.support_size) < evaluation.classes or max(found.collapsed_percent) > 0
    ]


def _series(evaluation: Evaluation, names: Sequence[str], key: str, x: Sequence[float]) -> tuple[Series, ...]:
    measure, found = MEASURES[key], []
    for rule, look in looks(evaluation.rules, names).items():
        given = measure.values(evaluation.rules[rule]) or ()
        y: tuple[float | None, ...] = tuple(measure.factor * value for value in given)
        if key == "learned":  # everything that is correct at the first exit is learned there, which would dwarf the rest
            y = (None, *y[1:])
        tips = tuple(f"{shown(rule)}, exit {exit}: {measure.text(value)}" for exit, value in enumerate(given, 1))
        found.append(Series(shown(rule), tuple(x), y, look, tips))
    return tuple(found)


def _value_axis(measure: Measure, series: Iterable[Series]) -> Axis:
    return Axis(measure.axis, linear(values(series), zero=measure.zero, low=0.0, high=measure.high))


def _summary(title: str, over: str, series: Iterable[Series], measure: Measure) -> str:
    parts = []
    for line in series:
        ends = [compact(y, digits=1 if measure.factor == 100 else 3) for _, _, y in line.points()]
        parts.append(f"{line.name} from {ends[0]} to {ends[-1]}" if ends else f"{line.name} without values")
    return f"{title} {over}, {measure.axis}: {'; '.join(parts)}."

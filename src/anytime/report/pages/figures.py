"""Which figures a report has, from which numbers: each with a title, a sentence on how to read it, and its table.

A figure whose numbers are missing (no labels, no prediction sets) is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anytime.report.numbers import compact, exact, number, percent, share
from anytime.report.pages.measures import MEASURES, Measure
from anytime.report.pages.rules import looks, reaching, shown, sign
from anytime.report.svg.chart import Axis, Chart, Guide, Look, Series, draw
from anytime.report.svg.scale import Linear, linear, symlog

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation
    from anytime.metrics.rule_metrics import ReliabilityBins

MAX_LABELLED_EXITS = 14
FEW_IN_BIN = 10


@dataclass(frozen=True)
class Table:
    """Numbers as words: the first cell of each row names it."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Figure:
    """One chart of the report, in the section it belongs to."""

    id: str
    section: str
    title: str
    reading: str
    chart: Chart
    table: Table

    @property
    def svg(self) -> str:
        """The chart drawn for the page."""
        return draw(self.chart)


# Section of the report, and the measures drawn in it exit by exit.
_BY_EXIT = (
    ("average", ("accuracy", "label_probability")),
    ("uncertainty", ("entropy", "set_size")),
    ("calibration", ("ece", "nll", "brier", "oracle_accuracy")),
    ("learning", ("learned", "forgot", "hindsight_improvability_percent", "agreement")),
)
_SUPPORT = ("support_size", "support_coverage", "collapsed_percent")


def figures(evaluation: Evaluation) -> list[Figure]:
    """All figures of the report, in its order; see `Figure.section` for where each belongs."""
    found = [by_exit(evaluation, section, key) for section, keys in _BY_EXIT for key in keys]
    found += [by_exit(evaluation, "support", key, rules=_with_support(evaluation)) for key in _SUPPORT]
    found += [against_cost(evaluation), *_drop_curves(evaluation), *_rise_curves(evaluation)]
    found += [reliability(evaluation, exit) for exit in sorted({0, evaluation.exits - 1})]
    return [figure for figure in found if figure is not None]


def by_exit(evaluation: Evaluation, section: str, key: str, *, rules: Sequence[str] | None = None) -> Figure | None:
    """A measure at each exit, one line a rule; None where no rule has it."""
    names = [rule for rule in (evaluation.rules if rules is None else rules) if MEASURES[key].values(evaluation.rules[rule])]
    if not names:
        return None
    measure = MEASURES[key]
    exits = tuple(range(1, evaluation.exits + 1))
    series = _series(evaluation, names, key, measure, [float(exit) for exit in exits])
    x = exit_axis(evaluation.exits)
    chart = Chart(_summary(measure.title, "at each exit", series, measure), x, _value_axis(measure, series), series)
    return Figure(key, section, measure.title, measure.reading, chart, _exit_table(evaluation, names, key))


def against_cost(evaluation: Evaluation) -> Figure | None:
    """Accuracy over the cumulative cost, where costs are known."""
    names = [rule for rule in evaluation.rules if evaluation.rules[rule].accuracy is not None]
    if not names or not evaluation.costs_given:
        return None
    measure = MEASURES["accuracy"]
    series = _series(evaluation, names, "accuracy", measure, list(evaluation.costs))
    x = Axis("cumulative cost", linear((0, *evaluation.costs)))
    chart = Chart(_summary("Accuracy", "over cumulative cost", series, measure), x, _value_axis(measure, series), series)
    costs = ("cumulative cost", *(number(cost) for cost in evaluation.costs))
    table = _exit_table(evaluation, names, "accuracy")
    reading = "The same accuracies over what each exit costs; the sooner a line is up, the more an early answer is worth."
    return Figure(
        "accuracy_cost",
        "average",
        "Accuracy for its cost",
        reading,
        chart,
        Table(table.caption, table.columns, (costs, *table.rows)),
    )


def _drop_curves(evaluation: Evaluation) -> list[Figure | None]:
    ideal = "The dashed line at zero is an ideal model."
    return [
        curve(
            evaluation,
            "label_drop_percent",
            section="drops",
            title="Falls of the true class's probability",
            reading=f"For each size of fall, how many inputs lose at least that much of the true class's probability. {ideal}",
            x_title="falls by at least",
        ),
        curve(
            evaluation,
            "final_drop_percent",
            section="drops",
            title="Falls of the final answer's probability",
            reading=f"The same for the class that the rule answers at the last exit, which needs no labels. {ideal}",
            x_title="falls by at least",
        ),
    ]


def _rise_curves(evaluation: Evaluation) -> list[Figure | None]:
    return [
        curve(
            evaluation,
            "entropy_rise_percent",
            section="uncertainty",
            title="Rises of entropy",
            reading="How many inputs grow less certain on the way, by at least so many nats; an ideal model never does.",
            x_title="rises by at least, nats",
        ),
        curve(
            evaluation,
            "set_size_rise_percent",
            section="uncertainty",
            title="Rises of the prediction set",
            reading="How many inputs see their prediction set grow on the way, by at least so many classes.",
            x_title="grows by at least, classes",
        ),
    ]


def curve(evaluation: Evaluation, key: str, *, section: str, title: str, reading: str, x_title: str) -> Figure | None:
    """Percent of inputs over a threshold, on a symlog axis that has a place for zero."""
    shares: dict[str, Mapping[str, float]] = {rule: getattr(found, key) or {} for rule, found in evaluation.rules.items()}
    names = [rule for rule in shares if shares[rule]]
    if not names:
        return None
    limits = list(shares[names[0]])
    series = tuple(
        Series(
            shown(rule),
            tuple(float(limit) for limit in limits),
            tuple(shares[rule][limit] for limit in limits),
            look,
            tuple(f"{shown(rule)}, {reaching(evaluation, limit)}: {exact(shares[rule][limit])}" for limit in limits),
        )
        for rule, look in _looks(evaluation, names)
    )
    x = Axis(x_title, linear((0.0, *series[0].x)))
    y = Axis("% of inputs", symlog(value for line in series for value in line.y if value is not None))
    guide = Guide((0.0, 0.0), (series[0].x[-1], 0.0), "ideal")
    words = "; ".join(f"{line.name} from {percent(line.y[0])} to {percent(line.y[-1])}" for line in series)
    chart = Chart(f"{title}: percent of inputs by size. {words}.", x, y, series, (guide,))
    rows = tuple((shown(rule), *(exact(shares[rule][limit]) for limit in limits)) for rule in names)
    table = Table(f"{title}, % of inputs", ("rule", *(f"{sign(evaluation)} {limit}" for limit in limits)), rows)
    return Figure(key.removesuffix("_percent"), section, title, reading, chart, table)


def reliability(evaluation: Evaluation, exit: int) -> Figure | None:
    """Accuracy over confidence at one exit."""
    bins = {
        rule: _filled_bins(found.reliability[exit]) for rule, found in evaluation.rules.items() if found.reliability is not None
    }
    if not bins:
        return None
    names = list(bins)
    series = tuple(_reliability_line(rule, look, bins[rule]) for rule, look in _looks(evaluation, names))
    scale = linear((0.0, 100.0))
    guide = Guide((0.0, 0.0), (100.0, 100.0), "as sure as right")
    title = f"Confidence against accuracy at exit {exit + 1}"
    chart = Chart(
        f"{title}, a reliability diagram.", Axis("confidence, %", scale), Axis("accuracy, %", scale), series, (guide,)
    )
    rows = tuple((shown(rule), share(c), share(a), number(n)) for rule in names for c, a, n in bins[rule])
    table = Table(title, ("rule", "mean confidence", "accuracy", "inputs"), rows)
    reading = (
        "On the dashed line, confidence is worth its name; below it the rule is too sure, above it too modest. "
        f"Points stand for {FEW_IN_BIN} inputs or more; the table has all."
    )
    return Figure(f"reliability_{exit + 1}", "calibration", title, reading, chart, table)


def _reliability_line(rule: str, look: Look, bins: Sequence[tuple[float, float, int]]) -> Series:
    # A bin of a few inputs jumps between 0 and 100 % and says nothing.
    drawn = [found for found in bins if found[2] >= FEW_IN_BIN] or bins
    return Series(
        shown(rule),
        tuple(100 * sure for sure, _, _ in drawn),
        tuple(100 * right for _, right, _ in drawn),
        look,
        tuple(f"{shown(rule)}: {share(sure)} sure, {share(right)} right, {count} inputs" for sure, right, count in drawn),
    )


def _filled_bins(bins: ReliabilityBins) -> list[tuple[float, float, int]]:
    return [
        (confidence, accuracy, int(count))
        for confidence, accuracy, count in zip(bins.confidence, bins.accuracy, bins.count, strict=True)
        if count
    ]


def _with_support(evaluation: Evaluation) -> list[str]:
    """The rules that can take classes out of the running; the softmax never does."""
    return [
        rule
        for rule, found in evaluation.rules.items()
        if min(found.support_size) < evaluation.classes or max(found.collapsed_percent) > 0
    ]


def _looks(evaluation: Evaluation, names: Iterable[str]) -> list[tuple[str, Look]]:
    every = looks(evaluation.rules)
    return [(name, every[name]) for name in names]


def _series(evaluation: Evaluation, names: Sequence[str], key: str, measure: Measure, x: Sequence[float]) -> tuple[Series, ...]:
    found = []
    for rule, look in _looks(evaluation, names):
        values = measure.values(evaluation.rules[rule]) or ()
        y: tuple[float | None, ...] = tuple(measure.factor * value for value in values)
        if key == "learned":  # all that is right at the first exit is learned there, which would dwarf the rest
            y = (None, *y[1:])
        tips = tuple(f"{shown(rule)}, exit {index}: {measure.text(value)}" for index, value in enumerate(values, 1))
        found.append(Series(shown(rule), tuple(x), y, look, tips))
    return tuple(found)


def _value_axis(measure: Measure, series: Iterable[Series]) -> Axis:
    low, high = measure.bounds
    return Axis(
        measure.axis, linear((y for line in series for _, _, y in line.points()), zero=measure.zero, low=low, high=high)
    )


def exit_axis(exits: int) -> Axis:
    """The axis of the exits, counted from 1; of many, only some are labelled."""
    every = -(-exits // MAX_LABELLED_EXITS)
    marks = tuple((float(exit), str(exit)) for exit in range(1, exits + 1) if (exit - 1) % every == 0)
    return Axis("exit", Linear(1.0, float(max(exits, 2)), 1.0), marks)


def _exit_table(evaluation: Evaluation, names: Iterable[str], key: str) -> Table:
    rows = [(shown(rule), *written(evaluation, rule, key)) for rule in names]
    if key == "set_size":
        covered = [rule for rule in names if evaluation.rules[rule].set_coverage]
        rows += [(f"{shown(rule)}, coverage", *written(evaluation, rule, "set_coverage")) for rule in covered]
    columns = ("rule", *(f"exit {exit}" for exit in range(1, evaluation.exits + 1)))
    return Table(f"{MEASURES[key].title} at each exit", columns, tuple(rows))


def written(evaluation: Evaluation, rule: str, key: str) -> tuple[str, ...]:
    """The values of a measure at each exit as words."""
    measure = MEASURES[key]
    return tuple(measure.text(value) for value in measure.values(evaluation.rules[rule]) or ())


def _summary(title: str, over: str, series: Iterable[Series], measure: Measure) -> str:
    parts = []
    for line in series:
        ends = [compact(y, digits=1 if measure.factor == 100 else 3) for _, _, y in line.points()]
        parts.append(f"{line.name} from {ends[0]} to {ends[-1]}" if ends else f"{line.name} without values")
    return f"{title} {over}, {measure.axis}: {'; '.join(parts)}."

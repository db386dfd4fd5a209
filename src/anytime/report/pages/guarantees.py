"""The section on guarantees: certificates in words, calibration before and after, coverage, and budgets.

Everything in it is fitted on calibration rows and measured on the rows of the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anytime.display.chart import Axis, Chart, Guide, Look, Series, scattered, values
from anytime.display.figure import Figure, exit_axis
from anytime.display.numbers import ABSENT, fraction, number, plural
from anytime.display.scale import linear
from anytime.display.table import Table, exit_table
from anytime.evaluation.figures import filled_bins
from anytime.evaluation.measures import MEASURES
from anytime.evaluation.rules import looks, shown
from anytime.report.svg.reliability import ReliabilityDiagram, draw_reliability

if TYPE_CHECKING:
    from anytime.evaluation import Guarantee, Guarantees
    from anytime.metrics import RuleMetrics

MAX_DIAGRAMS = 14


@dataclass(frozen=True)
class DiagramFigure:
    """A figure made of one reliability diagram per exit, with its table."""

    id: str
    title: str
    reading: str
    look: Look
    diagrams: tuple[ReliabilityDiagram, ...]
    table: Table

    @property
    def svgs(self) -> list[str]:
        """The diagrams as SVG."""
        return [draw_reliability(diagram, self.look, name=self.title) for diagram in self.diagrams]

    @property
    def compared(self) -> bool:
        """Whether the diagrams compare before and after a fit."""
        return any(diagram.before is not None for diagram in self.diagrams)


@dataclass(frozen=True)
class Section:
    """The content of the section, in order."""

    facts: tuple[str, ...]
    sentences: tuple[tuple[str, str], ...]
    figures: tuple[Figure, ...]
    diagrams: tuple[DiagramFigure, ...]
    temperatures: Table


def section(found: Guarantees, *, source: str) -> Section:
    """The section for the result of `measure_guarantees`; `source` names the calibration rows."""
    charts = [scaled(found, "ece"), scaled(found, "nll"), budget(found)]
    if found.sets is not None:
        charts.insert(2, coverage(found, found.sets.alpha))
    return Section(
        facts=facts(found, source),
        sentences=tuple((shown(name), each.certificate.joint_sentence) for name, each in found.rules.items()),
        figures=tuple(charts),
        diagrams=tuple(diagrams(found)),
        temperatures=_temperatures(found),
    )


def facts(found: Guarantees, source: str) -> tuple[str, ...]:
    """How the rows were used, in sentences."""
    used = (
        f"{plural(found.fitting_rows, 'random row')} of {source} fitted the temperatures and the fitted product; "
        f"{plural(found.calibrating_rows, 'other row')} gave the thresholds of the prediction sets and of early stopping.",
        f"All {plural(found.evaluation.samples, 'input')} of this report, which no fit has seen, count for the certificates. "
        "Each certificate holds for one rule, chosen in advance: choosing the best rule by this report weakens it. Future "
        "inputs must come from the same distribution.",
    )
    return (*used, dropped(found, source)) if found.dropped_rows else used


def dropped(found: Guarantees, source: str) -> str:
    """A sentence on calibration rows that were left out."""
    rows = plural(found.dropped_rows, "row")
    return f"{rows} of {source} {'is' if found.dropped_rows == 1 else 'are'} among the inputs of this report and left out."


def scaled(found: Guarantees, key: str) -> Figure:
    """ECE or NLL of each rule at its temperatures; a fitted rule is drawn as it is."""
    measure, exits = MEASURES[key], found.evaluation.exits
    names = _distinct_rules(found)
    series = tuple(
        _line(name, look, range(1, exits + 1), measure.values(found.rules[name].after or found.rules[name].before) or ())
        for name, look in looks(found.rules, names).items()
    )
    title = f"{measure.title} at the fitted temperatures"
    reading = "Each rule at its fitted temperatures; the table also has it unscaled. Caching follows scaling. Lower is better."
    ends = "; ".join(f"{line.name} from {number(line.y[0])} to {number(line.y[-1])}" for line in series)
    chart = Chart(f"{title}: {ends}.", exit_axis(exits), Axis(measure.axis, linear(values(series), zero=True, low=0.0)), series)
    rows = []
    for name in names:
        each = found.rules[name]
        rows.append((f"{shown(name)}, unscaled", *measure.texts(each.before)))
        if each.after is not None:
            rows.append((f"{shown(name)}, scaled", *measure.texts(each.after)))
    return Figure(f"scaled_{key}", "guarantees", title, reading, chart, exit_table(title, exits, rows))


def coverage(found: Guarantees, alpha: float) -> Figure:
    """Coverage of the prediction sets at each exit, with the target; the table also has their sizes."""
    exits, target = found.evaluation.exits, 100 * (1 - alpha)
    series = tuple(
        _line(name, look, range(1, exits + 1), found.rules[name].before.set_coverage or (), factor=100.0)
        for name, look in looks(found.rules).items()
    )
    title = "Coverage of the prediction sets"
    reading = (
        f"How often the sets contain the true class, with thresholds from the calibration rows. The target is {target:g} % at "
        "each exit. The sizes of the sets are in the table."
    )
    ends = "; ".join(f"{line.name} {number(line.y[-1])} at the last exit" for line in series)
    chart = Chart(
        f"{title}, target {target:g} %: {ends}",
        exit_axis(exits),
        Axis("coverage, %", linear([target, *values(series)], low=0.0, high=100.0)),
        series,
        (Guide((1.0, target), (float(max(exits, 2)), target), "target"),),
    )
    rows = []
    for name, each in found.rules.items():
        rows.append((f"{shown(name)}, coverage", *MEASURES["set_coverage"].texts(each.before)))
        rows.append((f"{shown(name)}, size", *MEASURES["set_size"].texts(each.before)))
    return Figure("set_coverage", "guarantees", title, reading, chart, exit_table(title, exits, rows))


def budget(found: Guarantees) -> Figure:
    """Accuracy over mean cost with early stopping, and with all inputs stopped at the same exit."""
    costs = found.evaluation.costs
    curves, marks = [], []
    for name, look in looks(found.rules).items():
        each = found.rules[name]
        accuracy = tuple(100 * value for value in each.budget.accuracy)
        curves.append(Series(shown(name), each.budget.cost, accuracy, Look(look.css)))
        marks.append(scattered(_line(name, look, costs, each.before.accuracy or (), factor=100.0)))
    series = (*curves, *marks)
    unit = "" if found.evaluation.costs_given else ", in exits"
    reading = (
        "Lines: inputs stop early once they are confident enough, with thresholds from the calibration rows. Marks: all inputs "
        "stop at the same exit. The distance of a line above its marks is the gain of early stopping."
    )
    title = "Accuracy over mean cost"
    ends = "; ".join(f"{line.name} up to {number(max(values([line])))} %" for line in curves)
    chart = Chart(
        f"{title}: {ends}.",
        Axis(f"mean cost per input{unit}", linear(costs, low=costs[0], high=costs[-1])),
        Axis("accuracy, %", linear(values(series), low=0.0, high=100.0)),
        series,
    )
    rows = [("mean cost", *(number(cost) for cost in costs))]
    for name, each in found.rules.items():
        rows.append((f"{shown(name)}, all at one exit", *MEASURES["accuracy"].texts(each.before)))
        rows.append((f"{shown(name)}, early stopping", *(fraction(at_cost(each, cost)) for cost in costs)))
    table = exit_table("Accuracy for at most the mean cost of each exit", found.evaluation.exits, rows)
    return Figure("budget", "guarantees", title, reading, chart, table)


def at_cost(found: Guarantee, cost: float) -> float | None:
    """The accuracy of the last point of the budget curve that costs at most `cost`."""
    known = [right for spent, right in zip(found.budget.cost, found.budget.accuracy, strict=True) if spent <= cost]
    return known[-1] if known else None


def diagrams(found: Guarantees) -> list[DiagramFigure]:
    """Reliability diagrams of each rule, one per exit; if there are many exits, of some of them."""
    count = found.evaluation.exits
    every = -(-count // MAX_DIAGRAMS)
    exits = [exit for exit in range(count) if (count - 1 - exit) % every == 0]
    drawn: list[DiagramFigure] = []
    for name, look in looks(found.rules, _distinct_rules(found)).items():
        each = found.rules[name]
        state = "fitted" if each.fitted else "before and after scaling" if each.after else "unscaled"
        title = f"{shown(name)}: accuracy over confidence, {state}"
        reading = (
            "Bars that end at the dashed line are calibrated; bars below it are overconfident. Top right: the ECE. Bottom: the "
            "number of inputs. Pale bars have fewer than ten."
        )
        shapes = tuple(_diagram(each, exit) for exit in exits)
        drawn.append(DiagramFigure(f"bars_{len(drawn) + 1}", title, reading, look, shapes, _bins_table(each, count, title)))
    return drawn


def _diagram(found: Guarantee, exit: int) -> ReliabilityDiagram:
    states = [state for state in (found.before, found.after) if state is not None]
    errors = [f"{state.ece[exit]:.3f}" for state in states if state.ece is not None]
    note = " → ".join(errors) if len(errors) > 1 else f"ECE {errors[0]}"
    *before, now = (_bins(state, exit) for state in states)
    return ReliabilityDiagram(f"exit {exit + 1}", note, now, before[0] if before else None)


def _bins(found: RuleMetrics, exit: int) -> list[tuple[float, float, int]]:
    return filled_bins((found.reliability or ())[exit], empty=True)


def _bins_table(found: Guarantee, exits: int, title: str) -> Table:
    states = [state for state in (found.before, found.after) if state is not None]
    rows = []
    for exit in range(exits):
        columns = [_bins(state, exit) for state in states]
        for index, cells in enumerate(zip(*columns, strict=True)):
            if any(count for _, _, count in cells):
                low, high = (100 * (index + end) / len(columns[0]) for end in (0, 1))
                words = [word for cell in cells for word in _bin_words(*cell)]
                rows.append((f"exit {exit + 1}, {low:.0f} to {high:.0f} %", *words))
    heads = ("mean confidence", "accuracy", "inputs")
    again = () if found.after is None else tuple(f"{head}, scaled" for head in heads)
    return Table(title, ("bin", *heads, *again), tuple(rows))


def _bin_words(confidence: float, accuracy: float, count: int) -> tuple[str, str, str]:
    return (fraction(confidence), fraction(accuracy), f"{count:,}") if count else (ABSENT, ABSENT, "0")


def _temperatures(found: Guarantees) -> Table:
    rows = []
    for name, each in found.rules.items():
        if each.temperature is not None:
            pairs = zip(each.temperature.temperatures, each.temperature.at_bound, strict=True)
            rows.append((shown(name), *(f"{number(value)}{'*' if bound else ''}" for value, bound in pairs)))
    powers = zip(found.product.past, found.product.now, strict=True)
    rows.append(("fitted product: powers of the past, of the exit", *(f"{number(a)}, {number(b)}" for a, b in powers)))
    return exit_table("Temperatures (* at a bound of the search) and powers per exit", found.evaluation.exits, rows)


def _distinct_rules(found: Guarantees) -> list[str]:
    """The rules without those that equal another rule at its temperatures: scaled caching is caching, scaled."""
    reached = [each.temperature.rule for each in found.rules.values() if each.temperature is not None]
    return [name for name, each in found.rules.items() if each.rule not in reached]


def _line(name: str, look: Look, x: Iterable[float], given: Sequence[float], *, factor: float = 1.0) -> Series:
    """One point per exit."""
    y = tuple(factor * value for value in given)
    tips = tuple(f"{shown(name)}, exit {exit}: {number(value)}" for exit, value in enumerate(y, 1))
    return Series(shown(name), tuple(float(each) for each in x), y, look, tips)

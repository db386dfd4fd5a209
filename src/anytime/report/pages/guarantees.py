"""The section on what can be guaranteed: certificates in words, calibration before and after, coverage, budgets.

Everything in it is fitted on calibration rows and measured on the rows of the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anytime.report.numbers import ABSENT, number, plural, share
from anytime.report.pages.figures import Figure, Table, exit_axis
from anytime.report.pages.measures import MEASURES
from anytime.report.pages.rules import looks, shown
from anytime.report.svg.chart import Axis, Chart, Guide, Look, Series
from anytime.report.svg.reliability import Bins, Panel, Panels
from anytime.report.svg.scale import linear

if TYPE_CHECKING:
    from anytime.evaluation import Guarantee, Guarantees
    from anytime.metrics import RuleMetrics

MOST_PANELS = 14


@dataclass(frozen=True)
class Section:
    """What the section shows, in its order."""

    facts: tuple[str, ...]
    sentences: tuple[tuple[str, str], ...]
    figures: tuple[Figure, ...]
    diagrams: tuple[Panels, ...]
    temperatures: Table


def section(found: Guarantees, *, source: str) -> Section:
    """The section for what `anytime.evaluation.guarantees` found; `source` names the calibration rows."""
    coverage = None if found.sets is None else covered(found, found.sets.alpha)
    charts = (scaled(found, "ece"), scaled(found, "nll"), coverage, budget(found))
    return Section(
        facts=facts(found, source),
        sentences=tuple((shown(name), each.certificate.joint_sentence) for name, each in found.rules.items()),
        figures=tuple(chart for chart in charts if chart is not None),
        diagrams=tuple(diagrams(found)),
        temperatures=_temperatures(found),
    )


def facts(found: Guarantees, source: str) -> tuple[str, ...]:
    """Which rows did what, in sentences."""
    apart = (
        f"Of {source}, {plural(found.fitting_rows, 'row')} drawn by lot fitted the temperatures and the fitted product, and "
        f"{plural(found.calibrating_rows, 'other')} gave the thresholds of the prediction sets and of stopping.",
        f"All {plural(found.evaluation.samples, 'input')} of this report, which no fit has seen, count for the certificates. "
        "Each certificate holds for one rule, chosen in advance: choosing the best rule by this report weakens it. Future "
        "inputs must come from the same distribution.",
    )
    return (*apart, dropped(found, source)) if found.dropped_rows else apart


def dropped(found: Guarantees, source: str) -> str:
    """That rows were left out, in a sentence."""
    rows = plural(found.dropped_rows, "row")
    return f"{rows} of {source} {'is' if found.dropped_rows == 1 else 'are'} among the inputs of this report and left out."


def scaled(found: Guarantees, key: str) -> Figure:
    """ECE or NLL of each rule at its temperatures; a fitted rule is drawn as it is."""
    measure = MEASURES[key]
    names = _told_apart(found)
    exits = [float(exit) for exit in range(1, found.evaluation.exits + 1)]
    series = tuple(
        _line(name, own, exits, measure.values(_best(found.rules[name])) or ()) for name, own in _looks(found, names)
    )
    values = [y for line in series for _, _, y in line.points()]
    title = f"{measure.title} at the fitted temperatures"
    reading = (
        f"Each rule at the temperatures that suit it best; the table has it as it is, too. Caching is cached after scaling. "
        f"{'Zero is ideal.' if key == 'ece' else 'Lower is better.'}"
    )
    ends = "; ".join(f"{line.name} from {number(line.y[0])} to {number(line.y[-1])}" for line in series)
    chart = Chart(
        f"{title}: {ends}.", exit_axis(found.evaluation.exits), Axis(measure.axis, linear(values, zero=True, low=0.0)), series
    )
    rows = []
    for name in names:
        each = found.rules[name]
        rows.append((f"{shown(name)}, as it is", *(number(value) for value in measure.values(each.before) or ())))
        if each.after is not None:
            rows.append((f"{shown(name)}, scaled", *(number(value) for value in measure.values(each.after) or ())))
    return Figure(f"scaled_{key}", "guarantees", title, reading, chart, Table(title, _exits(found), tuple(rows)))


def covered(found: Guarantees, alpha: float) -> Figure:
    """Coverage of the prediction sets at each exit, beside what was asked for; the table has their sizes."""
    names = list(found.rules)
    exits = [float(exit) for exit in range(1, found.evaluation.exits + 1)]
    asked = 100 * (1 - alpha)
    series = tuple(
        _line(name, own, exits, found.rules[name].before.set_coverage or (), factor=100.0) for name, own in _looks(found, names)
    )
    values = [asked, *(y for line in series for _, _, y in line.points())]
    guide = Guide((1.0, asked), (float(max(found.evaluation.exits, 2)), asked), "asked for")
    title = "Coverage of the prediction sets"
    reading = (
        f"How often the sets of other rows' thresholds hold the true class: {asked:g} % were asked for at each exit. "
        "The sizes, in the table, are what this costs."
    )
    chart = Chart(
        f"{title}, {asked:g} % asked for: "
        + "; ".join(f"{line.name} {number(line.y[-1])} at the last exit" for line in series),
        exit_axis(found.evaluation.exits),
        Axis("coverage, %", linear(values, low=0.0, high=100.0)),
        series,
        (guide,),
    )
    rows = []
    for name in names:
        before = found.rules[name].before
        rows.append((f"{shown(name)}, coverage", *(share(value) for value in before.set_coverage or ())))
        rows.append((f"{shown(name)}, size", *(number(value) for value in before.set_size or ())))
    return Figure("set_coverage", "guarantees", title, reading, chart, Table(title, _exits(found), tuple(rows)))


def budget(found: Guarantees) -> Figure:
    """Accuracy over mean cost where inputs stop by themselves, beside all inputs at one exit."""
    curves, marks = [], []
    for name, own in _looks(found, found.rules):
        each = found.rules[name]
        known = each.budget
        curves.append(Series(shown(name), known.cost, tuple(100 * right for right in known.accuracy), Look(own.css)))
        marks.append(_line(name, own, found.evaluation.costs, each.before.accuracy or (), factor=100.0, joined=False))
    series = (*curves, *marks)
    values = [y for line in series for _, _, y in line.points()]
    unit = "" if found.evaluation.costs_given else ", in exits"
    reading = (
        "Lines: easy inputs stop early, at thresholds of other rows, and hard ones go on. Marks: all inputs stop at the same "
        "exit. The further a line is above its marks, the more is gained by letting each input take its own time."
    )
    title = "Accuracy for a mean cost"
    ends = "; ".join(f"{line.name} up to {number(max(y for _, _, y in line.points()))} %" for line in curves)
    chart = Chart(
        f"{title}: {ends}.",
        Axis(
            f"mean cost an input{unit}",
            linear(found.evaluation.costs, low=found.evaluation.costs[0], high=found.evaluation.costs[-1]),
        ),
        Axis("accuracy, %", linear(values, low=0.0, high=100.0)),
        series,
    )
    return Figure("budget", "guarantees", title, reading, chart, _budget_table(found))


def at_cost(found: Guarantee, cost: float) -> float | None:
    """The accuracy of the last point of the budget curve that costs at most so much."""
    known = [right for spent, right in zip(found.budget.cost, found.budget.accuracy, strict=True) if spent <= cost]
    return known[-1] if known else None


def diagrams(found: Guarantees) -> list[Panels]:
    """A reliability diagram for each rule: a panel an exit, of many exits some."""
    every = -(-found.evaluation.exits // MOST_PANELS)
    exits = [exit for exit in range(found.evaluation.exits) if (found.evaluation.exits - 1 - exit) % every == 0]
    drawn: list[Panels] = []
    for name, own in _looks(found, _told_apart(found)):
        each = found.rules[name]
        panels = tuple(_panel(each, exit) for exit in exits)
        state = "as it was fitted" if each.fitted else "before and after scaling" if each.after else "as it is"
        title = f"{shown(name)}: confidence against accuracy, {state}"
        reading = (
            "Bars that end at the dashed line are as sure as they are right; shorter ones are too sure. "
            "On the right above each: its ECE. Below: how many inputs. Pale bars stand for fewer than ten."
        )
        drawn.append(
            Panels(f"bars_{len(drawn) + 1}", title, reading, own, panels, _bins_table(each, found.evaluation.exits, title))
        )
    return drawn


def _panel(found: Guarantee, exit: int) -> Panel:
    before = _bins(found.before, exit)
    was = f"{(found.before.ece or ())[exit]:.3f}"
    if found.after is None:
        return Panel(f"exit {exit + 1}", f"ECE {was}", before)
    now = f"{(found.after.ece or ())[exit]:.3f}"
    return Panel(f"exit {exit + 1}", f"{was} → {now}", _bins(found.after, exit), before)


def _bins(found: RuleMetrics, exit: int) -> Bins:
    bins = (found.reliability or ())[exit]
    return [
        (confidence, accuracy, int(count))
        for confidence, accuracy, count in zip(bins.confidence, bins.accuracy, bins.count, strict=True)
    ]


def _bins_table(found: Guarantee, exits: int, title: str) -> Table:
    states = [found.before] if found.after is None else [found.before, found.after]
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


def _bin_words(sure: float, right: float, count: int) -> tuple[str, str, str]:
    return (share(sure), share(right), f"{count:,}") if count else (ABSENT, ABSENT, "0")


def _budget_table(found: Guarantees) -> Table:
    """Accuracies at a few mean costs: those of the exits."""
    rows = [("mean cost", *(number(cost) for cost in found.evaluation.costs))]
    for name, each in found.rules.items():
        rows.append((f"{shown(name)}, all at one exit", *(share(value) for value in each.before.accuracy or ())))
        rows.append((f"{shown(name)}, stopping by itself", *(share(at_cost(each, cost)) for cost in found.evaluation.costs)))
    return Table("Accuracy for at most the mean cost of each exit", _exits(found), tuple(rows))


def _temperatures(found: Guarantees) -> Table:
    rows = [
        (shown(name), *(f"{number(value)}{'*' if bound else ''}" for value, bound in _pairs(each)))
        for name, each in found.rules.items()
        if each.temperature is not None
    ]
    powers = zip(found.product.past, found.product.now, strict=True)
    rows.append(("fitted product: powers of the past, of the exit", *(f"{number(a)}, {number(b)}" for a, b in powers)))
    return Table("Temperatures of the exits (* at a bound of the search), and powers", _exits(found), tuple(rows))


def _pairs(found: Guarantee) -> list[tuple[float, bool]]:
    assert found.temperature is not None
    return list(zip(found.temperature.temperatures, found.temperature.at_bound, strict=True))


def _told_apart(found: Guarantees) -> list[str]:
    """The rules but those that another is at its temperatures: scaled caching is what caching comes to."""
    reached = [each.temperature.rule for each in found.rules.values() if each.temperature is not None]
    return [name for name, each in found.rules.items() if each.rule not in reached]


def _best(found: Guarantee) -> RuleMetrics:
    return found.before if found.after is None else found.after


def _line(
    name: str, own: Look, x: Sequence[float], values: Sequence[float], *, factor: float = 1.0, joined: bool = True
) -> Series:
    """One value an exit; without a line between them, a gap follows each."""
    tips = [f"{shown(name)}, exit {exit}: {number(factor * value)}" for exit, value in enumerate(values, 1)]
    scaled = [factor * value for value in values]
    if joined:
        return Series(shown(name), tuple(x), tuple(scaled), own, tuple(tips))
    places = tuple(each for each in x for _ in range(2))
    gaps = tuple(each for value in scaled for each in (value, None))
    return Series(shown(name), places, gaps, own, tuple(each for tip in tips for each in (tip, "")))


def _looks(found: Guarantees, names: Sequence[str] | Mapping[str, Any]) -> list[tuple[str, Look]]:
    every = looks(found.rules)
    return [(name, every[name]) for name in names]


def _exits(found: Guarantees) -> tuple[str, ...]:
    return ("rule", *(f"exit {exit}" for exit in range(1, found.evaluation.exits + 1)))

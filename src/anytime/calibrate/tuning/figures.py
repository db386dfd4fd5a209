"""The figures and tables of a tuning: every candidate rule by how often it drops and how good it is, and the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anytime.calibrate.measure import drop_name
from anytime.checks import check_choice
from anytime.display.chart import IDEAL, Axis, Chart, Look, Series, look, scattered, values
from anytime.display.figure import Figure
from anytime.display.numbers import exact, fraction, number
from anytime.display.scale import linear, symlog
from anytime.display.table import Table

if TYPE_CHECKING:
    from anytime.calibrate.tuning.frontier import Candidate, Frontier

# The metrics drawn over the drops: name, name as a cost in a chain, factor, title, axis, and how to read it.
_CHARTS = (
    (
        "ece",
        "ece",
        1,
        "Calibration",
        "mean ECE over the exits",
        "The distance between confidence and accuracy. Lower is better.",
    ),
    ("accuracy", "error", 100, "Accuracy", "mean accuracy, %", "The accuracy, averaged over the exits. Higher is better."),
    ("nll", "nll", 1, "Likelihood", "mean NLL over the exits", "The negative log-likelihood of the labels. Lower is better."),
)


def frontier_figures(frontier: Frontier) -> list[Figure]:
    """One figure each for ECE, accuracy and NLL, over the fraction of inputs that drop."""
    return [_figure(frontier, *parts) for parts in _CHARTS]


def frontier_figure(frontier: Frontier, metric: str) -> Figure:
    """The figure of a metric: `ece`, `accuracy` or `nll`."""
    check_choice(metric, "metric", [parts[0] for parts in _CHARTS])
    return next(_figure(frontier, *parts) for parts in _CHARTS if parts[0] == metric)


def visible(frontier: Frontier) -> list[Candidate]:
    """The candidates to draw: a rule that loses the network's accuracy would only stretch the axes."""
    return [one for one in frontier.candidates if one.metrics["accuracy"] >= frontier.floor["accuracy"]]


def _figure(frontier: Frontier, key: str, cost: str, factor: int, title: str, axis: str, reading: str) -> Figure:
    drop = drop_name(frontier.drops[0])
    amount = f"{'more than' if frontier.strict else 'at least'} {frontier.drops[0]:g}"

    def points(name: str, own: Look, members: Sequence[Candidate]) -> Series:
        x = tuple(100 * one.metrics[drop] for one in members)
        return Series(name, x, tuple(factor * one.metrics[key] for one in members), own, tuple(_tip(one) for one in members))

    drawn = points("all", IDEAL, visible(frontier))
    families = [
        scattered(points(family, own, [one for one in visible(frontier) if one.family == family]))
        for family, own in looks(frontier).items()
    ]
    chain = frontier.chain(least=cost)
    edge = points("frontier", IDEAL, chain)
    x = Axis(f"inputs that drop by {amount}, %", symlog(drawn.x, least=0.1))
    y = Axis(axis, linear(values([drawn]), low=0))
    ends = " to ".join(
        f"{factor * one.metrics[key]:.3g} at {100 * one.metrics[drop]:.2g} % of inputs" for one in (chain[0], chain[-1])
    )
    summary = f"{title} over the percentage of inputs that drop by {amount}; the frontier goes from {ends}"
    table = candidate_table(frontier, chain, f"The frontier of {title.lower()} and drops")
    return Figure(f"frontier-{key}", "frontier", title, reading, Chart(summary, x, y, (edge, *families)), table)


def _tip(one: Candidate) -> str:
    return f"{one.name}: " + ", ".join(f"{name} {value:.3g}" for name, value in one.metrics.items())


def looks(frontier: Frontier) -> dict[str, Look]:
    """The look of each family."""
    return {family: look(index) for index, family in enumerate(dict.fromkeys(frontier.families))}


def chain_table(frontier: Frontier, least: str) -> Table:
    """The rules that trade drops for one metric."""
    found = frontier.chain(least=least)
    return candidate_table(
        frontier, found, f"{len(found)} of {len(frontier.names)} rules: the best trades of drops for {least}"
    )


def candidate_table(frontier: Frontier, rules: Sequence[Candidate], caption: str) -> Table:
    """One row per rule."""
    sign = ">" if frontier.strict else "≥"
    columns = ("rule", "accuracy", *(f"drops {sign} {limit:g}" for limit in frontier.drops), "ECE", "NLL")
    rows = tuple(
        (
            one.name,
            fraction(one.metrics["accuracy"]),
            *(exact(100 * one.metrics[drop_name(limit)]) for limit in frontier.drops),
            number(one.metrics["ece"]),
            number(one.metrics["nll"]),
        )
        for one in rules
    )
    return Table(caption, columns, rows)

"""The page of a tuning: every candidate rule by how often it drops and how good it is, and the frontier between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anytime.calibrate.measure import drop_name
from anytime.report.numbers import exact, fraction, number, plural
from anytime.report.pages.figure import Figure, Table
from anytime.report.pages.template import render_page
from anytime.report.svg.chart import IDEAL, MARKERS, Axis, Chart, Look, Series, draw, look, place, scattered, values
from anytime.report.svg.scale import linear, symlog

if TYPE_CHECKING:
    from anytime.calibrate.certify import ChoiceCertificate
    from anytime.calibrate.tuning.frontier import Candidate, Frontier
    from anytime.calibrate.tuning.tuned import TunedRule

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


def render_frontier(
    frontier: Frontier,
    *,
    source: str,
    chosen: TunedRule | None = None,
    certificate: ChoiceCertificate | None = None,
    title: str | None = None,
) -> str:
    """Render the frontier as one HTML document; the same frontier gives the same bytes.

    Args:
        frontier: The result of `tune`.
        source: The source of the logits, such as the name of the file.
        chosen: The chosen rule, if there is one; it is marked with a ring.
        certificate: Its guarantee, if there is one.
        title: The title of the page.
    """
    return render_page(
        "frontier.html.j2",
        title=title or source,
        source=source,
        facts=[
            f"{plural(len(frontier.names), 'rule')} tried",
            f"fitted on {plural(frontier.fitting_rows, 'row')}, measured on {number(frontier.choosing_rows)} others",
            plural(frontier.exits, "exit"),
            f"{number(frontier.classes or 0)} classes",
        ],
        chosen=chosen,
        metrics=None if chosen is None else _sentence(frontier, chosen),
        certificate=certificate,
        drawn=[(figure, _ringed(figure, frontier, chosen)) for figure in frontier_figures(frontier)],
        legend=[(_dot(own), family) for family, own in _looks(frontier).items()],
        hidden=len(frontier.names) - len(visible(frontier)),
        floor=fraction(frontier.floor["accuracy"], digits=1),
        pareto=_table(frontier, frontier.pareto, "The Pareto set: rules that no other rule beats in all four metrics"),
        every=_table(frontier, frontier.candidates, "All rules that were tried"),
    )


def frontier_figures(frontier: Frontier) -> list[Figure]:
    """One figure each for ECE, accuracy and NLL, over the fraction of inputs that drop."""
    return [_figure(frontier, *parts) for parts in _CHARTS]


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
        for family, own in _looks(frontier).items()
    ]
    chain = frontier.chain(least=cost)
    edge = points("frontier", IDEAL, chain)
    x = Axis(f"inputs that drop by {amount}, %", symlog(drawn.x, least=0.1))
    y = Axis(axis, linear(values([drawn]), low=0))
    ends = " to ".join(
        f"{factor * one.metrics[key]:.3g} at {100 * one.metrics[drop]:.2g} % of inputs" for one in (chain[0], chain[-1])
    )
    summary = f"{title} over the percentage of inputs that drop by {amount}; the frontier goes from {ends}"
    table = _table(frontier, chain, f"The frontier of {title.lower()} and drops")
    return Figure(f"frontier-{key}", "frontier", title, reading, Chart(summary, x, y, (edge, *families)), table)


def _tip(one: Candidate) -> str:
    return f"{one.name}: " + ", ".join(f"{name} {value:.3g}" for name, value in one.metrics.items())


def _ringed(figure: Figure, frontier: Frontier, chosen: TunedRule | None) -> str:
    """The chart with a ring around the chosen rule."""
    if chosen is None:
        return draw(figure.chart)
    key = figure.id.removeprefix("frontier-")
    value = chosen.metrics[key] * (100 if key == "accuracy" else 1)
    x, y = place(figure.chart, 100 * chosen.metrics[drop_name(frontier.drops[0])], value)
    ring = f'<g class="ideal"><circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="8.5"/></g>'
    return draw(figure.chart, over=ring)


def _sentence(frontier: Frontier, chosen: TunedRule) -> str:
    """The metrics of the chosen rule in words."""
    found = chosen.metrics
    means = f"Mean accuracy {fraction(found['accuracy'])}, mean ECE {number(found['ece'])}, mean NLL {number(found['nll'])}"
    amount = "more than" if frontier.strict else "at least"
    drops = [f"{exact(100 * found[drop_name(limit)])} of inputs drop by {amount} {limit:g}" for limit in frontier.drops]
    return f"{means}; {', '.join(drops)}."


def _looks(frontier: Frontier) -> dict[str, Look]:
    return {family: look(index) for index, family in enumerate(dict.fromkeys(frontier.families))}


def _dot(own: Look) -> str:
    marker = MARKERS[own.marker or "circle"]
    return (
        f'<svg class="swatch" viewBox="0 0 30 12" aria-hidden="true">'
        f'<g class="{own.css}"><path class="dot" d="M15,6{marker}"/></g></svg>'
    )


def _table(frontier: Frontier, rules: Sequence[Candidate], caption: str) -> Table:
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

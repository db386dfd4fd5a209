"""The picture of a tuning: every rule of the family by how often it drops and how good it is, and the frontier between them.

One HTML file that needs nothing else and runs no script; it follows the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anytime.calibrate.measure import drop_name
from anytime.report.numbers import exact, number, plural, share
from anytime.report.pages.figures import Figure, Table
from anytime.report.svg.chart import MARKERS, Axis, Chart, Look, Series, draw, look, place, style_sheet, template_text
from anytime.report.svg.scale import linear, symlog

if TYPE_CHECKING:
    from anytime.calibrate.certify import ChoiceCertificate
    from anytime.calibrate.tuning.frontier import Candidate, Frontier
    from anytime.calibrate.tuning.tuned import TunedRule

EDGE = Look("ideal")
# What is drawn over the drops: the figure, its name as a cost in a chain, a title, and how to read it.
_CHARTS = (
    ("ece", "ece", "Calibration", "mean ECE over the exits", "Lower is better: how far confidence is from being right."),
    ("accuracy", "error", "Accuracy", "mean accuracy, %", "Higher is better: right answers, on average over the exits."),
    ("nll", "nll", "Likelihood", "mean NLL over the exits", "Lower is better: what the true class's probability costs."),
)


def render_frontier(
    frontier: Frontier,
    *,
    source: str,
    chosen: TunedRule | None = None,
    certificate: ChoiceCertificate | None = None,
    title: str | None = None,
) -> str:
    """The frontier as one HTML document; the same frontier gives the same bytes.

    Args:
        frontier: What `tune` found.
        source: Where the logits came from, such as the name of the file.
        chosen: The rule that was chosen, if one was; it gets a ring.
        certificate: The promise about it, if there is one.
        title: The title of the page.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("anytime.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    shown = visible(frontier)
    facts = [
        f"{plural(len(frontier.names), 'rule')} tried",
        f"fitted on {plural(frontier.fitting_rows, 'row')}, measured on {number(frontier.choosing_rows)} others",
        plural(frontier.exits, "exit"),
        f"{number(frontier.classes or 0)} classes",
    ]
    return environment.get_template("frontier.html.j2").render(
        title=title or source,
        source=source,
        facts=facts,
        style=style_sheet() + template_text("report.css"),
        chosen=chosen,
        figures=None if chosen is None else _sentence(frontier, chosen),
        certificate=certificate,
        drawn=[(figure, _ringed(figure, frontier, chosen)) for figure in frontier_figures(frontier)],
        legend=[(_dot(own), family) for family, own in _looks(frontier).items()],
        hidden=len(frontier.names) - len(shown),
        floor=share(frontier.floor["accuracy"], digits=1),
        pareto=_table(frontier, frontier.pareto, "The Pareto set: rules that no other beats in all four figures"),
        everyone=_table(frontier, frontier.candidates, "All rules that were tried"),
    )


def frontier_figures(frontier: Frontier) -> list[Figure]:
    """One figure for each of ECE, accuracy and NLL, over the share of inputs that drop."""
    return [_figure(frontier, *parts) for parts in _CHARTS]


def visible(frontier: Frontier) -> list[Candidate]:
    """The candidates worth drawing: a rule that has lost the network's accuracy would only stretch the axes."""
    return [one for one in frontier.candidates if one.metrics["accuracy"] >= frontier.floor["accuracy"]]


def _figure(frontier: Frontier, key: str, cost: str, title: str, axis: str, reading: str) -> Figure:
    shown, falls = visible(frontier), drop_name(frontier.drops[0])
    scale = 100 if key == "accuracy" else 1
    reach = f"{'more than' if frontier.strict else 'at least'} {frontier.drops[0]:g}"
    series = [
        _points(family, own, [one for one in shown if one.family == family], falls, key, scale)
        for family, own in _looks(frontier).items()
    ]
    chain = frontier.chain(least=cost)
    edge = Series(
        "frontier",
        tuple(100 * one.metrics[falls] for one in chain),
        tuple(scale * one.metrics[key] for one in chain),
        EDGE,
    )
    x = Axis(f"inputs that fall by {reach}, %", symlog([100 * one.metrics[falls] for one in shown], least=0.1))
    y = Axis(axis, linear([scale * one.metrics[key] for one in shown], low=0))
    best = " to ".join(
        f"{scale * one.metrics[key]:.3g} at {100 * one.metrics[falls]:.2g} % of inputs" for one in (chain[0], chain[-1])
    )
    summary = f"{title} over the share of inputs that fall by {reach}; the frontier goes from {best}"
    table = _table(frontier, chain, f"The frontier of {title.lower()} and drops")
    return Figure(f"frontier-{key}", "frontier", title, reading, Chart(summary, x, y, (edge, *series)), table)


def _points(family: str, own: Look, members: Sequence[Candidate], falls: str, key: str, scale: int) -> Series:
    """Single points: a gap after each keeps the chart from joining them with a line."""
    xs = [100 * one.metrics[falls] for one in members for _ in range(2)]
    ys = [value for one in members for value in (scale * one.metrics[key], None)]
    tips = [tip for one in members for tip in (_tip(one), "")]
    return Series(family, tuple(xs), tuple(ys), own, tuple(tips))


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
    """The figures of the chosen rule in words."""
    figures = chosen.metrics
    means = f"Mean accuracy {share(figures['accuracy'])}, mean ECE {number(figures['ece'])}, mean NLL {number(figures['nll'])}"
    reach = "more than" if frontier.strict else "at least"
    falls = [f"{exact(100 * figures[drop_name(limit)])} of inputs fall by {reach} {limit:g}" for limit in frontier.drops]
    return f"{means}; {', '.join(falls)}."


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
    columns = ("rule", "accuracy", *(f"falls {sign} {limit:g}" for limit in frontier.drops), "ECE", "NLL")
    rows = tuple(
        (
            one.name,
            share(one.metrics["accuracy"]),
            *(exact(100 * one.metrics[drop_name(limit)]) for limit in frontier.drops),
            number(one.metrics["ece"]),
            number(one.metrics["nll"]),
        )
        for one in rules
    )
    return Table(caption, columns, rows)

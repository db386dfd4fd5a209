"""The page of a tuning: every candidate rule by how often it drops and how good it is, and the frontier between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytime.calibrate.measure import drop_name
from anytime.calibrate.tuning.figures import candidate_table, frontier_figures, looks, visible
from anytime.display.chart import Look
from anytime.display.figure import Figure
from anytime.display.numbers import exact, fraction, number, plural
from anytime.report.pages.template import render_page
from anytime.report.svg.chart import MARKERS, draw, place

if TYPE_CHECKING:
    from anytime.calibrate.certify import ChoiceCertificate
    from anytime.calibrate.tuning.frontier import Frontier
    from anytime.calibrate.tuning.tuned import TunedRule


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
        legend=[(_dot(own), family) for family, own in looks(frontier).items()],
        hidden=len(frontier.names) - len(visible(frontier)),
        floor=fraction(frontier.floor["accuracy"], digits=1),
        pareto=candidate_table(frontier, frontier.pareto, "The Pareto set: rules that no other rule beats in all four metrics"),
        every=candidate_table(frontier, frontier.candidates, "All rules that were tried"),
    )


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


def _dot(own: Look) -> str:
    marker = MARKERS[own.marker or "circle"]
    return (
        f'<svg class="swatch" viewBox="0 0 30 12" aria-hidden="true">'
        f'<g class="{own.css}"><path class="dot" d="M15,6{marker}"/></g></svg>'
    )

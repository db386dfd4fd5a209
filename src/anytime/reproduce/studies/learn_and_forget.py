"""Appendix B.5: at each exit, how many inputs are right for the first time, and how many wrong again for the first time."""

from __future__ import annotations

from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Finding, Line, Panel
from anytime.reproduce.measure import PLAIN, by_exit, curve, names_of, plain_numbers, rows_in_words, stored
from anytime.reproduce.needs import MSDNET_100


def study(context: Context) -> Finding:
    """Learned and forgotten inputs at each exit."""
    runs = context.runs.need(MSDNET_100)
    figures = stored(runs)
    factor = 100 / runs[0].rows()
    learned = by_exit("Learned", "% of inputs", figures, "learned", factor=factor, zero=True)
    forgot = by_exit("Forgotten", "% of inputs", figures, "forgot", factor=factor, zero=True)
    later = {
        key: {rule: sum(value.mean for value in curve(figures, rule, key, factor=factor)[1:]) for rule in PLAIN}
        for key in ("learned", "forgot")
    }
    return context.finding(
        runs=names_of(runs),
        rows=rows_in_words(runs),
        note="The paper plots numbers of inputs and its wording of 'forgot' is loose: here it is the first exit that is "
        "wrong after an earlier right one. All that is right at the first exit is learned there; the picture begins at the "
        "second.",
        panels=(_from_second(learned), _from_second(forgot)),
        claims=(
            Claim(
                "product and caching forget less than the backbone",
                max(later["forgot"]["product"], later["forgot"]["caching"]) < later["forgot"]["latest"],
                ", ".join(f"{rule} {value:.1f} %" for rule, value in later["forgot"].items()),
            ),
            Claim(
                "and learn less after the first exit",
                max(later["learned"]["product"], later["learned"]["caching"]) < later["learned"]["latest"],
                ", ".join(f"{rule} {value:.1f} %" for rule, value in later["learned"].items()),
            ),
        ),
        numbers=plain_numbers(figures, ("learned", "forgot")),
    )


def _from_second(panel: Panel) -> Panel:
    lines = tuple(Line(line.name, line.x, (None, *line.y[1:]), line.look, line.spread) for line in panel.lines)
    return Panel(panel.title, panel.x_title, panel.y_title, lines, exits=panel.exits, zero=True)

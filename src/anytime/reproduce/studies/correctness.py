"""The table of appendix B.1.2: how many inputs never lose a right answer, and how many never get one."""

from __future__ import annotations

from anytime.reproduce import paper
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Comparison, Finding, Line, Panel, over_seeds
from anytime.reproduce.measure import PLAIN, groups_in_words, names_of, plain_numbers, stored, title_of
from anytime.reproduce.needs import MSDNET

KEYS = {"monotone": "correct_monotone_percent", "never correct": "never_correct_percent"}


def study(context: Context) -> Finding:
    """Both shares for the three rules on each data set."""
    groups = {("msdnet", data): runs for data, runs in context.runs.sets(MSDNET).items()}
    comparisons: list[Comparison] = []
    panels: list[Panel] = []
    for (_, data), runs in groups.items():
        figures = stored(runs)
        lines = []
        for look, rule in enumerate(PLAIN):
            theirs = paper.CORRECTNESS.get((data, rule), (None, None))
            ours = [over_seeds([each[rule][key] for each in figures]) for key in KEYS.values()]
            for name, value, number in zip(KEYS, ours, theirs, strict=True):
                row = Comparison(f"{title_of(data)}, {rule}, {name}", number, value, paper.CORRECTNESS_TOLERANCE, unit="%")
                comparisons.append(row)
            never, monotone = ours[1], ours[0]
            crossed = (theirs[0],) if theirs[0] is not None else ()
            lines.append(Line(rule, (never.mean,), (monotone.mean,), look, (monotone.deviation,), ()))
            if crossed and theirs[1] is not None:
                lines.append(Line(rule, (theirs[1],), (None,), look, (), crossed))
        panels.append(Panel(title_of(data), "never correct, %", "monotone, %", tuple(lines)))
    return context.finding(
        runs=names_of(*groups.values()),
        rows=groups_in_words(groups),
        note="Printed numbers of the paper, not read off. In the picture up and to the left is better; an input that is "
        "never right counts as monotone, so both numbers belong together. ImageNet is not to be had here.",
        panels=tuple(panels),
        comparisons=tuple(comparisons),
        numbers={data: plain_numbers(stored(runs), tuple(KEYS.values())) for (_, data), runs in groups.items()},
    )

"""Appendix B.5: overthinking, the share of inputs right at some exit less the share right at the last."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Finding, Measured, Panel, each_over_seeds, over_seeds
from anytime.reproduce.measure import PLAIN, Figures, groups_in_words, line, names_of, plain_numbers, stored, title_of
from anytime.reproduce.needs import MSDNET

_KEYS = {"overthinking": "overthinking_percent", "right at some exit": "ever_correct_percent"}


def study(context: Context) -> Finding:
    """Overthinking, and the two accuracies it is the difference of."""
    groups = {("msdnet", data): runs for data, runs in context.runs.sets(MSDNET).items()}
    panels: list[Panel] = []
    claims: list[Claim] = []
    table: list[tuple[str, ...]] = []
    for (_, data), runs in groups.items():
        figures = stored(runs)
        values = {
            rule: [
                *(over_seeds([each[rule][key] for each in figures]) for key in _KEYS.values()),
                over_seeds([100 * each[rule]["accuracy"][-1] for each in figures]),
            ]
            for rule in PLAIN
        }
        panels += _panels(title_of(data), figures, runs[0].rows())
        table += [(f"{title_of(data)}, {rule}", *(_written(value) for value in found)) for rule, found in values.items()]
        over = {rule: found[0].mean for rule, found in values.items()}
        claims.append(
            Claim(
                f"{title_of(data)}: product and caching overthink less than the backbone",
                max(over["product"], over["caching"]) < over["latest"],
                ", ".join(f"{rule} {value:.2f} %" for rule, value in over.items()),
            )
        )
        lost = {rule: values["latest"][1].mean - values[rule][1].mean for rule in ("product", "caching")}
        gained = {rule: values[rule][2].mean - values["latest"][2].mean for rule in lost}
        claims.append(
            Claim(
                f"{title_of(data)}: most of it by a lower oracle, not by a better last exit",
                all(lost[rule] > gained[rule] for rule in lost),
                "; ".join(f"{rule}: oracle −{lost[rule]:.1f}, last exit {gained[rule]:+.1f} points" for rule in lost),
            )
        )
    return context.finding(
        runs=names_of(*groups.values()),
        rows=groups_in_words(groups),
        note="The paper's bars were not read off; what it says of them is checked.",
        panels=tuple(panels),
        claims=tuple(claims),
        headings=("rule", "overthinking", "right at some exit", "right at the last"),
        table=tuple(table),
        numbers={data: plain_numbers(stored(runs), tuple(_KEYS.values())) for (_, data), runs in groups.items()},
    )


def _panels(title: str, figures: Sequence[Figures], rows: int) -> list[Panel]:
    """What was right at some exit so far, and how much more that is than what is right now: its end is the measure."""
    ever, over = [], []
    for look, rule in enumerate(PLAIN):
        seeds = [[100 * count / rows for count in accumulate(each[rule]["learned"])] for each in figures]
        right = [[100 * share for share in each[rule]["accuracy"]] for each in figures]
        gaps = [[most - now for most, now in zip(*pair, strict=True)] for pair in zip(seeds, right, strict=True)]
        ever.append(line(rule, each_over_seeds(seeds), look))
        over.append(line(rule, each_over_seeds(gaps), look))
    exits = len(ever[0].x)
    return [
        Panel(f"{title}: right at some exit so far", "exit", "%", tuple(ever), exits=exits),
        Panel(f"{title}: overthinking so far", "exit", "% of inputs", tuple(over), exits=exits, zero=True),
    ]


def _written(value: Measured) -> str:
    return f"{value.mean:.2f}" + ("" if value.deviation is None else f" ± {value.deviation:.2f}") + " %"

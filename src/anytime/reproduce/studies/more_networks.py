"""What the studies of further networks share: the product keeps their accuracy, and their label's probability falls less."""

from __future__ import annotations

from anytime.reproduce import paper
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Finding, Panel
from anytime.reproduce.measure import (
    PLAIN,
    by_exit,
    by_limit,
    curve,
    groups_in_words,
    names_of,
    plain_numbers,
    stored,
    text_of,
    title_of,
)
from anytime.reproduce.needs import Need

_KEPT = 1.0
"""Points of accuracy at the last exit within which we call it kept."""
_AT = 2
"""The fall that is written out: the third threshold, .1."""


def accuracy_and_falls(context: Context, need: Need, note: str) -> Finding:
    """Accuracy and the label's falls under the three rules, for each data set with a run, and the paper's words on them.

    Args:
        context: Of the study.
        need: Which network.
        note: What was changed against the paper's.
    """
    sets = context.runs.sets(need)
    panels: list[Panel] = []
    claims: list[Claim] = []
    for data, runs in sets.items():
        figures = stored(runs)
        title = f"{paper.NETWORKS[need.network]}, {title_of(data)}"
        panels += [
            by_exit(f"{title}: accuracy", "accuracy, %", figures, "accuracy", factor=100),
            by_limit(f"{title}: label's falls", "falls by at least", figures, "label_drop_percent"),
        ]
        right = {rule: curve(figures, rule, "accuracy", factor=100) for rule in PLAIN}
        falls = {rule: curve(figures, rule, "label_drop_percent") for rule in PLAIN}
        claims += [
            Claim(
                f"{title}: the product keeps the accuracy (at the last exit {_KEPT:g} point lower at most)",
                right["product"][-1].mean >= right["latest"][-1].mean - _KEPT,
                "; ".join(f"{rule} {text_of(values)} %" for rule, values in right.items()),
            ),
            Claim(
                f"{title}: fewer falls of every size under the product than under the backbone",
                all(mine.mean <= base.mean for mine, base in zip(falls["product"], falls["latest"], strict=True)),
                ", ".join(f"{rule} {values[_AT].mean:.2f} %" for rule, values in falls.items()) + " by .1",
            ),
        ]
    keys = ("accuracy", "label_drop_percent", "final_drop_percent", "ece")
    return context.finding(
        runs=names_of(*sets.values()),
        rows=groups_in_words({(need.network, data): runs for data, runs in sets.items()}),
        note=f"{note} The paper's curves were not read off; what it says of them is checked.",
        panels=tuple(panels),
        claims=tuple(claims),
        numbers={data: plain_numbers(stored(runs), keys) for data, runs in sets.items()},
    )

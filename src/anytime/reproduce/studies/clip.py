"""Appendix B.8: clipping the ReLU goes from the Heaviside, monotone and blunt, to the ReLU, sharp and nearly monotone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from anytime.combine import ClippedReLU, Heaviside, Product, Rule
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Finding, Panel
from anytime.reproduce.measure import by_exit, by_limit, curve, measured, names_of, plain_numbers, rows_in_words, title_of
from anytime.reproduce.needs import MSDNET

LIMITS = (0.5, 2.0, 5.0, 10.0)


def study(context: Context) -> Finding:
    """Accuracy and falls of label and final answer for several limits, on each data set."""
    rules: dict[str, Rule[Any]] = {"Heaviside": Product(Heaviside())}
    rules |= {f"clipped at {limit:g}": Product(ClippedReLU(limit)) for limit in LIMITS}
    rules |= {"ReLU": Product()}
    names = tuple(rules)
    groups = context.runs.sets(MSDNET)
    panels: list[Panel] = []
    claims: list[Claim] = []
    numbers = {}
    for data, runs in groups.items():
        figures = measured(runs, rules)
        title = title_of(data)
        panels += [
            by_exit(f"{title}: accuracy", "accuracy, %", figures, "accuracy", rules=names, factor=100),
            by_limit(f"{title}: label's falls", "falls by at least", figures, "label_drop_percent", rules=names),
            by_limit(f"{title}: final answer's falls", "falls by at least", figures, "final_drop_percent", rules=names),
        ]
        last = [curve(figures, name, "accuracy", factor=100)[-1].mean for name in names]
        falls = [curve(figures, name, "final_drop_percent")[0].mean for name in names]
        claims += [
            Claim(
                f"{title}: the looser the limit, the better the last exit",
                all(after >= before for before, after in pairwise(last)),
                ", ".join(f"{name} {value:.1f} %" for name, value in zip(names, last, strict=True)),
            ),
            Claim(
                f"{title}: the looser the limit, the more final answers fall",
                all(after >= before for before, after in pairwise(falls)),
                ", ".join(f"{name} {value:.2f} %" for name, value in zip(names, falls, strict=True)) + " by ≥ .01",
            ),
        ]
        numbers[data] = plain_numbers(figures, ("accuracy", "label_drop_percent", "final_drop_percent"), names)
    return context.finding(
        runs=names_of(*groups.values()),
        rows="; ".join(f"{title_of(data)}: {rows_in_words(runs, kept=True)}" for data, runs in groups.items()),
        note="The paper shows CIFAR-10, with limits that are not known; a data set without a run here is left out.",
        panels=tuple(panels),
        claims=tuple(claims),
        numbers=numbers,
    )

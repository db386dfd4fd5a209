"""Appendix B.10: a mean cost for a whole batch, spent by confidence: the backbone leads at small costs, then the product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anytime.combine import Caching, Latest, Product, Rule
from anytime.policy import BudgetCurve, budget_curve
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Finding, Line, Measured, Panel, each_over_seeds
from anytime.reproduce.measure import names_of, rows_in_words, title_of
from anytime.reproduce.needs import MSDNET
from anytime.reproduce.runs import Run

RULES: dict[str, Rule[Any]] = {"latest": Latest(), "caching": Caching(), "product": Product()}
_COSTS = 20
_MEGA = 1e6


def study(context: Context) -> Finding:
    """Accuracy over mean cost for the three rules, and who is ahead at which cost."""
    groups = context.runs.sets(MSDNET)
    panels: list[Panel] = []
    claims: list[Claim] = []
    numbers: dict[str, Any] = {}
    most: list[str] = []
    for data, runs in groups.items():
        curves = {rule: [_curve(run, combine) for run in runs] for rule, combine in RULES.items()}
        panels.append(_panel(title_of(data), curves))
        grid = _grid(curves)
        at = {rule: [_mean_accuracy(seeds, cost) for cost in grid] for rule, seeds in curves.items()}
        leads = [mine >= theirs for mine, theirs in zip(at["latest"], at["product"], strict=True)]
        led = [cost for cost, leading in zip(grid, leads, strict=True) if leading]
        highest, last = max(at["latest"]), at["latest"][-1]
        most.append(f"{title_of(data)}, {len(led)} of {len(grid)}")
        claims += [
            Claim(
                f"{title_of(data)}: at the smallest costs the backbone is ahead of the product",
                all(leads[: len(grid) // 4]),
                f"at {len(led)} of {len(grid)} costs from {grid[0] / _MEGA:.0f} to {grid[-1] / _MEGA:.0f} million"
                + (f", the largest of them {led[-1] / _MEGA:.0f} million" if led else ""),
            ),
            Claim(
                f"{title_of(data)}: at the largest costs the product is ahead",
                at["product"][-1] > last,
                f"product {100 * at['product'][-1]:.2f} %, latest {100 * last:.2f} % (its best anywhere {100 * highest:.2f} %)",
            ),
        ]
        numbers[data] = {
            rule: [{"q": found.q, "cost": found.cost, "accuracy": found.accuracy} for found in seeds]
            for rule, seeds in curves.items()
        }
    return context.finding(
        runs=names_of(*groups.values()),
        rows="; ".join(f"{title_of(data)}: {rows_in_words(runs, kept=True)}" for data, runs in groups.items()),
        note="Thresholds are set on the kept validation rows for q = 1/20, 2/20, … 39/20 by MSDNet's protocol. Costs are "
        "multiply-accumulates per input. Confidences are compared as log-odds: as float32 probabilities a third of the "
        "backbone's are 1 on CIFAR-10, these leave together, and larger costs are not reached. The paper's curves were not "
        "read off; what it says of them is checked between the curves at equal costs. It finds the backbone ahead at most "
        f"costs; here that is {'; '.join(most)}.",
        panels=tuple(panels),
        claims=tuple(claims),
        numbers=numbers,
    )


def _curve(run: Run, rule: Rule[Any]) -> BudgetCurve:
    (held, _), (logits, labels) = run.logits("val"), run.logits()
    return budget_curve(rule(held), rule(logits), labels, costs=run.macs())


def _grid(curves: dict[str, list[BudgetCurve]]) -> list[float]:
    """Costs that every curve reaches, evenly spaced."""
    low = max(min(found.cost) for seeds in curves.values() for found in seeds)
    high = min(max(found.cost) for seeds in curves.values() for found in seeds)
    return [float(cost) for cost in np.linspace(low, high, _COSTS)]


def _mean_accuracy(seeds: Sequence[BudgetCurve], cost: float) -> float:
    return sum(_accuracy_at(found, cost) for found in seeds) / len(seeds)


def _accuracy_at(found: BudgetCurve, cost: float) -> float:
    order = np.argsort(found.cost)
    return float(np.interp(cost, np.asarray(found.cost)[order], np.asarray(found.accuracy)[order]))


def _panel(title: str, curves: dict[str, list[BudgetCurve]]) -> Panel:
    lines = []
    for look, (rule, seeds) in enumerate(curves.items()):
        cost: Sequence[Measured] = each_over_seeds([found.cost for found in seeds])
        right: Sequence[Measured] = each_over_seeds([found.accuracy for found in seeds])
        x = tuple(value.mean / _MEGA for value in cost)
        lines.append(Line(rule, x, tuple(100 * value.mean for value in right), look))
    return Panel(title, "mean cost, million MACs", "accuracy, %", tuple(lines))

"""B.10: a mean cost for a whole batch, spent by confidence: the backbone is ahead at small costs, then the product."""

from __future__ import annotations

from typing import Any

import numpy as np

from anytime.combine import Rule
from anytime.policy import BudgetCurve, budget_curve
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, each_over_seeds
from anytime.reproduce.group import RULES, rows_in_words, title_of
from anytime.reproduce.needs import MSDNET
from anytime.reproduce.plots import Line, Plot
from anytime.reproduce.runs import Run

_COSTS = 20
_DROPS = 0.001
"""Accuracy below its best at the largest cost that we call a drop."""
_MEGA = 1e6


def budgeted_batch(draft: Draft) -> Finding:
    """Accuracy over mean cost for the three rules, and which is ahead at which cost."""
    rows = []
    for data, runs in draft.runs.by_data(MSDNET).items():
        title = title_of(data)
        curves = {rule: [_curve(run, combine) for run in runs] for rule, combine in RULES.items()}
        grid = _grid(curves)
        at = {rule: [_mean_accuracy(seeds, cost) for cost in grid] for rule, seeds in curves.items()}
        leads = [mine >= theirs for mine, theirs in zip(at["latest"], at["product"], strict=True)]
        led = [cost for cost, leading in zip(grid, leads, strict=True) if leading]
        draft.used += runs
        draft.plots.append(_plot(title, curves))
        draft.claim(
            f"{title}: the backbone is ahead of the product at most costs",
            2 * len(led) > len(grid),
            f"at {len(led)} of {len(grid)} costs from {grid[0] / _MEGA:.0f} to {grid[-1] / _MEGA:.0f} million"
            + (f", the largest of them {led[-1] / _MEGA:.0f} million" if led else ""),
        )
        draft.claim(
            f"{title}: at the largest costs the product is ahead",
            at["product"][-1] > at["latest"][-1],
            f"product {100 * at['product'][-1]:.2f} %, latest {100 * at['latest'][-1]:.2f} % (its best at any cost "
            f"{100 * max(at['latest']):.2f} %)",
        )
        for rule, what in (("latest", "the backbone's accuracy drops again"), ("product", "the product's does not drop")):
            drops = max(at[rule]) - at[rule][-1]
            draft.claim(
                f"{title}: as costs grow {what} (by {100 * _DROPS:g} point or more)",
                (drops >= _DROPS) == (rule == "latest"),
                f"{100 * drops:.3f} points below its best, at the largest cost",
            )
        draft.numbers[data] = {
            rule: [{"q": found.q, "cost": found.cost, "accuracy": found.accuracy} for found in seeds]
            for rule, seeds in curves.items()
        }
        rows.append(f"{title}: {rows_in_words(runs, kept=True)}")
    return draft.finding(
        rows="; ".join(rows),
        note="Thresholds are set on the kept validation rows for q = 1/20, 2/20, … 39/20 by MSDNet's protocol. Costs are MACs "
        "per input. Confidences are compared as log-odds: as float32 probabilities a third of the backbone's are 1 on "
        "CIFAR-10, these stop together, and larger costs are not reached. The paper's curves were not read off; its claims "
        "about them are checked between the curves at equal costs.",
    )


def _curve(run: Run, rule: Rule[Any]) -> BudgetCurve:
    (held_out, _), (logits, labels) = run.logits("val"), run.logits()
    return budget_curve(rule(held_out), rule(logits), labels, costs=run.macs())


def _grid(curves: dict[str, list[BudgetCurve]]) -> list[float]:
    """Costs that every curve reaches, evenly spaced."""
    low = max(min(found.cost) for seeds in curves.values() for found in seeds)
    high = min(max(found.cost) for seeds in curves.values() for found in seeds)
    return [float(cost) for cost in np.linspace(low, high, _COSTS)]


def _mean_accuracy(seeds: list[BudgetCurve], cost: float) -> float:
    """Accuracy at a cost, between the points of each curve, over seeds."""
    total = 0.0
    for found in seeds:
        order = np.argsort(found.cost)
        total += float(np.interp(cost, np.asarray(found.cost)[order], np.asarray(found.accuracy)[order]))
    return total / len(seeds)


def _plot(title: str, curves: dict[str, list[BudgetCurve]]) -> Plot:
    lines = []
    for look, (rule, seeds) in enumerate(curves.items()):
        x = tuple(value.mean / _MEGA for value in each_over_seeds([found.cost for found in seeds]))
        y = tuple(100 * value.mean for value in each_over_seeds([found.accuracy for found in seeds]))
        lines.append(Line(rule, x, y, look))
    return Plot(title, "mean cost, million MACs", "accuracy, %", tuple(lines))

"""The report card as the page shows it. No labels are needed: an answer is compared with the same rule's at the last exit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from anytime.combine import Rule
from anytime.evaluation import Evaluation, evaluate
from anytime.report.pages.card import card


def evaluate_unlabelled(logits: Tensor, rules: Mapping[str, Rule[Any]], milliseconds: Sequence[float] | None) -> Evaluation:
    """The metrics of logits `(exits, inputs, classes)`, with the time up to each exit as its cost, if known."""
    costs = None if milliseconds is None else increasing(milliseconds)
    return evaluate(logits, rules=dict(rules), costs=costs, sets=None)


def card_of(evaluation: Evaluation) -> dict[str, Any]:
    """The report card of an evaluation as JSON."""
    properties = [
        {"name": each.name, "question": each.question, "scale": each.scale, "marks": [vars(mark) for mark in each.marks]}
        for each in card(evaluation)
    ]
    return {"inputs": evaluation.samples, "properties": properties}


def increasing(costs: Sequence[float]) -> list[float]:
    """Costs that increase from exit to exit, whatever the clock said."""
    found: list[float] = []
    for cost in costs:
        found.append(max(cost, found[-1] * (1 + 1e-6) if found else 1e-6))
    return found

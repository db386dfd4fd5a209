"""Single inputs: ten at a time as lines over the exits (the paper's figures 1 and 2), and the worst of all as a table.

The page shows the first ten without any script; the script behind the slider draws the others from `data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from anytime.report.numbers import plural
from anytime.report.pages.figures import Table, exit_axis
from anytime.report.pages.rules import base, followed, looks, shown
from anytime.report.pages.verdict import mender
from anytime.report.svg.chart import Axis, Chart, draw, path, place, sparkline
from anytime.report.svg.scale import Linear

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation, Example

GROUP = 10
FALLING, UNEASY = 0.5, 0.1
ABSENT_LABEL = "none"


@dataclass(frozen=True)
class Panel:
    """The lines of one rule."""

    rule: str
    title: str
    svg: str


@dataclass(frozen=True)
class Trajectories:
    """The section on single inputs, as it stands before the slider is moved."""

    panels: tuple[Panel, ...]
    groups: int
    count: str
    table: Table
    data: dict[str, Any]


@dataclass(frozen=True)
class WorstRow:
    """One of the worst inputs: its number, label, what was answered, and for each rule a tiny line and its fall."""

    row: str
    label: str
    answers: tuple[tuple[str, bool], ...]
    rules: tuple[tuple[str, str], ...]


def trajectories(evaluation: Evaluation) -> Trajectories | None:
    """The first ten of the sampled inputs under the base and the rule that mends it; None without a sample."""
    examples = list(evaluation.examples)
    if not examples:
        return None
    rules = list(dict.fromkeys(rule for rule in (base(evaluation), mender(evaluation)) if rule is not None))
    first = examples[:GROUP]
    panels = tuple(Panel(rule, shown(rule), panel(evaluation, rule, first)) for rule in rules)
    groups = -(-len(examples) // GROUP)
    return Trajectories(
        panels, groups, _count(first, rules, len(examples)), _table(evaluation, rules, first), _data(evaluation, rules)
    )


def panel(evaluation: Evaluation, rule: str, examples: Sequence[Example]) -> str:
    """Ten inputs as lines, told apart by how far they fall."""
    chart = _empty(evaluation, rule)
    lines = []
    for index, example in enumerate(examples):
        values = example.probability[rule]
        places = [place(chart, exit, value) for exit, value in enumerate(values, 1)]
        tip = f"{_name(example)}: {', '.join(f'{value:.2f}' for value in values)}; falls by {example.drop[rule]:.2f}"
        line = f'class="line {manner(example.drop[rule])}" data-line="{index}" d="{path(places)}"'
        lines.append(f"<path {line}><title>{escape(tip)}</title></path>")
    return draw(chart, over=f'<g class="paths">{"".join(lines)}</g>')


def manner(drop: float) -> str:
    """The class of a line that falls by `drop`."""
    return "falling" if drop >= FALLING else "uneasy" if drop >= UNEASY else "calm"


def worst(evaluation: Evaluation) -> list[WorstRow]:
    """The inputs that fall furthest under the first rule."""
    first = next(iter(evaluation.rules))
    every = looks(evaluation.rules)
    return [
        WorstRow(
            row=str(example.row),
            label=ABSENT_LABEL if example.label is None else str(example.label),
            answers=tuple(answers(example, first)),
            rules=tuple((_spark(example, rule, look), f"{example.drop[rule]:.2f}") for rule, look in every.items()),
        )
        for example in evaluation.worst
    ]


def answers(example: Example, rule: str) -> list[tuple[str, bool]]:
    """The answers over the exits, runs of equal ones drawn together (`3 ×2`), and whether each is right."""
    right = example.final[rule] if example.label is None else example.label
    runs = [(answer, len(list(run))) for answer, run in groupby(example.answers[rule])]
    return [(f"{answer} ×{length}" if length > 1 else str(answer), answer == right) for answer, length in runs]


def _spark(example: Example, rule: str, look: Any) -> str:
    values = example.probability[rule]
    said = " → ".join(text for text, _ in answers(example, rule))
    summary = f"{shown(rule)}: {', '.join(f'{value:.2f}' for value in values)}; answers {said}"
    return sparkline(values, look, summary=summary)


def _empty(evaluation: Evaluation, rule: str) -> Chart:
    summary = (
        f"Probability of the {followed(evaluation)} over the exits for ten inputs under {shown(rule)}; numbers in the table."
    )
    y = Axis(f"probability of the {followed(evaluation)}", Linear(0.0, 1.0, 0.25))
    return Chart(summary, exit_axis(evaluation.exits), y, ())


def _name(example: Example) -> str:
    return f"input {example.row}" + ("" if example.label is None else f", class {example.label}")


def _count(examples: Sequence[Example], rules: Sequence[str], total: int) -> str:
    falls = [f"{sum(example.drop[rule] >= FALLING for example in examples)} with {shown(rule)}" for rule in rules]
    shown_now = f"Inputs 1 to {len(examples)} of {plural(total, 'sampled input')}"
    return f"{shown_now}. Falling by {FALLING:g} or more: {', '.join(falls)}."


def _table(evaluation: Evaluation, rules: Sequence[str], examples: Sequence[Example]) -> Table:
    rows = tuple(
        (
            str(example.row),
            ABSENT_LABEL if example.label is None else str(example.label),
            shown(rule),
            *(f"{value:.2f}" for value in example.probability[rule]),
            f"{example.drop[rule]:.2f}",
        )
        for example in examples
        for rule in rules
    )
    exits = tuple(f"exit {exit}" for exit in range(1, evaluation.exits + 1))
    caption = f"Probability of the {followed(evaluation)} at each exit"
    return Table(caption, ("input", "label", "rule", *exits, "falls by"), rows)


def _data(evaluation: Evaluation, panels: Sequence[str]) -> dict[str, Any]:
    """What the slider's script needs: all sampled inputs, and where the exits and the probabilities 0 and 1 lie."""
    chart = _empty(evaluation, base(evaluation))
    rules = list(evaluation.rules)
    return {
        "rules": [shown(rule) for rule in rules],
        "panels": [rules.index(rule) for rule in panels],
        "x": [round(place(chart, exit, 0)[0], 1) for exit in range(1, evaluation.exits + 1)],
        "y": [round(place(chart, 1, value)[1], 1) for value in (0, 1)],
        "limits": [FALLING, UNEASY],
        "group": GROUP,
        "inputs": [_entry(example, rules) for example in evaluation.examples],
    }


def _entry(example: Example, rules: Sequence[str]) -> list[Any]:
    return [
        example.row,
        example.label,
        [[round(value, 3) for value in example.probability[rule]] for rule in rules],
        [round(example.drop[rule], 3) for rule in rules],
    ]

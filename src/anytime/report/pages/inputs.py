"""Single inputs: ten at a time as lines over the exits (figures 1 and 2 of the paper), and the worst of all as a table.

The page shows the first ten without any script; the script behind the slider draws the others from `data`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from anytime.display.chart import Axis, Chart, Look
from anytime.display.figure import exit_axis
from anytime.display.numbers import plural
from anytime.display.scale import LinearScale
from anytime.display.table import Table
from anytime.evaluation.rules import base, followed, looks, shown
from anytime.report.pages.verdict import best_rule
from anytime.report.svg.chart import draw, path, place, sparkline

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation, Example

GROUP = 10
LARGE, SMALL = 0.5, 0.1
NO_LABEL = "none"


@dataclass(frozen=True)
class RuleLines:
    """The lines of one rule."""

    rule: str
    title: str
    svg: str


@dataclass(frozen=True)
class InputSection:
    """The section on single inputs before the slider is moved."""

    panels: tuple[RuleLines, ...]
    groups: int
    count: str
    table: Table
    data: dict[str, Any]


@dataclass(frozen=True)
class WorstRow:
    """One of the worst inputs: its row, label and answers, and for each rule a small line and its drop."""

    row: str
    label: str
    answers: tuple[tuple[str, bool], ...]
    rules: tuple[tuple[str, str], ...]


def input_section(evaluation: Evaluation) -> InputSection | None:
    """The first ten of the sampled inputs under the base and the best rule; None without a sample."""
    examples = evaluation.examples
    if not examples:
        return None
    rules = list(dict.fromkeys(rule for rule in (base(evaluation), best_rule(evaluation)) if rule is not None))
    first = examples[:GROUP]
    return InputSection(
        panels=tuple(RuleLines(rule, shown(rule), panel(evaluation, rule, first)) for rule in rules),
        groups=-(-len(examples) // GROUP),
        count=_count(first, rules, len(examples)),
        table=_table(evaluation, rules, first),
        data=_data(evaluation, rules),
    )


def panel(evaluation: Evaluation, rule: str, examples: Sequence[Example]) -> str:
    """Ten inputs as lines, styled by the size of their drop."""
    chart = _empty(evaluation, rule)
    lines = []
    for index, example in enumerate(examples):
        values = example.probability[rule]
        places = [place(chart, exit, value) for exit, value in enumerate(values, 1)]
        tip = f"{_name(example)}: {', '.join(f'{value:.2f}' for value in values)}; drop {example.drop[rule]:.2f}"
        line = f'class="line {drop_class(example.drop[rule])}" data-line="{index}" d="{path(places)}"'
        lines.append(f"<path {line}><title>{escape(tip)}</title></path>")
    return draw(chart, over=f'<g class="paths">{"".join(lines)}</g>')


def drop_class(drop: float) -> str:
    """The CSS class of a line with this drop."""
    return "large-drop" if drop >= LARGE else "small-drop" if drop >= SMALL else "no-drop"


def worst(evaluation: Evaluation) -> list[WorstRow]:
    """The inputs with the largest drops under the first rule."""
    first = next(iter(evaluation.rules))
    every = looks(evaluation.rules)
    return [
        WorstRow(
            row=example.name,
            label=_label(example),
            answers=tuple(answers(example, first)),
            rules=tuple((_spark(example, rule, look), f"{example.drop[rule]:.2f}") for rule, look in every.items()),
        )
        for example in evaluation.worst
    ]


def answers(example: Example, rule: str) -> list[tuple[str, bool]]:
    """The answers over the exits, equal ones in a row merged (`3 ×2`), and whether each is correct."""
    right = example.final[rule] if example.label is None else example.label
    runs = [(answer, len(list(run))) for answer, run in groupby(example.answers[rule])]
    return [(f"{answer} ×{length}" if length > 1 else str(answer), answer == right) for answer, length in runs]


def _spark(example: Example, rule: str, look: Look) -> str:
    values = example.probability[rule]
    listed = " → ".join(text for text, _ in answers(example, rule))
    summary = f"{shown(rule)}: {', '.join(f'{value:.2f}' for value in values)}; answers {listed}"
    return sparkline(values, look, summary=summary)


def _empty(evaluation: Evaluation, rule: str) -> Chart:
    whose = f"robability of the {followed(evaluation)}"
    summary = f"P{whose} over the exits for ten inputs under {shown(rule)}; numbers in the table."
    return Chart(summary, exit_axis(evaluation.exits), Axis(f"p{whose}", LinearScale(0.0, 1.0, 0.25)), ())


def _name(example: Example) -> str:
    return f"input {example.name}" + ("" if example.label is None else f", class {example.label}")


def _label(example: Example) -> str:
    return NO_LABEL if example.label is None else str(example.label)


def _count(examples: Sequence[Example], rules: Sequence[str], total: int) -> str:
    large = [f"{sum(example.drop[rule] >= LARGE for example in examples)} with {shown(rule)}" for rule in rules]
    shown_now = f"Inputs 1 to {len(examples)} of {plural(total, 'sampled input')}"
    return f"{shown_now}. Drops of {LARGE:g} or more: {', '.join(large)}."


def _table(evaluation: Evaluation, rules: Sequence[str], examples: Sequence[Example]) -> Table:
    rows = tuple(
        (
            example.name,
            _label(example),
            shown(rule),
            *(f"{value:.2f}" for value in example.probability[rule]),
            f"{example.drop[rule]:.2f}",
        )
        for example in examples
        for rule in rules
    )
    exits = tuple(f"exit {exit}" for exit in range(1, evaluation.exits + 1))
    caption = f"Probability of the {followed(evaluation)} at each exit"
    return Table(caption, ("input", "label", "rule", *exits, "drop"), rows)


def _data(evaluation: Evaluation, panels: Sequence[str]) -> dict[str, Any]:
    """The data of the slider's script: all sampled inputs, and the positions of the exits and of the probabilities 0 and 1."""
    chart = _empty(evaluation, base(evaluation))
    rules = list(evaluation.rules)
    return {
        "rules": [shown(rule) for rule in rules],
        "panels": [rules.index(rule) for rule in panels],
        "x": [round(place(chart, exit, 0)[0], 1) for exit in range(1, evaluation.exits + 1)],
        "y": [round(place(chart, 1, value)[1], 1) for value in (0, 1)],
        "limits": [LARGE, SMALL],
        "group": GROUP,
        "inputs": [
            [
                example.row if example.position is None else example.name,
                example.label,
                [[round(value, 3) for value in example.probability[rule]] for rule in rules],
                [round(example.drop[rule], 3) for rule in rules],
            ]
            for example in evaluation.examples
        ],
    }

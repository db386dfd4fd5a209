"""The figures of an evaluation as a table on the terminal."""

from __future__ import annotations

from collections.abc import Callable

from anytime.evaluation import Evaluation
from anytime.metrics import RuleMetrics

Figure = Callable[[RuleMetrics], str]

_LABELLED: dict[str, Figure] = {
    "accuracy, first exit %": lambda f: f"{100 * (f.accuracy or ())[0]:.2f}",
    "accuracy, last exit %": lambda f: f"{100 * (f.accuracy or ())[-1]:.2f}",
    "label drops by ≥ .1, %": lambda f: f"{(f.label_drop_percent or {})['0.1']:.2f}",
    "label drops by ≥ .5, %": lambda f: f"{(f.label_drop_percent or {})['0.5']:.2f}",
    "right stays right, %": lambda f: f"{f.correct_monotone_percent:.2f}",
    "overthinking, %": lambda f: f"{f.overthinking_percent:.2f}",
    "ECE, mean": lambda f: f"{_mean(f.ece or ()):.3f}",
}
_ANY: dict[str, Figure] = {
    "final answer drops by ≥ .1, %": lambda f: f"{f.final_drop_percent['0.1']:.2f}",
    "entropy, first → last": lambda f: f"{f.entropy[0]:.2f} → {f.entropy[-1]:.2f}",
    "collapsed, last exit %": lambda f: f"{f.collapsed_percent[-1]:.2f}",
}


def print_table(found: Evaluation) -> None:
    """Print one column a rule to stdout."""
    from rich.table import Table

    from anytime.cli.console import make_console

    labels = "" if found.labelled else ", no labels"
    table = Table(title=f"{found.exits} exits, {found.samples:,} inputs, {found.classes} classes{labels}", title_justify="left")
    table.add_column("")
    for name in found.rules:
        table.add_column(name, justify="right")
    figures = {**(_LABELLED if found.labelled else {}), **_ANY}
    if next(iter(found.rules.values())).set_size is not None:
        figures["set size, first → last"] = lambda f: f"{(f.set_size or ())[0]:.1f} → {(f.set_size or ())[-1]:.1f}"
    for title, figure in figures.items():
        table.add_row(title, *(figure(rule) for rule in found.rules.values()))
    make_console().print(table)


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)

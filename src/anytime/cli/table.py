"""The metrics of an evaluation as a table on the terminal."""

from __future__ import annotations

from anytime.cli.console import print_table
from anytime.evaluation import Evaluation
from anytime.metrics import RuleMetrics


def print_evaluation(found: Evaluation) -> None:
    """Print one column per rule to stdout."""
    columns = [_cells(metrics) for metrics in found.rules.values()]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    inputs = f"{found.samples:,} inputs" + ("" if found.rows is None else f" ({found.rows:,} positions)")
    title = f"{found.exits} exits, {inputs}, {found.classes} classes{'' if found.labelled else ', no labels'}"
    print_table(("", *found.rules), rows, title=title)


def _cells(metrics: RuleMetrics) -> dict[str, str]:
    """The metrics to show, by their names; those that need labels or sets only if there are any."""
    cells: dict[str, str] = {}
    if metrics.accuracy and metrics.label_drop_percent and metrics.ece:
        cells |= {
            "accuracy, first exit %": f"{100 * metrics.accuracy[0]:.2f}",
            "accuracy, last exit %": f"{100 * metrics.accuracy[-1]:.2f}",
            **({} if metrics.mean_iou is None else {"mean IoU, last exit %": f"{100 * metrics.mean_iou[-1]:.2f}"}),
            "label drops by ≥ .1, %": f"{metrics.label_drop_percent['0.1']:.2f}",
            "label drops by ≥ .5, %": f"{metrics.label_drop_percent['0.5']:.2f}",
            "correct stays correct, %": f"{metrics.correct_monotone_percent:.2f}",
            "overthinking, %": f"{metrics.overthinking_percent:.2f}",
            "ECE, mean": f"{sum(metrics.ece) / len(metrics.ece):.3f}",
        }
    cells |= {
        "final answer drops by ≥ .1, %": f"{metrics.final_drop_percent['0.1']:.2f}",
        "entropy, first → last": f"{metrics.entropy[0]:.2f} → {metrics.entropy[-1]:.2f}",
        "collapsed, last exit %": f"{metrics.collapsed_percent[-1]:.2f}",
    }
    if metrics.set_size:
        cells["set size, first → last"] = f"{metrics.set_size[0]:.1f} → {metrics.set_size[-1]:.1f}"
    return cells

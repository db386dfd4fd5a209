"""The table and the picture of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from anytime.combine import Interval
from anytime.display.numbers import number, plural
from anytime.display.plot import make_axes, plot_bars, plot_classes
from anytime.display.table import Table
from anytime.errors import ShapeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from anytime.run.answer import Answer

_CLASSES = 5


def answer_table(answer: Answer, most: int) -> Table:
    """One row for each of at most so many inputs."""
    inputs = len(answer.fell_back)
    after = f"{1e3 * answer.elapsed:.3g} ms" + (f", {answer.reason}" if answer.reason else "")
    shown = f"the first {most} of {inputs:,} inputs" if inputs > most else plural(inputs, "input")
    if isinstance(answer.prediction, Interval):
        head: tuple[str, ...] = ("lower", "upper")
    elif answer.labels.ndim > 1:
        head = ("most frequent class", "classes", "mean confidence")
    else:
        head = ("class", "confidence")
    cells = [(*_cells(answer, row), _exit(answer, row), _collapsed(answer.fell_back[row])) for row in range(min(most, inputs))]
    rows = tuple((str(row), *each) for row, each in enumerate(cells))
    return Table(f"{shown}, after {after}", ("input", *head, "exit", "fell back"), rows)


def plot_answer(answer: Answer, row: int, ax: Axes | None) -> Axes:
    """The most probable classes of an input as bars, or the labels of its pixels as an image."""
    title = f"input {row} at exit {_exit(answer, row)} of {answer.exits}"
    labels = answer.labels[row]
    if labels.ndim == 0:
        probs = answer.probs[row].sort(descending=True, stable=True)
        some = slice(0, min(_CLASSES, len(probs.values)))
        names = [f"class {label}" for label in probs.indices[some].tolist()]
        return plot_bars(names, probs.values[some].tolist(), axis="probability", title=title, ax=ax)
    if labels.ndim != 2:
        raise ShapeError(
            f"the labels of an input have shape {tuple(labels.shape)}",
            expected="one label, or labels of (height, width)",
            fix="draw answer.labels yourself, or print answer.table()",
        )
    axes = make_axes(ax, f"{title}, mean confidence {float(answer.confidence[row].mean()):.2f}")
    assert not isinstance(answer.prediction, Interval)  # it has labels
    plot_classes(axes, labels.tolist(), answer.log_probs.shape[answer.prediction.class_dim])
    return axes


def _cells(answer: Answer, row: int) -> Iterator[str]:
    if isinstance(answer.prediction, Interval):
        yield from (number(float(end[row])) for end in (answer.lower, answer.upper))
        return
    labels = answer.labels[row].flatten()
    yield str(int(labels.mode().values))
    if answer.labels.ndim > 1:
        yield str(int((labels.bincount() > 0).sum()))
    yield number(float(answer.confidence[row].mean()))


def _exit(answer: Answer, row: int) -> str:
    return str(answer.exit if isinstance(answer.exit, int) else int(answer.exit[row]))


def _collapsed(fell_back: Tensor) -> str:
    share = float(fell_back.float().mean())
    return "no" if share == 0 else "yes" if fell_back.ndim == 0 else f"{100 * share:.3g} %"

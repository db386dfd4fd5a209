"""The chart of a training run: loss and validation accuracy of each exit over the epochs, from its `log.csv`."""

from __future__ import annotations

from pathlib import Path

from anytime.artifacts import write_text
from anytime.display.chart import Axis, Chart, Series, look
from anytime.display.scale import linear
from anytime.report.svg.chart import stacked
from anytime.train.log import read_log

_POINTS = 40  # the markers of more points would overlap


def write_curve(log: str | Path, chart: str | Path) -> None:
    """Draw a log; nothing is written if it has no lines yet."""
    path = Path(log)
    if path.is_file() and (lines := read_log(path)):
        write_text(chart, curve(lines))


def curve(lines: list[dict[str, str]]) -> str:
    """Two charts, one above the other, as an SVG file."""
    validated = [line for line in lines if line.get("val_accuracy_1")]
    summary = "Accuracy of each exit on validation rows over the epochs"
    charts = [
        ("Training loss", _chart(lines, "loss_", "training loss", "Loss of each exit over the epochs")),
        ("Validation accuracy", _chart(validated, "val_accuracy_", "accuracy, %", summary, factor=100.0)),
    ]
    return stacked([(title, chart) for title, chart in charts if chart.series])


def _chart(lines: list[dict[str, str]], column: str, title: str, summary: str, *, factor: float = 1.0) -> Chart:
    shown = _thinned(lines)
    epochs = tuple(float(line["epoch"]) for line in shown)
    names = [name for name in (shown[0] if shown else {}) if name.startswith(column)]
    series = []
    for index, name in enumerate(names):
        values = tuple(factor * float(line[name]) for line in shown)
        tips = (f"exit {index + 1}, epoch {epoch:g}: {value:.4g}" for epoch, value in zip(epochs, values, strict=True))
        series.append(Series(f"exit {index + 1}", epochs, values, look(index), tuple(tips)))
    every = [value for one in series for value in one.y if value is not None]
    return Chart(summary, Axis("epoch", linear(epochs, low=0)), Axis(title, linear(every, low=0)), tuple(series))


def _thinned(lines: list[dict[str, str]]) -> list[dict[str, str]]:
    """At most `_POINTS` lines, evenly spaced, including the last."""
    if len(lines) <= _POINTS:
        return lines
    return [lines[round(index * (len(lines) - 1) / (_POINTS - 1))] for index in range(_POINTS)]

"""The picture of a training run: loss and validation accuracy of each exit over the epochs, from its `log.csv`."""

from __future__ import annotations

import re
from pathlib import Path

from anytime.artifacts import write_text
from anytime.report.svg.chart import Axis, Chart, Series, look, standalone
from anytime.report.svg.scale import linear
from anytime.train.log import read_log

# More markers on a line than this run into each other.
_POINTS = 40
_SIZE = re.compile(r'<svg [^>]*?width="([\d.]+)" height="([\d.]+)"')


def write_curve(log: str | Path, picture: str | Path) -> None:
    """Draw a log; nothing is written where it has no lines yet."""
    path = Path(log)
    if not path.is_file():
        return
    if lines := read_log(path):
        write_text(picture, curve(lines))


def curve(lines: list[dict[str, str]]) -> str:
    """Two charts, one above the other, as an SVG file."""
    loss = _chart(lines, "loss_", "training loss", "Loss of each exit over the epochs")
    accuracy = _chart(
        [line for line in lines if line.get("val_accuracy_1")],
        "val_accuracy_",
        "accuracy, %",
        "Accuracy of each exit on validation rows over the epochs",
        scale=100.0,
    )
    charts = [(loss, "Training loss"), (accuracy, "Validation accuracy")]
    return _stack([standalone(chart, title=title) for chart, title in charts if chart.series])


def _chart(lines: list[dict[str, str]], column: str, title: str, summary: str, *, scale: float = 1.0) -> Chart:
    shown = _thinned(lines)
    epochs = tuple(float(line["epoch"]) for line in shown)
    names = [name for name in (shown[0] if shown else {}) if name.startswith(column)]
    series = tuple(
        _series(index, epochs, tuple(scale * float(line[name]) for line in shown)) for index, name in enumerate(names)
    )
    values = [value for one in series for value in one.y if value is not None]
    return Chart(summary, Axis("epoch", linear(epochs, low=0)), Axis(title, linear(values, low=0)), series)


def _series(index: int, epochs: tuple[float, ...], values: tuple[float, ...]) -> Series:
    name = f"exit {index + 1}"
    tips = tuple(f"{name}, epoch {epoch:g}: {value:.4g}" for epoch, value in zip(epochs, values, strict=True))
    return Series(name, epochs, values, look(index), tips)


def _thinned(lines: list[dict[str, str]]) -> list[dict[str, str]]:
    """At most `_POINTS` lines, evenly spread, the last one among them."""
    if len(lines) <= _POINTS:
        return lines
    return [lines[round(index * (len(lines) - 1) / (_POINTS - 1))] for index in range(_POINTS)]


def _stack(pictures: list[str]) -> str:
    """Pictures one below the other, as one."""
    sizes = [tuple(float(number) for number in found.groups()) for picture in pictures if (found := _SIZE.search(picture))]
    width, height = max(size[0] for size in sizes), sum(size[1] for size in sizes)
    parts, top = [], 0.0
    for picture, size in zip(pictures, sizes, strict=True):
        parts.append(picture.replace("<svg ", f'<svg y="{top:g}" ', 1))
        top += size[1]
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}">{"".join(parts)}</svg>\n'

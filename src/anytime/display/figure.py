"""A figure of a page: a chart with a title, a sentence on how to read it, and its numbers as a table."""

from __future__ import annotations

from dataclasses import dataclass

from anytime.display.chart import Axis, Chart
from anytime.display.scale import LinearScale
from anytime.display.table import Table

MAX_LABELLED_EXITS = 14


NO_TABLE = Table("", (), ())


@dataclass(frozen=True)
class Figure:
    """A chart with its table, in a section of the page."""

    id: str
    section: str
    title: str
    reading: str
    chart: Chart
    table: Table = NO_TABLE


def exit_axis(exits: int) -> Axis:
    """The axis of the exits, counted from 1; if there are many, only some are labelled."""
    every = -(-exits // MAX_LABELLED_EXITS)
    marks = tuple((float(exit), str(exit)) for exit in range(1, exits + 1) if (exit - 1) % every == 0)
    return Axis("exit", LinearScale(1.0, float(max(exits, 2)), 1.0), marks)

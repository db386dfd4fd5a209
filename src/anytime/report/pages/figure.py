"""A figure of a page: a chart with a title, a sentence on how to read it, and its numbers as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anytime.report.svg.chart import Axis, Chart, draw
from anytime.report.svg.scale import LinearScale

MAX_LABELLED_EXITS = 14


@dataclass(frozen=True)
class Table:
    """Numbers as text; the first cell of each row is its heading."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


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

    @property
    def svg(self) -> str:
        """The chart as SVG."""
        return draw(self.chart)


def exit_axis(exits: int) -> Axis:
    """The axis of the exits, counted from 1; if there are many, only some are labelled."""
    every = -(-exits // MAX_LABELLED_EXITS)
    marks = tuple((float(exit), str(exit)) for exit in range(1, exits + 1) if (exit - 1) % every == 0)
    return Axis("exit", LinearScale(1.0, float(max(exits, 2)), 1.0), marks)


def exit_table(caption: str, exits: int, rows: Sequence[tuple[str, ...]], *, heading: str = "rule") -> Table:
    """A table with one column per exit."""
    return Table(caption, (heading, *(f"exit {exit}" for exit in range(1, exits + 1))), tuple(rows))

"""Line charts as data: series, axes and guides. `anytime.report` draws them as SVG, `anytime.display.plot` with matplotlib.

A chart has no colours: a series has a look, which names one of the colours of `anytime.display.palette` and a marker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from anytime.display.scale import Scale

COLOURS = 10
MARKERS = ("circle", "square", "diamond", "triangle", "wedge", "plus")


@dataclass(frozen=True)
class Look:
    """The look of a series: a CSS class for colour and dash, and a marker."""

    css: str
    marker: str | None = None


IDEAL = Look("ideal")


def look(index: int) -> Look:
    """The look of series number `index`; the first 60 all differ."""
    round_, colour = divmod(index, COLOURS)
    return Look(f"s{colour}", MARKERS[(colour + round_) % len(MARKERS)])


@dataclass(frozen=True)
class Series:
    """One line: `x` and `y` of equal length, `None` where there is no point.

    Attributes:
        tips: One tooltip per point.
        spread: The length of an error bar on either side of each point, such as one standard deviation.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    look: Look
    tips: tuple[str, ...] = ()
    spread: tuple[float | None, ...] = ()

    def points(self) -> Iterator[tuple[int, float, float]]:
        """Index, x and y of each point."""
        for index, (x, y) in enumerate(zip(self.x, self.y, strict=True)):
            if y is not None and math.isfinite(y):
                yield index, x, y

    def bars(self) -> Iterator[tuple[float, float, float]]:
        """The x and both ends of each error bar; where no point is negative, bars end at zero."""
        floor = 0.0 if all(y >= 0 for _, _, y in self.points()) else -math.inf
        for index, x, y in self.points():
            spread = self.spread[index] if index < len(self.spread) else None
            if spread:
                yield x, max(y - spread, floor), y + spread

    def reach(self) -> Iterator[float]:
        """The values that a scale must contain: the points and the ends of the error bars."""
        yield from (y for _, _, y in self.points())
        yield from (end for _, *ends in self.bars() for end in ends)


def values(series: Iterable[Series]) -> list[float]:
    """The y of all points."""
    return [y for line in series for _, _, y in line.points()]


def scattered(series: Series) -> Series:
    """The points of a series without a line: a gap follows each point."""
    x = tuple(value for value in series.x for _ in range(2))
    y = tuple(value for point in series.y for value in (point, None))
    return replace(series, x=x, y=y, tips=tuple(text for tip in series.tips for text in (tip, "")))


@dataclass(frozen=True)
class Axis:
    """A scale with its title; `marks` replace the scale's own ticks."""

    title: str
    scale: Scale
    marks: tuple[tuple[float, str], ...] | None = None

    def ticks(self) -> tuple[tuple[float, str], ...]:
        """The position and text of each tick."""
        if self.marks is not None:
            return self.marks
        return tuple((value, self.scale.text(value)) for value in self.scale.ticks())


@dataclass(frozen=True)
class Guide:
    """A thin dashed reference line."""

    start: tuple[float, float]
    end: tuple[float, float]
    name: str


@dataclass(frozen=True)
class Chart:
    """The content of a chart. `summary` is its text for screen readers."""

    summary: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    guides: tuple[Guide, ...] = ()

    @property
    def legend(self) -> tuple[tuple[str, Look], ...]:
        """The name and look of each line; if lines have the same name, the look of the last."""
        lines = {series.name: series.look for series in self.series}
        return (*lines.items(), *((guide.name, IDEAL) for guide in self.guides))

"""Charts as data: what a study draws. `anytime.reproduce.drawing` turns them into one SVG in the style of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from torch import Tensor

from anytime.reproduce.finding import Measured

Kind = Literal["linear", "symlog"]
_OWN_LOOK = {"latest": 0, "caching": 1, "product": 2}


@dataclass(frozen=True)
class Line:
    """One line of a plot.

    Attributes:
        name: For the legend; lines with the same name share an entry.
        x, y: The points; y is None where a point is missing.
        look: Index of the colour and marker; `latest`, `caching` and `product` have 0, 1 and 2 in every plot.
        spread: Standard deviation over seeds at each point, drawn as an error bar.
        paper: The paper's values at the same x, drawn as crosses.
        marks: Whether points have a marker.
        faint: Whether the line is in the background.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    look: int
    spread: tuple[float | None, ...] = ()
    paper: tuple[float | None, ...] = ()
    marks: bool = True
    faint: bool = False


@dataclass(frozen=True)
class Band:
    """The area between two curves; None where the band is empty."""

    name: str
    x: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    look: int


@dataclass(frozen=True)
class Plot:
    """One chart.

    Attributes:
        title: What it shows.
        x_title, y_title: Axis titles, with units.
        lines: What is drawn.
        kind: Scale of the y axis; `symlog` is logarithmic and includes zero.
        exits: Number of exits on the x axis, or None for a numeric axis.
        x_marks: Positions and texts of the ticks on a numeric axis; None for round numbers.
        zero: Whether the y axis begins at zero.
        y_range: Ends of the y axis; None to follow the lines.
        bands: Areas behind the lines.
    """

    title: str
    x_title: str
    y_title: str
    lines: tuple[Line, ...]
    kind: Kind = "linear"
    exits: int | None = None
    x_marks: tuple[tuple[float, str], ...] | None = None
    zero: bool = False
    y_range: tuple[float, float] | None = None
    bands: tuple[Band, ...] = ()


@dataclass(frozen=True)
class ClassMap:
    """The predicted class over the plane, as rows of square cells from the top.

    Attributes:
        title: What it shows.
        cells: A look and an opacity from 0 to 1 per cell.
    """

    title: str
    cells: tuple[tuple[tuple[int, float], ...], ...]


def looks(names: Sequence[str]) -> dict[str, int]:
    """A look per line: `latest`, `caching` and `product` have their own, which no other line takes.

    >>> looks(("latest", "product", "temperature"))
    {'latest': 0, 'product': 2, 'temperature': 3}
    """
    free = count(len(_OWN_LOOK))
    return {name: _OWN_LOOK[name] if name in _OWN_LOOK else next(free) for name in names}


def line(
    name: str,
    values: Sequence[Measured],
    look: int,
    *,
    x: Sequence[float] | None = None,
    paper: Sequence[float | None] = (),
) -> Line:
    """A line over the exits, or over `x`, with error bars.

    The paper's values are left out if their number differs: they belong to a network with other exits.
    """
    places = tuple(float(exit) for exit in range(1, len(values) + 1)) if x is None else tuple(x)
    spread = tuple(value.deviation for value in values)
    crosses = tuple(paper) if len(paper) == len(values) else ()
    return Line(name, places, tuple(value.mean for value in values), look, spread if any(spread) else (), crosses)


def over_exits(title: str, y_title: str, lines: Sequence[Line], *, zero: bool = False) -> Plot:
    """A plot with the exits as its x axis."""
    return Plot(title, "exit", y_title, tuple(lines), exits=len(lines[0].x), zero=zero)


def inputs_plot(title: str, curves: Tensor, *, behind: Tensor | None = None) -> Plot:
    """The label's probability for single inputs, `(exits, inputs)`, with others faint in the background."""
    x = tuple(float(exit) for exit in range(1, len(curves) + 1))
    lines = [
        Line("", x, tuple(values), look, marks=False, faint=part is behind)
        for part in (behind, curves)
        if part is not None
        for look, values in enumerate(part.T.tolist())
    ]
    return Plot(title, "exit", "label's probability", tuple(lines), exits=len(x), y_range=(0.0, 1.0))

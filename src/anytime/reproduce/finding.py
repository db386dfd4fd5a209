"""What a study finds: numbers, rows that hold them against the paper's, pictures as data, and a plain word on both.

Pictures are described, not drawn: `anytime reproduce` draws them in the style of the report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from anytime.errors import OptionError, ShapeError

Kind = Literal["linear", "symlog"]

_NEAR = 1e-9
"""A difference that is the tolerance but for the last bit is within."""


@dataclass(frozen=True)
class Measured:
    """A number of ours: the mean over seeds, and the standard deviation where there are two or more."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One number of the paper beside ours.

    Attributes:
        what: What is measured, in words.
        paper: The paper's number, or None where a bound alone is asked for.
        ours: Ours, in the same unit.
        tolerance: How far apart the two may lie, or None where nothing is asked.
        at_most: A bound that ours must keep, or None.
        unit: `%`, `nats`, `classes`, or nothing.
    """

    what: str
    paper: float | None
    ours: Measured
    tolerance: float | None = None
    at_most: float | None = None
    unit: str = ""

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.paper is None else self.ours.mean - self.paper

    @property
    def within(self) -> bool | None:
        """Whether ours lies within what is asked; None where nothing is."""
        asked = []
        if self.tolerance is not None and self.difference is not None:
            asked.append(abs(self.difference) <= self.tolerance + _NEAR)
        if self.at_most is not None:
            asked.append(self.ours.mean <= self.at_most)
        return all(asked) if asked else None


@dataclass(frozen=True)
class Claim:
    """Something the paper says in words, and whether it holds here; `detail` has the numbers behind it."""

    what: str
    holds: bool
    detail: str


@dataclass(frozen=True)
class Line:
    """One line of a panel.

    Attributes:
        name: For the legend; lines of one name share an entry.
        x, y: The points; None where there is none.
        look: Which of the house's looks, from 0; `latest`, `caching` and `product` have 0, 1 and 2 everywhere.
        spread: Deviation over seeds at each point, drawn as a bar.
        paper: The paper's values at the same x, drawn as crosses.
        marks: Whether points carry a marker.
        faint: Whether it stands in the background.
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
    """An area between two curves."""

    name: str
    x: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    look: int


@dataclass(frozen=True)
class Panel:
    """One chart of a picture.

    Attributes:
        title: What it shows.
        x_title, y_title: Of the axes, with units.
        lines: What is drawn.
        kind: Of the y axis; `symlog` has a place for zero and for a tenth of a percent.
        exits: How many exits the x axis counts, or None for an axis of numbers.
        x_marks: Ticks of an axis of numbers, where they lie and what they say, in place of round numbers.
        zero: Whether the y axis begins at zero.
        y_range: Ends of the y axis, where they should not follow from the lines.
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
class Field:
    """A map of the plane in square cells, one row of the picture after the other from the top.

    Attributes:
        title: What it shows.
        cells: For each cell a look and how strongly it is coloured, from 0 to 1.
    """

    title: str
    cells: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True)
class Finding:
    """What a study found.

    Attributes:
        study: Its name.
        title: What it shows.
        figure: The figure or table of the paper.
        scale: `smoke`, `small` or `full`.
        runs: The runs it was measured on, by name.
        rows: Which inputs, in words.
        note: What to know about the numbers, and where and why they differ.
        panels: The picture.
        comparisons: Numbers beside the paper's.
        claims: The paper's words, checked.
        numbers: Everything measured, for machines.
        headings: Of `table`, if there is one.
        table: Further rows for people, such as a table that has no counterpart in the paper.
    """

    study: str
    title: str
    figure: str
    scale: str
    runs: tuple[str, ...]
    rows: str
    note: str
    panels: tuple[Panel | Field, ...]
    comparisons: tuple[Comparison, ...] = ()
    claims: tuple[Claim, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    headings: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()

    @property
    def verdict(self) -> str:
        """In one line: how many of the numbers asked for lie within, and how many claims hold.

        >>> Finding("x", "t", "f", "full", (), "", "", (), claims=(Claim("a", True, ""), Claim("b", False, ""))).verdict
        '1 of 2 claims hold'
        """
        asked = [row.within for row in self.comparisons if row.within is not None]
        parts = [f"{sum(asked)} of {len(asked)} numbers within tolerance"] if asked else []
        if self.claims:
            held = sum(claim.holds for claim in self.claims)
            parts.append(f"{held} of {len(self.claims)} {'claims hold' if len(self.claims) > 1 else 'claim holds'}")
        return "; ".join(parts) or "nothing to compare"

    def unasked(self) -> Finding:
        """The same without tolerances: a small scale shows that all runs, and is not held against the paper."""
        rows = tuple(replace(row, tolerance=None, at_most=None) for row in self.comparisons)
        note = f"At the scale {self.scale} this shows that everything runs, and says nothing about the paper. {self.note}"
        return replace(self, comparisons=rows, note=note)

    def to_json(self) -> dict[str, Any]:
        """A plain document without the picture; differences and verdicts are written out."""
        document = {key: value for key, value in asdict(self).items() if key != "panels"}
        document["comparisons"] = [
            {**asdict(row), "difference": row.difference, "within": row.within} for row in self.comparisons
        ]
        return {**document, "verdict": self.verdict}


def over_seeds(values: Sequence[float]) -> Measured:
    """Mean and standard deviation (of a sample, n - 1) of one number over seeds.

    >>> over_seeds([1.0, 2.0, 3.0])
    Measured(mean=2.0, deviation=1.0)
    """
    if not values:
        raise OptionError("no values to take the mean of", expected="one a seed", fix="give at least one run")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Measured(mean)
    return Measured(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)))


def each_over_seeds(curves: Sequence[Sequence[float]]) -> list[Measured]:
    """`over_seeds` point by point, for one curve a seed."""
    if len({len(values) for values in curves}) > 1:
        raise ShapeError(
            f"curves of {', '.join(str(len(values)) for values in curves)} points",
            expected="as many points of every seed",
            fix="give runs of one network, with as many exits",
        )
    return [over_seeds(values) for values in zip(*curves, strict=True)]

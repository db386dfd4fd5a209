"""What a study finds: our numbers beside the paper's, its claims checked, charts as data, and a note."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from anytime.errors import OptionError, ShapeError

if TYPE_CHECKING:
    from anytime.reproduce.plots import ClassMap, Plot

_ROUNDING = 1e-9
"""A difference that exceeds the tolerance by rounding only is within."""


@dataclass(frozen=True)
class Measured:
    """One of our numbers: the mean over seeds, and the standard deviation if there are two or more seeds."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One number of the paper beside ours.

    Attributes:
        what: What is measured.
        paper: The paper's number, or None if there is only a bound.
        ours: Our number, in the same unit.
        tolerance: Largest allowed difference, or None.
        at_most: Upper bound on our number, or None.
        unit: `%`, `points`, `nats`, `classes`, or nothing.
    """

    what: str
    paper: float | None
    ours: Measured
    tolerance: float | None = None
    at_most: float | None = None
    unit: str = ""

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.paper is None else self.ours.mean - self.paper

    @property
    def within(self) -> bool | None:
        """Whether our number meets the tolerance and the bound; None if it has neither."""
        checks = []
        if self.tolerance is not None and self.difference is not None:
            checks.append(abs(self.difference) <= self.tolerance + _ROUNDING)
        if self.at_most is not None:
            checks.append(self.ours.mean <= self.at_most)
        return all(checks) if checks else None

    def cells(self) -> tuple[str, ...]:
        """The table row.

        >>> Comparison("accuracy", 65.3, Measured(63.4, 0.4), 2.0, unit="%").cells()
        ('accuracy', '65.3 %', '63.40 ± 0.40 %', '−1.90', '± 2', 'within')
        """
        # Enough digits to see whether the tolerance is met.
        digits, unit = 2 if self.unit in ("%", "points", "classes") else 3, f" {self.unit}" if self.unit else ""
        asked = [] if self.tolerance is None else [f"± {self.tolerance:g}"]
        asked += [] if self.at_most is None else [f"≤ {self.at_most:g}"]
        return (
            self.what,
            "–" if self.paper is None else f"{self.paper:g}{unit}",
            f"{with_deviation(self.ours, digits)}{unit}",
            "–" if self.difference is None else signed(self.difference, digits),
            " and ".join(asked) or "–",
            {None: "–", True: "within", False: "NOT within"}[self.within],
        )


HEADINGS = ("what", "paper", "ours", "difference", "allowed", "verdict")
"""Of the cells of a comparison."""


@dataclass(frozen=True)
class Claim:
    """A statement of the paper (or our own), whether it holds here, and the numbers behind it."""

    what: str
    holds: bool
    detail: str

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.what} ({self.detail})"


@dataclass(frozen=True)
class Finding:
    """What a study found.

    Attributes:
        study: Its name.
        title: What it shows.
        figure: The figure or table of the paper.
        scale: `smoke`, `small` or `full`.
        runs: Names of the runs it was measured on.
        rows: Which inputs it was measured on.
        note: What to know about the numbers, and where and why they differ.
        plots: The figure.
        comparisons: Our numbers beside the paper's.
        claims: The paper's statements, checked.
        numbers: Everything that was measured, for programs.
        headings: Of `table`.
        table: A further table, such as one without a counterpart in the paper.
    """

    study: str
    title: str
    figure: str
    scale: str
    runs: tuple[str, ...]
    rows: str
    note: str
    plots: tuple[Plot | ClassMap, ...]
    comparisons: tuple[Comparison, ...] = ()
    claims: tuple[Claim, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    headings: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()

    @property
    def verdict(self) -> str:
        """How many numbers are within tolerance, and how many claims hold.

        >>> Finding("x", "t", "f", "full", (), "", "", (), claims=(Claim("a", True, ""), Claim("b", False, ""))).verdict
        '1 of 2 claims hold'
        """
        checked = [row.within for row in self.comparisons if row.within is not None]
        parts = [f"{sum(checked)} of {len(checked)} numbers within tolerance"] if checked else []
        if self.claims:
            held = sum(claim.holds for claim in self.claims)
            parts.append(f"{held} of {len(self.claims)} {'claims hold' if len(self.claims) > 1 else 'claim holds'}")
        return "; ".join(parts) or "nothing to compare"

    def without_tolerances(self) -> Finding:
        """The same without tolerances and bounds: at a small scale, numbers are not compared with the paper's."""
        rows = tuple(replace(row, tolerance=None, at_most=None) for row in self.comparisons)
        note = f"The scale {self.scale} only checks that the study runs; its numbers do not test the paper. {self.note}"
        return replace(self, comparisons=rows, note=note)

    def to_json(self) -> dict[str, Any]:
        """A JSON document without the plots; includes differences and verdicts."""
        document = {name: value for name, value in asdict(replace(self, plots=())).items() if name != "plots"}
        rows = [{**asdict(row), "difference": row.difference, "within": row.within} for row in self.comparisons]
        return {**document, "comparisons": rows, "verdict": self.verdict}


def over_seeds(values: Sequence[float]) -> Measured:
    """Mean and sample standard deviation (n - 1) of a number over seeds.

    >>> over_seeds([1.0, 2.0, 3.0])
    Measured(mean=2.0, deviation=1.0)
    """
    if not values:
        raise OptionError("no values to average", expected="one value per seed", fix="pass at least one run")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Measured(mean)
    return Measured(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)))


def each_over_seeds(curves: Sequence[Sequence[float]]) -> list[Measured]:
    """`over_seeds` at each point, for one curve per seed."""
    if len({len(values) for values in curves}) > 1:
        raise ShapeError(
            f"curves of {', '.join(str(len(values)) for values in curves)} points",
            expected="the same number of points for every seed",
            fix="pass runs of one network, with the same exits",
        )
    return [over_seeds(values) for values in zip(*curves, strict=True)]


def minus(text: str) -> str:
    """Formatted numbers with a typographic minus, and none before zero.

    >>> minus("-1.20, +0.50"), minus("-0.00")
    ('−1.20, +0.50', '0.00')
    """
    return text.lstrip("-") if not text.strip("-0.") else text.replace("-", "−")


def signed(value: float, digits: int) -> str:
    """A difference with its sign; one that rounds to zero is positive."""
    text = minus(f"{value:.{digits}f}")
    return text if text.startswith("−") else f"+{text}"


def with_deviation(value: Measured, digits: int) -> str:
    """A mean, with its standard deviation if there is one."""
    spread = "" if value.deviation is None else f" ± {value.deviation:.{digits}f}"
    return f"{minus(f'{value.mean:.{digits}f}')}{spread}"


def means(values: Sequence[Measured], digits: int = 1) -> str:
    """The means, separated by commas: `63.4, 66.5, 69.5`."""
    return ", ".join(f"{value.mean:.{digits}f}" for value in values)


def listed(values: Mapping[str, float], unit: str = " %", digits: int = 2) -> str:
    """Numbers by name: `latest 12.30 %, product 1.20 %`."""
    return ", ".join(f"{name} {value:.{digits}f}{unit}" for name, value in values.items())


def at_most(ours: Sequence[Measured], others: Sequence[Measured]) -> bool:
    """Whether the mean is at most the other's at every point."""
    return all(mine.mean <= theirs.mean for mine, theirs in zip(ours, others, strict=True))

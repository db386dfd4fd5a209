"""Scales of a chart: the position of a value between 0 and 1, and the values that get a tick."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from anytime.display.numbers import compact


class Scale(Protocol):
    """Maps values to positions."""

    def at(self, value: float) -> float:
        """The position of `value`: 0 at the low end, 1 at the high end."""

    def ticks(self) -> tuple[float, ...]:
        """The values with a tick, from low to high."""

    def text(self, value: float) -> str:
        """The text of a tick."""


@dataclass(frozen=True)
class LinearScale:
    """A linear scale from `low` to `high` with a tick every `step`."""

    low: float
    high: float
    step: float

    def at(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> tuple[float, ...]:
        first = math.ceil(self.low / self.step - 1e-9)
        last = math.floor(self.high / self.step + 1e-9)
        return tuple(round(index * self.step, 12) for index in range(first, last + 1))

    def text(self, value: float) -> str:
        digits = next((digits for digits in range(9) if math.isclose(self.step, round(self.step, digits), rel_tol=1e-9)), 9)
        text = compact(value, digits=digits if value else 0)
        return compact(value) if len(text) > 4 and float(value).is_integer() else text  # 100.0 would not fit


def linear(values: Iterable[float], *, zero: bool = False, low: float = -math.inf, high: float = math.inf) -> LinearScale:
    """A linear scale with round ends around `values`; if none is negative, it does not start below zero.

    Args:
        values: The values to contain; without any, the scale goes from 0 to 1.
        zero: Whether the scale starts at zero.
        low: The scale never goes below this, such as 0 for a fraction.
        high: The scale never goes above this, such as 100 for a percentage.

    Example:
        >>> linear([65.3, 72.8, 75.8], high=100).ticks()
        (64.0, 66.0, 68.0, 70.0, 72.0, 74.0, 76.0)
    """
    found = [value for value in values if math.isfinite(value)]
    least, most = (min(found), max(found)) if found else (0.0, 1.0)
    if zero:
        least, most = min(least, 0.0), max(most, 0.0)
    if least >= 0:
        low = max(low, 0.0)
    if most - least < 1e-9 * max(1.0, abs(most)):
        margin = abs(most) / 10 if abs(most) > 1e-9 else 1.0
        least, most = max(least if zero else least - margin, low), min(most + margin, high)
    step = nice_step(most - least)
    floor, ceiling = math.floor(least / step + 1e-9) * step, math.ceil(most / step - 1e-9) * step
    return LinearScale(max(round(floor, 12), low), min(round(ceiling, 12), high), step)


def nice_step(span: float, *, count: int = 4) -> float:
    """The step of 1, 2 or 5 times a power of ten that divides `span` into about `count` parts."""
    rough = span / count
    size = 10.0 ** math.floor(math.log10(rough))
    return min((size, 2 * size, 5 * size, 10 * size), key=lambda step: abs(math.log(step / rough)))


@dataclass(frozen=True)
class SymlogScale:
    """Linear from 0 to `threshold`, logarithmic from there to `high`: shows both zero and a tenth of a percent."""

    threshold: float
    high: float

    _LINEAR = 0.7  # the width of the linear part, in decades

    def at(self, value: float) -> float:
        return self._decades(max(value, 0.0)) / self._decades(self.high)

    def _decades(self, value: float) -> float:
        if value <= self.threshold:
            return self._LINEAR * value / self.threshold
        return self._LINEAR + math.log10(value / self.threshold)

    def ticks(self) -> tuple[float, ...]:
        decades = round(math.log10(self.high / self.threshold))
        return (0.0, *(round(self.threshold * 10**decade, 12) for decade in range(decades + 1)))

    def text(self, value: float) -> str:
        return f"{value:g}"


def symlog(values: Iterable[float], *, least: float = 0.01, most: float = 100.0) -> SymlogScale:
    """A symlog scale whose logarithmic part starts at the smallest positive value, but not below `least`.

    Args:
        values: The values to contain.
        least: The lowest end of the linear part.
        most: The scale never goes above this; a power of ten.

    Example:
        >>> symlog([0, 0.3, 66]).ticks()
        (0.0, 0.1, 1.0, 10.0, 100.0)
    """
    found = [value for value in values if math.isfinite(value) and value > 0]
    smallest, largest = (max(min(found), least), max(found)) if found else (0.1, 1.0)
    low = math.floor(min(math.log10(smallest), math.log10(most) - 2) + 1e-9)
    high = max(math.ceil(math.log10(min(largest, most)) - 1e-9), low + 1)
    return SymlogScale(10.0**low, 10.0**high)

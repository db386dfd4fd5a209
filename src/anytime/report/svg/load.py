"""The chart of correct answers over the load, as `anytime bench` and `benchmarks/load.py` draw it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from anytime.display.chart import Axis, Chart, Series, look
from anytime.display.scale import linear


@dataclass(frozen=True)
class LogScale:
    """A logarithmic scale with a tick at each of some values."""

    values: tuple[float, ...]

    def at(self, value: float) -> float:
        low, high = math.log(min(self.values)), math.log(max(self.values))
        return (math.log(value) - low) / (high - low) if value > 0 and high > low else 0.5 * (high <= low)

    def ticks(self) -> tuple[float, ...]:
        return self.values

    def text(self, value: float) -> str:
        return f"{value:g}"


def load_chart(loads: Sequence[float], lines: Mapping[str, Sequence[float]]) -> Chart:
    """A chart of percentages over loads in percent of a plain server's capacity.

    Args:
        loads: The loads.
        lines: The percentages of each line by its name.
    """
    x = tuple(sorted(loads))
    order = sorted(range(len(loads)), key=lambda index: loads[index])
    series = []
    for index, (name, found) in enumerate(lines.items()):
        y = tuple(found[at] for at in order)
        tips = tuple(f"{name}, load {load:g} %: {value:.1f} %" for load, value in zip(x, y, strict=True))
        series.append(Series(name, x, y, look(index), tips))
    ends = ", ".join(f"{one.name} {one.y[-1]:.0f} %" for one in series)
    axis = Axis("load, % of a plain server's capacity", LogScale(x))
    return Chart(
        f"Correct answers in time over the load; at {x[-1]:g} %: {ends}",
        axis,
        Axis("correct in time, % of all requests", linear([y for found in lines.values() for y in found], zero=True, high=100)),
        tuple(series),
    )

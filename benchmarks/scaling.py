"""How time and memory of `anytime.evaluate` grow with rows, classes and exits, beside the plain implementation.

    python benchmarks/scaling.py                                    about three minutes, 2 GB on disk, 6 GB of memory
    python benchmarks/scaling.py --picture docs/pictures/scaling.svg
    python benchmarks/scaling.py --quick --axes exits               a quick look

Logits, rival and memory are those of `benchmarks/evaluate.py`: each point is a memory-mapped float32 file, evaluated in a
process of its own by the engine that `anytime.evaluate` chooses. One size grows at a time: rows with 5 exits and 10 classes,
classes with 5 exits and 2,000 rows, exits with 2,000 rows and 1,000 classes. The rival stops growing after a size that takes it
more than `--plain-seconds` of CPU.

A slope is that of the logarithm over the logarithm of the size, fitted to the larger half of the points: 1 is linear. Read the
slope of CPU seconds: they hardly depend on what else the machine is doing. Sizes that do not fit the disk or the memory are
left out.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anytime.artifacts import write_text
from anytime.display.chart import Axis, Chart, Guide, Series, look
from anytime.display.numbers import ABSENT, compact, number
from anytime.report.svg.chart import stacked
from anytime.report.svg.load import LogScale
from evaluate import in_own_process, ours, plain, write_logits

Found = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """One size that grows, `name`, while the others stay.

    Args:
        name: `rows`, `classes` or `exits`.
        sizes: Its values, from small to large.
        quick: The values for a quick look.
        fixed: The other sizes.
    """

    name: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    fixed: dict[str, int]

    @property
    def title(self) -> str:
        return ", ".join(f"{value:,} {name}" for name, value in self.fixed.items())

    def shape(self, size: int) -> tuple[int, int, int]:
        """Exits, rows and classes."""
        given = {**self.fixed, self.name: size}
        return given["exits"], given["rows"], given["classes"]


SWEEPS = (
    Sweep("rows", (10_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000), (1000, 10_000), {"exits": 5, "classes": 10}),
    Sweep("classes", (10, 100, 300, 1000, 3000, 10_000, 20_000), (10, 1000), {"exits": 5, "rows": 2000}),
    Sweep("exits", (2, 4, 8, 16, 32, 48), (2, 8), {"rows": 2000, "classes": 1000}),
)


@dataclass(frozen=True)
class Points:
    """What one side measured: `found[i]` at `sizes[i]`."""

    sizes: list[int]
    found: list[Found]

    def of(self, quantity: str) -> list[float]:
        return [found[quantity] for found in self.found]

    def slope(self, quantity: str) -> float | None:
        return slope(self.sizes, self.of(quantity))


def slope(sizes: Sequence[float], values: Sequence[float]) -> float | None:
    """The slope of log(value) over log(size), fitted to the larger half of the points; None with fewer than two."""
    if len(sizes) < 2 or min(values) <= 0:
        return None
    half = slice(-max(2, (len(sizes) + 1) // 2), None)
    return float(np.polyfit(np.log(sizes[half]), np.log(values[half]), 1)[0])


def measure(sweep: Sweep, sizes: Sequence[int], plain_seconds: float) -> tuple[Points, Points]:
    """Both sides at each size, the rival until it takes too long."""
    mine, theirs = Points([], []), Points([], [])
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            why = too_large(sweep, size, mine, folder)
            if why:
                print(f"{size:,} {sweep.name} left out: {why}")
                break
            path = Path(folder) / "logits.npy"
            write_logits(path, *sweep.shape(size))
            add(mine, size, ours, path)
            if not theirs.found or theirs.found[-1]["cpu"] <= plain_seconds:
                add(theirs, size, plain, path)
    return mine, theirs


def add(points: Points, size: int, work: Callable[[Path], Found], path: Path) -> None:
    found = in_own_process(work, path)
    points.sizes.append(size)
    points.found.append({name: found[name] for name in ("seconds", "cpu", "peak")})


def too_large(sweep: Sweep, size: int, mine: Points, folder: str) -> str:
    """Why a size cannot be measured here; empty if it can."""
    if math.prod(sweep.shape(size)) * 4 * 1.1 > shutil.disk_usage(folder).free:
        return "the disk is too full"
    expected = mine.found[-1]["peak"] * size / mine.sizes[-1] if mine.found else 0.0
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return "too little memory" if expected > 0.8 * int(meminfo["MemAvailable"].split()[0]) / 1024 else ""


def table(sweep: Sweep, mine: Points, theirs: Points) -> str:
    """The numbers in Markdown, with the slopes in the last row."""
    heads = ("CPU s", "s", "MiB", "plain: CPU s", "plain: MiB", "CPU ratio")
    lines = [f"| {sweep.name} | {' | '.join(heads)} |", f"|{' ---: |' * (len(heads) + 1)}"]
    for index, size in enumerate(mine.sizes):
        own = mine.found[index]
        cells = [number(own["cpu"]), number(own["seconds"]), f"{own['peak']:,.0f}"]
        if index < len(theirs.found):
            rival = theirs.found[index]
            cells += [number(rival["cpu"]), f"{rival['peak']:,.0f}", f"{rival['cpu'] / own['cpu']:.1f}"]
        else:
            cells += [ABSENT] * 3
        lines.append(f"| {size:,} | {' | '.join(cells)} |")
    pairs = ((mine, "cpu"), (mine, "seconds"), (mine, "peak"), (theirs, "cpu"), (theirs, "peak"))
    slopes = [points.slope(quantity) for points, quantity in pairs]
    shown = [ABSENT if value is None else f"{value:.2f}" for value in slopes]
    return "\n".join([*lines, f"| slope | {' | '.join(shown)} | |"])


def chart(sweep: Sweep, mine: Points, theirs: Points, quantity: str, unit: str) -> Chart:
    """Both sides on logarithmic scales, with a line of slope 1 through our last point."""
    least = 1.0 if quantity == "peak" else 1e-3

    def line(name: str, points: Points, index: int) -> Series:
        values = [max(value, least) for value in points.of(quantity)]
        pairs = list(zip(points.sizes, values, strict=True))
        tips = tuple(f"{name}, {size:,} {sweep.name}: {number(value)} {unit}" for size, value in pairs)
        return Series(name, tuple(map(float, points.sizes)), tuple(values), look(index), tips)

    series = (line("anytime.evaluate", mine, 2), line("plain implementation", theirs, 1))
    values = [y for one in series for _, _, y in one.points()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    x, y = LogScale(tuple(map(float, mine.sizes))), LogScale(tuple(10.0**power for power in range(low, max(high, low + 1) + 1)))
    end, last = series[0].x[-1], max(mine.of(quantity)[-1], least)
    begin = max(series[0].x[0], end * y.values[0] / last)
    found = ", ".join(f"{one.name} {number(one.y[-1])} {unit} at {one.x[-1]:,.0f}" for one in series)
    return Chart(
        f"{unit} over the number of {sweep.name}: {found}",
        Axis(f"{sweep.name} ({sweep.title})", x, tuple((value, tick(value)) for value in x.values)),
        Axis(unit, y, tuple((value, tick(value)) for value in y.values)),
        series,
        (Guide((begin, last * begin / end), (end, last), "linear"),),
    )


def tick(value: float) -> str:
    return compact(value) if value >= 1e4 else f"{value:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [sweep.name for sweep in SWEEPS]
    parser.add_argument("--axes", nargs="+", choices=names, default=names, help="what grows")
    parser.add_argument("--quick", action="store_true", help="two small sizes each")
    parser.add_argument("--plain-seconds", type=float, default=3.0, help="CPU seconds of a size after which the rival stops")
    parser.add_argument("--picture", type=Path, help="where to draw the charts, an SVG file")
    options = parser.parse_args()
    print(f"anytime.evaluate; {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    charts = []
    for sweep in SWEEPS:
        if sweep.name not in options.axes:
            continue
        mine, theirs = measure(sweep, sweep.quick if options.quick else sweep.sizes, options.plain_seconds)
        if not mine.found:
            continue
        print(f"\n{sweep.name.capitalize()}, with {sweep.title}:\n\n{table(sweep, mine, theirs)}", flush=True)
        for quantity, unit, title in (("cpu", "CPU seconds", "Time"), ("peak", "MiB beyond the file", "Memory")):
            charts.append((f"{title} over {sweep.name}", chart(sweep, mine, theirs, quantity, unit)))
    if options.picture and charts:
        write_text(options.picture, stacked(charts))


if __name__ == "__main__":
    main()

"""The figures and tables of a profile: the time to each exit of a model on this hardware, and the MACs of each exit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anytime.display.chart import Axis, Chart, Look, Series
from anytime.display.figure import Figure, exit_axis
from anytime.display.numbers import ABSENT, compact, number, plural
from anytime.display.scale import linear
from anytime.display.table import Table

if TYPE_CHECKING:
    from anytime.run.timing.profile import Profile

MEDIAN, SLOW, COSTS = Look("s0", "circle"), Look("s2", "diamond"), Look("s4", "square")
LEGEND = ((MEDIAN, "half of the runs (p50)"), (SLOW, "99 of 100 runs (p99)"))


def profile_figures(profile: Profile) -> list[Figure]:
    """The time to each exit for every batch size, and the MACs if they are known."""
    figures = [time_figure(profile, batch) for batch in profile.batch_sizes]
    return figures if profile.macs is None else [figures[0], _cost_figure(profile, profile.macs), *figures[1:]]


def exit_table(profile: Profile) -> Table:
    """One row per exit: MACs, and p50 and p99 for every batch size."""
    columns = [times for batch in profile.batch_sizes for times in milliseconds(profile, batch)]
    costs = [ABSENT] * profile.exits if profile.macs is None else [compact(cost) for cost in profile.macs]
    rows = [(str(exit + 1), costs[exit], *(number(column[exit]) for column in columns)) for exit in range(profile.exits)]
    return Table("Milliseconds from the start to each exit", ("exit", "MACs", *_levels(profile)), tuple(rows))


def stage_table(profile: Profile) -> Table:
    """One row per stage: the time of the stage alone."""
    rows = [
        (
            str(stage + 1),
            *(
                number(1e3 * level)
                for stages in profile.stage_seconds.tolist()
                for level in (stages[stage][0], stages[stage][2])
            ),
        )
        for stage in range(profile.exits)
    ]
    return Table("Milliseconds of each stage alone, from which the runner forecasts", ("stage", *_levels(profile)), tuple(rows))


def _levels(profile: Profile) -> list[str]:
    return [f"{level}, batch {batch}" for batch in profile.batch_sizes for level in ("p50", "p99")]


def milliseconds(profile: Profile, batch: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The p50 and the p99 of the time to each exit."""
    median, slow = (tuple(1e3 * time for time in profile.seconds(batch, quantile=level)) for level in (0.5, 0.99))
    return median, slow


def time_figure(profile: Profile, batch: int) -> Figure:
    """The median and the slow time to each exit, for one batch size."""
    exits = tuple(float(exit + 1) for exit in range(profile.exits))
    median, slow = milliseconds(profile, batch)
    tips = [
        tuple(f"exit {exit + 1}: {words} within {time:.3g} ms" for exit, time in enumerate(times))
        for times, (_, words) in zip((median, slow), LEGEND, strict=True)
    ]
    series = (Series("p99", exits, slow, SLOW, tips[1]), Series("p50", exits, median, MEDIAN, tips[0]))
    inputs = plural(batch, "input")
    to_last = f"half of the runs take {number(median[-1])} ms to the last, 99 of 100 at most {number(slow[-1])} ms"
    chart = Chart(
        f"Time to each exit for {inputs}: {to_last}",
        exit_axis(profile.exits),
        Axis("ms from the start", linear([*median, *slow], zero=True)),
        series,
    )
    reading = "Lower is faster. The narrower the band, the more reliable a deadline."
    title = f"Time to each exit, batch of {inputs}"
    return Figure(f"time-{batch}", "time", title, reading, chart)


def _cost_figure(profile: Profile, costs: Sequence[float]) -> Figure:
    exits = tuple(float(exit + 1) for exit in range(profile.exits))
    tips = tuple(f"exit {exit + 1}: {compact(cost)}" for exit, cost in enumerate(costs))
    summary = f"Multiply-accumulates up to each exit, from {compact(costs[0])} to {compact(costs[-1])}"
    axis = Axis("MACs per input", linear(costs, zero=True))
    chart = Chart(summary, exit_axis(profile.exits), axis, (Series("MACs", exits, tuple(costs), COSTS, tips),))
    reading = "Multiply-accumulates per input up to each exit; they do not depend on the hardware."
    return Figure("costs", "time", "MACs of each exit", reading, chart)

"""The page of a profile: the time to each exit of a model on this hardware, and the MACs of each exit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anytime.artifacts import json_text, write_bundle
from anytime.report.numbers import ABSENT, compact, number, plural
from anytime.report.pages.figure import Figure, Table, exit_axis
from anytime.report.pages.template import render_page
from anytime.report.svg.chart import Axis, Chart, Look, Series, draw, path, place, swatch
from anytime.report.svg.scale import linear

if TYPE_CHECKING:
    from anytime.run.profile import Profile

MEDIAN, SLOW, COSTS = Look("s0", "circle"), Look("s2", "diamond"), Look("s4", "square")
_LEGEND = ((MEDIAN, "half of the runs (p50)"), (SLOW, "99 of 100 runs (p99)"))


def write_profile(folder: str | Path, profile: Profile, *, name: str, notes: Sequence[str] = ()) -> Path:
    """Write `profile.json`, which `Runner(profile=...)` reads, and `profile.html`; returns the path of the latter.

    Args:
        folder: The folder; created if it does not exist.
        profile: The profile.
        name: The name of the model.
        notes: Further notes for the reader.
    """
    page = render_profile(profile, name=name, notes=notes)
    write_bundle(
        folder,
        {"profile.json": json_text(profile.document()).encode(), "profile.html": page.encode(errors="replace")},
        kind="profile",
    )
    return Path(folder) / "profile.html"


def render_profile(profile: Profile, *, name: str, notes: Sequence[str] = ()) -> str:
    """Render a profile as one HTML document; the same profile gives the same bytes. Arguments as for `write_profile`."""
    busy = load_note(profile)
    return render_page(
        "profile.html.j2",
        name=name,
        facts=[plural(profile.exits, "exit"), f"{number(profile.classes or 0)} classes", f"engine {profile.engine}"],
        batch=plural(profile.batch_sizes[0], "input"),
        repeats=number(profile.repeats),
        headline=headline(profile),
        lead=_lead(profile),
        notes=[*notes, *([busy] if busy else [])],
        legend=[(swatch(look), words) for look, words in _LEGEND],
        drawn=[(figure, _with_band(figure)) for figure in profile_figures(profile)],
        exits=exit_table(profile),
        stages=stage_table(profile),
        machine=machine(profile),
    )


def headline(profile: Profile) -> str:
    """The time to the first and to the last exit in one sentence, for the smallest batch."""
    times, _ = _milliseconds(profile, profile.batch_sizes[0])
    if profile.exits == 1:
        return f"The only exit after {number(times[0])} ms"
    return f"First exit after {number(times[0])} ms, all {profile.exits} after {number(times[-1])} ms"


def load_note(profile: Profile) -> str | None:
    """A warning if other processes used the machine during the measurement."""
    load, cores = profile.machine.get("load"), profile.machine.get("cores")
    if not isinstance(load, int | float) or not isinstance(cores, int) or load <= 0.5 * cores:
        return None
    return f"The machine was busy: load {load:.1f} on {plural(cores, 'core')}. On an idle machine these times are shorter."


def machine(profile: Profile) -> list[tuple[str, str]]:
    """The hardware and software of the measurement, as pairs of a name and a value."""
    known = {**profile.machine, "threads": profile.threads}
    load = known.get("load")
    known["load"] = None if load is None else f"{load:.2f}"
    names = {"load": "load average", "gpu": "GPU"}
    return [(names.get(name, name), str(value)) for name, value in known.items() if value is not None]


def profile_figures(profile: Profile) -> list[Figure]:
    """The time to each exit for every batch size, and the MACs if they are known."""
    figures = [_time_figure(profile, batch) for batch in profile.batch_sizes]
    return figures if profile.macs is None else [figures[0], _cost_figure(profile, profile.macs), *figures[1:]]


def exit_table(profile: Profile) -> Table:
    """One row per exit: MACs, and p50 and p99 for every batch size."""
    columns = [times for batch in profile.batch_sizes for times in _milliseconds(profile, batch)]
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


def _milliseconds(profile: Profile, batch: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The p50 and the p99 of the time to each exit."""
    median, slow = (tuple(1e3 * time for time in profile.seconds(batch, share=level)) for level in (0.5, 0.99))
    return median, slow


def _time_figure(profile: Profile, batch: int) -> Figure:
    exits = tuple(float(exit + 1) for exit in range(profile.exits))
    median, slow = _milliseconds(profile, batch)
    tips = [
        tuple(f"exit {exit + 1}: {words} within {time:.3g} ms" for exit, time in enumerate(times))
        for times, (_, words) in zip((median, slow), _LEGEND, strict=True)
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


def _with_band(figure: Figure) -> str:
    """The chart, with the area between its two lines filled if it has two."""
    if len(figure.chart.series) < 2:
        return draw(figure.chart)
    slow, median = ([place(figure.chart, x, y) for _, x, y in series.points()] for series in figure.chart.series)
    around = path([*slow, *reversed(median)])
    # Without pointer events, so that the points below it still show their tooltips.
    return draw(figure.chart, over=f'<g class="{SLOW.css}" pointer-events="none"><path class="bar few" d="{around}z"/></g>')


def _lead(profile: Profile) -> str:
    _, times = _milliseconds(profile, profile.batch_sizes[0])
    to_last = "" if profile.exits == 1 else f" and {number(times[-1])} ms"
    return f"In 99 of 100 runs it was at most {number(times[0])} ms{to_last}."

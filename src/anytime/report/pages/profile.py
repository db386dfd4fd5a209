"""The page of a profile: the time to each exit of a model on this hardware, and the MACs of each exit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anytime.artifacts import json_text, write_bundle
from anytime.display.figure import Figure
from anytime.display.numbers import number, plural
from anytime.report.pages.template import render_page
from anytime.report.svg.chart import draw, path, place, swatch
from anytime.run.timing.profile_figures import LEGEND, SLOW, exit_table, milliseconds, profile_figures, stage_table

if TYPE_CHECKING:
    from anytime.run.timing.profile import Profile


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
        legend=[(swatch(look), words) for look, words in LEGEND],
        drawn=[(figure, _with_band(figure)) for figure in profile_figures(profile)],
        exits=exit_table(profile),
        stages=stage_table(profile),
        machine=machine(profile),
    )


def headline(profile: Profile) -> str:
    """The time to the first and to the last exit in one sentence, for the smallest batch."""
    times, _ = milliseconds(profile, profile.batch_sizes[0])
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


def _with_band(figure: Figure) -> str:
    """The chart, with the area between its two lines filled if it has two."""
    if len(figure.chart.series) < 2:
        return draw(figure.chart)
    slow, median = ([place(figure.chart, x, y) for _, x, y in series.points()] for series in figure.chart.series)
    around = path([*slow, *reversed(median)])
    # Without pointer events, so that the points below it still show their tooltips.
    return draw(figure.chart, over=f'<g class="{SLOW.css}" pointer-events="none"><path class="bar few" d="{around}z"/></g>')


def _lead(profile: Profile) -> str:
    _, times = milliseconds(profile, profile.batch_sizes[0])
    to_last = "" if profile.exits == 1 else f" and {number(times[-1])} ms"
    return f"In 99 of 100 runs it was at most {number(times[0])} ms{to_last}."

"""The picture of a profile: how long a model takes to each exit on a machine, and what each exit costs.

One HTML file that needs nothing else and runs no script; it follows the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anytime.artifacts import json_text, write_bundle
from anytime.report.numbers import ABSENT, compact, number, plural
from anytime.report.pages.figures import Figure, Table, exit_axis
from anytime.report.svg.chart import Axis, Chart, Look, Series, draw, path, place, style_sheet, swatch, template_text
from anytime.report.svg.scale import linear

if TYPE_CHECKING:
    from anytime.run.timing.profile import Profile

MEDIAN, SLOW, COSTS = Look("s0", "circle"), Look("s2", "diamond"), Look("s4", "square")
_LEGEND = ((MEDIAN, "half of the runs (p50)"), (SLOW, "99 of 100 runs (p99)"))


def write_profile(folder: str | Path, profile: Profile, *, name: str, notes: Sequence[str] = ()) -> Path:
    """Write `profile.json`, which `Runner(profile=...)` reads, and `profile.html`; the path of the latter.

    Args:
        folder: Where; made if it is not there.
        profile: What was measured.
        name: What the model is called.
        notes: What a reader should know besides.
    """
    page = render_profile(profile, name=name, notes=notes)
    write_bundle(
        folder,
        {"profile.json": json_text(profile.document()).encode(), "profile.html": page.encode(errors="replace")},
        kind="profile",
    )
    return Path(folder) / "profile.html"


def render_profile(profile: Profile, *, name: str, notes: Sequence[str] = ()) -> str:
    """A profile as one HTML document; the same profile gives the same bytes.

    Args:
        profile: What was measured.
        name: What the model is called.
        notes: What a reader should know besides.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("anytime.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    busy = load_note(profile)
    return environment.get_template("profile.html.j2").render(
        name=name,
        facts=[plural(profile.exits, "exit"), f"{number(profile.classes or 0)} classes", f"engine {profile.engine}"],
        style=style_sheet() + template_text("report.css"),
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
    """The first exit and the last in one sentence, for the smallest batch."""
    times = profile.seconds(profile.batch_sizes[0])
    if profile.exits == 1:
        return f"The only exit after {_ms(times[0])} ms"
    return f"First exit after {_ms(times[0])} ms, all {profile.exits} after {_ms(times[-1])} ms"


def load_note(profile: Profile) -> str | None:
    """A warning where others used the machine."""
    load, cores = profile.machine.get("load"), profile.machine.get("cores")
    if not isinstance(load, int | float) or not isinstance(cores, int) or load <= 0.5 * cores:
        return None
    return f"The machine was busy: load {load:.1f} on {plural(cores, 'core')}. On an idle one these times would be shorter."


def machine(profile: Profile) -> list[tuple[str, str]]:
    """What it was measured on, as pairs of a name and a value."""
    known = {**profile.machine, "threads": profile.threads}
    load = known.get("load")
    known["load"] = None if load is None else f"{load:.2f}"
    names = {"load": "load average", "gpu": "GPU"}
    return [(names.get(name, name), str(value)) for name, value in known.items() if value is not None]


def profile_figures(profile: Profile) -> list[Figure]:
    """The time to each exit for every batch size, and what the exits cost where that is known."""
    figures = [_time_figure(profile, batch) for batch in profile.batch_sizes]
    return figures if profile.macs is None else [figures[0], _cost_figure(profile, profile.macs), *figures[1:]]


def exit_table(profile: Profile) -> Table:
    """A row an exit: cost, and p50 and p99 for every batch size."""
    heads = [f"{level}, batch {batch}" for batch in profile.batch_sizes for level in ("p50", "p99")]
    columns = [profile.seconds(batch, share=share) for batch in profile.batch_sizes for share in (0.5, 0.99)]
    costs = [ABSENT] * profile.exits if profile.macs is None else [compact(cost) for cost in profile.macs]
    rows = [(str(exit + 1), costs[exit], *(_ms(column[exit]) for column in columns)) for exit in range(profile.exits)]
    return Table("Milliseconds from the start to each exit", ("exit", "MACs", *heads), tuple(rows))


def stage_table(profile: Profile) -> Table:
    """A row a stage: what it takes by itself."""
    heads = [f"{level}, batch {batch}" for batch in profile.batch_sizes for level in ("p50", "p99")]
    rows = [
        (
            str(exit + 1),
            *(_ms(level) for stages in profile.stage_seconds.tolist() for level in (stages[exit][0], stages[exit][2])),
        )
        for exit in range(profile.exits)
    ]
    return Table("Milliseconds of each stage by itself, which the runner forecasts from", ("stage", *heads), tuple(rows))


def _time_figure(profile: Profile, batch: int) -> Figure:
    exits = tuple(float(exit + 1) for exit in range(profile.exits))
    middle, slow = (tuple(1e3 * time for time in profile.seconds(batch, share=share)) for share in (0.5, 0.99))
    tips = [
        tuple(f"exit {exit + 1}: {words} within {time:.3g} ms" for exit, time in enumerate(times))
        for times, (_, words) in zip((middle, slow), _LEGEND, strict=True)
    ]
    series = (Series("p99", exits, slow, SLOW, tips[1]), Series("p50", exits, middle, MEDIAN, tips[0]))
    inputs = plural(batch, "input")
    to_last = f"half of the runs take {number(middle[-1])} ms to the last, 99 of 100 at most {number(slow[-1])} ms"
    chart = Chart(
        f"Time to each exit for {inputs}: {to_last}",
        exit_axis(profile.exits),
        Axis("ms from the start", linear([*middle, *slow], zero=True)),
        series,
    )
    rows = tuple((str(int(exit)), number(low), number(high)) for exit, low, high in zip(exits, middle, slow, strict=True))
    reading = "Lower is quicker. The narrower the band, the surer a deadline."
    title = f"Time to each exit, {inputs} at once" if batch > 1 else f"Time to each exit, {inputs}"
    return Figure(f"time-{batch}", "time", title, reading, chart, Table(title, ("exit", "p50, ms", "p99, ms"), rows))


def _cost_figure(profile: Profile, costs: Sequence[float]) -> Figure:
    exits = tuple(float(exit + 1) for exit in range(profile.exits))
    tips = tuple(f"exit {exit + 1}: {compact(cost)}" for exit, cost in enumerate(costs))
    summary = f"Multiply-accumulates up to each exit, from {compact(costs[0])} to {compact(costs[-1])}"
    axis = Axis("MACs for one input", linear(costs, zero=True))
    chart = Chart(summary, exit_axis(profile.exits), axis, (Series("MACs", exits, tuple(costs), COSTS, tips),))
    rows = tuple((str(exit + 1), number(cost)) for exit, cost in enumerate(costs))
    reading = "Multiply-accumulates for one input up to each exit, the same on every machine."
    return Figure("costs", "time", "Cost of each exit", reading, chart, Table("Cost of each exit", ("exit", "MACs"), rows))


def _with_band(figure: Figure) -> str:
    """The chart, with the room between its two lines filled where it has two."""
    if len(figure.chart.series) < 2:
        return draw(figure.chart)
    slow, middle = ([place(figure.chart, x, y) for _, x, y in series.points()] for series in figure.chart.series)
    around = path([*slow, *reversed(middle)])
    # The points below it must still be reached by a pointer.
    return draw(figure.chart, over=f'<g class="{SLOW.css}" pointer-events="none"><path class="bar few" d="{around}z"/></g>')


def _lead(profile: Profile) -> str:
    times = profile.seconds(profile.batch_sizes[0], share=0.99)
    to_last = "" if profile.exits == 1 else f" and {_ms(times[-1])} ms"
    return f"In 99 of 100 runs it was at most {_ms(times[0])} ms{to_last}."


def _ms(seconds: float) -> str:
    """Milliseconds with three digits.

    >>> _ms(0.0005213), _ms(0.01234), _ms(1.2345)
    ('0.521', '12.3', '1,234')
    """
    return number(1e3 * seconds)

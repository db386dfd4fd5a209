"""`anytime reproduce NAME`: a figure or table of the paper on trained networks, beside the paper's own numbers.

The studies stand in `anytime.reproduce`; here they are called, drawn in the report's style, printed and written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from anytime.errors import AnytimeError, MissingFileError, MissingRunError, OptionError
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytime.report.svg.chart import Axis, Chart, Look, Series
    from anytime.report.svg.scale import Scale
    from anytime.reproduce import Band, Field, Finding, Line, Panel, Study
    from anytime.reproduce.runs import Runs

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]

_COLUMNS = 3
_GAP, _TITLE, _HEAD, _LEGEND_LINE = 12.0, 24.0, 44.0, 20.0
_STYLE = (
    ".chart .panel{font-size:13px}.faint{opacity:.28}.area{fill:var(--ink);fill-opacity:.2}"
    ".cross{fill:none;stroke:var(--ink);stroke-width:2}"
)


def reproduce(
    name: str,
    /,
    *,
    runs: Path | None = None,
    scale: Literal["smoke", "small", "full"] = "full",
    out: Path | None = None,
    page: Path | None = None,
    images: Path | None = None,
    json: Flag = False,
) -> int:
    """Make a figure or table of the paper again, and hold it against the paper's.

    Args:
        name: A study, `all` of them, or `list`.
        runs: Folder with trained runs, such as results/ of the repository; by default ./results for the full scale.
        scale: `smoke` needs no runs and takes seconds, `small` trains on digits what is missing, `full` is the paper's.
        out: Folder for finding.json and picture.svg, one folder a study.
        page: Markdown file that puts all findings beside the paper; pictures go to a folder `pictures/reproduction` beside it.
        images: Folder with CIFAR, for the figures that logits do not suffice for.
        json: Print one JSON document instead of tables.
    """
    from anytime.reproduce import CATALOGUE, find

    if name == "list":
        return list_studies(json=json)
    studies = list(CATALOGUE) if name == "all" else [find(name)]
    check_paths(page, images)
    check_outputs(studies, out, page, inputs=(runs or Path("results"), images))
    at_hand = open_runs(runs, scale)
    findings: list[Finding] = []
    without_runs: list[tuple[Study, MissingRunError]] = []
    failures: list[tuple[Study, AnytimeError]] = []
    for study in studies:
        if len(studies) > 1:
            print(f"{study.name} ...", file=sys.stderr)
        try:
            findings.append(study.run(at_hand, scale=scale, images=images))
        except MissingRunError as error:
            without_runs.append((study, error))
            continue
        except AnytimeError as error:
            failures.append((study, error))
            continue
        if out is not None:
            write(out / study.name, findings[-1])
        if not json:
            print_finding(findings[-1])
    if json and (findings or name == "all"):
        import json as writer

        documents = [found.to_json() for found in findings]
        print(writer.dumps(documents if name == "all" else documents[0], allow_nan=False))
    if page is not None:
        command = f"anytime reproduce {name} --scale {scale}{' --images FOLDER' if images else ''} --page FILE"
        write_page(page, findings, [study for study, _ in (*without_runs, *failures)], command=command)
    for study, why in (*without_runs, *failures):
        print(f"anytime: {study.name} could not be made: {why}", file=sys.stderr)
    # Of all studies, those whose networks nobody has trained yet are left out; one that was asked for is an error.
    return 1 if failures or (without_runs and name != "all") else 0


def check_paths(page: Path | None, images: Path | None) -> None:
    """Refuse, before minutes of work, what could not be written or read after it."""
    if page is not None and page.is_dir():
        raise OptionError(f"--page {page} is a folder", expected="a Markdown file", fix=f"give --page {page / 'page.md'}")
    if images is not None and not images.is_dir():
        raise MissingFileError(
            f"there is no folder {images}", expected="a folder with CIFAR", fix="check --images, or leave it out", path=images
        )


def check_outputs(studies: Sequence[Study], out: Path | None, page: Path | None, *, inputs: tuple[Path | None, ...]) -> None:
    """Refuse, before minutes of work, to write over what this command did not write."""
    from anytime.outputs import check_file, check_folder
    from anytime.reproduce.page import HEADING

    if out is not None:
        for study in studies:
            check_folder(out / study.name, kind="reproduce", inputs=inputs)
    if page is not None:
        check_file(page, ours=lambda head: head.startswith(HEADING.encode()), inputs=inputs)
        for study in studies:
            check_file(picture_place(page, study.name), ours=lambda head: b'class="chart"' in head, inputs=inputs)


def picture_place(page: Path, study: str) -> Path:
    """Where the picture of a study goes, beside the page."""
    return page.parent / "pictures" / "reproduction" / f"{study}.svg"


def open_runs(folder: Path | None, scale: Literal["smoke", "small", "full"]) -> Runs:
    """The runs for a scale: those of the folder, and small ones where a scale allows it."""
    from anytime.reproduce.runs import Runs

    if scale == "full":
        return Runs.open(folder or Path("results"))
    from anytime import samples
    from anytime.reproduce.stand_ins import SMALL, SMOKE, from_sample, on_digits

    found = Runs.open(folder) if folder is not None else Runs()
    if scale == "smoke" and folder is None:
        found = Runs((from_sample(samples.cifar100_msdnet()),), "the package")
    return found.with_stand_in(on_digits(SMOKE if scale == "smoke" else SMALL))


def list_studies(*, json: bool) -> int:
    """Print every study with the paper's figure and the runs it needs."""
    from anytime.reproduce import CATALOGUE

    if json:
        import json as writer

        rows = [
            {
                "name": study.name,
                "shows": study.shows,
                "figure": study.figure,
                "needs": [str(need) for need in study.needs],
            }
            for study in CATALOGUE
        ]
        print(writer.dumps(rows))
        return 0
    cells = []
    for study in CATALOGUE:
        runs = ", ".join(map(str, study.needs)) or "none, trains in seconds"
        cells.append((study.name, study.figure, study.shows, runs))
    print_table("", ("study", "in the paper", "shows", "runs"), cells)
    return 0


def print_finding(found: Finding) -> None:
    """Print what was found to stdout: numbers beside the paper's, claims, the note."""
    from anytime.reproduce.words import claim_cells, comparison_cells

    if found.comparisons:
        print_table(f"{found.study}: {found.title} ({found.figure})", *comparison_cells(found))
    else:
        print(f"{found.study}: {found.title} ({found.figure})")
    if found.table:
        print_table("", found.headings, found.table)
    for claim in claim_cells(found):
        print(f"  {claim}")
    print(f"  {found.verdict}. Measured on {found.rows or 'what was trained here'}.\n  {found.note}\n")


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table to stdout."""
    from rich.table import Table

    from anytime.cli.console import make_console

    table = Table(title=title or None, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "default", overflow="fold")
    for row in rows:
        table.add_row(*row)
    make_console().print(table)


def write(folder: Path, found: Finding) -> None:
    """Write a finding and its picture, both or neither."""
    from anytime.artifacts import json_text, write_bundle

    files = {"finding.json": json_text(found.to_json()).encode(), "picture.svg": picture(found).encode()}
    write_bundle(folder, files, kind="reproduce")


def write_page(path: Path, findings: Sequence[Finding], missing: Sequence[Study], *, command: str) -> None:
    """Write the page and its pictures."""
    from anytime.artifacts import write_text
    from anytime.reproduce.page import render

    for found in findings:
        write_text(picture_place(path, found.study), picture(found))
    write_text(path, render(findings, missing, pictures="pictures/reproduction", command=command))


def picture(found: Finding) -> str:
    """All panels of a finding as one SVG file in the style of the report."""
    from html import escape

    from anytime.report.svg.chart import HEIGHT, WIDTH, style_sheet

    columns = max(1, min(2 if len(found.panels) == 4 else _COLUMNS, len(found.panels)))
    step = HEIGHT + _TITLE + 8
    parts = []
    for index, panel in enumerate(found.panels):
        row, column = divmod(index, columns)
        x, y = _GAP + column * (WIDTH + _GAP), _HEAD + row * step
        parts.append(f'<text class="heading panel" x="{x + 4:g}" y="{y + 14:g}">{escape(panel.title)}</text>')
        parts.append(_placed(panel, x, y + _TITLE))
    width = _GAP + columns * (WIDTH + _GAP)
    below = _HEAD - (-len(found.panels) // columns) * step + 14
    legend, lines = _legend(found, width - 40)
    height = below + lines * _LEGEND_LINE
    title = f"{found.study}: {found.title}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(title)}. {escape(found.verdict)}.">'
        f'<style>{style_sheet()}{_STYLE}</style><rect class="paper" width="100%" height="100%" rx="8"/>'
        f'<text class="heading" x="16" y="26">{escape(title)}</text>{"".join(parts)}'
        f'<g transform="translate(20 {below:g})">{legend}</g></svg>\n'
    )


def _placed(panel: Panel | Field, x: float, y: float) -> str:
    from anytime.report.svg.chart import HEIGHT, WIDTH, draw
    from anytime.reproduce import Field

    if isinstance(panel, Field):
        return f'<g transform="translate({x + 8:g} {y:g})">{_cells(panel, HEIGHT - 8)}</g>'
    chart = _chart(panel)
    over = "".join([*(_area(chart, band) for band in panel.bands), *(_marks(chart, line) for line in panel.lines)])
    # A chart inside a picture takes its place from attributes, not from the style of a page.
    inner = f'<svg x="{x:g}" y="{y:g}" width="{WIDTH:g}" height="{HEIGHT:g}"'
    return draw(chart, over=over).replace('<svg class="chart"', inner, 1)


def _chart(panel: Panel) -> Chart:
    from anytime.report.svg.chart import Axis, Chart, Series

    series = tuple(Series(line.name, line.x, line.y, _look(line), spread=line.spread) for line in panel.lines)
    return Chart(panel.title, _x_axis(panel), Axis(panel.y_title, _y_scale(panel, series)), series)


def _x_axis(panel: Panel) -> Axis:
    from dataclasses import replace

    from anytime.report.pages.figure import exit_axis
    from anytime.report.svg.chart import Axis
    from anytime.report.svg.scale import linear

    if panel.exits is not None:
        return replace(exit_axis(panel.exits), title=panel.x_title)
    values = [x for line in panel.lines for x in line.x]
    return Axis(panel.x_title, linear([0.0, *values] if panel.kind == "symlog" else values), panel.x_marks)


def _y_scale(panel: Panel, series: Sequence[Series]) -> Scale:
    from anytime.report.svg.scale import linear, symlog

    if panel.y_range is not None:
        return linear(panel.y_range)
    paper = [y for line in panel.lines for y in line.paper if y is not None]
    if panel.kind == "symlog":  # its points decide where zero ends
        return symlog([*paper, *(y for line in series for _, _, y in line.points())])
    values = [*paper, *(y for line in series for y in line.reach())]
    values += [y for band in panel.bands for y in (*band.low, *band.high) if y is not None]
    return linear(values, zero=panel.zero)


def _look(line: Line) -> Look:
    from anytime.report.svg.chart import Look, look

    known = look(line.look)
    return Look(f"{known.css} faint" if line.faint else known.css, known.marker if line.marks else None)


def _marks(chart: Chart, line: Line) -> str:
    """What lies over a line: the paper's values as crosses."""
    from anytime.report.svg.chart import place

    parts = []
    for x, y in zip(line.x, line.paper, strict=False):
        if y is not None:
            across, down = place(chart, x, y)
            parts.append(f'<path class="cross" d="M{across:.1f},{down:.1f}m-5,-5l10,10m0,-10l-10,10"/>')
    return f'<g class="{_look(line).css}">{"".join(parts)}</g>' if parts else ""


def _area(chart: Chart, band: Band) -> str:
    """The band as closed areas, one for each stretch of x without a gap."""
    from anytime.report.svg.chart import look, path, place

    stretches: list[list[tuple[float, float, float]]] = [[]]
    for x, low, high in zip(band.x, band.low, band.high, strict=True):
        if low is None or high is None:
            stretches.append([])
        else:
            stretches[-1].append((x, low, high))
    closed = []
    for stretch in stretches:
        if len(stretch) > 1:
            there = [place(chart, x, high) for x, _, high in stretch]
            back = [place(chart, x, low) for x, low, _ in reversed(stretch)]
            closed.append(path([*there, *back]) + "Z")
    return f'<g class="{look(band.look).css}"><path class="area" d="{"".join(closed)}"/></g>' if closed else ""


def _cells(field: Field, side: float) -> str:
    """A map in squares; cells that look alike are one path, and neighbours in a row one step of it."""
    from itertools import groupby

    size = side / len(field.cells)
    paths: dict[tuple[int, float], str] = {}
    for row, cells in enumerate(field.cells):
        column = 0
        for kind, alike in groupby(cells):
            count = len(list(alike))
            step = f"M{column * size:.1f},{row * size:.1f}h{count * size:.1f}v{size:.1f}h-{count * size:.1f}z"
            paths[kind] = paths.get(kind, "") + step
            column += count
    drawn = [
        f'<path fill="var(--s{look})" fill-opacity="{strength:g}" d="{steps}"/>'
        for (look, strength), steps in paths.items()
        if strength > 0
    ]
    return f'<g shape-rendering="crispEdges">{"".join(drawn)}</g><rect class="base" width="{side:g}" height="{side:g}"/>'


def _legend(found: Finding, width: float) -> tuple[str, int]:
    """The legend of all panels as SVG, broken into lines by how wide the words may be; and the number of lines."""
    from html import escape

    from anytime.report.svg.chart import MARKERS, look
    from anytime.reproduce import Panel

    panels = [panel for panel in found.panels if isinstance(panel, Panel)]
    entries = {line.name: _look(line) for panel in panels for line in panel.lines if line.name}
    swatches = []
    for name, known in entries.items():
        dot = "" if known.marker is None else f'<path class="dot" d="M15,0{MARKERS[known.marker]}"/>'
        swatches.append((name, f'<g class="{known.css}"><path class="line" d="M1,0H29"/>{dot}</g>'))
    for name, index in {band.name: band.look for panel in panels for band in panel.bands}.items():
        swatches.append((name, f'<g class="{look(index).css}"><path class="area" d="M1,-6H29V6H1Z"/></g>'))
    if any(line.paper for panel in panels for line in panel.lines):
        swatches.append(("the paper", '<g class="s0"><path class="cross" d="M15,0m-5,-5l10,10m0,-10l-10,10"/></g>'))
    parts, x, row = [], 0.0, 0
    for name, drawn in swatches:
        room = 48 + 6.8 * len(name)
        if x and x + room > width:
            x, row = 0.0, row + 1
        text = f'<text x="38" y="4">{escape(name)}</text>'
        parts.append(f'<g transform="translate({x:g} {row * _LEGEND_LINE:g})">{drawn}{text}</g>')
        x += room
    return "".join(parts), row + 1 if swatches else 0

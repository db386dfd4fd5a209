"""Draws the plots of a finding as one SVG file in the style of the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import groupby

from anytime.display.chart import Axis, Chart, Look, Series, look
from anytime.display.figure import exit_axis
from anytime.display.scale import Scale, linear, symlog
from anytime.report.svg.chart import HEIGHT, LEGEND_LINE, MARKERS, WIDTH, draw, path, place, style_sheet
from anytime.reproduce.finding import Finding
from anytime.reproduce.plots import Band, ClassMap, Line, Plot

_COLUMNS = 3
_GAP, _TITLE, _HEAD = 12.0, 24.0, 44.0
_STYLE = (
    ".chart .panel{font-size:13px}.faint{opacity:.28}.area{fill:var(--ink);fill-opacity:.2}"
    ".cross{fill:none;stroke:var(--ink);stroke-width:2}"
)


def draw_finding(found: Finding) -> str:
    """All plots of a finding as one SVG file."""
    columns = max(1, min(2 if len(found.plots) == 4 else _COLUMNS, len(found.plots)))
    step = HEIGHT + _TITLE + 8
    parts = []
    for index, plot in enumerate(found.plots):
        row, column = divmod(index, columns)
        x, y = _GAP + column * (WIDTH + _GAP), _HEAD + row * step
        parts.append(f'<text class="heading panel" x="{x + 4:g}" y="{y + 14:g}">{escape(plot.title)}</text>')
        parts.append(_placed(plot, x, y + _TITLE))
    width = _GAP + columns * (WIDTH + _GAP)
    below = _HEAD - (-len(found.plots) // columns) * step + 14
    legend, lines = _legend(found, width - 40)
    height = below + lines * LEGEND_LINE
    title = f"{found.study}: {found.title}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(title)}. {escape(found.verdict)}.">'
        f'<style>{style_sheet()}{_STYLE}</style><rect class="paper" width="100%" height="100%" rx="8"/>'
        f'<text class="heading" x="16" y="26">{escape(title)}</text>{"".join(parts)}'
        f'<g transform="translate(20 {below:g})">{legend}</g></svg>\n'
    )


def _placed(plot: Plot | ClassMap, x: float, y: float) -> str:
    if isinstance(plot, ClassMap):
        return f'<g transform="translate({x + 8:g} {y:g})">{_cells(plot, HEIGHT - 8)}</g>'
    chart = _chart(plot)
    over = "".join([*(_area(chart, band) for band in plot.bands), *(_crosses(chart, line) for line in plot.lines)])
    return draw(chart, over=over, at=(x, y))


def _chart(plot: Plot) -> Chart:
    series = tuple(Series(line.name, line.x, line.y, _look(line), spread=line.spread) for line in plot.lines)
    return Chart(plot.title, _x_axis(plot), Axis(plot.y_title, _y_scale(plot, series)), series)


def _x_axis(plot: Plot) -> Axis:
    if plot.exits is not None:
        return replace(exit_axis(plot.exits), title=plot.x_title)
    values = [x for line in plot.lines for x in line.x]
    return Axis(plot.x_title, linear([0.0, *values] if plot.kind == "symlog" else values), plot.x_marks)


def _y_scale(plot: Plot, series: Sequence[Series]) -> Scale:
    if plot.y_range is not None:
        return linear(plot.y_range)
    paper = [y for line in plot.lines for y in line.paper if y is not None]
    if plot.kind == "symlog":  # its points decide where zero ends
        return symlog([*paper, *(y for line in series for _, _, y in line.points())])
    values = [*paper, *(y for line in series for y in line.reach())]
    values += [y for band in plot.bands for y in (*band.low, *band.high) if y is not None]
    return linear(values, zero=plot.zero)


def _look(line: Line) -> Look:
    known = look(line.look)
    return Look(f"{known.css} faint" if line.faint else known.css, known.marker if line.marks else None)


def _crosses(chart: Chart, line: Line) -> str:
    """The paper's values."""
    parts = []
    for x, y in zip(line.x, line.paper, strict=False):
        if y is not None:
            across, down = place(chart, x, y)
            parts.append(f'<path class="cross" d="M{across:.1f},{down:.1f}m-5,-5l10,10m0,-10l-10,10"/>')
    return f'<g class="{_look(line).css}">{"".join(parts)}</g>' if parts else ""


def _area(chart: Chart, band: Band) -> str:
    """The band as closed areas, one per range of x without a gap."""
    parts: list[list[tuple[float, float, float]]] = [[]]
    for x, low, high in zip(band.x, band.low, band.high, strict=True):
        if low is None or high is None:
            parts.append([])
        else:
            parts[-1].append((x, low, high))
    closed = []
    for part in parts:
        if len(part) > 1:
            there = [place(chart, x, high) for x, _, high in part]
            back = [place(chart, x, low) for x, low, _ in reversed(part)]
            closed.append(path([*there, *back]) + "Z")
    return f'<g class="{look(band.look).css}"><path class="area" d="{"".join(closed)}"/></g>' if closed else ""


def _cells(found: ClassMap, side: float) -> str:
    """Equal cells are one path, and equal neighbours in a row one rectangle of it."""
    edges = [round(side * at / len(found.cells), 1) for at in range(len(found.cells) + 1)]
    paths: dict[tuple[int, float], str] = {}
    for row, cells in enumerate(found.cells):
        column = 0
        for kind, alike in groupby(cells):
            count = len(list(alike))
            wide, high = edges[column + count] - edges[column], edges[row + 1] - edges[row]
            step = f"M{edges[column]:g},{edges[row]:g}h{wide:.1f}v{high:.1f}h-{wide:.1f}z"
            paths[kind] = paths.get(kind, "") + step
            column += count
    drawn = [
        f'<path fill="var(--s{look})" fill-opacity="{strength:g}" d="{steps}"/>'
        for (look, strength), steps in paths.items()
        if strength > 0
    ]
    return f'<g shape-rendering="crispEdges">{"".join(drawn)}</g><rect class="base" width="{side:g}" height="{side:g}"/>'


def _legend(found: Finding, width: float) -> tuple[str, int]:
    """The legend of all plots as SVG, wrapped by an estimate of the text width; and the number of lines."""
    plots = [plot for plot in found.plots if isinstance(plot, Plot)]
    entries = {line.name: _look(line) for plot in plots for line in plot.lines if line.name}
    swatches = []
    for name, known in entries.items():
        dot = "" if known.marker is None else f'<path class="dot" d="M15,0{MARKERS[known.marker]}"/>'
        swatches.append((name, f'<g class="{known.css}"><path class="line" d="M1,0H29"/>{dot}</g>'))
    for name, index in {band.name: band.look for plot in plots for band in plot.bands}.items():
        swatches.append((name, f'<g class="{look(index).css}"><path class="area" d="M1,-6H29V6H1Z"/></g>'))
    if any(line.paper for plot in plots for line in plot.lines):
        swatches.append(("the paper", '<g class="s0"><path class="cross" d="M15,0m-5,-5l10,10m0,-10l-10,10"/></g>'))
    parts, x, row = [], 0.0, 0
    for name, drawn in swatches:
        room = 48 + 6.8 * len(name)
        if x and x + room > width:
            x, row = 0.0, row + 1
        text = f'<text x="38" y="4">{escape(name)}</text>'
        parts.append(f'<g transform="translate({x:g} {row * LEGEND_LINE:g})">{drawn}{text}</g>')
        x += room
    return "".join(parts), row + 1 if swatches else 0

"""Line charts as SVG text.

A chart has no colours. Its parts have CSS classes (`line`, `dot`, `grid`, `s0` to `s9` for the series), which
`templates/chart.css` styles for light mode, dark mode and print. `draw` gives an SVG element for a page with that style;
`stacked` gives a file with the style inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from anytime.display.chart import Chart, Guide, Look, Series
from anytime.display.palette import variables

WIDTH, HEIGHT = 440.0, 264.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 30.0, 42.0  # ticks such as 99.58 need the left
INSET = 9.0  # between the frame and the outermost points, so that the axis does not hide a line at zero
LEGEND_LINE = 20.0

MARKERS = {
    "circle": "m-3.9,0a3.9,3.9 0 1 0 7.8,0a3.9,3.9 0 1 0 -7.8,0",
    "square": "m-3.5,-3.5h7v7h-7z",
    "diamond": "m0,-5l5,5 -5,5 -5,-5z",
    "triangle": "m0,-4.8l4.5,7.9h-9z",
    "wedge": "m0,4.8l-4.5,-7.9h9z",
    "plus": "m-1.5,-4.8h3v3.3h3.3v3h-3.3v3.3h-3v-3.3h-3.3v-3h3.3z",
}


def draw(chart: Chart, *, over: str = "", at: tuple[float, float] | None = None) -> str:
    """The chart as an SVG element for a page that has `style_sheet()`.

    Args:
        chart: The chart.
        over: SVG to draw over it.
        at: Its position inside a larger SVG; there the size is fixed, not set by the page's style.
    """
    size = f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}"'
    place = 'class="chart"' if at is None else f'x="{at[0]:g}" y="{at[1]:g}" width="{WIDTH:g}" height="{HEIGHT:g}"'
    return f'<svg {place} {size} role="img" aria-label="{escape(chart.summary)}">{_body(chart)}{over}</svg>'


def stacked(charts: Sequence[tuple[str, Chart]]) -> str:
    """Charts with their titles as one SVG file, one below the other.

    The file has style, background and legends of its own, and follows the reader's light or dark mode.
    """
    parts, top = [], 0.0
    for title, chart in charts:
        legend, lines = _legend(chart)
        height = HEIGHT + 42 + LEGEND_LINE * lines
        parts.append(
            f'<g transform="translate(0 {top:g})" role="img" aria-label="{escape(chart.summary)}">'
            f'<rect class="paper" width="100%" height="{height:g}" rx="8"/>'
            f'<text class="heading" x="14" y="26">{escape(title)}</text>'
            f'<g transform="translate(10 34)">{_body(chart)}</g>'
            f'<g transform="translate(14 {HEIGHT + 46:g})">{legend}</g></g>'
        )
        top += height
    width = WIDTH + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width:g} {top:g}" '
        f'width="{width * 1.5:g}" height="{top * 1.5:g}"><style>{style_sheet()}</style>{"".join(parts)}</svg>\n'
    )


def style_sheet() -> str:
    """The CSS for charts: the colours and the classes."""
    return variables() + template_text("chart.css")


def template_text(name: str) -> str:
    """The text of a file in `templates/`."""
    return resources.files("anytime.report").joinpath("templates", name).read_text(encoding="utf-8")


def swatch(look: Look) -> str:
    """A short line with its marker, for a legend."""
    return f'<svg class="swatch" viewBox="0 0 30 12" aria-hidden="true">{_sample(look, 6)}</svg>'


def _sample(look: Look, y: float) -> str:
    dot = "" if look.marker is None else f'<path class="dot" d="M15,{y:g}{MARKERS[look.marker]}"/>'
    return f'<g class="{look.css}"><path class="line" d="M1,{y:g}H29"/>{dot}</g>'


def sparkline(values: list[float], look: Look, *, summary: str) -> str:
    """A small line over the exits, from 0 to 1, with a dot at its end."""
    width, height, inset = 92.0, 26.0, 4.0
    steps = max(len(values) - 1, 1)
    places = [
        (inset + (width - 2 * inset) * index / steps, height - inset - (height - 2 * inset) * value)
        for index, value in enumerate(values)
    ]
    end = f"M{places[-1][0]:.1f},{places[-1][1]:.1f}m-2.4,0a2.4,2.4 0 1 0 4.8,0a2.4,2.4 0 1 0 -4.8,0"
    return (
        f'<svg class="spark" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(summary)}">'
        f"<title>{escape(summary)}</title>"
        f'<path class="grid" d="M0,{inset:g}H{width:g}M0,{height - inset:g}H{width:g}"/>'
        f'<g class="{look.css}"><path class="line" d="{path(places)}"/><path class="dot" d="{end}"/></g></svg>'
    )


def place(chart: Chart, x: float, y: float) -> tuple[float, float]:
    """The position of a point in the SVG."""
    inner_width = WIDTH - LEFT - RIGHT - 2 * INSET
    inner_height = HEIGHT - TOP - BOTTOM - 2 * INSET
    return (
        LEFT + INSET + inner_width * chart.x.scale.at(x),
        HEIGHT - BOTTOM - INSET - inner_height * chart.y.scale.at(y),
    )


def _body(chart: Chart) -> str:
    guides = "".join(_guide(chart, guide) for guide in chart.guides)
    lines = "".join(_line(chart, series) for series in chart.series)
    dots = "".join(_dots(chart, series) for series in chart.series)
    bars = "".join(_bars(chart, series) for series in chart.series)
    return f"{_frame(chart)}{guides}{lines}{dots}{bars}"


def _frame(chart: Chart) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = [f'<text class="axis" x="4" y="14">{escape(chart.y.title)}</text>']
    parts.append(f'<text class="axis end" x="{right:g}" y="{HEIGHT - 6:g}">{escape(chart.x.title)}</text>')
    for value, text in chart.y.ticks():
        y = place(chart, 0, value)[1]
        parts.append(f'<path class="grid" d="M{LEFT:g},{y:.1f}H{right:g}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 7:g}" y="{y + 4:.1f}">{escape(text)}</text>')
    for value, text in chart.x.ticks():
        x = place(chart, value, 0)[0]
        parts.append(f'<path class="base" d="M{x:.1f},{bottom:g}v4"/>')
        parts.append(f'<text class="tick middle" x="{x:.1f}" y="{bottom + 18:g}">{escape(text)}</text>')
    parts.append(f'<path class="base" d="M{LEFT:g},{bottom:g}H{right:g}"/>')
    return "".join(parts)


def _guide(chart: Chart, guide: Guide) -> str:
    (x1, y1), (x2, y2) = place(chart, *guide.start), place(chart, *guide.end)
    return f'<g class="ideal"><path class="line" d="M{x1:.1f},{y1:.1f}L{x2:.1f},{y2:.1f}"/></g>'


def _line(chart: Chart, series: Series) -> str:
    line, before = "", -2
    for index, x, y in series.points():
        across, down = place(chart, x, y)
        line += f"{'L' if index == before + 1 else 'M'}{across:.1f},{down:.1f}"
        before = index
    return f'<g class="{series.look.css}"><path class="line" d="{line}"/></g>' if line else ""


def _dots(chart: Chart, series: Series) -> str:
    if series.look.marker is None:
        return ""
    dots = []
    for index, x, y in series.points():
        across, down = place(chart, x, y)
        tip = f"<title>{escape(series.tips[index])}</title>" if series.tips else ""
        dots.append(f'<path class="dot" d="M{across:.1f},{down:.1f}{MARKERS[series.look.marker]}">{tip}</path>')
    return f'<g class="{series.look.css}">{"".join(dots)}</g>'


def _bars(chart: Chart, series: Series) -> str:
    bars = []
    for x, low, high in series.bars():
        (across, bottom), (_, top) = place(chart, x, low), place(chart, x, high)
        bars.append(f"M{across:.1f},{bottom:.1f}V{top:.1f}m-3,0h6M{across - 3:.1f},{bottom:.1f}h6")
    return f'<g class="{series.look.css}"><path class="spread" d="{"".join(bars)}"/></g>' if bars else ""


def path(places: list[tuple[float, float]]) -> str:
    """The `d` of an SVG path through all points."""
    return "".join(f"{'L' if index else 'M'}{x:.1f},{y:.1f}" for index, (x, y) in enumerate(places))


def _legend(chart: Chart) -> tuple[str, int]:
    """The legend as SVG, broken into lines by an estimate of the text width, and the number of lines."""
    parts, x, line = [], 0.0, 0
    for name, look in chart.legend:
        width = 38 + 6.8 * len(name) + 10
        if x and x + width > WIDTH:
            x, line = 0.0, line + 1
        text = f'<text x="38" y="4">{escape(name)}</text>'
        parts.append(f'<g transform="translate({x:g} {line * LEGEND_LINE:g})">{_sample(look, 0)}{text}</g>')
        x += width
    return "".join(parts), line + 1

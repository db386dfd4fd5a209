"""Charts drawn with matplotlib (extra `plot`), in the colours and markers of the reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anytime.display.chart import COLOURS, Chart, Look, Series
from anytime.display.palette import LIGHT
from anytime.display.scale import Scale, SymlogScale
from anytime.errors import DtypeError, MissingExtraError
from anytime.safe_text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "wedge": "v", "plus": "P"}
_DASHES: dict[str, Any] = {
    "s0": "-",
    "s1": (0, (1, 1.6)),
    "s2": (0, (4, 2)),
    "s3": (0, (5, 2, 1, 2)),
    "s4": (0, (2, 2)),
    "s5": (0, (7, 2, 1, 2, 1, 2)),
    "s6": (0, (1, 3)),
    "s7": (0, (8, 2.5)),
    "s8": (0, (5, 2, 1.5, 2)),
    "s9": (0, (4, 2, 1, 2, 1, 2, 1, 2)),
    "ideal": (0, (4, 3)),
}
_MOST_IN_LEGEND = 12
_WIDEST_LEGEND = 64
"""How many letters of names fit beside each other below a chart."""


def plot_chart(chart: Chart, *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw a chart into axes, or into new ones."""
    axes = make_axes(ax, title)
    for guide in chart.guides:
        ends = zip(guide.start, guide.end, strict=True)
        axes.plot(*ends, color=LIGHT["guide"], linestyle=_DASHES["ideal"], linewidth=1.2, label=_plain(guide.name))
    for series in chart.series:
        _draw(axes, series)
    for axis, side in ((chart.x, axes.xaxis), (chart.y, axes.yaxis)):
        side.set_label_text(axis.title)
        if isinstance(axis.scale, SymlogScale):
            options = {"linthresh": axis.scale.threshold, "linscale": 0.7}
            (axes.set_xscale if side is axes.xaxis else axes.set_yscale)("symlog", **options)
        ticks = axis.ticks()
        side.set_ticks([value for value, _ in ticks], labels=[text for _, text in ticks])
        side.set_minor_locator(_no_ticks())
        (axes.set_xlim if side is axes.xaxis else axes.set_ylim)(*_limits(axis.scale))
    handles, names = axes.get_legend_handles_labels()
    if 1 < len(names) <= _MOST_IN_LEGEND:
        if ax is None:  # below the chart, where it hides no line
            columns = max(1, min(len(names), _WIDEST_LEGEND // max(map(len, names))))
            axes.figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, handlelength=3.2)
        else:
            axes.legend(frameon=False, handlelength=3.2)
    return axes


def plot_bars(names: Sequence[str], values: Sequence[float], *, axis: str, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw horizontal bars with their values, the first on top."""
    axes = make_axes(ax, title)
    bars = axes.barh(range(len(names)), list(values), color=LIGHT["s2"], height=0.7)
    axes.bar_label(bars, labels=[f"{value:.3g}" for value in values], padding=3, color=LIGHT["soft"])
    axes.set_yticks(range(len(names)), labels=[_plain(name) for name in names])
    axes.invert_yaxis()
    axes.set_xlabel(axis)
    axes.set_xmargin(0.12)
    axes.grid(False, axis="y")
    return axes


def plot_classes(axes: Axes, labels: Sequence[Sequence[int]], classes: int) -> None:
    """Draw the class of each pixel, with a colour bar that names the classes."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    few = classes <= COLOURS
    colours = ListedColormap([LIGHT[f"s{kind}"] for kind in range(classes)]) if few else None
    shown = colours or colormaps["tab20" if classes <= 20 else "viridis"].resampled(classes)
    image = axes.imshow(labels, cmap=shown, vmin=-0.5, vmax=classes - 0.5, interpolation="nearest")
    axes.grid(False)
    bar = axes.figure.colorbar(image, ax=axes, label="class", shrink=0.8)
    if classes <= 20:
        bar.set_ticks(range(classes))
        bar.minorticks_off()
    axes.set_xlabel("column, pixels")
    axes.set_ylabel("row, pixels")


def make_axes(ax: Any, title: str = "") -> Axes:
    """The given axes, or new ones, in the style of the reports."""
    pyplot = _pyplot()
    from matplotlib.axes import Axes

    if ax is None:
        _, ax = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    if not isinstance(ax, Axes):
        raise DtypeError(
            f"ax is a {type(ax).__name__}",
            expected="matplotlib axes, or None for new ones",
            fix="pass one: figure, ax = matplotlib.pyplot.subplots()",
        )
    if title:
        ax.set_title(_plain(title), loc="left", fontsize="medium", fontweight="bold", color=LIGHT["text"])
    ax.grid(True, color=LIGHT["grid"], linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _plain(name: str) -> str:
    """A caller's name as matplotlib shows it as it is: without control characters, and a dollar does not begin a formula."""
    return printable(name).replace("$", r"\$")


def _colour(look: Look) -> str:
    """The colour of a look on white paper."""
    return LIGHT["guide" if look.css == "ideal" else look.css]


def _draw(axes: Axes, series: Series) -> None:
    points = list(series.points())
    pieces: list[list[tuple[float, float]]] = []
    last = -2
    for index, x, y in points:  # a gap in the series is a gap in the line
        if index == last + 1:
            pieces[-1].append((x, y))
        else:
            pieces.append([(x, y)])
        last = index
    ink, dash, marker = _colour(series.look), _DASHES[series.look.css], _MARKERS.get(series.look.marker or "")
    for piece in pieces:
        if len(piece) > 1:
            axes.plot(*zip(*piece, strict=True), color=ink, linestyle=dash, linewidth=1.8)
    if marker:
        axes.plot([x for _, x, _ in points], [y for _, _, y in points], color=ink, linestyle="", marker=marker, markersize=5)
    for x, low, high in series.bars():
        axes.plot([x, x], [low, high], color=ink, linewidth=1.2)
    line = dash if any(len(piece) > 1 for piece in pieces) else ""
    axes.plot([], [], color=ink, linestyle=line, marker=marker, linewidth=1.8, markersize=5, label=_plain(series.name))


def _limits(scale: Scale) -> tuple[float, float]:
    """The ends of an axis: those of the scale, and a little more, so that the frame does not cut markers."""
    ends = getattr(scale, "low", 0.0), getattr(scale, "high", 1.0)
    if isinstance(scale, SymlogScale):
        return -0.25 * scale.threshold, 1.2 * scale.high
    margin = 0.03 * (ends[1] - ends[0])
    return ends[0] - margin, ends[1] + margin


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtraError(
            f"matplotlib cannot be imported: {error}",
            expected="the extra 'plot'",
            fix="pip install 'anytime-nn[plot]'; table() needs nothing",
        ) from None
    return pyplot

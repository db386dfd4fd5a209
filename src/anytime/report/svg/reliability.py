"""Reliability diagrams: one small bar chart per exit, each an SVG of its own, so that they wrap on a phone.

A bar is the accuracy of the inputs in one bin of confidence; below it is their number. To compare a rule before and after a
fit, bars show it after the fit and short dark strokes before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from anytime.display.chart import Look
from anytime.display.numbers import fraction
from anytime.metrics.calibration import FEW_IN_BIN

WIDTH, HEIGHT = 168.0, 196.0
LEFT, RIGHT, TOP = 30.0, 6.0, 24.0
SIDE = WIDTH - LEFT - RIGHT
BOTTOM = TOP + SIDE  # of the accuracies; the counts are below
COUNTS = 18.0

Bins = Sequence[tuple[float, float, int]]
"""Mean confidence, accuracy and number of inputs of each bin, including empty ones."""


@dataclass(frozen=True)
class ReliabilityDiagram:
    """One exit: its title, a note on the right, its bins (after a fit, if there is one), and its bins before the fit."""

    title: str
    note: str
    bins: Bins
    before: Bins | None = None


def draw_reliability(diagram: ReliabilityDiagram, look: Look, *, name: str) -> str:
    """The diagram as an SVG element for a page that has `style_sheet()`."""
    states = [diagram.bins] if diagram.before is None else [diagram.bins, diagram.before]
    most = max((count for bins in states for _, _, count in bins), default=0) or 1
    diagonal = f'<g class="ideal"><path class="line" d="M{LEFT:g},{BOTTOM:g}L{LEFT + SIDE:g},{TOP:g}"/></g>'
    bars = "".join(
        f'<path class="bar{few}" d="M{left:.1f},{BOTTOM:g}v{-SIDE * accuracy:.1f}h{width:.1f}V{BOTTOM:g}z"/>'
        f'<path class="bar" d="M{left:.1f},{BOTTOM + 2:g}v{COUNTS * count / most:.1f}h{width:.1f}V{BOTTOM + 2:g}z"/>'
        for left, width, accuracy, count, few in _filled(diagram.bins)
    )
    strokes = "".join(
        f'<path class="tick-mark{few}" d="M{left:.1f},{BOTTOM - SIDE * accuracy:.1f}h{width:.1f}"/>'
        f'<path class="tick-mark few" d="M{left:.1f},{BOTTOM + 2 + COUNTS * count / most:.1f}h{width:.1f}"/>'
        for left, width, accuracy, count, few in _filled(diagram.before or ())
    )
    tips = "".join(_tip(index, diagram) for index in range(len(diagram.bins)))
    summary = f"{name}, {diagram.title}, {diagram.note}: accuracy over confidence, a reliability diagram."
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(summary)}">'
        f'<text class="axis" x="{LEFT:g}" y="14">{escape(diagram.title)}</text>'
        f'<text class="end" x="{WIDTH - RIGHT:g}" y="14">{escape(diagram.note)}</text>'
        f'{_frame()}<g class="{look.css}">{bars}</g>{diagonal}{strokes}{tips}</svg>'
    )


def _filled(bins: Bins) -> Iterable[tuple[float, float, float, int, str]]:
    """Left edge, width, accuracy, count and extra class of the bar of each bin that has inputs."""
    for index, (_, accuracy, count) in enumerate(bins):
        width = SIDE / len(bins)
        if count:
            yield LEFT + index * width + 0.6, width - 1.2, accuracy, count, " few" if count < FEW_IN_BIN else ""


def _frame() -> str:
    parts = []
    for part in (0.0, 0.5, 1.0):
        across, down = LEFT + SIDE * part, BOTTOM - SIDE * part
        parts.append(f'<path class="grid" d="M{LEFT:g},{down:g}h{SIDE:g}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 4:g}" y="{down + 4:g}">{100 * part:g}</text>')
        anchor = ("middle", "middle", "end")[round(2 * part)]
        parts.append(f'<text class="tick {anchor}" x="{across:g}" y="{HEIGHT - 3:g}">{100 * part:g}</text>')
    return "".join(parts) + f'<path class="base" d="M{LEFT:g},{BOTTOM:g}h{SIDE:g}"/>'


def _tip(index: int, diagram: ReliabilityDiagram) -> str:
    """An invisible column with the numbers of a bin as its tooltip."""
    width = SIDE / len(diagram.bins)
    states = [("", diagram.bins)] if diagram.before is None else [("after: ", diagram.bins), ("before: ", diagram.before)]
    words = [
        f"{state}confidence {fraction(confidence, digits=1)}, accuracy {fraction(accuracy, digits=1)}, {count:,} inputs"
        for state, bins in states
        for confidence, accuracy, count in [bins[index]]
        if count
    ]
    if not words:
        return ""
    return (
        f'<rect class="hit" x="{LEFT + index * width:.1f}" y="{TOP:g}" width="{width:.1f}" height="{SIDE + COUNTS + 2:g}">'
        f"<title>{escape('; '.join(words))}</title></rect>"
    )

"""Reliability diagrams as small multiples: one little bar chart an exit, each an SVG of its own, so that they wrap on a phone.

A bar is the accuracy of the inputs in a bin of confidence, under it how many these are. Where there are two states of a rule,
before and after a fit, the bars are those after it, and short dark strokes those before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from anytime.report.numbers import share
from anytime.report.pages.figures import FEW_IN_BIN, Table
from anytime.report.svg.chart import Look

WIDTH, HEIGHT = 168.0, 196.0
LEFT, RIGHT, TOP = 30.0, 6.0, 24.0
SIDE = WIDTH - LEFT - RIGHT
BOTTOM = TOP + SIDE  # of the accuracies; the counts hang below
COUNTS = 18.0

Bins = Sequence[tuple[float, float, int]]
"""Mean confidence, accuracy and number of inputs of each bin, empty ones too."""


@dataclass(frozen=True)
class Panel:
    """One exit: its title, a word on the right, and its bins after a fit, or as they are, and before it."""

    title: str
    note: str
    bins: Bins
    before: Bins | None = None


@dataclass(frozen=True)
class Panels:
    """A figure made of panels, with its table."""

    id: str
    title: str
    reading: str
    look: Look
    panels: tuple[Panel, ...]
    table: Table

    @property
    def svgs(self) -> list[str]:
        """The panels drawn for the page."""
        return [draw_panel(panel, self.look, name=self.title) for panel in self.panels]

    @property
    def compared(self) -> bool:
        """Whether there is a state before the fit."""
        return any(panel.before is not None for panel in self.panels)


def draw_panel(panel: Panel, look: Look, *, name: str) -> str:
    """One panel as an SVG element for a page that has `style_sheet()`."""
    states = [panel.bins] if panel.before is None else [panel.bins, panel.before]
    most = max((count for bins in states for _, _, count in bins), default=0) or 1
    diagonal = f'<g class="ideal"><path class="line" d="M{LEFT:g},{BOTTOM:g}L{LEFT + SIDE:g},{TOP:g}"/></g>'
    bars = "".join(_bar(index, panel.bins, most) for index in range(len(panel.bins)))
    strokes = "" if panel.before is None else "".join(_stroke(index, panel.before, most) for index in range(len(panel.before)))
    hits = "".join(_hit(index, panel) for index in range(len(panel.bins)))
    summary = f"{name}, {panel.title}, {panel.note}: accuracy over confidence, a reliability diagram."
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(summary)}">'
        f'<text class="axis" x="{LEFT:g}" y="14">{escape(panel.title)}</text>'
        f'<text class="end" x="{WIDTH - RIGHT:g}" y="14">{escape(panel.note)}</text>'
        f'{_frame()}<g class="{look.css}">{bars}</g>{diagonal}{strokes}{hits}</svg>'
    )


def _frame() -> str:
    parts = []
    for part in (0.0, 0.5, 1.0):
        across, down = LEFT + SIDE * part, BOTTOM - SIDE * part
        parts.append(f'<path class="grid" d="M{LEFT:g},{down:g}h{SIDE:g}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 4:g}" y="{down + 4:g}">{100 * part:g}</text>')
        anchor = ("middle", "middle", "end")[round(2 * part)]
        parts.append(f'<text class="tick {anchor}" x="{across:g}" y="{HEIGHT - 3:g}">{100 * part:g}</text>')
    return "".join(parts) + f'<path class="base" d="M{LEFT:g},{BOTTOM:g}h{SIDE:g}"/>'


def _bar(index: int, bins: Bins, most: int) -> str:
    _, right, count = bins[index]
    if not count:
        return ""
    left, width = _place(index, len(bins))
    few = " few" if count < FEW_IN_BIN else ""
    return (
        f'<path class="bar{few}" d="M{left:.1f},{BOTTOM:g}v{-SIDE * right:.1f}h{width:.1f}V{BOTTOM:g}z"/>'
        f'<path class="bar" d="M{left:.1f},{BOTTOM + 2:g}v{COUNTS * count / most:.1f}h{width:.1f}V{BOTTOM + 2:g}z"/>'
    )


def _stroke(index: int, bins: Bins, most: int) -> str:
    _, right, count = bins[index]
    if not count:
        return ""
    left, width = _place(index, len(bins))
    few = " few" if count < FEW_IN_BIN else ""
    return (
        f'<path class="tick-mark{few}" d="M{left:.1f},{BOTTOM - SIDE * right:.1f}h{width:.1f}"/>'
        f'<path class="tick-mark few" d="M{left:.1f},{BOTTOM + 2 + COUNTS * count / most:.1f}h{width:.1f}"/>'
    )


def _hit(index: int, panel: Panel) -> str:
    """An invisible column that tells the numbers of a bin to a pointer."""
    width = SIDE / len(panel.bins)
    states = [("", panel.bins)] if panel.before is None else [("after: ", panel.bins), ("before: ", panel.before)]
    words = [
        f"{state}{share(bins[index][0], digits=1)} sure, {share(bins[index][1], digits=1)} right, {bins[index][2]:,} inputs"
        for state, bins in states
        if bins[index][2]
    ]
    if not words:
        return ""
    return (
        f'<rect class="hit" x="{LEFT + index * width:.1f}" y="{TOP:g}" width="{width:.1f}" height="{SIDE + COUNTS + 2:g}">'
        f"<title>{escape('; '.join(words))}</title></rect>"
    )


def _place(index: int, bins: int) -> tuple[float, float]:
    """Where the bar of a bin begins, and how wide it is."""
    width = SIDE / bins
    return LEFT + index * width + 0.6, width - 1.2

"""A line on a terminal that shows how far long work is, at which rate, and how long it will take."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """`step 1200/52500  █░░░░░  2 %  17,012 inputs/s  4 min left`, rewritten in place; silent unless stderr is a terminal.

    Args:
        steps: How many there are, or None if that is unknown.
        batch: Inputs per step.
        step: What a step is called.
        stream: Where to write; stderr by default.
    """

    def __init__(self, steps: int | None, batch: int = 1, *, step: str = "step", stream: TextIO | None = None) -> None:
        self.steps, self.batch, self.step = steps, batch, step
        self.stream = stream or sys.stderr
        self._first: tuple[int, int, float] | None = None
        self._shown = 0.0

    def show(self, step: int, inputs: int | None = None) -> None:
        """Show that `step` steps, or so many inputs, are done, at most four times per second."""
        now, inputs = time.monotonic(), step * self.batch if inputs is None else inputs
        if self._first is None:
            self._first = (step, inputs, now)
        if not self.stream.isatty() or now - self._shown < 0.25:
            return
        self._shown = now
        since = now - self._first[2]
        self.stream.write(f"\r\x1b[K{self._line(step, inputs, step - self._first[0], inputs - self._first[1], since)}")
        self.stream.flush()

    def _line(self, step: int, inputs: int, steps_since: int, inputs_since: int, seconds: float) -> str:
        speed = f"  {inputs_since / seconds:,.0f} inputs/s" if inputs_since and seconds > 0 else ""
        if not self.steps:
            return f"{self.step} {step}  {inputs:,} inputs{speed}"
        fraction = min(1.0, step / self.steps)
        left = f"  {_left((self.steps - step) * seconds / steps_since)}" if speed and steps_since else ""
        return f"{self.step} {step}/{self.steps}  {_bar(fraction)}  {100 * fraction:.0f} %{speed}{left}"

    def close(self) -> None:
        """Erase the line."""
        self.clear()

    def clear(self) -> None:
        """Erase the line."""
        if self.stream.isatty() and self._shown:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


def _bar(fraction: float, width: int = 24) -> str:
    filled = round(fraction * width)
    return "█" * filled + "░" * (width - filled)


def _left(seconds: float) -> str:
    """The remaining time in words.

    >>> _left(20), _left(250), _left(4000)
    ('under 1 min left', '4 min left', '1 h 07 min left')
    """
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours:
        return f"{hours} h {minutes:02} min left"
    return f"{minutes} min left" if minutes else "under 1 min left"

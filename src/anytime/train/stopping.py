"""When a run ends before its last step: Ctrl-C, a request to terminate, or a limit of time."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

CTRL_C = "Ctrl-C was pressed"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Turns signals into a flag that the loop reads between steps, so that a step is never cut in two.

    A second Ctrl-C ends the program at once.

    Args:
        seconds: Stop when this many have passed since the block was entered; none for no limit.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.reason: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def asked(self) -> bool:
        """Whether to stop now; `reason` says why."""
        if self.reason is None and self.seconds is not None and self.elapsed >= self.seconds:
            self.reason = f"its {self.seconds:.0f} seconds are over"
        return self.reason is not None

    @property
    def elapsed(self) -> float:
        """Seconds since the block was entered."""
        return time.monotonic() - self._began

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.reason = CTRL_C if number == signal.SIGINT else "it was asked to terminate"
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

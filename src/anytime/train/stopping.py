"""Stop a run before its last step: on Ctrl-C, on a request to terminate, or when its time is over."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

CTRL_C = "Ctrl-C was pressed"
_RUNNING, _TIME_OVER, _TERMINATE, _INTERRUPT = range(4)
_CODES = {signal.SIGINT: _INTERRUPT, signal.SIGTERM: _TERMINATE}


class Stopping:
    """Turns signals into a flag that the loop reads between steps. A second Ctrl-C ends the program immediately.

    Args:
        seconds: Stop this many seconds after the block was entered; None for no limit.
        agree: Given why this process should stop, returns why all of them do: the maximum over all ranks.
    """

    def __init__(self, seconds: float | None = None, *, agree: Callable[[int], int] = lambda code: code) -> None:
        self.seconds = seconds
        self._agree = agree
        self._own = self._code = _RUNNING  # what this process asks for, and what was agreed on
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            for number in _CODES:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def requested(self, *, check_time: bool = True) -> bool:
        """Whether to stop now. All ranks must call this after the same steps."""
        if self._own == _RUNNING and check_time and self.seconds is not None and self.elapsed >= self.seconds:
            self._own = _TIME_OVER
        self._code = self._agree(self._own)
        return self._code != _RUNNING

    @property
    def reason(self) -> str:
        """Why the run stops."""
        return ("", f"the limit of {self.seconds or 0:g} seconds was reached", "SIGTERM was received", CTRL_C)[self._code]

    @property
    def elapsed(self) -> float:
        """Seconds since the block was entered."""
        return time.monotonic() - self._start

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._own = _CODES[signal.Signals(number)]
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Processes that start in this block ignore Ctrl-C, which a terminal sends to all: the process that waits decides."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

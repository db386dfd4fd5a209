"""The clock that deadlines are kept by: monotonic, so that nobody who sets the time of day moves a deadline.

It goes on while a process is stopped (SIGSTOP, a debugger); on Linux it stands still while the machine sleeps. It is an
object of its own so that the logic above it can be tested without waiting.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from anytime.run.timing.scheduling_hints import be_prompt


class Gate(Protocol):
    """A lock that is closed until what is waited for has come."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Wait; whether it opened in time."""
        ...

    def release(self) -> None:
        """Open it."""
        ...


class Clock(Protocol):
    """Tells the time and waits."""

    def now(self) -> float:
        """Seconds since some moment in the past."""
        ...

    def wait(self, gate: Gate, seconds: float | None) -> bool:
        """Wait for a gate, at most so long; whether it opened. Nobody else waits for the same gate."""
        ...


class MonotonicClock:
    """The machine's monotonic clock.

    Args:
        prompt: Whether a thread that waits with a limit asks the kernel to be woken without delay; see `scheduling_hints`.
            It asks once, and stays so.
    """

    def __init__(self, *, prompt: bool = True) -> None:
        self._prompt = prompt

    # An attribute, not a method around it: a look at the clock is part of every stage.
    now = staticmethod(time.perf_counter)

    def wait(self, gate: Gate, seconds: float | None) -> bool:
        """Wait for a gate, at most so long; whether it opened."""
        timeout = -1.0 if seconds is None else min(max(seconds, 0.0), threading.TIMEOUT_MAX)
        if self._prompt and seconds is not None:
            be_prompt()
        return gate.acquire(timeout=timeout)

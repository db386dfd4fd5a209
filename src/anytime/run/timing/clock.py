"""The clock for deadlines: monotonic, so that setting the system time moves no deadline.

It runs on while the process is stopped (SIGSTOP, a debugger); on Linux it pauses while the machine sleeps. It is an object so
that the scheduling logic can be tested without waiting.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from anytime.run.timing.scheduling_hints import request_prompt_wakeups


class Clock(Protocol):
    """Reads the time and waits."""

    def now(self) -> float:
        """Seconds since a fixed moment in the past."""
        ...

    def wait(self, gate: threading.Lock, seconds: float | None) -> bool:
        """Acquire a locked gate, waiting at most so long; whether it was released in time. Each gate has a single waiter."""
        ...


class MonotonicClock:
    """The system's monotonic clock.

    Args:
        prompt: Whether a thread that waits with a timeout asks the kernel for wake-ups without delay, once and for good; see
            `anytime.run.timing.scheduling_hints`.
    """

    def __init__(self, *, prompt: bool = True) -> None:
        self._prompt = prompt

    # The function itself rather than a method: every stage reads the clock.
    now = staticmethod(time.perf_counter)

    def wait(self, gate: threading.Lock, seconds: float | None) -> bool:
        """Acquire a locked gate, waiting at most so long; whether it was released in time."""
        timeout = -1.0 if seconds is None else min(max(seconds, 0.0), threading.TIMEOUT_MAX)
        if self._prompt and seconds is not None:
            request_prompt_wakeups()
        return gate.acquire(timeout=timeout)

"""A module run in a thread that waits at each exit: for modules that cannot be traced.

The caller and the thread take turns, so that there is never more than one of them at work. The thread begins with the caller's
modes (gradients, inference, autocast, CUDA stream, and those that watch operations, such as a counter of FLOPs), errors come
out where the caller waits, and closing the generator ends the thread at the place where it waits. Nothing after that place
is computed.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from anytime.errors import StateError
from anytime.models.modes import Modes

_this_thread = threading.local()


class _Stop(BaseException):
    """Ends the forward pass from inside; not an Exception, so that no module takes it for its own."""


def make_pausable(places: Sequence[nn.Module]) -> None:
    """Let modules stop at their ends where a `Paused` run is under way; without one nothing changes.

    Hooks stay for good: one that waits in a run must not be taken away by another run of the same module.
    """
    for place in places:
        if _pause not in place._forward_hooks.values():
            place.register_forward_hook(_pause)


def run_paused(module: nn.Module, places: Sequence[nn.Module], x: Tensor) -> Iterator[Any]:
    """Yield what `places` give, in this order, and at last what `module` gives; runs on only when asked."""
    worker = _Worker(module, places, x)
    try:
        for _ in range(len(places) + 1):
            yield worker.next()
    finally:
        worker.close()


def _pause(module: nn.Module, args: Any, output: Any) -> None:
    worker: _Worker | None = getattr(_this_thread, "worker", None)
    if worker is not None:
        worker.reach(module, output)


class _Worker:
    """The thread and the two semaphores by which it and the caller take turns."""

    def __init__(self, module: nn.Module, places: Sequence[nn.Module], x: Tensor) -> None:
        self._module, self._places, self._x = module, list(places), x
        self._go, self._there = threading.Semaphore(0), threading.Semaphore(0)
        self._found: Any = None
        self._error: BaseException | None = None
        self._seen = 0
        self._closed = False
        self._modes = Modes.now()
        context = contextvars.copy_context()
        # A daemon: a generator that is still open when the interpreter ends must not hold it up.
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="anytime-exits", daemon=True)
        self._thread.start()

    def next(self) -> Any:
        """Let the thread run to the next exit or to the end."""
        self._go.release()
        self._there.acquire()
        if self._error is not None:
            raise self._error
        found, self._found = self._found, None
        return found

    def close(self) -> None:
        """End the thread where it waits."""
        self._closed = True
        self._go.release()
        if not sys.is_finalizing():  # the interpreter stops daemons by itself, and one that is stopped never ends
            self._thread.join()
        self._error = None  # its traceback holds frames that hold this object

    def reach(self, module: nn.Module, output: Any) -> None:
        """Called in the thread at the end of a place: hand over, then wait."""
        if not any(module is place for place in self._places):
            return
        if self._seen == len(self._places) or module is not self._places[self._seen]:
            raise StateError(
                f"a {type(module).__name__} with an exit ran out of turn",
                expected="each of them once, in the order seen with the example",
                fix="put exits only where every input passes once",
            )
        self._seen += 1
        self._hand_over(output)
        self._wait()

    def _run(self) -> None:
        _this_thread.worker = self
        try:
            self._wait()
            with self._modes.again():
                output = self._module(self._x)
            if self._seen < len(self._places):
                raise StateError(
                    f"{self._seen} of {len(self._places)} exits were passed",
                    expected="all of them for every input",
                    fix="put exits only where every input passes",
                )
            self._hand_over(output)
        except _Stop:
            pass
        except BaseException as error:
            self._error = error
            self._there.release()

    def _hand_over(self, output: Any) -> None:
        self._found = output
        self._there.release()

    def _wait(self) -> None:
        self._go.acquire()
        if self._closed:
            raise _Stop

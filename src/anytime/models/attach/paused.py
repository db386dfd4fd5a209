"""A module that runs in a thread and waits at each exit, for modules that cannot be traced.

The caller and the thread alternate; only one of them runs at a time. The thread starts with the caller's modes (gradients,
inference, autocast, CUDA stream, and dispatch modes such as a FLOP counter), errors are raised where the caller waits, and
closing the generator ends the thread where it waits. Nothing after that place is computed.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from torch import nn

from anytime.checks import Inputs
from anytime.errors import StateError
from anytime.models.attach.probe import Place, call
from anytime.models.modes import Modes

_this_thread = threading.local()


class _Stop(BaseException):
    """Ends the forward pass from inside; not an Exception, so that no module handles it."""


def make_pausable(places: Iterable[Place]) -> None:
    """Register hooks that wait after the call of a place during `run_paused`, and do nothing otherwise.

    Hooks are never removed: another run of the same module may be waiting in one.
    """
    for place in places:
        if _pause not in place.module._forward_hooks.values():
            place.module.register_forward_hook(_pause)


def run_paused(module: nn.Module, places: Sequence[Place], x: Inputs) -> Generator[Any]:
    """Yield the outputs of `places`, in this order, then that of `module`; the module runs only as far as requested."""
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
    """The thread, and the two semaphores by which it alternates with the caller."""

    def __init__(self, module: nn.Module, places: Sequence[Place], x: Inputs) -> None:
        self._module, self._places, self._x = module, list(places), x
        self._calls: Counter[int] = Counter()
        self._resume, self._reached = threading.Semaphore(0), threading.Semaphore(0)
        self._found: Any = None
        self._error: BaseException | None = None
        self._seen = 0
        self._closed = False
        self._modes = Modes.now()
        context = contextvars.copy_context()
        # A daemon: a generator that is still open must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="anytime-exits", daemon=True)
        self._thread.start()

    def next(self) -> Any:
        """Run the thread to the next exit or to the end."""
        self._resume.release()
        self._reached.acquire()
        if self._error is not None:
            raise self._error
        found, self._found = self._found, None
        return found

    def close(self) -> None:
        """End the thread where it waits."""
        self._closed = True
        self._resume.release()
        if not sys.is_finalizing():  # the interpreter stops daemon threads, and a stopped one never ends
            self._thread.join()
        self._error = None  # its traceback holds frames that hold this object

    def reach(self, module: nn.Module, output: Any) -> None:
        """Called in the thread after a place: publish its output, then wait."""
        here = [place for place in self._places if module is place.module]
        if not here:
            return
        number = self._calls[id(module)]
        self._calls[id(module)] += 1
        if number < here[0].calls and not any(number == place.call for place in here):
            return
        expected = self._places[self._seen] if self._seen < len(self._places) else None
        if expected is None or module is not expected.module or number != expected.call:
            raise StateError(
                f"a {type(module).__name__} with an exit ran more often or in another order than with the example",
                expected="each submodule with an exit as often and in the same order for every input",
                fix="attach exits only where every input passes exactly once",
            )
        self._seen += 1
        self._publish(output)
        self._wait()

    def _run(self) -> None:
        _this_thread.worker = self
        try:
            self._wait()
            with self._modes.again():
                output = call(self._module, self._x)
            if self._seen < len(self._places):
                raise StateError(
                    f"an input passed {self._seen} of {len(self._places)} exits",
                    expected="all exits for every input",
                    fix="attach exits only where every input passes exactly once",
                )
            self._publish(output)
        except _Stop:
            pass
        except BaseException as error:
            self._error = error
            self._reached.release()

    def _publish(self, output: Any) -> None:
        self._found = output
        self._reached.release()

    def _wait(self) -> None:
        self._resume.acquire()
        if self._closed:
            raise _Stop

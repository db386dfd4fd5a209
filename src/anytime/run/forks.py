"""Locks in forked processes: a lock that another thread held at the fork is never released there.

Every object of `run` that owns a lock or threads registers itself here, and a child process renews all of them first.

Torch's locks cannot be renewed: the first call of an operator holds one while it initialises static variables, and so do
operations on a tensor that several threads read. A fork therefore waits until no thread runs a stage or makes an answer, and
what would begin meanwhile waits for the fork.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE = 1.0
"""Seconds: a fork does not wait for what has been running for longer, since it may hang; nor does anything wait for a fork."""
_POLL = 2e-4
"""Seconds between two looks: a lock to wait for might itself be lost in a fork or to an exception in a signal handler."""


class _Fork(NamedTuple):
    """A fork that is about to happen: in which thread, until when others wait for it, and whether answers do, too."""

    thread: int
    until: float
    answers: bool


_owners: weakref.WeakSet[Any] = weakref.WeakSet()
_running: dict[int, float] = {}  # the threads that may hold a lock of torch, and since when
_fork: _Fork | None = None


def renew_in_children(owner: Any) -> None:
    """Call `owner.renew()`, which makes new locks, in every process that is forked while `owner` exists."""
    _owners.add(owner)


def never_forked(*, stage: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function that uses torch: other threads do not fork while it runs.

    Args:
        stage: Whether it waits as soon as a fork waits for others. An answer waits only while the process is forked: it may be
            due before a long stage ends.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            thread = get_ident()
            if thread in _running:  # inside another one
                return function(*args, **kwargs)
            try:
                _running[thread] = time.monotonic()
                while (fork := _fork) is not None and _waits(fork, thread, stage):
                    del _running[thread]
                    time.sleep(_POLL)
                    _running[thread] = time.monotonic()
                return function(*args, **kwargs)
            finally:
                _running.pop(thread, None)

        return run

    return decorate


def _waits(fork: _Fork, thread: int, stage: bool) -> bool:
    return (stage or fork.answers) and fork.thread != thread and time.monotonic() < fork.until


def _before() -> None:
    global _fork
    thread, until = get_ident(), time.monotonic() + _PATIENCE
    for answers in (False, True):
        _fork = _Fork(thread, until, answers)  # first: what begins from now on looks at it
        while time.monotonic() < until and _others_run(thread):
            time.sleep(_POLL)


def _others_run(thread: int) -> bool:
    began_after = time.monotonic() - _PATIENCE
    return any(began > began_after for other, began in list(_running.items()) if other != thread)


def _after() -> None:
    global _fork
    if _fork is not None and _fork.thread == get_ident():  # else another thread is about to fork, too
        _fork = None


def _renew_all() -> None:
    global _fork
    _fork = None
    _running.clear()
    for owner in list(_owners):
        owner.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_renew_all)

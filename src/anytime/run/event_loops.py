"""Calls from the runner's threads into an event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Mailbox:
    """Calls functions in the thread of an event loop; many at once, since every wake-up of the loop is a system call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._posted: deque[Callable[[], None]] = deque()
        self._called = False

    def post(self, function: Callable[[], None]) -> None:
        """Have a function called soon, from any thread."""
        self._posted.append(function)
        if not self._called and (loop := self._loop()) is not None:
            self._called = True
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        self._called = False  # before the first one is taken: what is posted from now on wakes the loop again
        while self._posted:
            self._posted.popleft()()


_MAILBOXES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()


def mailbox(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """The mailbox of an event loop; to be called in its thread."""
    found = _MAILBOXES.get(loop)
    if found is None:
        found = _MAILBOXES[loop] = Mailbox(loop)
    return found

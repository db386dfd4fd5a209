"""Threads that run stages while a caller waits for its deadline.

A thread that has done its work waits for more, so that a request costs two hand-overs and no new thread. A request that comes
while others are under way, or while a stage that was abandoned comes to its end, takes another thread, up to a limit; beyond
that it waits for the first that is free.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Protocol

from anytime.errors import StateError
from anytime.run.prompt import be_patient

_LOOK_AT = 64
"""How many may wait before those that nobody waits for are looked for."""


class Work(Protocol):
    """Something to do in a thread; `queued` says that it had to wait for one to be free."""

    queued: bool

    @property
    def settled(self) -> bool:
        """Whether nobody waits for it any more."""
        ...

    def work(self) -> None:
        """Do it; errors are kept, not raised."""
        ...

    def finish(self) -> None:
        """Tell who waits; called when the thread is free again."""
        ...

    def interrupt(self) -> None:
        """Begin nothing more."""
        ...


class Workers:
    """Up to `limit` threads, begun when they are needed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: list[_Worker] = []
        self._queue: deque[Work] = deque()
        self._closed = False
        self._look_at, self._process = _LOOK_AT, os.getpid()

    def run(self, work: Work) -> None:
        """Have a thread do it, as soon as one is free."""
        if self._process != os.getpid():
            self._begin_anew()
        with self._lock:
            if self._closed:
                raise StateError("the runner is closed", expected="an open one", fix="make a new Runner")
            if self._idle:
                worker = self._idle.pop()
            elif len(self._all) < self._limit:
                worker = _Worker(self)
                self._all.append(worker)
            else:
                work.queued = True
                self._queue.append(work)
                if len(self._queue) > self._look_at:  # threads that hang must not make the queue grow for ever
                    self._queue = deque(waiting for waiting in self._queue if not waiting.settled)
                    self._look_at = max(_LOOK_AT, 2 * len(self._queue))
                return
            worker.give(work)

    def free(self, worker: _Worker) -> Work | None:
        """What a thread does next; without any it is free from now on."""
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            if not self._closed:
                self._idle.append(worker)
            return None

    def close(self, *, patience: float | None = None) -> None:
        """End all threads: those at work after the stage they are in.

        Args:
            patience: For how many seconds to wait for them; as long as it takes by default.
        """
        with self._lock:
            self._closed = True
            workers, waiting = list(self._all), list(self._queue)
            self._all.clear()
            self._idle.clear()
            self._queue.clear()
        for work in waiting:
            work.interrupt()
            work.finish()
        for worker in workers:
            worker.end()
        until = None if patience is None else time.monotonic() + patience
        for worker in workers:
            worker.join(None if until is None else max(until - time.monotonic(), 0.0))

    def _begin_anew(self) -> None:
        """Threads do not come along into a forked process, and who waits for them is in the other one."""
        self._lock = threading.Lock()
        self._idle, self._all, self._queue = [], [], deque()
        self._process = os.getpid()


class _Worker:
    """A thread, and the queue by which it is given work."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._given: SimpleQueue[Work | None] = SimpleQueue()
        self._current: Work | None = None
        self._ended = False
        # A daemon: a runner that nobody closed must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._run, name="anytime-runner", daemon=True)
        self._thread.start()

    def give(self, work: Work) -> None:
        """Hand over something to do to a thread that is free."""
        self._given.put(work)

    def end(self) -> None:
        """Let the thread end, after the stage it is in."""
        self._ended = True
        current = self._current
        if current is not None:
            current.interrupt()
        self._given.put(None)

    def join(self, seconds: float | None) -> None:
        """Wait until it has ended, or so long."""
        # The interpreter stops daemons by itself when it ends, and one that is stopped never comes back.
        if self._thread is not threading.current_thread() and not sys.is_finalizing():
            self._thread.join(seconds)

    def _run(self) -> None:
        be_patient()
        while (work := self._given.get()) is not None:
            while work is not None:
                self._current = work
                if self._ended:
                    work.interrupt()
                work.work()
                self._current = None
                # Free before the caller hears of it: its next request finds this thread, and needs no other.
                following = self._workers.free(self)
                work.finish()
                work = following

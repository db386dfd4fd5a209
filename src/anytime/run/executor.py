"""Threads that take turns at the stages of all requests: the unit of scheduling is one stage, not one request.

Only as many stages run at once as maximise throughput (`anytime.run.timing.pace`). The others wait, and their waiting time does
not count as stage time. The next stage is that of the request with the fewest exits; ties go to a caller that was refused
before, then to the earliest deadline. Under overload every request gets a first exit before any gets a second.
A request that nothing else waits behind stays in its thread: a single caller pays nothing for the scheduling.

A stage cannot be stopped. One that takes far longer than the next stage in line keeps its thread but loses its slot: another
thread takes over, up to `limit` threads in all.

Threads fetch their work themselves, and busy threads are counted when needed, never kept in a counter. An exception raised by
a signal handler, at any instruction of a caller, can therefore lose the caller's own request and nothing else.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from anytime.errors import StateError
from anytime.models.modes import Modes
from anytime.run.forks import renew_in_children
from anytime.run.timing.clock import Clock
from anytime.run.timing.pace import Pace
from anytime.run.timing.scheduling_hints import use_batch_scheduling

if TYPE_CHECKING:
    from anytime.run.task import Task

_LOOK_AT = 64
"""How many requests may wait before expired ones are removed."""
_FAIR = 8
"""Every so many turns, the request without a deadline that has waited longest is next; it could wait forever otherwise."""
_SOONEST = 1e-3
"""Seconds between two checks for stages that take too long."""


class Caller(threading.local):
    """How many consecutive requests of a thread were refused."""

    refused = 0


class Executor:
    """Up to `limit` threads, started when needed.

    Args:
        limit: The largest number of threads, including those whose stages were given up.
        clock: The clock.

    Attributes:
        pace: How many of them run stages at once.
        caller: The number of consecutive requests of the calling thread that were `refused`.
    """

    def __init__(self, limit: int, clock: Clock) -> None:
        self._limit, self._clock = limit, clock
        self.pace = Pace(limit)
        self.caller = Caller()
        self._closed = False
        self._reset()
        renew_in_children(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # garbage collection may close a runner while this thread holds it
        self._waiting: dict[Task, None] = {}
        self._look_at = _LOOK_AT
        self._at: dict[int, Task | None] = {}
        self._here: set[Task] = set()
        self._started: list[threading.Thread] = []
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._watched = False
        self._refusal: tuple[int | None, float] = (None, -math.inf)
        self._turns = itertools.count(1)

    def renew(self) -> None:
        """A forked process has neither the threads nor their waiters."""
        left = [*self._waiting, *(work for work in self._at.values() if work is not None)]
        self._reset()
        for work in left:
            work.orphan()

    # For callers. An exception in a signal handler may end these at any instruction.

    def run(self, work: Task) -> None:
        """Queue a request for the threads."""
        work.modes = Modes.now()
        with self._lock:
            if self._closed:
                raise StateError("the runner is closed", expected="an open runner", fix="make a new Runner")
            idle, free = self._idle(), self.pace.level - self._busy(self._clock.now(), work.patience)
            work.waited = len(self._waiting) >= min(idle, free)
            expired = self._expired() if len(self._waiting) >= self._look_at else []
            self._waiting[work] = None
            wanted = (free > 0 or not self._watched) and (idle > 0 or len(self._at) < self._limit)
        for each in expired:
            each.expire()
        if wanted:
            self._call(idle)

    def turn(self, work: Task) -> bool:
        """Run one stage, in the caller's thread if no other request waits; whether there is another one."""
        try:
            if self._admits(work):
                return work.step()
        finally:
            work.at_work = False  # first, before anything can be interrupted
            self._here.discard(work)
            if self._waiting:
                self._nudge()
        work.turn = gate = threading.Lock()
        gate.acquire()
        self.run(work)
        self._clock.wait(gate, None)
        return work.more

    def at_work(self) -> bool:
        """Whether any stage is running or waiting."""
        with self._lock:
            return bool(self._waiting) or self._busy(self._clock.now(), math.inf) > 0

    def note_refusal(self, now: float) -> None:
        """Record that a request of the calling thread was refused."""
        self._refusal = threading.get_ident(), now

    def refused_another(self, since: float) -> bool:
        """Whether the last refusal was of another thread, at or after a time."""
        thread, at = self._refusal
        return thread != threading.get_ident() and at >= since

    def withdraw(self, work: Task) -> None:
        """Remove a request from the queue."""
        with self._lock:
            waited = work in self._waiting
            if waited:
                del self._waiting[work]
        if waited:
            work.drop()
        elif self._waiting:
            self._nudge()

    def close(self, *, patience: float | None = None) -> None:
        """End all threads, busy ones after their current stage.

        Args:
            patience: How many seconds to wait for them; without limit by default.
        """
        with self._lock:
            self._closed = True
            left = [*self._waiting, *(work for work in self._at.values() if work is not None)]
        for work in left:
            work.interrupt()
        for _ in range(2 * self._limit + len(self._started)):  # more than there can be threads
            self._wakes.put(None)
        until = None if patience is None else time.monotonic() + patience
        for thread in list(self._started):
            # At its end the interpreter stops daemon threads itself; joining one would block forever.
            if thread is not threading.current_thread() and thread.ident is not None and not sys.is_finalizing():
                thread.join(None if until is None else max(until - time.monotonic(), 0.0))

    # Under the lock.

    def _idle(self) -> int:
        return sum(work is None for work in self._at.values())

    def _busy(self, now: float, patience: float) -> int:
        """How many slots are taken by stages worth waiting for."""
        threads = sum(work is not None and work.holds(now, patience) for work in self._at.values())
        return threads + sum(work.at_work and work.holds(now, patience) for work in self._here)

    def _admits(self, work: Task) -> bool:
        """Whether a stage may run in its caller's thread now."""
        with self._lock:
            now = self._clock.now()
            # Without a deadline it need not wait for a slot: idle cores should be used.
            if self._waiting or (work.deadline is not None and self._busy(now, work.patience) >= self.pace.level):
                return False
            work.picked, work.at_work = now, True
            self._here.add(work)
            return True

    def _expired(self) -> list[Task]:
        """The expired requests in the queue, which must not fill the memory while threads hang."""
        now = self._clock.now()
        expired = [work for work in self._waiting if work.settled or (work.deadline is not None and work.deadline < now)]
        self._look_at = max(_LOOK_AT, 2 * (len(self._waiting) - len(expired)))
        return expired

    def _pick(self, now: float) -> Task | None:
        """The request to run next, if a slot is free."""
        if not self._waiting:
            return None
        work = choose(self._waiting, next(self._turns), now)
        if self._busy(now, work.patience) >= self.pace.level:
            return None
        del self._waiting[work]
        work.picked = now
        return work

    # Without the lock.

    def _nudge(self) -> None:
        """Wake a thread if a slot is free while requests wait."""
        with self._lock:
            idle, now = self._idle(), self._clock.now()
            patience = min((work.patience for work in self._waiting), default=0.0)
            free = self._waiting and self._busy(now, patience) < self.pace.level
            wanted = free and (idle > 0 or len(self._at) < self._limit)
        if wanted:
            self._call(idle)

    def _call(self, idle: int) -> None:
        """Have a thread look for work: an idle one, or a new one, which registers itself or ends at once."""
        if idle:
            self._wakes.put(None)
            return
        # A daemon: a runner that was not closed must not keep the interpreter from ending.
        thread = threading.Thread(target=self._serve, name="anytime-runner", daemon=True)
        with self._lock:
            self._started = [*(each for each in self._started if each.ident is None or each.is_alive()), thread]
        try:
            thread.start()
        except RuntimeError:
            if not self._at:  # else the other threads do the work
                raise

    # The threads.

    def _serve(self) -> None:
        use_batch_scheduling()
        me = threading.get_ident()
        with self._lock:
            if self._closed or len(self._at) >= self._limit:
                return
            self._at[me] = None
        try:
            self._take_turns(me)
        finally:
            left = self._at.pop(me, None)
            if left is not None:  # an error of this thread itself: no caller must wait for it
                left.interrupt()
                left.finish()

    def _take_turns(self, me: int) -> None:
        wakes, own = self._wakes, Modes.now()
        work: Task | None = None
        more = False
        while True:
            last, (work, wait) = work, self._next(me, work, more)
            # The slot is freed before the caller is notified, so that its next request finds this thread idle.
            if last is not None and not more:
                self._notify(last)
            last = None  # a reference would keep the runner alive
            if work is not None:
                more = self._run(work, own)
            elif self._closed:
                return
            else:
                with suppress(Empty):
                    wakes.get(timeout=wait)

    def _next(self, me: int, last: Task | None, more: bool) -> tuple[Task | None, float | None]:
        """The next work of a thread, and how long to wait before checking again if no slot is free."""
        with self._lock:
            now = self._clock.now()
            self._at[me], self._watched = None, False
            if not self._closed:
                if last is not None:
                    self._measure(last, more, now)
                if last is not None and more:
                    last.waited = True
                    self._waiting[last] = None
                self._at[me] = work = self._pick(now)
                if work is not None:
                    work.waited = work.waited and work is not last
                if work is not None or not self._waiting:
                    return work, None
                self._watched = True
                return None, max(min(each.patience for each in self._waiting), _SOONEST)
        if last is not None and more:
            last.drop()
            last.finish()
        return None, None

    def _measure(self, last: Task, more: bool, now: float) -> None:
        """Record the throughput after a stage, if all slots were in use."""
        done = last.done
        if len(self._waiting) + more + self._busy(now, math.inf) < self.pace.level:
            self.pace.pause()
        elif done is not None:  # a request that was given up runs nothing
            self.pace.note(done, now)

    def _run(self, work: Task, own: Modes) -> bool:
        """Run stages of a request until it ends or others are active, or a single one if requested; whether there are more."""
        if work.modes == own:
            return self._stages(work)
        with work.modes.again():
            return self._stages(work)

    def _stages(self, work: Task) -> bool:
        more = work.step()
        if work.turn is not None:
            return False
        while more and not (self._waiting or self._others()):
            more = work.step()
        return more

    def _others(self) -> bool:
        """Whether other requests are running, so that throughput is to be measured."""
        return len(self._at) > 1 and len(self._at) - list(self._at.values()).count(None) > 1

    def _notify(self, work: Task) -> None:
        if work.turn is None:
            work.finish()
        else:
            with suppress(RuntimeError):  # released already
                work.turn.release()


def choose(waiting: Iterable[Task], turn: int, now: float) -> Task:
    """The request to run next: the smallest `Task.rank`, and every eighth turn one without a deadline.

    Args:
        waiting: The waiting requests, in order of arrival.
        turn: The number of this turn.
        now: The time.
    """
    if turn % _FAIR == 0:
        for work in waiting:
            if work.deadline is None:
                return work
    return min(waiting, key=lambda work: work.rank(now))

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
from typing import Protocol

from anytime.errors import StateError
from anytime.models.modes import Modes
from anytime.run.forks import renew_in_children
from anytime.run.timing.clock import Clock
from anytime.run.timing.pace import Pace
from anytime.run.timing.scheduling_hints import be_patient

_LOOK_AT = 64
"""How many may wait before those whose time is up are looked for."""
_FAIR = 8
"""Every so many turns, the request without a deadline that has waited longest is next: nothing else would ever end its wait."""
_SOONEST = 1e-3
"""Seconds between two looks at stages that may take too long."""


class Work(Protocol):
    """A request, as the executor sees it. Whoever takes it from those that wait is the only one to run it."""

    deadline: float | None
    modes: Modes
    waited: bool
    """Set where it has to wait for its next stage; what it measures leaves that time out."""
    picked: float
    at_work: bool
    """Whether a stage runs in the caller's own thread."""
    turn: threading.Lock | None
    """Where one stage is wanted and no more: opened after it, and when it is settled."""
    more: bool
    """Whether there is another stage to run."""

    def rank(self, now: float) -> tuple[float, ...]:
        """Whose turn it is: the least."""
        ...

    @property
    def patience(self) -> float:
        """For how many seconds it is worth waiting for a running stage."""
        ...

    @property
    def done(self) -> float | None:
        """The seconds that its last stage takes at best, if that is known."""
        ...

    @property
    def settled(self) -> bool:
        """Whether nobody waits for it any more."""
        ...

    def holds(self, now: float, patience: float) -> bool:
        """Whether its running stage is worth waiting for."""
        ...

    def step(self) -> bool:
        """Run one stage; whether to run another. Errors are kept, not raised."""
        ...

    def finish(self) -> None:
        """Tell who waits; called when the thread is free again."""
        ...

    def expire(self) -> None:
        """Its time is up: settle it, and withdraw it only then, so that nothing is lost if that is interrupted."""
        ...

    def drop(self) -> None:
        """Let go of everything; no stage will run any more."""
        ...

    def interrupt(self) -> None:
        """Begin nothing more."""
        ...

    def orphan(self) -> None:
        """Begin nothing more in a forked process, in which its thread does not exist."""
        ...


class Caller(threading.local):
    """How many requests in a row of a thread were refused."""

    refused = 0


class Executor:
    """Up to `limit` threads, begun when they are needed.

    Args:
        limit: How many threads, those included whose stages were given up.
        clock: Tells the time.

    Attributes:
        pace: How many of them run stages at once.
        caller: What is known of the calling thread: how many of its requests in a row were `refused`.
    """

    def __init__(self, limit: int, clock: Clock) -> None:
        self._limit, self._clock = limit, clock
        self.pace = Pace(limit)
        self.caller = Caller()
        self._closed = False
        self._reset()
        renew_in_children(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # a collection may close a runner while this thread holds it
        self._waiting: dict[Work, None] = {}
        self._look_at = _LOOK_AT
        self._at: dict[int, Work | None] = {}
        self._here: set[Work] = set()
        self._begun: list[threading.Thread] = []
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._watched = False
        self._refusal: tuple[int | None, float] = (None, -math.inf)
        self._turns = itertools.count(1)

    def renew(self) -> None:
        """Threads do not come along into a forked process, and who waits for them is in the other one."""
        left = [*self._waiting, *(work for work in self._at.values() if work is not None)]
        self._reset()
        for work in left:
            work.orphan()

    # For callers. Any instruction of these may be the last, by an exception out of a signal handler.

    def run(self, work: Work) -> None:
        """Have threads run its stages, as soon as it is its turn."""
        work.modes = Modes.now()
        with self._lock:
            if self._closed:
                raise StateError("the runner is closed", expected="an open one", fix="make a new Runner")
            idle, free = self._idle(), self.pace.level - self._busy(self._clock.now(), work.patience)
            work.waited = len(self._waiting) >= min(idle, free)
            expired = self._look_through() if len(self._waiting) >= self._look_at else []
            self._waiting[work] = None
            wanted = (free > 0 or not self._watched) and (idle > 0 or len(self._at) < self._limit)
        for each in expired:
            each.expire()
        if wanted:
            self._call(idle)

    def turn(self, work: Work) -> bool:
        """Run one stage, in the caller's thread if nobody else waits for a turn; whether to run another."""
        try:
            if self._admits(work):
                return work.step()
        finally:
            work.at_work = False  # first of all, before anything could be interrupted
            self._here.discard(work)
            if self._waiting:
                self._nudge()
        work.turn = gate = threading.Lock()
        gate.acquire()
        self.run(work)
        self._clock.wait(gate, None)
        return work.more

    def at_work(self) -> bool:
        """Whether stages of requests that somebody waits for are running, or wait for their turn."""
        with self._lock:
            return bool(self._waiting) or self._busy(self._clock.now(), math.inf) > 0

    def note_refusal(self, now: float) -> None:
        """A request of the calling thread was refused without a turn."""
        self._refusal = threading.get_ident(), now

    def refused_another(self, since: float) -> bool:
        """Whether the last refusal was of another thread, and since then."""
        thread, at = self._refusal
        return thread != threading.get_ident() and at >= since

    def withdraw(self, work: Work) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            waited = work in self._waiting
            if waited:
                del self._waiting[work]
        if waited:
            work.drop()
        elif self._waiting:
            self._nudge()

    def close(self, *, patience: float | None = None) -> None:
        """End all threads: those at work after the stage they are in.

        Args:
            patience: For how many seconds to wait for them; as long as it takes by default.
        """
        with self._lock:
            self._closed = True
            left = [*self._waiting, *(work for work in self._at.values() if work is not None)]
        for work in left:
            work.interrupt()
        for _ in range(2 * self._limit + len(self._begun)):  # more than there can be threads, as none must be left out
            self._wakes.put(None)
        until = None if patience is None else time.monotonic() + patience
        for thread in list(self._begun):
            # The interpreter stops daemons by itself when it ends, and one that is stopped never comes back.
            if thread is not threading.current_thread() and thread.ident is not None and not sys.is_finalizing():
                thread.join(None if until is None else max(until - time.monotonic(), 0.0))

    # Under the lock.

    def _idle(self) -> int:
        return sum(work is None for work in self._at.values())

    def _busy(self, now: float, patience: float) -> int:
        """How many slots are taken by stages that are worth waiting for."""
        threads = sum(work is not None and work.holds(now, patience) for work in self._at.values())
        return threads + sum(work.at_work and work.holds(now, patience) for work in self._here)

    def _admits(self, work: Work) -> bool:
        """Whether a stage may run in its caller's thread at once."""
        with self._lock:
            now = self._clock.now()
            # Without a deadline there is no need to wait for a slot: a machine with idle cores should use them.
            if self._waiting or (work.deadline is not None and self._busy(now, work.patience) >= self.pace.level):
                return False
            work.picked, work.at_work = now, True
            self._here.add(work)
            return True

    def _look_through(self) -> list[Work]:
        """Those that nobody will ever fetch must not fill the memory while threads hang."""
        now = self._clock.now()
        expired = [work for work in self._waiting if work.settled or (work.deadline is not None and work.deadline < now)]
        self._look_at = max(_LOOK_AT, 2 * (len(self._waiting) - len(expired)))
        return expired

    def _pick(self, now: float) -> Work | None:
        """Whose stage is next, if a slot is free for it."""
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
        """A slot may be free while others wait."""
        with self._lock:
            idle, now = self._idle(), self._clock.now()
            patience = min((work.patience for work in self._waiting), default=0.0)
            free = self._waiting and self._busy(now, patience) < self.pace.level
            wanted = free and (idle > 0 or len(self._at) < self._limit)
        if wanted:
            self._call(idle)

    def _call(self, idle: int) -> None:
        """Have a thread look for work: one that is idle, or a new one, which counts itself in or ends at once."""
        if idle:
            self._wakes.put(None)
            return
        # A daemon: a runner that nobody closed must not keep the interpreter from ending.
        thread = threading.Thread(target=self._serve, name="anytime-runner", daemon=True)
        with self._lock:
            self._begun = [*(each for each in self._begun if each.ident is None or each.is_alive()), thread]
        try:
            thread.start()
        except RuntimeError:
            if not self._at:  # else the others do the work
                raise

    # The threads.

    def _serve(self) -> None:
        be_patient()
        me = threading.get_ident()
        with self._lock:
            if self._closed or len(self._at) >= self._limit:
                return
            self._at[me] = None
        try:
            self._take_turns(me)
        finally:
            left = self._at.pop(me, None)
            if left is not None:  # an error of this thread itself: nobody must wait for it
                left.interrupt()
                left.finish()

    def _take_turns(self, me: int) -> None:
        wakes, own = self._wakes, Modes.now()
        work: Work | None = None
        more = False
        while True:
            last, (work, wait) = work, self._next(me, work, more)
            # The slot is free before the caller hears of it: its next request finds this thread, and needs no other.
            if last is not None and not more:
                self._hand_back(last)
            last = None  # a runner lives as long as its last task
            if work is not None:
                more = self._run(work, own)
            elif self._closed:
                return
            else:
                with suppress(Empty):
                    wakes.get(timeout=wait)

    def _next(self, me: int, last: Work | None, more: bool) -> tuple[Work | None, float | None]:
        """What a thread does next. Where it has to wait for a slot: for how long, before it looks again."""
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

    def _measure(self, last: Work, more: bool, now: float) -> None:
        """A stage has ended: how much gets done counts where all that may run does run."""
        done = last.done
        if len(self._waiting) + more + self._busy(now, math.inf) < self.pace.level:
            self.pace.pause()
        elif done is not None:  # the step of a request that was given up runs nothing
            self.pace.note(done, now)

    def _run(self, work: Work, own: Modes) -> bool:
        """Stages of one request, until it ends or others are on their way, or one where no more is wanted; whether to go on."""
        if work.modes == own:
            return self._stages(work)
        with work.modes.again():
            return self._stages(work)

    def _stages(self, work: Work) -> bool:
        more = work.step()
        if work.turn is not None:
            return False
        while more and not (self._waiting or self._others()):
            more = work.step()
        return more

    def _others(self) -> bool:
        """Whether other requests are on their way, so that what gets done is to be measured."""
        return len(self._at) > 1 and len(self._at) - list(self._at.values()).count(None) > 1

    def _hand_back(self, work: Work) -> None:
        if work.turn is None:
            work.finish()
        else:
            with suppress(RuntimeError):  # it is open
                work.turn.release()


def choose(waiting: Iterable[Work], turn: int, now: float) -> Work:
    """Whose stage is next: the least by `Work.rank`, but every so often one without a deadline.

    Args:
        waiting: Those that wait, in the order in which they began to.
        turn: The number of this turn.
        now: The time.
    """
    if turn % _FAIR == 0:
        for work in waiting:
            if work.deadline is None:
                return work
    return min(waiting, key=lambda work: work.rank(now))

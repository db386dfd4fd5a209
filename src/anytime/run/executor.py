"""Threads that run the stages of all requests: the unit of scheduling is one stage for a batch of requests.

No more stages run at once than there are slots: one per core, or one on a GPU. What runs next is the scheduling policy's choice
(`anytime.run.scheduler`). A request that nothing else waits behind stays in its thread: a single caller pays nothing for the
scheduling.

A request with a deadline is admitted if its first stage fits behind those of the requests admitted before, else refused at
once. A caller that blocks in `predict` is parked instead: it is admitted when there is room, the one that was refused most often
first, and refused when it is too late for that.

A stage cannot be stopped. One that takes far longer than expected keeps its thread but loses its slot: another thread takes
over, up to `limit` threads in all.

Threads fetch their work themselves, and busy threads are counted when needed, never kept in a counter. An exception raised by
a signal handler, at any instruction of a caller, can therefore lose the caller's own request and nothing else.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from anytime.errors import StateError
from anytime.models.modes import Modes
from anytime.run.batch import Batch, StageReport
from anytime.run.forks import renew_in_children
from anytime.run.scheduler import SchedulingPolicy, retry_after
from anytime.run.setup import RunSetup
from anytime.run.task import Task
from anytime.run.timing.clock import Clock
from anytime.run.timing.scheduling_hints import use_batch_scheduling

_LOOK_AT = 64
"""How many requests may wait before expired ones are removed."""
_FAIR = 8
"""Every so many turns, the request without a deadline that has waited longest is next; it could wait forever otherwise."""
_PATIENCE, _STAGES = 0.01, 4
"""A running stage holds its slot for so many times its expected duration, and at least these seconds."""
_SOONEST = 1e-3
"""Seconds between two checks for stages that take too long."""


@dataclass(frozen=True)
class LoadStatus:
    """How busy a runner is.

    Attributes:
        waiting: Requests that wait for a stage.
        running: Requests whose stages run.
        workers: How many stages can run at once.
    """

    waiting: int
    running: int
    workers: int


class Caller(threading.local):
    """How many consecutive requests of a thread were refused."""

    refusals = 0


class _Times:
    """Stage times as the scheduling policy reads them."""

    def __init__(self, setup: RunSetup, largest_batch: int, margin: float) -> None:
        self.seconds = setup.forecast.seconds
        self.largest_batch, self.margin = largest_batch, margin


class Executor:
    """Up to `limit` threads, started when needed.

    Args:
        limit: The largest number of threads, including those whose stages were given up.
        clock: The clock.
        policy: Chooses the next batch.
        largest_batch: The largest number of requests in a batch.
        queue: How many requests may wait.

    Attributes:
        setup: What all requests share; set before the first one.
        slots: How many stages run at once.
        on_stage: Called after each stage in the thread that ran it.
        caller: The number of consecutive `refusals` of the calling thread.
    """

    def __init__(self, limit: int, clock: Clock, policy: SchedulingPolicy, *, largest_batch: int, queue: int) -> None:
        self._limit, self._clock, self._policy, self._queue = limit, clock, policy, queue
        self._largest_batch = largest_batch
        self.setup: RunSetup
        self.slots = 1
        self.on_stage: Callable[[StageReport], None] | None = None
        self.caller = Caller()
        self._closed = False
        self._reset()
        renew_in_children(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # garbage collection may close a runner while this thread holds it
        self._waiting: dict[Task, None] = {}
        self._parked: dict[Task, None] = {}
        self._look_at = _LOOK_AT
        self._at: dict[int, Batch | None] = {}
        self._here: set[Batch] = set()
        self._started: list[threading.Thread] = []
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._watched = False
        self._turn = 0
        self._times: tuple[int, _Times] | None = None

    def renew(self) -> None:
        """A forked process has neither the threads nor their waiters."""
        left = self._all()
        self._reset()
        for task in left:
            task.orphan()

    # For callers. An exception in a signal handler may end these at any instruction.

    def submit(self, task: Task, *, park: bool = False) -> None:
        """Queue a request for the threads, or refuse it.

        Args:
            task: The request.
            park: Whether a request that does not fit now waits until it does.
        """
        with self._lock:
            if self._closed:
                raise StateError("the runner is closed", expected="an open runner", fix="make a new Runner")
            expired = self._expired() if len(self._waiting) + len(self._parked) >= self._look_at else []
            now = self._clock.now()
            idle, free = self._idle(), self.slots - self._busy(now)
            task.waited = len(self._waiting) >= min(idle, free)
            retry = self._retry_after(task, now, free > 0)
            if retry is None:
                self._waiting[task] = None
            elif park and retry > 0:
                self._parked[task] = None
                task.waited, task.retry_after = True, retry
            wanted = retry is None and (free > 0 or not self._watched) and (idle > 0 or len(self._at) < self._limit)
        for each in expired:
            each.expire()
        if retry is not None and not (park and retry > 0):
            task.refuse(retry)
        if wanted:
            self._call(idle)

    def stages_here(self, task: Task) -> Iterator[int]:
        """Run the stages of a request one by one, in the caller's thread if no other request waits; yields the exits."""
        try:
            now = self._clock.now()
            if task.dispatch is not None and task.first_needed() > task.deadline - now and not self._may_try(task, now):
                task.refuse(0.0)
            task.waited = task.mode == "stream"  # the time until the first stage is the reader's
            while not task.stops(self._clock.now()) and task.fits(self._clock.now()):
                before = task.exit
                self._run_one(task)
                if task.exit == before:
                    break
                yield task.exit
        finally:
            self.withdraw(task)
            task.finish()

    def _run_one(self, task: Task) -> None:
        """Run one stage in the caller's thread or, if other requests wait, in a thread of the runner."""
        now = self._clock.now()
        batch = Batch([task], self.setup, now)
        try:
            if self._admits(task, batch, now):
                batch.step(waiting=0, on_stage=self.on_stage)
                return
        finally:
            self._here.discard(batch)
            if self._waiting:
                self._nudge()
        task.turn = gate = threading.Lock()
        gate.acquire()
        self.submit(task, park=True)
        if not self._clock.wait(gate, task.seconds_left() if task.exit < task.least else None):
            self.withdraw(task)
            if self.is_running(task):
                self._clock.wait(gate, None)
        task.turn = None

    @property
    def load(self) -> LoadStatus:
        """How busy the threads are."""
        with self._lock:
            running = sum(len(batch.running) for batch in self._active())
            return LoadStatus(len(self._waiting) + len(self._parked), running, self.slots)

    def is_running(self, task: Task) -> bool:
        """Whether a stage of a request is running."""
        with self._lock:
            return any(task in batch.running for batch in self._active())

    def withdraw(self, task: Task) -> None:
        """Remove a request from the queue."""
        with self._lock:
            waited = task in self._waiting or task in self._parked
            self._waiting.pop(task, None)
            self._parked.pop(task, None)
        if waited:
            task.drop()
        elif self._waiting:
            self._nudge()

    def close(self, *, patience: float | None = None) -> None:
        """End all threads, busy ones after their current stage.

        Args:
            patience: How many seconds to wait for them; without limit by default.
        """
        with self._lock:
            self._closed = True
            left = self._all()
        for task in left:
            task.interrupt()
        for _ in range(2 * self._limit + len(self._started)):  # more than there can be threads
            self._wakes.put(None)
        until = None if patience is None else time.monotonic() + patience
        for thread in list(self._started):
            # At its end the interpreter stops daemon threads itself; joining one would block forever.
            if thread is not threading.current_thread() and thread.ident is not None and not sys.is_finalizing():
                thread.join(None if until is None else max(until - time.monotonic(), 0.0))

    # Under the lock.

    def _all(self) -> list[Task]:
        running = [task for batch in self._active() for task in batch.running]
        return [*self._waiting, *self._parked, *running]

    def _idle(self) -> int:
        return sum(batch is None for batch in self._at.values())

    def _busy(self, now: float) -> int:
        """How many slots are taken by stages worth waiting for."""
        return sum(
            batch is not None and now - batch.began <= max(_PATIENCE, _STAGES * batch.expected)
            for batch in (*self._at.values(), *self._here)
        )

    def _retry_after(self, task: Task, now: float, free: bool) -> float | None:
        """None if a request is admitted; 0 if its deadline is too short in any case, else when to try again."""
        if task.exit or (task.dispatch is None and len(self._waiting) < self._queue):
            return None
        if task.dispatch is None or len(self._waiting) >= self._queue:
            return max(self.setup.forecast.seconds(1, task.rows), _SOONEST)
        left = task.deadline - now
        if left <= 0 or (task.first_needed() > left and not self._may_try(task, now)):
            return 0.0
        if task.trial or (free and not self._waiting):
            return None
        at = now if free else min(batch.began + batch.expected for batch in self._active())
        return retry_after(now, task, self._waiting, self._stage_times(), free=at, workers=self.slots)

    def _may_try(self, task: Task, now: float) -> bool:
        task.trial = self.setup.forecast.decline(1, task.rows, task.mode, now)
        return task.trial

    def _active(self) -> list[Batch]:
        return [batch for batch in (*self._at.values(), *self._here) if batch is not None]

    def _stage_times(self) -> _Times:
        """Stage times for the policy; the batch size that pays is looked up every so many turns."""
        if self._times is None or self._times[0] != self._turn // _FAIR:
            size = self.setup.forecast.paying_batch(self._largest_batch) if self.setup.joins else 1
            self._times = self._turn // _FAIR, _Times(self.setup, size, self.setup.forecast.dispatch("thread", self.setup.grace).slow)
        return self._times[1]

    def _admits(self, task: Task, batch: Batch, now: float) -> bool:
        """Whether a stage may run in its caller's thread now."""
        with self._lock:
            # Without a deadline it need not wait for a slot: idle cores should be used.
            if self._waiting or self._closed or (task.dispatch is not None and self._busy(now) >= self.slots):
                return False
            self._here.add(batch)
            return True

    def _expired(self) -> list[Task]:
        """The expired requests in the queue, which must not fill the memory while threads hang."""
        now = self._clock.now()
        expired = [task for task in (*self._waiting, *self._parked) if task.settled or task.deadline < now]
        self._look_at = max(_LOOK_AT, 2 * (len(self._waiting) + len(self._parked) - len(expired)))
        return expired

    def _unpark(self, now: float) -> None:
        """Admit parked requests as long as they fit, the most refused first."""
        while self._parked:
            task = min(self._parked, key=lambda task: (-task.refusals, task.arrived))
            free = self._busy(now) < self.slots
            retry = self._retry_after(task, now, free)
            if retry == 0.0:
                del self._parked[task]  # its caller is refused at its deadline
                continue
            if retry is not None:
                return
            del self._parked[task]
            self._waiting[task] = None

    def _pick(self, now: float, ended: list[Task]) -> Batch | None:
        """The batch to run next, if a slot is free. Requests that nothing more fits for are moved to `ended`."""
        if self._parked:
            self._unpark(now)
        trial: Task | None = None
        for task in list(self._waiting):
            if task.stops(now, poll=False) or not task.fits(now):
                del self._waiting[task]
                ended.append(task)
            elif task.trial:
                trial = task
        if not self._waiting or self._busy(now) >= self.slots:
            return None
        stages, self._turn = 1, self._turn + 1
        fair = self._turn % _FAIR == 0
        patient = next((task for task in self._waiting if task.dispatch is None), None) if fair else None
        if len(self._waiting) == 1:
            tasks = list(self._waiting)
        elif trial is not None or patient is not None:
            tasks = [trial or patient]  # type: ignore[list-item]
        else:
            chosen = self._policy.choose(now, list(self._waiting), self._stage_times())
            if chosen is None:  # the policy runs nothing more for those that have an answer
                done = [task for task in self._waiting if task.exit >= task.least]
                for task in done:
                    del self._waiting[task]
                ended += done
                return None
            tasks, stages = chosen.requests, chosen.stages
        for task in tasks:
            del self._waiting[task]
        return Batch(tasks, self.setup, now, stages=stages, final=self._policy.decides_depth)

    # Without the lock.

    def _nudge(self) -> None:
        """Wake a thread if a slot is free while requests wait."""
        with self._lock:
            idle = self._idle()
            free = bool(self._waiting) and self._busy(self._clock.now()) < self.slots
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
            for task in [] if left is None else left.running:  # an error of this thread itself: no caller must wait for it
                task.interrupt()
                task.finish()

    def _take_turns(self, me: int) -> None:
        wakes, own = self._wakes, Modes.now()
        batch: Batch | None = None
        ended: list[Task] = []
        while True:
            batch, wait = self._next(me, batch, ended)
            # The slot is freed before the callers are notified, so that their next requests find this thread idle.
            for task in ended:
                self._notify(task)
            ended = []  # a reference would keep the runner alive
            if batch is not None:
                ended = self._run(batch, own)
            elif self._closed:
                return
            else:
                with suppress(Empty):
                    wakes.get(timeout=wait)

    def _next(self, me: int, last: Batch | None, ended: list[Task]) -> tuple[Batch | None, float | None]:
        """The next batch of a thread, and how long to wait before checking again if no slot is free."""
        with self._lock:
            now = self._clock.now()
            self._at[me], self._watched = None, False
            for task in last.tasks if last is not None else ():
                if self._closed or task.turn is not None or last.final:
                    ended.append(task)
                else:
                    task.waited = True
                    self._waiting[task] = None
            if self._closed:
                return None, None
            self._at[me] = batch = self._pick(now, ended)
            if batch is not None or not self._waiting:
                return batch, None
            self._watched = True
            return None, _SOONEST

    def _run(self, batch: Batch, own: Modes) -> list[Task]:
        """Run a batch until it ends or others wait; the requests that have ended."""
        modes = batch.tasks[0].modes
        if modes == own:
            return self._stages(batch)
        with modes.again():
            return self._stages(batch)

    def _stages(self, batch: Batch) -> list[Task]:
        ended = batch.step(waiting=len(self._waiting) + len(self._parked), on_stage=self.on_stage)
        while batch.tasks and (batch.stages > 0 or self._stays(batch)):
            if not batch.final:
                now = self._clock.now()
                more = [task for task in batch.tasks if task.fits(now)]
                if len(more) < len(batch.tasks):
                    ended += [task for task in batch.tasks if task not in more]
                    batch.tasks = more
                    continue
            if ended:
                for task in ended:
                    self._notify(task)
                ended = []
            ended = batch.step(waiting=len(self._waiting) + len(self._parked), on_stage=self.on_stage)
        return ended

    def _stays(self, batch: Batch) -> bool:
        """Whether a batch goes on at once: no other request waits, and all stages were requested."""
        return not (self._waiting or self._parked or self._closed or batch.final) and batch.tasks[0].turn is None

    def _notify(self, task: Task) -> None:
        if task.turn is None:
            task.finish()
        else:
            with suppress(RuntimeError):  # released already
                task.turn.release()

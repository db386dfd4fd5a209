"""Threads that run the stages of all requests: the unit of scheduling is one stage for a batch of requests.

No more stages run at once than there are slots (`anytime.run.timing.slots`). What runs next is the scheduling policy's choice
(`anytime.run.scheduler`). A request that nothing else waits behind stays in its thread: a single caller pays nothing for the
scheduling.

A stage cannot be stopped. One that takes far longer than expected keeps its thread but loses its slot: another thread takes
over, up to `limit` threads in all.

Callers that block take no lock: they append to a queue and wake a thread, and threads fetch their work themselves. An exception
raised by a signal handler, at any instruction of a caller, can therefore lose the caller's own request and nothing else.
"""

from __future__ import annotations

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
from anytime.run.queue import LOOK_AT, SOONEST, RequestQueue
from anytime.run.scheduler import SchedulingPolicy
from anytime.run.task import Task
from anytime.run.timing.clock import Clock
from anytime.run.timing.scheduling_hints import use_batch_scheduling


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


class Executor:
    """Up to `limit` threads, started when needed.

    Args:
        limit: The largest number of threads, including those whose stages were given up.
        clock: The clock.
        policy: Chooses the next batch.
        largest_batch: The largest number of rows in a batch.
        queue: How many requests may wait.
        nice: By how much the priority of the threads is lowered.

    Attributes:
        queue: The requests.
        on_stage: Called after each stage in the thread that ran it.
        caller: The number of consecutive `refusals` of the calling thread.
    """

    def __init__(
        self, limit: int, clock: Clock, policy: SchedulingPolicy, *, largest_batch: int, queue: int, nice: int = 0
    ) -> None:
        self._limit, self._clock, self._nice = limit, clock, nice
        self.queue = RequestQueue(policy, largest_batch=largest_batch, most=queue)
        self.on_stage: Callable[[StageReport], None] | None = None
        self.caller = Caller()
        self._closed = False
        self._reset()
        renew_in_children(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # garbage collection may close a runner while this thread holds it
        self._threads: set[int] = set()
        self._idle: set[int] = set()
        self._started: list[threading.Thread] = []
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._watched = self._called = False
        self._submitted = self._seen = 0  # how many requests were queued, and as many as a thread has seen

    def renew(self) -> None:
        """A forked process has neither the threads nor their waiters."""
        left = self.queue.all()
        self.queue.clear()
        self._reset()
        for task in left:
            task.orphan()

    # For callers. An exception in a signal handler may end these at any instruction.

    def run(self, task: Task) -> None:
        """Queue a request whose caller blocks. It takes no lock: callers that wait for one would slow the stages down."""
        self._check_open()
        task.parks, task.thread = True, threading.get_ident()
        self.queue.arrived.append(task)
        if len(self.queue.arrived) > LOOK_AT:
            self._forget_expired()
        self._wake()

    def submit(self, task: Task) -> None:
        """Queue a request, or refuse it at once."""
        self._check_open()
        ended: list[Task] = []
        with self._lock:
            self.queue.arrived.append(task)
            self.queue.take_arrivals(self._clock.now(), ended)
            self._submitted += 1
        self._end(ended)
        self._wake()

    def stages_here(self, task: Task) -> Iterator[int]:
        """Run the stages of a request one by one, in the caller's thread if no other request waits; yields the exits."""
        try:
            now = self._clock.now()
            if task.dispatch is not None and task.first_needed() > task.deadline - now and not self.queue.may_try(task, now):
                task.reject(0.0)
            task.waited = task.mode == "stream"  # the time until the first stage is the reader's
            batch = Batch([task], self.queue.setup, now)
            while task.reason is None and (task.dispatch is None or task.fits(self._clock.now())):
                before = task.exit
                self._run_one(task, batch)
                if task.exit == before:
                    break
                yield task.exit
            batch.note_times()
        finally:
            self.withdraw(task)
            task.finish()

    def _run_one(self, task: Task, batch: Batch) -> None:
        """Run one stage in the caller's thread or, if other requests wait, in a thread of the runner."""
        # Without a deadline it need not wait for a slot: idle cores should be used.
        if not (self.queue.queued() or self._closed) and (task.dispatch is None or self.queue.free(self._clock.now()) > 0):
            try:
                self.queue.active.add(batch)
                batch.step(waiting=0, on_stage=self.on_stage)
            finally:
                self.queue.active.discard(batch)
                if self.queue.queued():
                    self._wake()
            return
        task.turn = gate = threading.Lock()
        gate.acquire()
        self.run(task)
        if not self._clock.wait(gate, task.seconds_left() if task.exit < task.least else None):
            self.withdraw(task)
            if self.is_running(task):
                self._clock.wait(gate, None)
        task.turn = None

    @property
    def load(self) -> LoadStatus:
        """How busy the threads are."""
        running = sum(len(batch.running) for batch in list(self.queue.active))
        return LoadStatus(len(self.queue.arrived) + len(self.queue.waiting) + len(self.queue.parked), running, self.queue.slots)

    def is_running(self, task: Task) -> bool:
        """Whether a stage of a request is running."""
        return any(task in batch.running for batch in list(self.queue.active))

    def withdraw(self, task: Task) -> None:
        """Remove a request that is settled from the queue; one that is parked is removed by a thread."""
        if task in self.queue.waiting:
            with self._lock:
                waited = self.queue.waiting.pop(task, task) is None
            if waited:
                task.drop()
        if self.queue.waiting:
            self._wake()

    def close(self, *, patience: float | None = None) -> None:
        """End all threads, busy ones after their current stage.

        Args:
            patience: How many seconds to wait for them; without limit by default.
        """
        with self._lock:
            self._closed = True
            left = self.queue.all()
        for task in left:
            task.interrupt()
        for _ in range(2 * self._limit + len(self._started)):  # more than there can be threads
            self._wakes.put(None)
        until = None if patience is None else time.monotonic() + patience
        for thread in list(self._started):
            # At its end the interpreter stops daemon threads itself; joining one would block forever.
            if thread is not threading.current_thread() and thread.ident is not None and not sys.is_finalizing():
                thread.join(None if until is None else max(until - time.monotonic(), 0.0))

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the runner is closed", expected="an open runner", fix="make a new Runner")

    def _wake(self) -> None:
        """Have a thread look for work: an idle one if a slot is free or nobody watches the running stages, or a new one.

        Beyond one thread per slot there is one more, which watches, and one for each stage that has lost its slot.
        """
        now = self._clock.now()
        active = list(self.queue.active)
        lost = sum(now >= self.queue.lost_at(batch) for batch in active)
        if self._idle:
            if not self._called and (len(active) - lost < self.queue.slots or not self._watched):
                self._called = True  # a single call is enough: the thread that wakes up takes all that has arrived
                self._wakes.put(None)
        elif len(self._threads) < min(self._limit, self.queue.slots + 1 + lost):
            # A daemon: a runner that was not closed must not keep the interpreter from ending.
            thread = threading.Thread(target=self._serve, name="anytime-runner", daemon=True)
            with self._lock:
                self._started = [*(each for each in self._started if each.ident is None or each.is_alive()), thread]
            try:
                thread.start()
            except RuntimeError:
                if not self._threads:  # else the other threads do the work
                    raise

    def _forget_expired(self) -> None:
        """Expired requests must not fill the memory while threads hang."""
        expired: list[Task] = []
        with self._lock:
            now = self._clock.now()
            expired += [task for task in list(self.queue.arrived) if task.settled or task.deadline < now]
            for task in expired:
                self.queue.arrived.remove(task)  # no other one is ever out of the queue: an exception may come now
        for task in expired:
            task.expire()
            task.drop()

    # The threads.

    def _serve(self) -> None:
        use_batch_scheduling(self._nice)
        me = threading.get_ident()
        with self._lock:
            if self._closed or len(self._threads) >= self._limit:
                return
            self._threads.add(me)
        batch: Batch | None = None
        ended: list[Task] = []
        try:
            own = Modes.now()
            while not self._closed or batch is not None:
                batch = self._next(batch, ended)
                # The slot is free, and the thread idle, before the callers are notified: their next requests find it so.
                if batch is None:
                    self._sleep(me, ended)
                else:
                    self._end(ended)
                    if (self.queue.waiting or self.queue.parked) and not self._watched:
                        self._wake()  # this thread may have watched, and its stage may hang
                    ended = self._run(batch, own)
        finally:
            self._threads.discard(me)
            if batch is not None:  # an error of this thread itself: no caller must wait for it
                self.queue.active.discard(batch)
                for task in batch.running:
                    task.interrupt()
                    task.finish()

    def _next(self, last: Batch | None, ended: list[Task]) -> Batch | None:
        """The next batch of a thread; requests that end are added to `ended`."""
        with self._lock:
            self._called, self._seen = False, self._submitted
            now = self._clock.now()
            if last is not None:
                self.queue.note_speed(last)
                self.queue.active.discard(last)
                for task in last.tasks:
                    if last.final:
                        task.stop_by_policy()
                    if self._closed or task.turn is not None or last.final:
                        ended.append(task)
                    else:
                        task.waited = True
                        self.queue.waiting[task] = None
            if self._closed:
                return None
            self.queue.take_arrivals(now, ended)
            batch = self.queue.pick(now, ended)
            if batch is not None:
                self.queue.active.add(batch)
            return batch

    def _sleep(self, me: int, ended: list[Task]) -> None:
        """Wait for work; if requests wait for a slot, until a running stage loses its own."""
        self._idle.add(me)
        watches = False
        try:
            self._end(ended)
            if self.queue.arrived or self._closed or self._submitted != self._seen:
                return
            active = list(self.queue.active)
            watches = bool((self.queue.waiting or self.queue.parked) and active) and not self._watched
            timeout = None
            if watches:
                self._watched = True
                timeout = max(min(map(self.queue.lost_at, active)) - self._clock.now(), SOONEST)
            with suppress(Empty):
                self._wakes.get(timeout=timeout)
        finally:
            self._idle.discard(me)
            if watches:
                self._watched = False

    def _run(self, batch: Batch, own: Modes) -> list[Task]:
        """Run a batch until it ends or others wait; the requests that have ended."""
        modes = batch.tasks[0].modes
        if modes == own or not self.queue.setup.reads_modes:
            return self._stages(batch)
        with modes.again():
            return self._stages(batch)

    def _stages(self, batch: Batch) -> list[Task]:
        ended = batch.step(waiting=self.queue.count(), on_stage=self.on_stage)
        while batch.tasks and (batch.stages > 0 or self._stays(batch)):
            if not batch.final:
                now = self._clock.now()
                more = [task for task in batch.tasks if task.fits(now)]
                if len(more) < len(batch.tasks):
                    ended += [task for task in batch.tasks if task not in more]
                    batch.tasks = more
                    continue
            self._end(ended)
            ended = batch.step(waiting=self.queue.count(), on_stage=self.on_stage)
        batch.note_times()
        return ended

    def _stays(self, batch: Batch) -> bool:
        """Whether a batch goes on at once: no other request waits, and all stages were requested."""
        return not (self.queue.queued() or self._closed or batch.final) and batch.tasks[0].turn is None

    def _end(self, ended: list[Task]) -> None:
        """Notify the callers of requests that have ended. No reference is kept, since it would keep the runner alive."""
        while ended:
            task = ended.pop()
            turn = task.turn  # its caller, who may give up waiting now, forgets it
            if turn is None:
                task.finish()
            else:
                with suppress(RuntimeError):  # released already
                    turn.release()

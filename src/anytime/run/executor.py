"""Threads that run the stages of all requests: the unit of scheduling is one stage for a batch of requests.

No more stages run at once than there are slots (`anytime.run.timing.slots`). What runs next is the scheduling policy's choice
(`anytime.run.scheduler`). A request that nothing else waits behind stays in its thread: a single caller pays nothing for the
scheduling.

A request with a deadline is admitted if its first stage fits behind those of the requests admitted before, else refused at
once. A caller that blocks in `predict` is parked instead: it is admitted when there is room, the one that was refused most
often first, and refused when it is too late for that.

A stage cannot be stopped. One that takes far longer than expected keeps its thread but loses its slot: another thread takes
over, up to `limit` threads in all.

Callers that block take no lock: they append to a queue and wake a thread, and threads fetch their work themselves. An exception
raised by a signal handler, at any instruction of a caller, can therefore lose the caller's own request and nothing else.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from anytime.errors import StateError
from anytime.models.modes import Modes
from anytime.run.batch import Batch, StageReport
from anytime.run.forks import renew_in_children
from anytime.run.scheduler import POLICIES, SchedulingPolicy, retry_after
from anytime.run.setup import RunSetup
from anytime.run.task import Task
from anytime.run.timing.clock import Clock
from anytime.run.timing.scheduling_hints import use_batch_scheduling

_LOOK_AT = 64
"""How many requests may wait before expired ones are removed."""
_REFRESH, _EXPLORE = 8, 32
"""Every so many turns, the batch size that pays is determined again; and every so many times, larger ones are tried."""
_PATIENCE, _STAGES = 0.05, 8
"""A running stage holds its slot for so many times its expected duration, and at least these seconds."""
_SOONEST = 1e-3
"""Seconds between two checks for stages that take too long."""
_HALF, _MOST, _FASTER = 0.5, 0.75, 1.3
"""A batch takes at most half of the time allowed, so that those who come while it runs have time for theirs; or three quarters,
if the larger batch has so many times the throughput."""
_NEW, _SLOWEST = 0.1, 5.0
"""The weight of the last stage in the present slowdown, and the largest one that counts."""
_SHORTEST = 1e-6
"""Seconds that a stage of unknown duration counts for."""


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
    """Stage times as the scheduling policy reads them.

    Args:
        setup: Of the runner.
        rows: The largest batch in rows.
        each: Rows per request.
        margin: Seconds between the end of a stage and its answer being with the caller.
        slowdown: How much longer than forecast stages take now.
    """

    def __init__(self, setup: RunSetup, rows: int, each: int, margin: float, slowdown: float) -> None:
        self._seconds, self._each = setup.forecast.seconds, each
        self.largest_batch, self.margin, self._slowdown = max(1, rows // each), margin, slowdown

    def seconds(self, stage: int, batch: int) -> float:
        """The expected duration of a stage for a number of requests."""
        return max(self._slowdown * self._seconds(stage, batch * self._each), _SHORTEST)  # unknown ones count as short

    def limit(self, allowed: float) -> None:
        """Limit the batch size for requests that allow so many seconds."""
        small, large = (self._largest(part * allowed) for part in (_HALF, _MOST))
        faster = large * self.seconds(1, small) > _FASTER * small * self.seconds(1, large)
        self.largest_batch = large if faster else small

    def _largest(self, longest: float) -> int:
        sizes = range(self.largest_batch, 1, -1)
        return next((size for size in sizes if self.seconds(1, size) + self.margin <= longest), 1)

    @property
    def full(self) -> float:
        """The seconds that the first stage of a full batch needs."""
        return self.seconds(1, self.largest_batch) + self.margin


class Executor:
    """Up to `limit` threads, started when needed.

    Args:
        limit: The largest number of threads, including those whose stages were given up.
        clock: The clock.
        policy: Chooses the next batch.
        largest_batch: The largest number of rows in a batch.
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
        self._arrived: deque[Task] = deque()
        self._waiting: dict[Task, None] = {}
        self._parked: list[tuple[int, float, int, Task]] = []  # a heap
        self._active: set[Batch] = set()
        self._threads: set[int] = set()
        self._idle: set[int] = set()
        self._started: list[threading.Thread] = []
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._watched = self._called = False
        self._submitted = self._seen = 0  # how many requests were queued, and as many as a thread has seen
        self._turn = 0
        self._numbers = itertools.count()
        self._last = 0, -math.inf  # the thread of the last request, and its time
        self._slowdown = 1.0
        self._known_times: dict[bool, tuple[object, _Times]] = {}  # for the policy and for admission
        self._clean_at = _LOOK_AT

    def renew(self) -> None:
        """A forked process has neither the threads nor their waiters."""
        left = self._all()
        self._reset()
        for task in left:
            task.orphan()

    # For callers. An exception in a signal handler may end these at any instruction.

    def run(self, task: Task) -> None:
        """Queue a request whose caller blocks. It takes no lock: callers that wait for one would slow the stages down."""
        self._check_open()
        task.parks, task.thread = True, threading.get_ident()
        self._arrived.append(task)
        if len(self._arrived) > _LOOK_AT:
            self._forget_expired()
        self._wake()

    def submit(self, task: Task) -> None:
        """Queue a request, or refuse it at once."""
        self._check_open()
        ended: list[Task] = []
        with self._lock:
            self._arrived.append(task)
            self._take_arrivals(self._clock.now(), ended)
            self._submitted += 1
        self._end(ended)
        self._wake()

    def stages_here(self, task: Task) -> Iterator[int]:
        """Run the stages of a request one by one, in the caller's thread if no other request waits; yields the exits."""
        try:
            now = self._clock.now()
            if task.dispatch is not None and task.first_needed() > task.deadline - now and not self._may_try(task, now):
                task.reject(0.0)
            task.waited = task.mode == "stream"  # the time until the first stage is the reader's
            batch = Batch([task], self.setup, now)
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
        if not (self._queued() or self._closed) and (task.dispatch is None or self._free(self._clock.now()) > 0):
            try:
                self._active.add(batch)
                batch.step(waiting=0, on_stage=self.on_stage)
            finally:
                self._active.discard(batch)
                if self._queued():
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
        running = sum(len(batch.running) for batch in list(self._active))
        return LoadStatus(len(self._arrived) + len(self._waiting) + len(self._parked), running, self.slots)

    def is_running(self, task: Task) -> bool:
        """Whether a stage of a request is running."""
        return any(task in batch.running for batch in list(self._active))

    def withdraw(self, task: Task) -> None:
        """Remove a request that is settled from the queue; one that is parked is removed by a thread."""
        if task in self._waiting:
            with self._lock:
                waited = self._waiting.pop(task, task) is None
            if waited:
                task.drop()
        if self._waiting:
            self._wake()

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

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the runner is closed", expected="an open runner", fix="make a new Runner")

    def _queued(self) -> bool:
        return bool(self._waiting or self._arrived or self._parked)

    def _free(self, now: float) -> int:
        """How many slots are free; a stage that takes far too long has lost its slot."""
        return self.slots - sum(now < self._lost_at(batch) for batch in list(self._active))

    def _lost_at(self, batch: Batch) -> float:
        return batch.began + max(_PATIENCE, _STAGES * batch.expected)

    def _wake(self) -> None:
        """Have a thread look for work: an idle one if a slot is free or nobody watches the running stages, or a new one.

        Beyond one thread per slot there is one more, which watches, and one for each stage that has lost its slot.
        """
        now = self._clock.now()
        active = list(self._active)
        lost = sum(now >= self._lost_at(batch) for batch in active)
        if self._idle:
            if not self._called and (len(active) - lost < self.slots or not self._watched):
                self._called = True  # a single call is enough: the thread that wakes up takes all that has arrived
                self._wakes.put(None)
        elif len(self._threads) < min(self._limit, self.slots + 1 + lost):
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
            expired += [task for task in list(self._arrived) if task.settled or task.deadline < now]
            for task in expired:
                self._arrived.remove(task)  # no other one is ever out of the queue: an exception may come now
        for task in expired:
            task.expire()
            task.drop()

    # Under the lock.

    def _all(self) -> list[Task]:
        running = [task for batch in list(self._active) for task in batch.running]
        return [*self._arrived, *self._waiting, *(task for *_, task in self._parked), *running]

    def _take_arrivals(self, now: float, ended: list[Task]) -> None:
        """Admit, park or refuse the requests that have arrived."""
        crowd = bool(self._parked) or len(self._arrived) > 1
        while self._arrived:
            task = self._arrived[0]  # removed once it is elsewhere: `submit` may be interrupted by an exception
            if task.settled:
                ended.append(self._arrived.popleft())
                continue
            retry = None if task.exit else self._retry_after(task, now)
            if retry is None and crowd and task.parks and task.dispatch is not None and not (task.exit or task.trial):
                retry = self.setup.forecast.seconds(1, task.rows) + _SHORTEST  # `_unpark` chooses among all of them
            if retry is None:
                task.waited = task.waited or bool(self._waiting) or self._free(now) <= 0
                self._waiting[task] = None
                self._arrived.popleft()
            else:
                self._arrived.popleft()
                task.waited = True
                if task.parks and (retry > 0 or self._others(task, now)):
                    task.retry_after = max(retry, self.setup.forecast.shortest(1, task.rows))
                    heapq.heappush(self._parked, (-task.refusals, -task.arrived, next(self._numbers), task))
                else:
                    task.reject(retry)
                    ended.append(task)
            self._last = task.thread, now

    def _retry_after(self, task: Task, now: float) -> float | None:
        """None if a request is admitted; 0 if its deadline is too short in any case, else when to try again."""
        full = len(self._waiting) >= self._queue
        if task.dispatch is None or full:
            return max(self.setup.forecast.seconds(1, task.rows), _SOONEST) if full else None
        left = task.deadline - now
        if left <= 0 or (task.first_needed() > left and not self._may_try(task, now)):
            # Durations that were measured under load rule it out, which does not mean that it never fits.
            busy = bool(self._waiting or self._active) and self.setup.forecast.shortest(1, task.rows) < task.budget.time
            return max(task.first_needed() - left, _SOONEST) if busy else 0.0
        if task.trial or (not self._waiting and self._free(now) > 0):
            return None
        ends = sorted(
            max(now, one.began + self._slowdown * one.expected) for one in list(self._active) if now < self._lost_at(one)
        )
        slots = [*[now] * (self.slots - len(ends)), *ends][: self.slots]
        backlog, times = sum(one.exit < one.least for one in self._waiting), self._stage_times(task)
        if task.parks and backlog >= self.slots * times.largest_batch:
            return times.full  # it waits outside: who comes later has more time left when there is room
        return retry_after(now, task, self._waiting, times, free=slots)

    def _may_try(self, task: Task, now: float) -> bool:
        task.trial = self.setup.forecast.decline(1, task.rows, task.mode, now)
        return task.trial

    def _others(self, task: Task, now: float) -> bool:
        """Whether other threads make requests: callers that are refused at once and ask again would slow their stages down."""
        thread, at = self._last
        return bool(self._parked or self._active) or (thread != task.thread and now - at < task.budget.time)

    def _stage_times(self, task: Task | None = None) -> _Times:
        """Stage times for the policy, for the requests that wait and perhaps another; kept for a few turns."""
        setup, turn = self.setup, self._turn // _REFRESH
        waiting = self._waiting if task is None else (task,)
        allowed = min((one.deadline - one.arrived for one in waiting), default=math.inf)
        each = max((one.rows for one in waiting), default=1)
        key, known = (turn, round(allowed, 4), each), self._known_times.get(task is None)
        if known is None or known[0] != key:
            explore = turn % _EXPLORE == 0
            rows = self._largest_batch if explore else setup.forecast.paying_batch(self._largest_batch)
            # Who is admitted must have time for a slow dispatch; after that a typical one is better than no answer.
            known_modes = [one.dispatch for one in waiting if one.dispatch is not None]
            margin = max((each.typical if task is None else each.slow for each in known_modes), default=0.0)
            times = _Times(setup, rows if setup.joins else 1, each, margin, self._slowdown)
            times.limit(allowed)
            self._known_times[task is None] = known = key, times
        return known[1]

    def _unpark(self, now: float) -> None:
        """Admit parked requests as long as they fit, the most refused first, the latest first among equals.

        If more are parked than fit into a batch, those that are too urgent to wait for a full one are left behind: a batch
        that ends in time for them would be small.
        """
        if len(self._parked) > self._clean_at:
            self._parked = [entry for entry in self._parked if not entry[-1].settled]
            heapq.heapify(self._parked)
            self._clean_at = max(_LOOK_AT, 2 * len(self._parked))
        while self._parked and self._free(now) > 0:
            task = self._parked[0][-1]
            retry: float | None = 0.0
            if not task.settled and task.first_needed() <= task.deadline - now:
                times = self._stage_times(task)
                crowded = len(self._parked) > times.largest_batch
                if not crowded or task.deadline - now >= times.full:
                    retry = self._retry_after(task, now)
            if retry:
                return
            heapq.heappop(self._parked)
            if retry is None:
                self._waiting[task] = None  # the others are too late: their callers are refused at their deadlines

    def _pick(self, now: float, ended: list[Task]) -> Batch | None:
        """The batch to run next, if a slot is free. Requests that nothing more fits for are moved to `ended`."""
        trial: Task | None = None
        for task in list(self._waiting):
            if task.stops(now, poll=False) or not task.fits(now):
                del self._waiting[task]
                ended.append(task)
            elif task.trial:
                trial = task
        self._unpark(now)
        if not self._waiting or self._free(now) <= 0:
            return None
        stages, self._turn = 1, self._turn + 1
        if trial is not None or len(self._waiting) == 1:
            tasks = [trial or next(iter(self._waiting))]
        else:
            try:
                chosen = self._policy.choose(now, list(self._waiting), self._stage_times())
                if chosen is not None and type(self._policy) not in POLICIES.values():
                    _check_choice(chosen.requests, self._waiting)
            except Exception as error:  # a policy of the user's
                for task in self._waiting:
                    task.fail(error)
                ended += self._waiting
                self._waiting.clear()
                return None
            if chosen is None:  # the policy runs nothing more for those that have an answer
                done = [task for task in self._waiting if task.exit >= task.least]
                for task in done:
                    del self._waiting[task]
                ended += done
                return None
            tasks, stages = chosen.requests, chosen.stages
        for task in tasks:
            del self._waiting[task]
        return Batch(tasks, self.setup, now, stages=stages, final=getattr(self._policy, "decides_depth", False))

    # The threads.

    def _serve(self) -> None:
        use_batch_scheduling()
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
                    if (self._waiting or self._parked) and not self._watched:
                        self._wake()  # this thread may have watched, and its stage may hang
                    ended = self._run(batch, own)
        finally:
            self._threads.discard(me)
            if batch is not None:  # an error of this thread itself: no caller must wait for it
                self._active.discard(batch)
                for task in batch.running:
                    task.interrupt()
                    task.finish()

    def _next(self, last: Batch | None, ended: list[Task]) -> Batch | None:
        """The next batch of a thread; requests that end are added to `ended`."""
        with self._lock:
            self._called, self._seen = False, self._submitted
            now = self._clock.now()
            if last is not None:
                self._note_speed(last)
                self._active.discard(last)
                for task in last.tasks:
                    if self._closed or task.turn is not None or last.final:
                        ended.append(task)
                    else:
                        task.waited = True
                        self._waiting[task] = None
            if self._closed:
                return None
            self._take_arrivals(now, ended)
            batch = self._pick(now, ended)
            if batch is not None:
                self._active.add(batch)
            return batch

    def _note_speed(self, last: Batch) -> None:
        """Follow a change of load faster than the forecasts of all batch sizes do; others can only slow a stage down."""
        if last.expected > 0 and last.took is not None:
            ratio = min(max(last.took / last.expected, 1.0), _SLOWEST)
            self._slowdown += _NEW * (ratio - self._slowdown)

    def _sleep(self, me: int, ended: list[Task]) -> None:
        """Wait for work; if requests wait for a slot, until a running stage loses its own."""
        self._idle.add(me)
        watches = False
        try:
            self._end(ended)
            if self._arrived or self._closed or self._submitted != self._seen:
                return
            active = list(self._active)
            watches = bool((self._waiting or self._parked) and active) and not self._watched
            timeout = None
            if watches:
                self._watched = True
                timeout = max(min(map(self._lost_at, active)) - self._clock.now(), _SOONEST)
            with suppress(Empty):
                self._wakes.get(timeout=timeout)
        finally:
            self._idle.discard(me)
            if watches:
                self._watched = False

    def _run(self, batch: Batch, own: Modes) -> list[Task]:
        """Run a batch until it ends or others wait; the requests that have ended."""
        modes = batch.tasks[0].modes
        if modes == own:
            return self._stages(batch)
        with modes.again():
            return self._stages(batch)

    def _stages(self, batch: Batch) -> list[Task]:
        ended = batch.step(waiting=self._count_queued(), on_stage=self.on_stage)
        while batch.tasks and (batch.stages > 0 or self._stays(batch)):
            if not batch.final:
                now = self._clock.now()
                more = [task for task in batch.tasks if task.fits(now)]
                if len(more) < len(batch.tasks):
                    ended += [task for task in batch.tasks if task not in more]
                    batch.tasks = more
                    continue
            self._end(ended)
            ended = batch.step(waiting=self._count_queued(), on_stage=self.on_stage)
        batch.note_times()
        return ended

    def _count_queued(self) -> int:
        return len(self._arrived) + len(self._waiting) + len(self._parked)

    def _stays(self, batch: Batch) -> bool:
        """Whether a batch goes on at once: no other request waits, and all stages were requested."""
        return not (self._queued() or self._closed or batch.final) and batch.tasks[0].turn is None

    def _end(self, ended: list[Task]) -> None:
        """Notify the callers of requests that have ended. No reference is kept, since it would keep the runner alive."""
        while ended:
            task = ended.pop()
            if task.turn is None:
                task.finish()
            else:
                with suppress(RuntimeError):  # released already
                    task.turn.release()


def _check_choice(chosen: Sequence[Task], waiting: Mapping[Task, None]) -> None:
    """Refuse what a policy of the user's must not choose: it would end the thread."""
    if not chosen or len(set(chosen)) < len(chosen) or any(one not in waiting for one in chosen):
        fault = "no request, or one that does not wait"
    elif len({(one.exit, one.group) for one in chosen}) > 1:
        fault = "requests at different exits or of different groups"
    else:
        return
    raise StateError(
        f"the scheduling policy chose {fault}",
        expected="some of the requests that it was given, with equal `exit` and `group`; or None",
        fix="return only requests from its second argument from choose(now, requests, times)",
    )

"""The requests that wait for a stage: which are admitted or parked, and which batch is next.

A request with a deadline is admitted if its first stage fits behind those of the requests admitted before, else refused at
once. A caller that blocks in `predict` is parked instead: it is admitted when there is room, the one that was refused most
often first, and refused when it is too late for that.

All but `free`, `queued`, `count`, `retry_after` and appending to `arrived` is done under the executor's lock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence

from anytime.errors import StateError
from anytime.run.batch import Batch
from anytime.run.budget import Budget
from anytime.run.scheduler import POLICIES, SchedulingPolicy, retry_after
from anytime.run.setup import RunSetup
from anytime.run.task import Task

LOOK_AT = 64
"""How many requests may wait before expired ones are removed."""
SOONEST = 1e-3
"""Seconds: the shortest time after which to try again, and between two checks for stages that take too long."""
_REFRESH = 8
"""Every so many turns the batch sizes are determined again."""
_PATIENCE, _STAGES = 0.05, 8
"""A running stage holds its slot for so many times its expected duration, and at least these seconds."""
_HALF, _MOST, _FASTER = 0.5, 0.75, 1.3
"""A batch takes at most half of the time allowed, so that those who come while it runs have time for theirs; or three quarters,
if the larger batch has so many times the throughput."""
_NEW, _SLOWEST = 0.1, 5.0
"""The weight of the last stage in the present slowdown, and the largest one that counts."""
_RECENT = 1.0
"""Seconds for which others count as present after a request had to wait for them."""
_NOTHING = 0.0, 0.0, 0, 0
"""Nothing is refused; else until when requests are with at most so many seconds, and at least so many rows and exits."""
_SHORTEST = 1e-6
"""Seconds that a stage of unknown duration counts for."""


class _Times:
    """Stage times as the scheduling policy reads them.

    Args:
        setup: Of the runner.
        rows: The largest batch in rows.
        each: Rows per request.
        margin: Seconds between the end of a stage and its answer being with the caller.
        slowdown: How much longer than forecast stages take now.
        allowed: Seconds that a request allows.
    """

    def __init__(self, setup: RunSetup, rows: int, each: int, margin: float, slowdown: float, allowed: float) -> None:
        self._seconds, self._each = setup.forecast.seconds, each
        self.largest_batch, self.margin, self._slowdown = max(1, rows // each), margin, slowdown
        small, large = (self._largest(part * allowed) for part in (_HALF, _MOST))
        faster = large * self.seconds(1, small) > _FASTER * small * self.seconds(1, large)
        self.largest_batch = large if faster else small
        self.paying_batch = min(self.largest_batch, max(1, setup.forecast.paying_batch(rows) // each))

    def seconds(self, stage: int, batch: int) -> float:
        """The expected duration of a stage for a number of requests."""
        return max(self._slowdown * self._seconds(stage, batch * self._each), _SHORTEST)  # unknown ones count as short

    def _largest(self, longest: float) -> int:
        # Without the margin: a slow dispatch under load must not make batches small, which would slow down everything else.
        return next((size for size in range(self.largest_batch, 1, -1) if self.seconds(1, size) <= longest), 1)

    @property
    def full(self) -> float:
        """The seconds that the first stage of a batch that pays needs."""
        return self.seconds(1, self.paying_batch) + self.margin


class RequestQueue:
    """The requests of a runner that wait or run.

    Args:
        policy: Chooses the next batch.
        largest_batch: The largest number of rows in a batch.
        most: How many requests may wait.

    Attributes:
        setup: What all requests share; set before the first one.
        slots: How many stages run at once.
        arrived: Requests that no thread has looked at.
        waiting: Requests that were admitted.
        parked: Requests of blocked callers that were not admitted yet, as a heap.
        active: The batches that run.
        refusing: What was refused since the last stage ended, and would be again.
    """

    def __init__(self, policy: SchedulingPolicy, *, largest_batch: int, most: int) -> None:
        self._policy, self._largest_batch, self._most = policy, largest_batch, most
        self.setup: RunSetup
        self.slots = 1
        self.clear()

    def clear(self) -> None:
        """Forget all requests."""
        self.arrived: deque[Task] = deque()
        self.waiting: dict[Task, None] = {}
        self.parked: list[tuple[int, float, int, Task]] = []
        self.active: set[Batch] = set()
        self._turn = 0
        self._numbers = itertools.count()
        self._last = 0, -math.inf  # the thread of the last request, and its time
        self._slowdown = 1.0
        self._known_times: dict[bool, tuple[object, _Times]] = {}  # for the policy and for admission
        self._clean_at = LOOK_AT
        self.refusing = _NOTHING
        self._crowded = -math.inf  # when a request last had to wait for others

    def queued(self) -> bool:
        """Whether any request waits."""
        return bool(self.waiting or self.arrived or self.parked)

    def free(self, now: float) -> int:
        """How many slots are free; a stage that takes far too long has lost its slot."""
        return self.slots - sum(now < self.lost_at(batch) for batch in list(self.active))

    def lost_at(self, batch: Batch) -> float:
        """When a running stage loses its slot."""
        return batch.began + max(_PATIENCE, _STAGES * batch.expected)

    def count(self) -> int:
        """How many requests wait."""
        return len(self.arrived) + len(self.waiting) + len(self.parked)

    def note_speed(self, last: Batch) -> None:
        """Follow a change of load faster than the forecasts of all batch sizes do; others can only slow a stage down."""
        self.refusing = _NOTHING
        if last.expected > 0 and last.took is not None:
            ratio = min(max(last.took / last.expected, 1.0), _SLOWEST)
            self._slowdown += _NEW * (ratio - self._slowdown)

    def retry_after(self, budget: Budget, rows: int, now: float) -> float:
        """After how many seconds to try again, if a request that asks no more was refused a moment ago; 0 if none was."""
        until, seconds, fewest_rows, fewest_exits = self.refusing
        same = budget.time is not None and budget.time <= seconds and rows >= fewest_rows
        return max(until - now, 0.0) if same and (budget.min_exits or 1) >= fewest_exits else 0.0

    def all(self) -> list[Task]:
        """All requests that wait or run."""
        running = [task for batch in list(self.active) for task in batch.running]
        return [*self.arrived, *self.waiting, *(task for *_, task in self.parked), *running]

    def take_arrivals(self, now: float, ended: list[Task]) -> None:
        """Admit, park or refuse the requests that have arrived."""
        crowd = bool(self.parked) or len(self.arrived) > 1
        while self.arrived:
            task = self.arrived[0]  # removed once it is elsewhere: `submit` may be interrupted by an exception
            if task.settled:
                ended.append(self.arrived.popleft())
                continue
            retry = None if task.exit else self._retry_after(task, now)
            if retry is None and crowd and task.parks and task.dispatch is not None and not (task.exit or task.trial):
                retry = self.setup.forecast.seconds(1, task.rows) + _SHORTEST  # `_unpark` chooses among all of them
            if retry is None:
                if self.waiting or self.free(now) <= 0:
                    task.waited, self._crowded = True, now
                self.waiting[task] = None
                self.arrived.popleft()
            else:
                self.arrived.popleft()
                task.waited = True
                if task.parks and (retry > 0 or self._others(task, now)):
                    task.retry_after = max(retry, self.setup.forecast.shortest(1, task.rows))
                    heapq.heappush(self.parked, (-task.refusals, -task.arrived, next(self._numbers), task))
                else:
                    if retry > 0 and task.budget.time is not None:
                        self.refusing = now + retry, task.budget.time, task.rows, task.least
                    task.reject(retry)
                    ended.append(task)
            self._last = task.thread, now

    def _retry_after(self, task: Task, now: float) -> float | None:
        """None if a request is admitted; 0 if its deadline is too short in any case, else when to try again."""
        full = len(self.waiting) >= self._most
        if task.dispatch is None or full:
            return max(self.setup.forecast.seconds(1, task.rows), SOONEST) if full else None
        left = task.deadline - now
        if left <= 0 or (task.first_needed() > left and not self.may_try(task, now)):
            # Durations that were measured under load rule it out, which does not mean that it never fits.
            busy = bool(self.waiting or self.active) or now - self._crowded < _RECENT
            busy = busy and task.first_at_best() < task.budget.time
            return max(task.first_needed() - left, SOONEST) if busy else 0.0
        if task.trial or (not self.waiting and self.free(now) > 0):
            return None
        ends = sorted(
            max(now, one.began + self._slowdown * one.expected) for one in list(self.active) if now < self.lost_at(one)
        )
        slots = [*[now] * (self.slots - len(ends)), *ends][: self.slots]
        backlog, times = sum(one.exit < one.least for one in self.waiting), self._stage_times(task)
        if task.parks and backlog >= self.slots * times.paying_batch:
            return times.full  # it is parked: a request that arrives later has more time left when there is room
        return retry_after(now, task, self.waiting, times, free=slots)

    def may_try(self, task: Task, now: float) -> bool:
        """Whether to try a first stage although the forecast rules it out."""
        task.trial = self.setup.forecast.decline(1, task.rows, task.mode, now)
        return task.trial

    def _others(self, task: Task, now: float) -> bool:
        """Whether other threads make requests: callers that are refused at once and ask again would slow their stages down."""
        thread, at = self._last
        return bool(self.parked or self.active) or (thread != task.thread and now - at < task.budget.time)

    def _stage_times(self, task: Task | None = None) -> _Times:
        """Stage times for the policy, for the requests that wait and perhaps another; kept for a few turns."""
        setup, turn = self.setup, self._turn // _REFRESH
        waiting = self.waiting if task is None else (task,)
        allowed = min((one.deadline - one.arrived for one in waiting), default=math.inf)
        each = max((one.rows for one in waiting), default=1)
        key, known = (turn, round(allowed, 4), each), self._known_times.get(task is None)
        if known is None or known[0] != key:
            # Who is admitted must have time for a slow dispatch; after that a typical one is better than no answer.
            known_modes = [one.dispatch for one in waiting if one.dispatch is not None]
            margin = max((each.typical if task is None else each.slow for each in known_modes), default=0.0)
            rows = self._largest_batch if setup.joins else 1
            times = _Times(setup, rows, each, margin, self._slowdown, allowed)
            self._known_times[task is None] = known = key, times
        return known[1]

    def _unpark(self, now: float) -> None:
        """Admit parked requests as long as they fit, the most refused first, the latest first among equals.

        If more are parked than fit into a batch, those that are too urgent to wait for a full one are left behind: a batch
        that ends in time for them would be small.
        """
        if len(self.parked) > self._clean_at:
            self.parked = [entry for entry in self.parked if not entry[-1].settled]
            heapq.heapify(self.parked)
            self._clean_at = max(LOOK_AT, 2 * len(self.parked))
        while self.parked and self.free(now) > 0:
            task = self.parked[0][-1]
            retry: float | None = 0.0
            if not task.settled and task.first_needed() <= task.deadline - now:
                times = self._stage_times(task)
                crowded = len(self.parked) > times.paying_batch
                if not crowded or task.deadline - now >= times.full:
                    retry = self._retry_after(task, now)
            if retry:
                return
            heapq.heappop(self.parked)
            if retry is None:
                self.waiting[task] = None  # the others are too late: their callers are refused at their deadlines

    def pick(self, now: float, ended: list[Task]) -> Batch | None:
        """The batch to run next, if a slot is free. Requests that nothing more fits for are moved to `ended`."""
        trial: Task | None = None
        for task in list(self.waiting):
            if task.stops(now, poll=False) or not task.fits(now):
                del self.waiting[task]
                ended.append(task)
            elif task.trial:
                trial = task
        self._unpark(now)
        if not self.waiting or self.free(now) <= 0:
            return None
        stages, self._turn = 1, self._turn + 1
        if trial is not None or len(self.waiting) == 1:
            tasks = [trial or next(iter(self.waiting))]
        else:
            try:
                chosen = self._policy.choose(now, list(self.waiting), self._stage_times())
                if chosen is not None and type(self._policy) not in POLICIES.values():
                    _check_choice(chosen.requests, self.waiting)
            except Exception as error:  # a policy of the user's
                for task in self.waiting:
                    task.fail(error)
                ended += self.waiting
                self.waiting.clear()
                return None
            if chosen is None:  # the policy runs nothing more for those that have an answer
                done = [task for task in self.waiting if task.exit >= task.least]
                for task in done:
                    task.stop_by_policy()
                    del self.waiting[task]
                ended += done
                return None
            tasks, stages = chosen.requests, chosen.stages
        for task in tasks:
            del self.waiting[task]
        return Batch(tasks, self.setup, now, stages=stages, final=getattr(self._policy, "decides_depth", False))


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

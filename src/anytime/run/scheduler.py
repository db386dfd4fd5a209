"""Which requests run which stage next: scheduling policies as pure functions, apart from threads, clocks and HTTP.

The unit of work is one stage for a batch of requests that have reached the same exit. A policy sees the time, the waiting
requests and how long stages take, and returns the next batch. The stages of a request up to its least exit, usually the first,
are mandatory: without them there is no answer. Later stages are optional: they improve an answer that exists. A policy that
degrades gracefully runs mandatory stages in time for everybody and spends the rest of the machine on optional ones. A request
without a deadline may wait behind others for `PATIENCE` seconds, then all its stages are urgent: it never starves.

`ExpectedGain` is the default. It runs mandatory stages when enough of them wait or time presses, and meanwhile the batch whose
answers are expected to improve most per second. `LeastProgress` always advances the requests with the fewest exits. The others
are for comparison: `EarliestDeadline` serves few requests well when there are too many, `SlackFit` fixes the depth of a batch
when it starts, and `AllExits` is an ordinary model server with dynamic batching.

Mandatory and optional parts follow imprecise computation (Yao et al., arXiv 2011.01112), SlackFit follows SuperServe (arXiv
2312.16733). Batching by stage is also in Fluid Batching (arXiv 2209.13443) and EdgeServing (arXiv 2605.05527).

It is over 400 lines because the policies stand side by side, to be compared.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

__all__ = [
    "POLICIES",
    "AllExits",
    "EarliestDeadline",
    "ExpectedGain",
    "LeastProgress",
    "Request",
    "SchedulingPolicy",
    "SlackFit",
    "StageBatch",
    "StageTimes",
    "retry_after",
]

CAUTION = 1.2
"""How much longer than expected the batches of a queue may take."""
PATIENCE = 1.0
"""Seconds that a request without a deadline may wait behind others."""


class Request(Protocol):
    """A request, as a policy sees it.

    Attributes:
        arrived: When it arrived, in seconds.
        deadline: When its answer is due; infinity for none.
        exit: The exit it has reached; 0 before the first.
        last: The last exit it may use.
        confidence: The confidence of its answer so far; 0 before the first exit.
        group: What it can share a batch with: requests of the same group have inputs of the same shape.

    It may also have `least`, the first exit that is an answer to it; 1 if there is no such attribute.
    """

    arrived: float
    deadline: float
    exit: int
    last: int
    confidence: float
    group: object


R = TypeVar("R", bound=Request)


class StageTimes(Protocol):
    """How long stages take.

    It may also have `paying_batch`, the batch size beyond which larger ones save little time per request; the largest one if
    there is no such attribute.
    """

    @property
    def largest_batch(self) -> int:
        """The largest batch."""
        ...

    @property
    def margin(self) -> float:
        """Seconds between the end of a stage and its answer being with the caller."""
        ...

    def seconds(self, stage: int, batch: int) -> float:
        """The expected duration of a stage, counted from 1, for a batch."""
        ...


class StageBatch(NamedTuple, Generic[R]):
    """What to run next.

    Attributes:
        stage: Which stage, counted from 1.
        requests: For which requests.
        stages: For how many stages these requests stay together. Mandatory stages are run at once, optional ones one by one by
            policies that decide after every stage.
    """

    stage: int
    requests: list[R]
    stages: int = 1


class SchedulingPolicy(Protocol):
    """Chooses the next batch.

    It may also have `decides_depth`, whether a request ends after the stages it was chosen for; false if there is no such
    attribute.
    """

    def choose(self, now: float, requests: Sequence[R], times: StageTimes) -> StageBatch[R] | None:
        """The next batch; None if no stage of any request would end in time.

        Args:
            now: The time in seconds.
            requests: The requests that wait, none of which is running, all with stages left.
            times: How long stages take.
        """
        ...


def retry_after(
    now: float,
    request: Request,
    waiting: Iterable[Request],
    times: StageTimes,
    *,
    free: float | Sequence[float] = 0.0,
) -> float | None:
    """Whether a new request can be admitted: None if its mandatory stages fit, else the seconds after which to try again.

    Every admitted request gets an answer in time. So a new one is admitted only if its mandatory stages, and those of the
    requests behind it, can end in time, in batches by deadline. Requests that are too late already do not count.

    Args:
        now: The time.
        request: The new request.
        waiting: The requests that wait.
        times: How long stages take.
        free: When the worker is free; for several workers one time each.
    """
    workers = [max(now, free)] if isinstance(free, int | float) else sorted([max(now, each) for each in free])
    mandatory = [one for one in waiting if one.deadline == math.inf or one.exit < _least(one)]
    first = times.seconds(1, 1)
    soonest = workers[0] + first + times.margin
    backlog = sum([one.deadline >= soonest for one in mandatory])
    missing = _missing_behind(request, backlog, times, workers) if backlog else 0.0
    if missing <= 0 and not _fits_last(request, mandatory, times, workers):
        groups = _alike(min(workers), mandatory, times)
        key = request.exit, _least(request), request.deadline == math.inf, request.group
        groups.setdefault(key, []).append(request)
        batches = _in_order(groups, times)
        own = next(index for index, batch in enumerate(batches) if any(one is request for one in batch.requests))
        ends = list(_ends(batches, times, workers))
        missing = max(end - batch.requests[0].deadline for end, batch in zip(ends[own:], batches[own:], strict=True))
    return None if missing <= 0 else max(missing, first)


def _fits_last(request: Request, mandatory: Sequence[Request], times: StageTimes, workers: Sequence[float]) -> bool:
    """Whether a request fits behind others of its kind with earlier deadlines, the usual case; false if it is another case."""
    kind, before = (_least(request), request.group), -math.inf
    for one in mandatory:
        if one.exit or (_least(one), one.group) != kind or not before <= one.deadline <= request.deadline < math.inf:
            return False
        before = one.deadline
    batches, others = divmod(len(mandatory), times.largest_batch)
    rounds, worker = divmod(batches, len(workers))
    seconds = rounds * _through(0, kind[0], times.largest_batch, times) + _through(0, kind[0], others + 1, times)
    most_urgent = mandatory[-others].deadline if others else request.deadline
    return workers[worker] + seconds + times.margin <= most_urgent


def _missing_behind(request: Request, backlog: int, times: StageTimes, workers: Sequence[float]) -> float:
    """How many seconds are missing if the requests before this one run in full batches that take longer than expected.

    If requests were admitted as long as they just fit, they would wait until only small batches fit, which are slow. It also
    refuses most of an overload at once, whatever the number of requests that wait.
    """
    size, least = times.largest_batch, _least(request)
    batches, others = divmod(backlog, size)  # it shares its batch with these others
    rounds, worker = divmod(batches, len(workers))
    seconds = rounds * _through(0, least, size, times) + _through(0, least, others + 1, times)
    return workers[worker] + CAUTION * seconds + times.margin - request.deadline


@dataclass(frozen=True)
class LeastProgress:
    """Mandatory stages by deadline, then the requests with the fewest exits, ties by deadline."""

    def choose(self, now: float, requests: Sequence[R], times: StageTimes) -> StageBatch[R] | None:
        """The next batch."""
        ready = _alike(now, requests, times)
        urgent = {key: members for key, members in ready.items() if key[0] < key[1]}
        for key, members in ready.items():
            if key[2] and (overdue := [one for one in members if _urgency(one) <= now]):
                urgent[key] = overdue
        if urgent:
            return _run_mandatory(now, _in_order(urgent, times)[0], times)
        return _run_most_urgent(now, ready, times, by=lambda one: (one.exit, _urgency(one)))


@dataclass(frozen=True)
class EarliestDeadline:
    """The request whose deadline is next, with others at the same exit."""

    def choose(self, now: float, requests: Sequence[R], times: StageTimes) -> StageBatch[R] | None:
        """The next batch."""
        return _run_most_urgent(now, _alike(now, requests, times), times, by=_urgency)


@dataclass(frozen=True)
class AllExits:
    """First come, first served, all exits: an ordinary model server.

    Attributes:
        batched: Whether requests that wait share a batch.
        drop: Whether requests are dropped that cannot end in time.
    """

    batched: bool = True
    drop: bool = True
    decides_depth: ClassVar[bool] = True

    def choose(self, now: float, requests: Sequence[R], times: StageTimes) -> StageBatch[R] | None:
        """The next batch, for all stages at once."""
        size = times.largest_batch if self.batched else 1
        waiting = sorted((request for request in requests if request.exit == 0), key=lambda request: request.arrived)
        while waiting:
            together = [request for request in waiting if request.group == waiting[0].group][:size]
            if not self.drop:
                return StageBatch(1, together, together[0].last)
            seconds = _through(0, together[0].last, len(together), times)
            in_time = [request for request in together if now + seconds + times.margin <= request.deadline]
            if in_time:
                return StageBatch(1, in_time, in_time[0].last)
            waiting = waiting[1:]  # the oldest cannot end in time, whatever its company
        return None


@dataclass(frozen=True)
class SlackFit:
    """Fix the depth and the size of a batch by the slack of its most urgent request, as SuperServe does with subnetworks.

    A batch as large as possible first, then as deep as fits: with little slack, many requests get few exits.
    """

    decides_depth: ClassVar[bool] = True

    def choose(self, now: float, requests: Sequence[R], times: StageTimes) -> StageBatch[R] | None:
        """The next batch, for as many stages as fit."""
        ready = _alike(now, [request for request in requests if request.exit == 0], times)
        if not ready:
            return None
        together = min((sorted(members, key=_urgency) for members in ready.values()), key=lambda members: _urgency(members[0]))
        first, least = together[0], _least(together[0])
        for size in range(min(len(together), times.largest_batch), 0, -1):
            depth, end = 0, now + times.margin
            while depth < first.last and (end := end + times.seconds(depth + 1, size)) <= first.deadline:
                depth += 1
            if depth >= least:
                return StageBatch(1, together[:size], depth)
        return None


def uncertainty(exit: int, confidence: float) -> float:
    """The expected gain of another stage: the part of the probability that is not on the answer."""
    return 1.0 - confidence


@dataclass(frozen=True)
class ExpectedGain:
    """Mandatory stages first, optional ones by expected gain per second.

    Attributes:
        gain: The expected improvement of an answer by the next stage, from the exit reached and its confidence.
        reserve: How much earlier than necessary mandatory stages run, in batches of first stages; infinity for at once. While
            they wait, others come to share their batch, and the machine works on answers that exist.
    """

    gain: Callable[[int, float], float] = uncertainty
    reserve: float = 1.0

    def choose(self, now: float, requests: Sequence[R], times: StageTimes) -> StageBatch[R] | None:
        """The next batch."""
        ready = _alike(now, requests, times)
        best = self._best(now, _with_answers(ready), times)
        mandatory = {key: members for key, members in ready.items() if key[0] < key[1] or key[2]}
        if not mandatory:
            return best
        batches, enough = _in_order(mandatory, times), getattr(times, "paying_batch", times.largest_batch)
        first = batches[0].requests
        full = len(first) >= enough and first[0].exit < _least(first[0])  # waiting would gain little
        if best is not None and not full:
            reserve = self.reserve * times.seconds(1, enough)
            ends = _ends(batches, times, [now + times.seconds(best.stage, len(best.requests))])
            # The reserve is for answers; a request without a deadline that has one waits for its patience to end.
            slack = [
                _urgency(one) - (reserve if one.exit < _least(one) else 0.0) for one in (each.requests[0] for each in batches)
            ]
            if all(end <= latest for end, latest in zip(ends, slack, strict=True)):
                return best
        return _run_mandatory(now, batches[0], times)

    def _best(self, now: float, optional: dict[tuple[int, object], list[R]], times: StageTimes) -> StageBatch[R] | None:
        """The batch with the highest expected gain per second."""
        best: StageBatch[R] | None = None
        highest, gain, size = -math.inf, self.gain, times.largest_batch
        for (exit, _), members in optional.items():
            gains = [gain(exit, one.confidence) for one in members]
            least = sorted(gains)[-size] if len(members) > size else -math.inf
            ranked = sorted([(-gains[at], one.deadline, at) for at, one in enumerate(members) if gains[at] >= least])
            chosen = _in_time(now, [members[at] for _, _, at in ranked[:size]], exit + 1, times)
            rate = -sum([loss for loss, _, _ in ranked[: len(chosen)]]) / times.seconds(exit + 1, len(chosen))
            if rate > highest:
                highest, best = rate, StageBatch(exit + 1, chosen)
        return best


POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "gain": ExpectedGain,
    "least-progress": LeastProgress,
    "earliest-deadline": EarliestDeadline,
    "slack-fit": SlackFit,
    "all-exits": AllExits,
}
"""Policies by name."""


_arrived, _deadline = attrgetter("arrived"), attrgetter("deadline")
_Key = tuple[int, int, bool, object]
"""What requests with the same stages to go have in common: exit, least exit, whether there is no deadline, group."""


def _alike(now: float, requests: Iterable[R], times: StageTimes) -> dict[_Key, list[R]]:
    """Requests with the same stages to go, without those that would not end in time even alone."""
    found: dict[_Key, tuple[float, list[R]]] = {}
    for request in requests:
        deadline = request.deadline
        key = request.exit, getattr(request, "least", 1), deadline == math.inf, request.group
        known = found.get(key)
        if known is None:
            exit, least, _, _ = key
            known = found[key] = now + _through(exit, max(exit + 1, least), 1, times) + times.margin, []
        if known[0] <= deadline:
            known[1].append(request)
    return {key: members for key, (_, members) in found.items() if members}


def _with_answers(alike: dict[_Key, list[R]]) -> dict[tuple[int, object], list[R]]:
    """Requests that have an answer, by exit and group."""
    found: dict[tuple[int, object], list[R]] = {}
    for (exit, least, _, group), members in alike.items():
        if exit >= least:
            found[exit, group] = found[exit, group] + members if (exit, group) in found else members
    return found


def _in_order(alike: dict[_Key, list[R]], times: StageTimes) -> list[StageBatch[R]]:
    """Mandatory stages in the order in which they run: by deadline."""
    batches, size = list[StageBatch[R]](), times.largest_batch
    for (exit, least, endless, _), members in alike.items():
        members.sort(key=_arrived if endless else _deadline)
        stages = (members[0].last if endless else least) - exit
        batches += [StageBatch(exit + 1, members[begin : begin + size], stages) for begin in range(0, len(members), size)]
    return sorted(batches, key=lambda batch: _urgency(batch.requests[0]))


def _ends(batches: Iterable[StageBatch[R]], times: StageTimes, free: Iterable[float]) -> Iterator[float]:
    """When the answers to batches are with their callers, if each batch runs on the first worker that is free."""
    workers = sorted(free)
    for stage, requests, stages in batches:
        end = workers[0] + _through(stage - 1, stage - 1 + stages, len(requests), times)
        heapq.heapreplace(workers, end)
        yield end + times.margin


def _in_time(now: float, ordered: list[R], last: int, times: StageTimes) -> list[R]:
    """As many of these requests, in this order, as can run together up to an exit and end in time; at least one."""
    size = min(len(ordered), times.largest_batch)
    while size > 1:
        end = now + _through(ordered[0].exit, last, size, times) + times.margin
        if end <= min([request.deadline for request in ordered[:size]]):
            break
        size -= 1
    return ordered[:size]


def _run_mandatory(now: float, batch: StageBatch[R], times: StageTimes) -> StageBatch[R]:
    """These stages at once, for as many requests as end in time; without a deadline, those up to the least exit or one."""
    stage, requests, stages = batch
    chosen = _in_time(now, requests, stage - 1 + stages, times)
    if requests[0].deadline == math.inf:
        stages = max(_least(requests[0]) - stage + 1, 1)
    return StageBatch(stage, chosen, stages)


def _run_most_urgent(
    now: float, ready: dict[_Key, list[R]], times: StageTimes, *, by: Callable[[R], Any]
) -> StageBatch[R] | None:
    """The next stage of the first request by some order, and of those that can share its batch."""
    if not ready:
        return None
    first = min((min(members, key=by) for members in ready.values()), key=by)
    together = [one for key, members in ready.items() if key[::3] == (first.exit, first.group) for one in members]
    return StageBatch(first.exit + 1, _in_time(now, sorted(together, key=by), first.exit + 1, times))


def _through(exit: int, last: int, batch: int, times: StageTimes) -> float:
    """The time from an exit to a later one."""
    if last == exit + 1:
        return times.seconds(last, batch)
    return sum([times.seconds(stage, batch) for stage in range(exit + 1, last + 1)])


def _least(request: Request) -> int:
    return getattr(request, "least", 1)


def _urgency(request: Request) -> float:
    """The deadline, or the end of the patience of a request without one."""
    return request.deadline if request.deadline < math.inf else request.arrived + PATIENCE

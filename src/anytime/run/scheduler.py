"""Which requests run which stage next: scheduling policies as pure functions, apart from threads, clocks and HTTP.

The unit of work is one stage for a batch of requests that have reached the same exit. A policy sees the time, the waiting
requests and how long stages take, and returns the next batch. The first stage of a request is mandatory: without it there is
no answer. All later stages are optional: they improve an answer that exists. A policy that degrades gracefully runs first
stages in time for everybody and spends the rest of the machine on later stages.

`ExpectedGain` is the default. It delays first stages as long as their deadlines allow, which makes their batches larger, and
uses the time in between for the batch whose answers are expected to improve most per second. `LeastProgress` always advances
the requests with the fewest exits. The others are for comparison: `EarliestDeadline` serves few requests well when there are
too many, `SlackFit` fixes the depth of a batch when it starts, and `AllExits` is an ordinary model server with dynamic
batching.

Mandatory and optional parts follow imprecise computation (Yao et al., arXiv 2011.01112), SlackFit follows SuperServe (arXiv
2312.16733). Batching by stage is also in Fluid Batching (arXiv 2209.13443) and EdgeServing (arXiv 2605.05527).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

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


class Request(Protocol):
    """A request, as a policy sees it.

    Attributes:
        arrived: When it arrived, in seconds.
        deadline: When its answer is due; infinity for none.
        exit: The exit it has reached; 0 before the first.
        last: The last exit it may use.
        confidence: The confidence of its answer so far; 0 before the first exit.
        group: What it can share a batch with: requests of the same group have inputs of the same shape.
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

    Attributes:
        largest_batch: The batch size beyond which larger batches save no more time per request.
        margin: Seconds between the end of a stage and its answer being with the caller.
    """

    largest_batch: int
    margin: float

    def seconds(self, stage: int, batch: int) -> float:
        """The expected duration of a stage, counted from 1, for a batch."""
        ...


class StageBatch(NamedTuple, Generic[R]):
    """What to run next.

    Attributes:
        stage: Which stage, counted from 1.
        requests: For which requests.
        stages: For how many stages these requests stay together; 1 for all policies that decide after every stage.
    """

    stage: int
    requests: list[R]
    stages: int = 1


class SchedulingPolicy(Protocol):
    """Chooses the next batch."""

    def choose(self, now: float, requests: Sequence[R], times: StageTimes) -> StageBatch[R] | None:
        """The next batch; None if no stage of any request would end in time.

        Args:
            now: The time in seconds.
            requests: The requests that wait, none of which is running, all with stages left.
            times: How long stages take.
        """
        ...


def retry_after(
    now: float, request: Request, waiting: Iterable[Request], times: StageTimes, *, free: float = 0.0
) -> float | None:
    """Whether a new request can be admitted: None if its first stage fits, else the seconds after which to try again.

    Every admitted request gets a first exit in time. So a new one is admitted only if its first stage and those of all others
    that wait for theirs can end in time, in batches by deadline.

    Args:
        now: The time.
        request: The new request.
        waiting: The requests that wait.
        times: How long stages take.
        free: When a worker is free.
    """
    first = [request, *(other for other in waiting if other.exit == 0)]
    missing = max(now, free) - latest_start(first, times)
    return None if missing <= 0 else max(missing, times.seconds(1, 1))


@dataclass(frozen=True)
class LeastProgress:
    """The requests with the fewest exits first, ties by deadline."""

    def choose(self, now: float, requests: Sequence[R], times: StageTimes) -> StageBatch[R] | None:
        """The next batch."""
        ready = [request for request in requests if _fits(now, request, times)]
        if not ready:
            return None
        first = min(ready, key=lambda request: (request.exit, request.deadline))
        return _batch(now, first, ready, times)


@dataclass(frozen=True)
class EarliestDeadline:
    """The request whose deadline is next, with others at the same exit."""

    def choose(self, now: float, requests: Sequence[R], times: StageTimes) -> StageBatch[R] | None:
        """The next batch."""
        ready = [request for request in requests if _fits(now, request, times)]
        return _batch(now, min(ready, key=lambda request: request.deadline), ready, times) if ready else None


@dataclass(frozen=True)
class AllExits:
    """First come, first served, all exits: an ordinary model server.

    Attributes:
        batched: Whether requests that wait share a batch.
        drop: Whether requests are dropped that cannot end in time.
    """

    batched: bool = True
    drop: bool = True

    def choose(self, now: float, requests: Sequence[R], times: StageTimes) -> StageBatch[R] | None:
        """The next batch, for all stages at once."""
        size = times.largest_batch if self.batched else 1
        waiting = sorted((request for request in requests if request.exit == 0), key=lambda request: request.arrived)
        while waiting:
            together = [request for request in waiting if request.group == waiting[0].group][:size]
            if not self.drop:
                return StageBatch(1, together, together[0].last)
            seconds = _through(together[0].last, len(together), times)
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

    def choose(self, now: float, requests: Sequence[R], times: StageTimes) -> StageBatch[R] | None:
        """The next batch, for as many stages as fit."""
        waiting = sorted((request for request in requests if request.exit == 0), key=lambda request: request.deadline)
        waiting = [request for request in waiting if _fits(now, request, times)]
        if not waiting:
            return None
        slack = waiting[0].deadline - times.margin - now
        together = [request for request in waiting if request.group == waiting[0].group]
        for size in range(min(len(together), times.largest_batch), 0, -1):
            depth = max((exit for exit in range(1, waiting[0].last + 1) if _through(exit, size, times) <= slack), default=0)
            if depth:
                return StageBatch(1, together[:size], depth)
        return None


def uncertainty(exit: int, confidence: float) -> float:
    """The expected gain of another stage: the part of the probability that is not on the answer."""
    return 1.0 - confidence


@dataclass(frozen=True)
class ExpectedGain:
    """First stages as late as their deadlines allow, later ones by expected gain per second.

    Attributes:
        gain: The expected improvement of an answer by the next stage, from the exit reached and its confidence.
        reserve: How much earlier than necessary first stages run, in full batches of first stages. It is for requests that are
            still to come: with 0, a burst finds no room and is refused; with 1, almost nobody is refused who could be served.
    """

    gain: Callable[[int, float], float] = uncertainty
    reserve: float = 1.0

    def choose(self, now: float, requests: Sequence[R], times: StageTimes) -> StageBatch[R] | None:
        """The next batch."""
        ready = [request for request in requests if _fits(now, request, times)]
        first = sorted((request for request in ready if request.exit == 0), key=lambda request: request.deadline)
        best = self._best(now, [request for request in ready if request.exit], times)
        reserve = self.reserve * times.seconds(1, times.largest_batch)
        if first and (
            best is None
            or len(first) >= times.largest_batch
            or now + times.seconds(best.stage, len(best.requests)) + reserve > latest_start(first, times)
        ):
            return _batch(now, first[0], first, times)
        return best

    def _best(self, now: float, ready: list[R], times: StageTimes) -> StageBatch[R] | None:
        best: StageBatch[R] | None = None
        highest = -math.inf
        groups: dict[tuple[int, object], list[R]] = {}
        for request in ready:
            groups.setdefault((request.exit, request.group), []).append(request)
        for (exit, _), members in groups.items():
            gains = [(self.gain(exit, request.confidence), request) for request in members]
            gains.sort(key=lambda pair: (-pair[0], pair[1].deadline))
            chosen, total, due = list[R](), 0.0, math.inf
            for value, request in gains[: times.largest_batch]:
                due = min(due, request.deadline)
                if now + times.seconds(exit + 1, len(chosen) + 1) + times.margin > due:
                    break
                chosen.append(request)
                total += value
            if chosen and (rate := total / times.seconds(exit + 1, len(chosen))) > highest:
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


def latest_start(first: Iterable[Request], times: StageTimes) -> float:
    """When the earliest of these first stages has to start so that all of them end in time, in batches by deadline."""
    groups: dict[object, list[Request]] = {}
    for request in sorted(first, key=lambda request: request.deadline):
        groups.setdefault(request.group, []).append(request)
    size = times.largest_batch
    batches = [members[begin : begin + size] for members in groups.values() for begin in range(0, len(members), size)]
    start = math.inf
    for batch in sorted(batches, key=lambda batch: batch[0].deadline, reverse=True):
        start = min(start, batch[0].deadline - times.margin) - times.seconds(1, len(batch))
    return start


def _fits(now: float, request: Request, times: StageTimes) -> bool:
    return now + times.seconds(request.exit + 1, 1) + times.margin <= request.deadline


def _through(exit: int, batch: int, times: StageTimes) -> float:
    return sum(times.seconds(stage, batch) for stage in range(1, exit + 1))


def _batch(now: float, first: R, ready: Sequence[R], times: StageTimes) -> StageBatch[R]:
    """`first` and those at the same exit that can share its batch, as many as end in time."""
    stage = first.exit + 1
    others = [
        request for request in ready if request.exit == first.exit and request.group == first.group and request is not first
    ]
    others.sort(key=lambda request: request.deadline)
    chosen, due = [first], first.deadline - times.margin - now
    for request in others[: times.largest_batch - 1]:
        due = min(due, request.deadline - times.margin - now)
        if times.seconds(stage, len(chosen) + 1) > due:
            break
        chosen.append(request)
    return StageBatch(stage, chosen)

"""Load on a simulated clock: what a scheduling policy would do with a model's stage times, before anybody buys a machine.

Requests arrive at random (a Poisson process), all with the same time until their deadline. Stages take as long as the profile
says, one batch at a time per worker. Answers are those of real rows of logits, so accuracy is that of the model's own exits.
The bound is what a machine could reach that splits its time freely: every request gets the mix of exits with the best
accuracy for an equal part of the machine, in full batches.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from anytime.run.scheduler import SchedulingPolicy, StageBatch, StageTimes, retry_after

if TYPE_CHECKING:
    from anytime.run.timing.profile import Profile

__all__ = [
    "CIFAR_MSDNET",
    "LinearTimes",
    "Load",
    "Simulated",
    "SimulatedRequest",
    "draw_requests",
    "fit_times",
    "fluid_bound",
    "run_requests",
    "simulate",
]


@dataclass(frozen=True)
class LinearTimes:
    """Stage times that grow in a line with the batch: `fixed + batch * per_row` for each stage.

    Attributes:
        fixed: Seconds per stage, whatever the batch.
        per_row: Seconds per stage and row.
        largest_batch: The batch size beyond which larger batches save no more time per request.
        margin: Seconds between the end of a stage and its answer being with the caller.
    """

    fixed: tuple[float, ...]
    per_row: tuple[float, ...]
    largest_batch: int = 16
    margin: float = 0.0

    def seconds(self, stage: int, batch: int) -> float:
        """The duration of a stage, counted from 1."""
        return self.fixed[stage - 1] + batch * self.per_row[stage - 1]

    @property
    def capacity(self) -> float:
        """Requests per second of a plain server: all exits, one request after the other."""
        return 1 / sum(self.seconds(stage, 1) for stage in range(1, len(self.fixed) + 1))


CIFAR_MSDNET = LinearTimes(
    fixed=tuple(1.91e-3 * part for part in (0.22, 0.13, 0.14, 0.13, 0.13, 0.12, 0.13)),
    per_row=tuple(2.30e-3 * part for part in (0.22, 0.13, 0.14, 0.13, 0.13, 0.12, 0.13)),
)
"""Stage times of the CIFAR MSDNet on one core: 4.21 ms for one image, 2.54 ms per image in a batch of 8."""


def fit_times(profile: Profile) -> LinearTimes:
    """The stage times of a profile: a line through the medians of each stage over its batch sizes.

    With one batch size, batches are assumed to save no time. The largest batch is the largest that was measured.
    """
    sizes = np.asarray(profile.batch_sizes, dtype=float)
    fixed, per_row = [], []
    for medians in profile.stage_seconds[:, :, 0].numpy().T:
        slope, start = np.polyfit(sizes, medians, 1) if len(sizes) > 1 else (0.0, -1.0)
        if start < 0:  # a line through zero
            slope, start = float(sizes @ medians / (sizes @ sizes)), 0.0
        elif slope < 0:  # no longer with more rows
            slope, start = 0.0, float(medians.mean())
        fixed.append(float(start))
        per_row.append(float(slope))
    return LinearTimes(tuple(fixed), tuple(per_row), largest_batch=max(profile.batch_sizes))


@dataclass(frozen=True)
class Load:
    """Traffic.

    Attributes:
        rate: Requests per second.
        deadline: Seconds from a request to its deadline.
        requests: How many requests.
        seed: Of the arrival times and of the rows.
    """

    rate: float
    deadline: float
    requests: int = 5000
    seed: int = 0


@dataclass(frozen=True)
class Simulated:
    """What became of the requests.

    Attributes:
        in_time: Fraction of all requests with an answer in time.
        refused: Fraction of all requests that were refused at once.
        late: Fraction of all requests that were admitted and got no answer in time.
        mean_exit: Mean exit of the answers in time.
        correct: Fraction of all requests with a correct answer in time.
        batch: Mean batch size over the stages that ran.
    """

    in_time: float
    refused: float
    late: float
    mean_exit: float
    correct: float
    batch: float


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """A request and what became of it.

    Attributes:
        row: The row of logits that it asks about.
        answered: The exit of its answer; 0 for none in time.
        refused: Whether it was refused.
    """

    arrived: float
    deadline: float
    row: int
    last: int
    least: int = 1
    exit: int = 0
    confidence: float = 0.0
    group: object = None
    answered: int = 0
    refused: bool = False


def simulate(
    policy: SchedulingPolicy,
    load: Load,
    times: StageTimes,
    *,
    correct: np.ndarray,
    confidence: np.ndarray,
    workers: int = 1,
    admission: bool = True,
) -> Simulated:
    """Run a policy under a load.

    Args:
        policy: Chooses the next batch.
        load: The traffic.
        times: How long stages take.
        correct: Whether the answer of each exit is correct, `(exits, rows)`.
        confidence: The confidence of each exit's answer, `(exits, rows)`.
        workers: How many batches run at once.
        admission: Whether requests are refused whose first stage would not end in time, and leave at their deadline.
    """
    requests = draw_requests(load, *correct.shape)
    sizes = run_requests(policy, requests, times, confidence=confidence, workers=workers, admission=admission)
    answered = [request for request in requests if request.answered]
    count, refused = len(requests), sum(request.refused for request in requests)
    return Simulated(
        in_time=len(answered) / count,
        refused=refused / count,
        late=(count - len(answered) - refused) / count,
        mean_exit=float(np.mean([request.answered for request in answered])) if answered else 0.0,
        correct=sum(bool(correct[request.answered - 1, request.row]) for request in answered) / count,
        batch=float(np.mean(sizes)) if sizes else 0.0,
    )


def draw_requests(load: Load, exits: int, rows: int) -> list[SimulatedRequest]:
    """Requests at random times about random rows."""
    chance = np.random.default_rng(load.seed)
    arrivals = np.cumsum(chance.exponential(1 / load.rate, load.requests)).tolist()
    picked = chance.integers(rows, size=load.requests).tolist()
    return [SimulatedRequest(at, at + load.deadline, row, exits) for at, row in zip(arrivals, picked, strict=True)]


def run_requests(
    policy: SchedulingPolicy,
    requests: Sequence[SimulatedRequest],
    times: StageTimes,
    *,
    confidence: np.ndarray,
    workers: int = 1,
    admission: bool = True,
) -> list[int]:
    """Answer or refuse requests, given in the order of their arrival; returns the sizes of the batches that ran."""
    coming = iter(requests)
    upcoming = next(coming, None)
    waiting: list[SimulatedRequest] = []
    running: list[tuple[float, int, StageBatch[SimulatedRequest]]] = []
    order, sizes, now = itertools.count(), list[int](), 0.0
    while now < math.inf:
        while upcoming is not None and upcoming.arrived <= now:
            free = [now] * (workers - len(running)) + [end for end, *_ in running]
            upcoming.refused = admission and retry_after(now, upcoming, waiting, times, free=free) is not None
            if not upcoming.refused:
                waiting.append(upcoming)
            upcoming = next(coming, None)
        while running and running[0][0] <= now:
            ended, _, batch = heapq.heappop(running)
            for request in batch.requests:
                request.exit += batch.stages
                request.confidence = float(confidence[request.exit - 1, request.row])
                if ended + times.margin <= request.deadline + 1e-9 and request.exit >= request.least:
                    request.answered = request.exit
                if request.exit < request.last:
                    waiting.append(request)
        waiting = [request for request in waiting if now < request.deadline or not admission]
        while len(running) < workers and waiting and (chosen := policy.choose(now, waiting, times)) is not None:
            seconds = sum(times.seconds(chosen.stage + more, len(chosen.requests)) for more in range(chosen.stages))
            sizes += [len(chosen.requests)] * chosen.stages
            taken = set(map(id, chosen.requests))
            waiting = [request for request in waiting if id(request) not in taken]
            heapq.heappush(running, (now + seconds, next(order), chosen))
        now = min(math.inf if upcoming is None else upcoming.arrived, running[0][0] if running else math.inf)
    return sizes


def fluid_bound(load: Load, times: StageTimes, accuracy: Sequence[float], *, workers: int = 1) -> float:
    """The largest fraction of correct answers for a load, if time could be split freely between requests and batches were full.

    There is time from the first arrival to the deadline of the last. Requests are alike: a policy that knows which answers are
    still unsure can be slightly better.

    Args:
        load: The requests.
        times: How long stages take.
        accuracy: The accuracy of each exit.
        workers: How many batches run at once.
    """
    size = times.largest_batch
    costs = np.cumsum([times.seconds(stage, size) / size for stage in range(1, len(accuracy) + 1)])
    share = workers * (1 / load.rate + load.deadline / load.requests)
    points = [(0.0, 0.0), *zip(costs.tolist(), accuracy, strict=True)]
    best = 0.0
    for (cost, value), (other, more) in itertools.combinations_with_replacement(points, 2):
        if cost <= share:
            part = 1.0 if other == cost else min((share - cost) / (other - cost), 1.0)
            best = max(best, value, value + part * (more - value))
    return best

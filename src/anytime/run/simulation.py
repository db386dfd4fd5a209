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

import numpy as np

from anytime.run.scheduler import SchedulingPolicy, StageTimes, retry_after

__all__ = ["LinearTimes", "Load", "Simulated", "fluid_bound", "simulate"]


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
class _Simulated:
    arrived: float
    deadline: float
    row: int
    last: int
    exit: int = 0
    confidence: float = 0.0
    answered: int = 0
    refused: bool = False
    group: object = None


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
        admission: Whether requests are refused whose first stage would not end in time.
    """
    chance = np.random.default_rng(load.seed)
    exits, rows = correct.shape
    arrivals = np.cumsum(chance.exponential(1 / load.rate, load.requests))
    picked = chance.integers(rows, size=load.requests)
    requests = [
        _Simulated(float(at), float(at + load.deadline), int(row), exits) for at, row in zip(arrivals, picked, strict=True)
    ]
    coming = iter(requests)
    upcoming = next(coming, None)
    waiting: list[_Simulated] = []
    running: list[tuple[float, int, list[_Simulated], int]] = []
    order = itertools.count()
    batches: list[int] = []
    now = 0.0
    while upcoming is not None or waiting or running:
        while upcoming is not None and upcoming.arrived <= now:
            free = [now] * (workers - len(running)) + [end for end, *_ in running]
            upcoming.refused = admission and retry_after(now, upcoming, waiting, times, free=free) is not None
            if not upcoming.refused:
                waiting.append(upcoming)
            upcoming = next(coming, None)
        while running and running[0][0] <= now:
            ended, _, batch, stages = heapq.heappop(running)
            for request in batch:
                request.exit += stages
                request.confidence = float(confidence[request.exit - 1, request.row])
                if ended + times.margin <= request.deadline + 1e-9:
                    request.answered = request.exit
                    if request.exit < request.last:
                        waiting.append(request)
        waiting = [request for request in waiting if now < request.deadline]
        while len(running) < workers and waiting and (chosen := policy.choose(now, waiting, times)) is not None:
            seconds = sum(times.seconds(chosen.stage + more, len(chosen.requests)) for more in range(chosen.stages))
            batches += [len(chosen.requests)] * chosen.stages
            taken = set(map(id, chosen.requests))
            waiting = [request for request in waiting if id(request) not in taken]
            heapq.heappush(running, (now + seconds, next(order), chosen.requests, chosen.stages))
        now = min(math.inf if upcoming is None else upcoming.arrived, running[0][0] if running else math.inf)
        if now == math.inf:
            break
    return _tally(requests, correct, batches)


def _tally(requests: Sequence[_Simulated], correct: np.ndarray, batches: Sequence[int]) -> Simulated:
    answered = [request for request in requests if request.answered]
    count = len(requests)
    right = sum(bool(correct[request.answered - 1, request.row]) for request in answered)
    refused = sum(request.refused for request in requests)
    return Simulated(
        in_time=len(answered) / count,
        refused=refused / count,
        late=(count - len(answered) - refused) / count,
        mean_exit=float(np.mean([request.answered for request in answered])) if answered else 0.0,
        correct=right / count,
        batch=float(np.mean(batches)) if batches else 0.0,
    )


def fluid_bound(rate: float, times: StageTimes, accuracy: Sequence[float], *, workers: int = 1) -> float:
    """The largest fraction of correct answers for a load, if time could be split freely between requests and batches were full.

    Args:
        rate: Requests per second.
        times: How long stages take.
        accuracy: The accuracy of each exit.
        workers: How many batches run at once.
    """
    size = times.largest_batch
    costs = np.cumsum([times.seconds(stage, size) / size for stage in range(1, len(accuracy) + 1)])
    share = workers / rate
    points = [(0.0, 0.0), *zip(costs.tolist(), accuracy, strict=True)]
    best = 0.0
    for (cost, value), (other, more) in itertools.combinations_with_replacement(points, 2):
        if cost <= share:
            part = 1.0 if other == cost else min((share - cost) / (other - cost), 1.0)
            best = max(best, value, value + part * (more - value))
    return best

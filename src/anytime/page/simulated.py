"""The load view without a server: the scheduling policies on a simulated clock, for a grid of rates and deadlines.

The stage times and the answers are those of the CIFAR-100 sample (`anytime.run.simulation`), so accuracy is that of its exits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from anytime.page.recorded import cifar100
from anytime.run.scheduler import AllExits, ExpectedGain, SchedulingPolicy
from anytime.run.simulation import CIFAR_MSDNET, Load, SimulatedRequest, draw_requests, run_requests

RATES = (25, 50, 100, 150, 200, 300, 450, 700)
DEADLINES = (5, 10, 20, 50)
"""In milliseconds."""
SLICES, SECONDS = 12, 0.25


@cache
def simulated_load() -> dict[str, Any]:
    """Counts per slice of time, for each rate and deadline: `runs[rate][deadline][system][slice]`."""
    source = cifar100()
    prediction = source.rules["product"](source.logits)
    correct = (prediction.labels == source.labels).numpy()
    confidence = prediction.confidence.numpy()
    systems: dict[str, SchedulingPolicy] = {"anytime": ExpectedGain(), "all_exits": AllExits()}
    runs = [
        [
            {name: _run(policy, rate, deadline, correct, confidence) for name, policy in systems.items()}
            for deadline in DEADLINES
        ]
        for rate in RATES
    ]
    return {
        "title": "CIFAR-100, simulated",
        "exits": len(source.logits),
        "rates": list(RATES),
        "deadlines": list(DEADLINES),
        "seconds": SECONDS,
        "columns": ["sent", "in_time", "refused", "exits", "correct"],
        "runs": runs,
    }


def _run(
    policy: SchedulingPolicy, rate: float, deadline: float, correct: np.ndarray, confidence: np.ndarray
) -> list[list[int]]:
    load = Load(rate, deadline / 1e3, requests=max(1, round(rate * SLICES * SECONDS)))
    requests = draw_requests(load, *correct.shape)
    run_requests(policy, requests, CIFAR_MSDNET, confidence=confidence)
    counted = [[] for _ in range(SLICES)]  # type: list[list[SimulatedRequest]]
    for request in requests:
        counted[min(int(request.arrived / SECONDS), SLICES - 1)].append(request)
    return [count(slice, correct) for slice in counted]


def count(requests: Sequence[SimulatedRequest], correct: np.ndarray) -> list[int]:
    """Requests, answers in time, refusals, the sum of the exits, and correct answers in time."""
    answered = [request for request in requests if request.answered]
    return [
        len(requests),
        len(answered),
        sum(request.refused for request in requests),
        sum(request.answered for request in answered),
        sum(bool(correct[request.answered - 1, request.row]) for request in answered),
    ]

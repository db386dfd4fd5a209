"""How many stages to run at once.

On a GPU one, on a CPU one per core, unless the stages run many small operations from Python: their threads wait for the
interpreter's lock, and two can achieve less than one. For these it is measured, and one until then.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

import torch

from anytime.installed import count_cores
from anytime.run.engines import Engine

_ROUNDS = 3
_PAYS = 1.25
"""More threads must have so many times the throughput of fewer."""


def most_slots(engine: Engine, workers: int, threads: int | None) -> int:
    """One on a GPU, else one per `threads` cores, at most `workers`."""
    device = getattr(engine, "device", None)
    if device is not None and device.type != "cpu":
        return 1
    return max(1, min(workers, count_cores() // (threads or torch.get_num_threads())))


def count_slots(engine: Engine, workers: int, threads: int | None) -> int:
    """How many stages to run at once before anything is measured."""
    return 1 if getattr(engine, "in_python", True) else most_slots(engine, workers, threads)


def measure_slots(run: Callable[[], object], most: int) -> int:
    """The number of threads, doubled up to `most`, in which `run` has the highest throughput."""
    counts = [1 << power for power in range(most.bit_length())]
    run()  # the first run is slow
    rounds = [[_throughput(run, count) for count in counts] for _ in range(_ROUNDS)]  # in turns: other load affects all
    best, highest = 1, 0.0
    for count, rates in zip(counts, zip(*rounds, strict=True), strict=True):
        if statistics.median(rates) > _PAYS * highest:
            best, highest = count, statistics.median(rates)
    return best


def _throughput(run: Callable[[], object], count: int) -> float:
    """Runs per second in so many threads at once."""
    began = time.perf_counter()
    others = [threading.Thread(target=run) for _ in range(count - 1)]
    for thread in others:
        thread.start()
    run()
    for thread in others:
        thread.join()
    return count / (time.perf_counter() - began)

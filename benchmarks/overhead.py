"""What the rule and the runner add to a bare loop over the stages, on the CPU.

    python benchmarks/overhead.py                  the CIFAR MSDNet, one input, one thread, the fastest engine and plain torch
    python benchmarks/overhead.py --rounds 50      a quick run

The bare loop runs the same engine's stages and nothing else. Compared with it, all with the product rule: `predict` without a
deadline (in the caller's thread), `predict` with one that is never reached (in a thread of the runner, so with two thread
switches), and `stream`, which returns an answer after every exit. Times are medians over rounds in which the variants take
turns. The limit is 20 µs or 2 % per stage, whichever is larger.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import anytime
from anytime.models import create
from anytime.run import Runner
from anytime.run.engines import Engine, make_engine


def bare(engine: Engine, x: Tensor) -> None:
    with torch.inference_mode():
        stages = engine.begin(x)
        for _ in range(engine.num_exits):
            stages.advance()
        stages.close()


def take_turns(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median seconds of each job."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 5):
        for name, job in jobs.items():
            begin = time.perf_counter()
            job()
            if turn >= 5:  # the first ones are a warm-up
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(engine: Engine, x: Tensor, rounds: int) -> bool:
    with Runner(engine, anytime.Product(), engine) as runner:
        jobs: dict[str, Callable[[], object]] = {
            "bare loop": lambda: bare(engine, x),
            "predict": lambda: runner.predict(x),
            "predict, deadline": lambda: runner.predict(x, deadline=10.0),
            "stream": lambda: list(runner.stream(x)),
        }
        times = take_turns(jobs, rounds)
    stage = times["bare loop"] / engine.num_exits
    allowed = max(20e-6, 0.02 * stage)
    print(f"\n{engine.name}: {1e3 * times['bare loop']:.2f} ms for all exits, limit {1e6 * allowed:.0f} µs per stage")
    print(f"{'':20}   added per stage          of the stage")
    kept = True
    for name in list(jobs)[1:]:
        added = (times[name] - times["bare loop"]) / engine.num_exits
        kept &= name == "stream" or added <= allowed
        print(f"{name:20}   {1e6 * added:7.1f} µs {'' if added <= allowed else '(over limit)':12}   {added / stage:8.1%}")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--engines", nargs="+", default=["auto", "eager"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = create("msdnet-cifar", classes=100).eval(), torch.randn(1, 3, 32, 32)
    print(f"msdnet-cifar, 100 classes, batch 1, one thread, load {os.getloadavg()[0]:.1f}, {options.rounds} rounds")
    made = {engine.name: engine for engine in (make_engine(model, name, example=x) for name in options.engines)}
    kept = [measure(engine, x, options.rounds) for engine in made.values()]
    print("\nwithin the limit" if all(kept) else "\nover the limit")


if __name__ == "__main__":
    main()

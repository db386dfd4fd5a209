"""Callers in several threads share one runner: how many get an answer on time, and whether any is starved.

    python benchmarks/callers.py                                        1 to 64 threads, deadline 20 ms, ONNX Runtime
    python benchmarks/callers.py --engine eager --seconds 10
    python benchmarks/callers.py --deadline 2ms 8ms 40ms
    python benchmarks/callers.py --device cuda --engine cuda-graphs --deadline 5ms

The CIFAR MSDNet, one input per request. Every caller makes its next request as soon as it has an answer or a refusal. The rival
has no runner: every caller runs the engine's stages in its own thread and checks the clock after each exit. Both are measured
in turn for each number of threads, with one torch thread per stage.

An answer is on time if its caller has it at most 0.5 ms after the deadline, by the caller's own clock. "Refused in a row" is
the longest sequence of requests of one caller that were not answered on time, "longest without" the longest time that one
caller had no answer on time, in deadlines. The ratios are the runner's answers on time per second to the rival's, and the
lowest rate after the peak to the peak, as threads are added.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import anytime
from anytime.errors import DeadlineTooShort, Overloaded
from anytime.models import create
from anytime.run import Runner
from anytime.run.budget import seconds
from anytime.run.engines import Engine, make_engine

LATE = 0.5e-3
Ask = Callable[[Tensor, float], int]
"""Takes an input and the seconds allowed; returns the exit reached, 0 for a refusal."""


@dataclass
class Caller:
    """The results of one caller."""

    asked: int = 0
    exits: list[int] = field(default_factory=list)
    in_a_row: int = 0
    longest_run: int = 0
    last: float = 0.0
    longest: float = 0.0

    def note(self, began: float, now: float, exit: int, allowed: float) -> None:
        self.asked += 1
        if exit and now - began <= allowed + LATE:
            self.exits.append(exit)
            self.in_a_row = 0
            self.without(now)
            self.last = now
        else:
            self.in_a_row += 1
            self.longest_run = max(self.longest_run, self.in_a_row)

    def without(self, now: float) -> None:
        self.longest = max(self.longest, now - self.last)


def ask_runner(runner: Runner) -> Ask:
    def ask(x: Tensor, allowed: float) -> int:
        try:
            answer = runner.predict(x, deadline=allowed)
        except (DeadlineTooShort, Overloaded):
            return 0
        assert isinstance(answer.exit, int)
        return answer.exit

    return ask


def ask_yourself(engine: Engine, rule: anytime.Product) -> Ask:
    """The rival."""

    def ask(x: Tensor, allowed: float) -> int:
        began = time.perf_counter()
        stages, state, exit = engine.begin(x), rule.start(engine.num_exits), 0
        while exit < engine.num_exits:
            state, _ = rule.step(state, stages.advance())
            exit += 1
            if time.perf_counter() - began >= allowed:
                break
        stages.close()
        return exit

    return ask


def run(ask: Ask, x: Tensor, *, threads: int, allowed: float, length: float, skip: float) -> list[Caller]:
    """Run callers for so many seconds; the first seconds, in which the runner adapts, are not counted."""
    callers = [Caller() for _ in range(threads)]
    start = time.perf_counter() + skip
    end = start + length

    def call(caller: Caller) -> None:
        caller.last = start
        while (began := time.perf_counter()) < end:
            exit = ask(x, allowed)
            if began >= start:
                caller.note(began, time.perf_counter(), exit, allowed)
        caller.without(time.perf_counter())

    running = [threading.Thread(target=call, args=(caller,)) for caller in callers]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return callers


def show(threads: int, name: str, callers: list[Caller], allowed: float, length: float) -> float:
    """Print a row; the answers on time per second."""
    exits = [exit for caller in callers for exit in caller.exits]
    rate, asked = len(exits) / length, sum(caller.asked for caller in callers)
    mean = sum(exits) / max(len(exits), 1)
    without = max(caller.longest for caller in callers) / allowed
    print(
        f"{threads:7}  {name:24}{len(exits) / max(asked, 1):9.1%}{rate:14.1f}{mean:11.2f}"
        f"{max(caller.longest_run for caller in callers):18}{without:17.1f}",
        flush=True,
    )
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="onnxruntime")
    parser.add_argument("--device", default="cpu", help="where the model is")
    parser.add_argument("--deadline", nargs="+", default=["20ms"])
    parser.add_argument("--seconds", type=float, default=5.0, help="for each number of threads")
    parser.add_argument("--skip", type=float, default=1.0, help="seconds of warm-up, which are not counted")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    options = parser.parse_args()
    length = options.seconds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, rule, x = create("msdnet-cifar", classes=100).eval().to(options.device), anytime.Product(), torch.randn(1, 3, 32, 32)
    engine = make_engine(model, options.engine, example=x)
    own = ask_yourself(engine, rule)
    for deadline in options.deadline:
        allowed = seconds(deadline)
        print(
            f"msdnet-cifar, 100 classes, one input, {engine.name} on {options.device}, deadline {1e3 * allowed:g} ms, "
            f"{len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f}, {length:g} s each\n\n"
            f"threads  {'':24}{'on time':>9}{'on time per s':>14}{'mean exit':>11}{'refused in a row':>18}"
            f"{'longest without':>17}"
        )
        rates, ratios = dict[int, float](), dict[int, float]()
        for threads in options.threads:
            with Runner(model, rule, engine) as runner:
                runner.warm_up(x)
                found = run(ask_runner(runner), x, threads=threads, allowed=allowed, length=length, skip=options.skip)
            rates[threads] = show(threads, "runner", found, allowed, length)
            found = run(own, x, threads=threads, allowed=allowed, length=length, skip=options.skip)
            ratios[threads] = rates[threads] / max(show(threads, "clock after each exit", found, allowed, length), 1 / length)
        print("\nrunner to rival: " + ", ".join(f"{count} threads {ratio:.2f}" for count, ratio in ratios.items()))
        peak = max(rates, key=rates.__getitem__)
        after = min(rate for count, rate in rates.items() if count >= peak)
        print(
            f"lowest rate after the peak ({peak} threads) to the peak: {after / max(rates[peak], 1 / length):.0%}\n", flush=True
        )


if __name__ == "__main__":
    main()

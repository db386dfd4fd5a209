"""Random deadlines: how many answers are late, which exits they reached, and whether they are right.

    python benchmarks/deadlines.py                         10,000 requests on one core
    python benchmarks/deadlines.py --requests 100000       the full number
    python benchmarks/deadlines.py --load                  with another process that keeps the same core busy
    python benchmarks/deadlines.py --batch 8               with stages of several milliseconds
    python benchmarks/deadlines.py --device cuda           the stages on a GPU, everything else on one core

The CIFAR MSDNet, one input at a time, one thread, the fastest engine; everything is pinned to one core. Deadlines are uniform
between zero and 1.5 times (`--longest`) the median time of all exits. On the same input, with the same deadline, seven variants
take turns in random order, since a variant that follows a wait finds an idle processor and cold caches:

* the runner, which answers with the prior if not even the first exit fits;
* the runner with `grace="0.5ms"`, which uses the half millisecond in which an answer is not late;
* that runner with `preempt=False`, which runs the stages in its caller: no thread is involved, and a running stage cannot be
  given up;
* the rival, a plain loop that checks the clock after each exit and stops when the time is up;
* all stages in order, whose times give the oracle: the last exit that ends before the deadline;
* a wait for the deadline and nothing else, and a loop that polls the clock until then: the lateness of the machine itself.

An answer is late if it is delivered more than 0.5 ms after its deadline. The first requests, in which the runner measures stage
times, are not counted. Every answer of the runner is compared with the rule on stored logits. After an answer for which a
running stage was given up, all variants wait for the end of that stage.

The host of a virtual machine preempts a core for milliseconds, and nothing that runs on it can then be on time. This shows as
wall time without process time, except for variants that wait. The last two columns are the fraction of turns in which the core
was away for more than 0.1 ms, and the fraction of late answers in the other turns.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

import anytime
from anytime.models import create
from anytime.run import Runner, RunOptions
from anytime.run.engines import Engine, make_engine
from anytime.run.timing.clock import MonotonicClock

LATE = 0.5e-3
AWAY = 0.1e-3
"""Seconds without the core from which on a turn counts as without it."""
INPUTS = 64
SAME = 1e-5
"""Log-probabilities closer than this are the same: sums in another order differ in the last digits."""


RUNNER, GRACE, IN_CALLER = "runner", "runner with grace", "runner in its caller, grace"
RIVAL, ORACLE, WAIT = "clock after each exit", "oracle", "a wait and nothing else"


@dataclass
class Tally:
    """The counts of one variant."""

    beyond: list[float] = field(default_factory=list)
    exits: list[int] = field(default_factory=list)
    away: list[bool] = field(default_factory=list)

    def add(self, beyond: float, exit: int, away: bool) -> None:
        self.beyond.append(beyond)
        self.exits.append(exit)
        self.away.append(away)

    @property
    def late(self) -> float:
        return sum(beyond > LATE for beyond in self.beyond) / len(self.beyond)

    @property
    def late_by_itself(self) -> float:
        there = [beyond > LATE for beyond, away in zip(self.beyond, self.away, strict=True) if not away]
        return sum(there) / max(len(there), 1)

    @property
    def without(self) -> float:
        return sum(exit == 0 for exit in self.exits) / len(self.exits)

    def quantile(self, level: float) -> float:
        return sorted(self.beyond)[min(int(level * len(self.beyond)), len(self.beyond) - 1)]


@contextmanager
def competitor(core: int, wanted: bool) -> Iterator[None]:
    """A process that keeps the core busy."""
    if not wanted:
        yield
        return
    code = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True:\n    pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        time.sleep(1)
        yield
    finally:
        process.kill()
        process.wait()


def stage_times(engine: Engine, x: Tensor) -> list[float]:
    times = []
    stages = engine.begin(x)
    before = time.perf_counter()
    for _ in range(engine.num_exits):
        stages.advance()
        now = time.perf_counter()
        times.append(now - before)
        before = now
    stages.close()
    return times


Turn = Callable[[Tensor, float], tuple[float, int, anytime.Answer | None]]
"""Takes an input and the seconds allowed; returns the seconds taken, the exit and, if there is one to check, the answer."""


def ask(runner: Runner, x: Tensor, allowed: float) -> tuple[float, int, anytime.Answer]:
    """A runner."""
    began = time.perf_counter()
    answer = runner.predict(x, deadline=allowed)
    taken = time.perf_counter() - began
    assert isinstance(answer.exit, int)
    return taken, answer.exit, answer


def check_after_each(engine: Engine, rule: anytime.Product, x: Tensor, allowed: float) -> tuple[float, int, None]:
    """The rival."""
    began = time.perf_counter()
    stages, state, exit = engine.begin(x), rule.start(engine.num_exits), 0
    while exit < engine.num_exits:
        state, _ = rule.step(state, stages.advance())
        exit += 1
        if time.perf_counter() - began >= allowed:
            break
    stages.close()
    return time.perf_counter() - began, exit, None


def know_all(engine: Engine, x: Tensor, allowed: float) -> tuple[float, int, None]:
    """The oracle; it is never late."""
    elapsed, reached = 0.0, 0
    for seconds in stage_times(engine, x):
        elapsed += seconds
        reached += elapsed <= allowed
    return allowed, reached, None


def wait_only(x: Tensor, allowed: float) -> tuple[float, int, None]:
    """Wait for the deadline as the runner's callers do."""
    closed = threading.Lock()
    closed.acquire()
    began = time.perf_counter()
    MonotonicClock().wait(closed, allowed)
    return time.perf_counter() - began, 0, None


def watch_only(x: Tensor, allowed: float) -> tuple[float, int, None]:
    """Poll the clock until the deadline."""
    began = time.perf_counter()
    while (taken := time.perf_counter() - began) < allowed:
        pass
    return taken, 0, None


def stored_answers(engine: Engine, inputs: Tensor, rule: anytime.Product, batch: int) -> anytime.Prediction:
    """The rule's values at all exits of all inputs, from stored logits."""
    rows = []
    for x in inputs.split(batch):
        stages = engine.begin(x)
        rows.append(torch.stack([stages.advance() for _ in range(engine.num_exits)]))
        stages.close()
    return rule(torch.cat(rows, 1))


def same(first: Tensor, second: Tensor) -> bool:
    support = first > -torch.inf
    return bool((support == (second > -torch.inf)).all()) and bool(((first - second)[support].abs() <= SAME).all())


def report(tallies: dict[str, Tally], *, away: bool) -> None:
    """Print the table; without the columns on the core if it is busy or waits for a GPU."""
    columns = f"{'':28}{'late':>8}{'mean exit':>11}{'of the oracle':>15}{'no exit':>9}   {'beyond: p50, p99, max':26}"
    print(f"\n{columns}{'core away':>9}{'else late':>11}" if away else f"\n{columns}".rstrip())
    most = max(sum(tallies[ORACLE].exits), 1)
    for name, tally in tallies.items():
        exits = f"{statistics.mean(tally.exits):11.2f}{sum(tally.exits) / most:15.1%}{tally.without:9.1%}"
        spread = ", ".join(f"{1e3 * tally.quantile(level):.2f}" for level in (0.5, 0.99, 1.0)) + " ms"
        timed = name != ORACLE
        late = f"{tally.late:8.3%}" if timed else ""
        row = f"{name:28}{late:8}{exits if any(tally.exits) else '':35}   {spread if timed else '':26}"
        if away and name != WAIT:
            row += f"{statistics.mean(tally.away):9.2%}{f'{tally.late_by_itself:11.3%}' if timed else ''}"
        print(row.rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--skip", type=int, default=200, help="requests at the start that are not counted")
    parser.add_argument("--seed", type=int, default=0, help="of the deadlines and inputs")
    parser.add_argument("--load", action="store_true", help="keep the core busy with another process")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--device", default="cpu", help="the device of the model")
    parser.add_argument("--batch", type=int, default=1, choices=[2**power for power in range(10)], help="inputs per request")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--longest", type=float, default=1.5, help="the longest deadline, in median times of all exits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    os.sched_setaffinity(0, {options.core})
    model, rule = create("msdnet-cifar", classes=100).eval().to(options.device), anytime.Product()
    inputs = torch.randn(max(INPUTS, options.batch), 3, 32, 32)
    batch, engine = options.batch, make_engine(model, options.engine, example=inputs[: options.batch])
    offline = stored_answers(engine, inputs, rule, batch)
    wrong = asked = 0
    with (
        torch.inference_mode(),
        competitor(options.core, options.load),
        Runner(model, rule, engine, options=RunOptions(on_too_short="prior")) as runner,
        Runner(model, rule, engine, options=RunOptions(on_too_short="prior", grace=LATE)) as graced,
        Runner(model, rule, engine, options=RunOptions(on_too_short="prior", grace=LATE, preempt=False)) as in_caller,
    ):
        turns: dict[str, Turn] = {
            RUNNER: partial(ask, runner),
            GRACE: partial(ask, graced),
            IN_CALLER: partial(ask, in_caller),
            RIVAL: partial(check_after_each, engine, rule),
            ORACLE: partial(know_all, engine),
            WAIT: wait_only,
            "polling the clock only": watch_only,
        }
        order, tallies = list(turns), {name: Tally() for name in turns}
        whole = statistics.median(sum(stage_times(engine, inputs[:batch])) for _ in range(50))
        longest = options.longest * whole
        print(
            f"msdnet-cifar, 100 classes, batch {batch}, {engine.name}, one thread on core {options.core}, "
            f"{'with a busy process on it' if options.load else 'no other process of ours on it'}, "
            f"load average {os.getloadavg()[0]:.1f}\n"
            f"all {engine.num_exits} exits: {1e3 * whole:.2f} ms (median); deadlines up to {1e3 * longest:.2f} ms; "
            f"{options.requests} requests, the first {options.skip} not counted",
            flush=True,
        )
        for number in range(options.requests):
            first, allowed = batch * draw.randrange(len(inputs) // batch), draw.uniform(0, longest)
            rows = slice(first, first + batch)
            draw.shuffle(order)
            for name in order:
                x, on_account, before = inputs[rows], time.process_time(), time.perf_counter()
                taken, exit, answer = turns[name](x, allowed)
                away = time.perf_counter() - before - (time.process_time() - on_account) > AWAY
                if answer is not None:
                    asked += 1
                    wrong += exit > 0 and not same(answer.log_probs, offline.log_probs[exit - 1, rows])
                    if answer.reason == "deadline":
                        time.sleep(whole)
                if number >= options.skip:
                    tallies[name].add(taken - allowed, exit, away)
    report(tallies, away=options.device == "cpu" and not options.load)
    print()
    for name in (RUNNER, GRACE, IN_CALLER):
        if tallies[name].late > 0:
            times = tallies[RIVAL].late / tallies[name].late
            print(f"{name}: late {times:.1f} times less often than with the clock after each exit")
    print(f"answers that differ from the rule's value on stored logits: {wrong} of {asked}")


if __name__ == "__main__":
    main()

"""Random deadlines: how many answers are late, which exits they reached, and whether they are right.

    python benchmarks/deadlines.py                         10,000 requests on one core
    python benchmarks/deadlines.py --requests 100000       the full number
    python benchmarks/deadlines.py --load                  with another process that keeps the same core busy
    python benchmarks/deadlines.py --batch 8               with stages of several milliseconds
    python benchmarks/deadlines.py --device cuda           the stages on a GPU, everything else on one core
    python benchmarks/deadlines.py --device cuda --requests 3000 --seconds 30     the same, in about 40 seconds

The CIFAR MSDNet, one input at a time, one thread, the fastest engine; everything is pinned to one core. Deadlines are uniform
between zero and 1.5 times (`--longest`) the median time of all exits. On the same input, with the same deadline, these variants
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
running stage was given up, all variants wait for the end of that stage; with a GPU, after every answer for the end of its work.

With CUDA graphs the runners are measured three times: as they are, with stages queued ahead and the rule on the GPU; with
stages queued and the rule on the CPU ("rule on the CPU", in a thread without grace only); and with neither ("one by one"). The
oracle runs the stages one by one in all cases, and a second one queues them all.

The host of a virtual machine preempts a core for milliseconds, and nothing that runs on it can then be on time. This shows as
wall time without process time, except for variants that wait. The last two columns are the fraction of turns in which the core
was away for more than 0.1 ms, and the fraction of late answers in the other turns.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import anytime
from anytime.models import create
from anytime.run import Runner, RunOptions
from anytime.run.engines import Engine, make_engine
from anytime.run.engines.base import Ahead
from anytime.run.engines.cuda import CudaGraphsEngine
from anytime.run.timing.clock import MonotonicClock

LATE = 0.5e-3
AWAY = 0.1e-3
"""Seconds without the core from which on a turn counts as without it."""
INPUTS = 64
SAME = 1e-5
"""Log-probabilities closer than this, relative to one plus their size, are the same: other sums differ in the last digits."""


RUNNER, GRACE, IN_CALLER = "runner", "runner with grace", "runner in its caller, grace"
RIVAL, ORACLE, QUEUED, WAIT = "clock after each exit", "oracle", "oracle, queued", "a wait and nothing else"
ONE_BY_ONE, ON_CPU = ", one by one", ", rule on the CPU"


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


def stage_times(engine: Engine, x: Tensor, ahead: Ahead | None = None) -> list[float]:
    times = []
    stages: Any = engine.begin(x)
    if ahead is not None:
        stages.ahead = ahead
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


def know_all(engine: Engine, ahead: Ahead | None, x: Tensor, allowed: float) -> tuple[float, int, None]:
    """The oracle; it is never late."""
    elapsed, reached = 0.0, 0
    for seconds in stage_times(engine, x, ahead):
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
    return bool((support == (second > -torch.inf)).all()) and bool(
        ((first - second)[support].abs() <= SAME * (1 + second[support].abs())).all()
    )


def report(tallies: dict[str, Tally], *, away: bool) -> None:
    """Print the table; without the columns on the core if it is busy or waits for a GPU."""
    wide = max(map(len, tallies)) + 2
    columns = f"{'':{wide}}{'late':>8}{'mean exit':>11}{'of the oracle':>15}{'no exit':>9}   {'beyond: p50, p99, max':26}"
    print(f"\n{columns}{'core away':>9}{'else late':>11}" if away else f"\n{columns}".rstrip())
    most = max(sum(tallies[ORACLE].exits), 1)
    for name, tally in tallies.items():
        exits = f"{statistics.mean(tally.exits):11.2f}{sum(tally.exits) / most:15.1%}{tally.without:9.1%}"
        spread = ", ".join(f"{1e3 * tally.quantile(level):.2f}" for level in (0.5, 0.99, 1.0)) + " ms"
        timed = name not in (ORACLE, QUEUED)
        late = f"{tally.late:8.3%}" if timed else ""
        row = f"{name:{wide}}{late:8}{exits if any(tally.exits) else '':35}   {spread if timed else '':26}"
        if away and name != WAIT:
            row += f"{statistics.mean(tally.away):9.2%}{f'{tally.late_by_itself:11.3%}' if timed else ''}"
        print(row.rstrip())


def make_engines(model: Any, options: argparse.Namespace, x: Tensor, rule: anytime.Product) -> tuple[Engine, Engine | None]:
    """The engine, and for CUDA graphs one with the rule inside."""
    if options.device != "cpu" and options.engine in ("auto", "cuda-graphs"):
        sizes = (len(x),)
        return CudaGraphsEngine(model, x, sizes=sizes), CudaGraphsEngine(model, x, sizes=sizes, rule=rule)
    return make_engine(model, options.engine, example=x), None


MODES: dict[str, dict[str, Any]] = {RUNNER: {}, GRACE: {"grace": LATE}, IN_CALLER: {"grace": LATE, "preempt": False}}


def make_runners(
    model: Any, rule: anytime.Product, engine: Engine, with_rule: Engine | None
) -> dict[str, tuple[Runner, Engine]]:
    """All runners by name, with the engine whose logits they answer from."""
    kinds: list[tuple[str, Engine, dict[str, Any]]] = [(name, with_rule or engine, {}) for name in MODES]
    if with_rule is not None:
        kinds += [(RUNNER + ON_CPU, engine, {}), *((name + ONE_BY_ONE, engine, {"resolution": 0}) for name in MODES)]
    made = {}
    for name, each, more in kinds:
        mode = MODES[name.removesuffix(ON_CPU).removesuffix(ONE_BY_ONE)]
        made[name] = Runner(model, rule, each, options=RunOptions(on_too_short="prior", **mode, **more)), each
    return made


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
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so many seconds of counted requests")
    parser.add_argument("--longest", type=float, default=1.5, help="the longest deadline, in median times of all exits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    os.sched_setaffinity(0, {options.core})
    model, rule = create("msdnet-cifar", classes=100).eval().to(options.device), anytime.Product()
    inputs = torch.randn(max(INPUTS, options.batch), 3, 32, 32)
    batch = options.batch
    engine, with_rule = make_engines(model, options, inputs[:batch], rule)
    offline = {id(each): stored_answers(each, inputs, rule, batch) for each in (engine, with_rule) if each is not None}
    wrong = asked = 0
    with torch.inference_mode(), competitor(options.core, options.load), ExitStack() as stack:
        runners = make_runners(model, rule, engine, with_rule)
        for runner, _ in runners.values():
            stack.enter_context(runner)
        turns: dict[str, Turn] = {name: partial(ask, runner) for name, (runner, _) in runners.items()}
        turns |= {RIVAL: partial(check_after_each, engine, rule), ORACLE: partial(know_all, engine, None)}
        if with_rule is not None:
            turns[QUEUED] = partial(know_all, engine, Ahead(engine.num_exits, math.inf, math.inf))
        turns |= {WAIT: wait_only, "polling the clock only": watch_only}
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
        if with_rule is not None:
            print("; ".join(getattr(each, "why", "") for each in (engine, with_rule)), flush=True)
            queued = statistics.median(sum(stage_times(engine, inputs[:batch], turns[QUEUED].args[1])) for _ in range(50))  # type: ignore[attr-defined]
            print(f"all exits with stages queued ahead: {1e3 * queued:.2f} ms", flush=True)
        until = math.inf
        for number in range(options.requests):
            if number == options.skip:
                until = time.perf_counter() + options.seconds
            if time.perf_counter() > until and number > options.skip:
                print(f"ended after {number} requests")
                break
            first, allowed = batch * draw.randrange(len(inputs) // batch), draw.uniform(0, longest)
            rows = slice(first, first + batch)
            draw.shuffle(order)
            for name in order:
                x, on_account, before = inputs[rows], time.process_time(), time.perf_counter()
                taken, exit, answer = turns[name](x, allowed)
                away = time.perf_counter() - before - (time.process_time() - on_account) > AWAY
                if answer is not None:
                    asked += 1
                    wanted = offline[id(runners[name][1])].log_probs
                    wrong += exit > 0 and not same(answer.log_probs, wanted[exit - 1, rows])
                    if answer.reason == "deadline":
                        time.sleep(whole)
                    if with_rule is not None and torch.cuda.is_available():
                        torch.cuda.synchronize()
                if number >= options.skip:
                    tallies[name].add(taken - allowed, exit, away)
    report(tallies, away=options.device == "cpu" and not options.load)
    print()
    most = max(sum(tallies[ORACLE].exits), 1)
    for name in MODES if with_rule is not None else ():
        now, before = (sum(tallies[each].exits) / most for each in (name, name + ONE_BY_ONE))
        print(f"{name}: {now:.1%} of the oracle's exits, before {before:.1%}")
    for name in MODES:
        if tallies[name].late > 0:
            times = tallies[RIVAL].late / tallies[name].late
            print(f"{name}: late {times:.1f} times less often than with the clock after each exit")
    print(f"answers that differ from the rule's value on stored logits: {wrong} of {asked}")


if __name__ == "__main__":
    main()

"""A runner under load in a separate process, with forks or signals at random moments. Used by tests/run and tests/long.

python tests/long/battery.py forks 1000
python tests/long/battery.py interrupts 1000
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

import torch

from anytime.errors import AnytimeError
from anytime.models import MLP, MLPConfig
from anytime.run import Budget, Runner, RunOptions

DEADLINE, PATIENCE = 0.5, 30.0
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)


class Stop(BaseException):
    """Raised by the signal handler."""


def ask(runner: Runner, x: torch.Tensor, draw: random.Random) -> None:
    """One random request; a refusal is an answer too."""
    deadline = draw.choice([1e-4, 1e-3, 0.02, DEADLINE])
    try:
        match draw.choice(["predict", "predict", "submit", "drop", "stream", "here"]):
            case "predict":
                runner.predict(x, deadline=deadline)
            case "submit":
                runner.submit(x, deadline=deadline).result()
            case "drop":
                runner.submit(x, deadline=deadline)
            case "stream":
                list(runner.stream(x, deadline=deadline))
            case "here":
                runner.predict(x, budget=Budget(exits=2))
    except AnytimeError:
        pass


def under_load(runner: Runner, x: torch.Tensor, work: Callable[[], None]) -> None:
    """Run `work` while other threads use the runner; their errors fail it."""
    end, failed = threading.Event(), list[BaseException]()

    def load(seed: int) -> None:
        draw = random.Random(seed)
        try:
            while not end.is_set():
                ask(runner, x, draw)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    try:
        work()
    finally:
        end.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert not failed, failed
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback()
        os._exit(3)


def in_child(runner: Runner, x: torch.Tensor, seed: int) -> int:
    """Requests of a forked process, each of which must end in an answer or a refusal; returns the exit code."""
    signal.alarm(int(PATIENCE))  # ends a process that hangs
    draw = random.Random(seed)
    try:
        for _ in range(3):
            ask(runner, x, draw)
        with suppress(AnytimeError):
            runner.predict(x, deadline=DEADLINE)
        runner.close()
    except BaseException:
        return 1
    return 0


def forks(runner: Runner, x: torch.Tensor, count: int) -> None:
    """Fork while other threads use the runner."""
    draw = random.Random(0)

    def work() -> None:
        for seed in range(count):
            time.sleep(draw.uniform(0, 1e-3))
            child = os.fork()
            if child == 0:
                os._exit(in_child(runner, x, seed))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code == 0, f"child {seed} ended with {code}"

    under_load(runner, x, work)


def interrupts(runner: Runner, x: torch.Tensor, count: int) -> None:
    """Requests of the main thread, while a signal handler raises at random moments and other threads use the runner."""
    draw, seen = random.Random(0), 0

    def stop(*_: object) -> None:
        raise Stop

    def work() -> None:
        nonlocal seen
        signal.signal(signal.SIGALRM, stop)
        while seen < count:
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 3e-3))
                while True:
                    ask(runner, x, draw)
            except Stop:
                seen += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    under_load(runner, x, work)
    assert seen == count


def main(kind: str, count: int, workers: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = MLP(MLPConfig(classes=5, inputs=8, exits=6)).eval(), torch.randn(3, 8)
    before = threading.active_count()
    runner = Runner(model, options=RunOptions(workers=workers))
    {"forks": forks, "interrupts": interrupts}[kind](runner, x, count)
    for _ in range(20):  # every thread is usable
        assert runner.predict(x, deadline=PATIENCE).exit == 6
    tasks = [runner.submit(x, deadline=PATIENCE) for _ in range(4 * workers)]
    assert [task.result().exit for task in tasks] == [6] * len(tasks)
    assert runner.load_status.waiting == 0
    assert len(runner._executor._threads) <= workers
    runner.close()
    assert threading.active_count() == before
    print("done", count)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 2)

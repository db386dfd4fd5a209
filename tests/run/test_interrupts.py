"""Random interrupts of a real network leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch

import anytime
from anytime.errors import AnytimeError
from anytime.models import MLP, MLPConfig
from anytime.run import Answer, Budget, Runner
from anytime.run.engines.eager import EagerEngine


def interrupt_at_random(runner: Runner, x: torch.Tensor, draw: random.Random, expected: torch.Tensor) -> None:
    """One request, ended at random in one of several modes."""
    mode = draw.choice(["task", "event", "stream", "asyncio", "deadline", "drop"])
    answer: Answer | None = None
    pause = draw.choice([0.0, 1e-5, 1e-4, 5e-4])
    match mode:
        case "task":
            task = runner.submit(x)
            threading.Event().wait(pause)
            answer = task.current()
            task.interrupt()
            answer = _or_none(task.result)
        case "event":
            event = threading.Event()
            threading.Timer(pause, event.set).start() if draw.random() < 0.1 else event.set()
            answer = _or_none(lambda: runner.predict(x, budget=Budget(until=event)))
        case "stream":
            wanted = draw.randint(1, 6)
            for answer in runner.stream(x):
                if answer.exit == wanted:
                    break
        case "asyncio":
            answer = asyncio.run(_cancelled(runner, x, pause))
        case "deadline":
            answer = _or_none(lambda: runner.predict(x, deadline=draw.uniform(0, 1e-3)))
        case "drop":
            runner.submit(x, budget=Budget(time=0.01))
    if answer is not None:
        assert isinstance(answer.exit, int)
        torch.testing.assert_close(answer.log_probs, expected[answer.exit - 1])


def _or_none(ask: object) -> Answer | None:
    try:
        return ask()  # type: ignore[operator,no-any-return]
    except AnytimeError:
        return None


async def _cancelled(runner: Runner, x: torch.Tensor, pause: float) -> Answer | None:
    request = asyncio.create_task(runner.predict_async(x))
    await asyncio.sleep(pause)
    request.cancel()
    try:
        answer = await request
    except asyncio.CancelledError:
        answer = None
    assert len(asyncio.all_tasks()) == 1
    return answer


def check_interrupts(count: int) -> None:
    """So many random interrupts: the same threads and as much memory as after the first tenth of them."""
    torch.manual_seed(0)
    draw = random.Random(0)
    model, x = MLP(MLPConfig(classes=5, inputs=8, exits=6)).eval(), torch.randn(3, 8)
    with torch.no_grad():
        expected = anytime.Product()(model(x)).log_probs
    before = threading.active_count()
    with Runner(model, anytime.Product(), EagerEngine(model)) as runner:
        for _ in range(count // 10):
            interrupt_at_random(runner, x, draw, expected)
        tracemalloc.start()
        try:
            for half in range(2):
                for _ in range(9 * count // 20):
                    interrupt_at_random(runner, x, draw, expected)
                gc.collect()
                held = tracemalloc.get_traced_memory()[0]
                if half == 0:
                    middle = held
        finally:
            tracemalloc.stop()
        assert threading.active_count() <= before + 4 + 1  # the runner's own, and a timer that has not ended yet
        assert held < middle + 100_000
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert threading.active_count() == before
    del runner
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is anytime.run.Task]


def test_five_hundred_random_interrupts_leave_nothing_behind() -> None:
    check_interrupts(500)


@pytest.mark.long
def test_ten_thousand_random_interrupts_leave_nothing_behind() -> None:
    check_interrupts(10_000)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.parametrize("kind", ["forks", "interrupts"])
def test_forks_and_interrupts_under_load_lose_nothing(kind: str) -> None:
    battery = Path(__file__).parents[1] / "long" / "battery.py"  # where a thousand of them are tried
    ended = subprocess.run([sys.executable, str(battery), kind, "25", "1"], capture_output=True, text=True, timeout=250)
    assert ended.stdout.split() == ["done", "25"], ended.stderr

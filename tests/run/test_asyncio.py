from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import anytime
from anytime.errors import DeadlineTooShort
from anytime.run import Budget, Forecast, Runner, RunOptions


class Held:
    """A clock's sleep that waits for a word at one stage."""

    def __init__(self, clock: Any, engine: Any, *, stages: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._engine, self._stages = engine, stages
        clock.sleep = self

    def __call__(self, seconds: float) -> None:
        if len(self._engine.begun) == self._stages:
            self.reached.set()
            assert self.go_on.wait(20)


def test_the_loop_is_free_while_stages_run(fakes: Any, logits: Tensor) -> None:
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    held = Held(clock, engine, stages=2)

    async def main(runner: Runner) -> anytime.run.Answer:
        request = asyncio.create_task(runner.predict_async(engine.rows))
        while not held.reached.is_set():
            await asyncio.sleep(0.001)
        held.go_on.set()
        return await request

    with Runner(engine, engine=engine, options=RunOptions(clock=clock)) as runner:
        answer = asyncio.run(main(runner))
    assert (answer.exit, answer.reason) == (5, "finished")
    torch.testing.assert_close(answer.log_probs, anytime.Product()(logits).log_probs[-1])


def test_cancelling_interrupts(fakes: Any, logits: Tensor) -> None:
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    held = Held(clock, engine, stages=3)

    async def main(runner: Runner) -> None:
        request = asyncio.create_task(runner.predict_async(engine.rows))
        while not held.reached.is_set():
            await asyncio.sleep(0.001)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert len(asyncio.all_tasks()) == 1

    with Runner(engine, engine=engine, options=RunOptions(clock=clock)) as runner:
        asyncio.run(main(runner))
        held.go_on.set()
    assert engine.begun == [0, 1, 2]
    assert engine.open == 0


def test_the_answer_is_there_at_the_deadline(fakes: Any, logits: Tensor) -> None:
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    held = Held(clock, engine, stages=3)
    with Runner(engine, engine=engine, options=RunOptions(clock=clock)) as runner:
        answer = asyncio.run(runner.predict_async(engine.rows, deadline="50ms"))  # asyncio waits by a clock of its own
        assert (answer.exit, answer.reason) == (2, "deadline")
        held.go_on.set()
    assert engine.begun == [0, 1, 2]


def test_budgets_and_errors_are_those_of_predict(fakes: Any, logits: Tensor) -> None:
    engine, forecast = fakes.FakeEngine(logits), Forecast()
    with Runner(engine, engine=engine, options=RunOptions(forecast=forecast)) as runner:
        assert asyncio.run(runner.predict_async(engine.rows, budget=Budget(exits=2))).exit == 2
        forecast.seed(1, 6, [9.0] * 100)
        with pytest.raises(DeadlineTooShort):
            asyncio.run(runner.predict_async(engine.rows, deadline="1ms"))
        engine.fail_at = 1
        with pytest.raises(ArithmeticError):
            asyncio.run(runner.predict_async(engine.rows))


def test_many_at_once(fakes: Any, logits: Tensor) -> None:
    engine = fakes.FakeEngine(logits)

    async def main(runner: Runner) -> list[Any]:
        return await asyncio.gather(*(runner.predict_async(engine.rows[row : row + 1]) for row in range(6) for _ in range(10)))

    with Runner(engine, engine=engine) as runner:
        answers = asyncio.run(main(runner))
    expected = anytime.Product()(logits).log_probs[-1]
    for number, answer in enumerate(answers):
        torch.testing.assert_close(answer.log_probs[0], expected[number // 10])

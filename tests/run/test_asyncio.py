from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import anytime
from anytime.errors import DeadlineTooShort, Overloaded
from anytime.models import create
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


def test_the_time_counts_from_when_the_request_arrived() -> None:
    async def main(runner: Runner) -> None:
        with pytest.raises((DeadlineTooShort, Overloaded)):
            await runner.predict_async(torch.zeros(1, 2), deadline=10.0, arrived=time.perf_counter() - 20.0)
        answer = await runner.predict_async(torch.zeros(1, 2), deadline=100.0, arrived=time.perf_counter() - 20.0)
        assert answer.elapsed > 20

    with Runner(create("mlp-toy", classes=8).eval(), "product") as runner:
        asyncio.run(main(runner))


def test_what_was_refused_is_refused_again_until_a_stage_ends() -> None:
    with Runner(create("mlp-toy", classes=8).eval(), "product") as runner:
        queue, now = runner._executor.queue, time.perf_counter()
        runner.check_load(Budget(0.02))
        queue.refusing = now + 60.0, 0.02, 2, 1
        runner.check_load(Budget(0.02))  # fewer rows than what was refused
        runner.check_load(Budget(0.03), 2)  # more time
        runner.check_load(Budget(exits=1), 2)  # no deadline
        with pytest.raises(Overloaded) as error:
            runner.check_load(Budget(0.02), 2)
        assert 0 < error.value.retry_after <= 60

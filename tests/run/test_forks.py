"""Forks while stages run or answers are made, with a lock in the place of torch's own, which no child can renew."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from anytime.combine import Product
from anytime.run import Runner, RunOptions, forks

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]
LONG = 60.0


class Torch:
    """Work that holds a lock. The first call holds it until a fork waits; the calls that begin while one waits are counted."""

    def __init__(self) -> None:
        self.lock, self.reached, self.during_fork = threading.Lock(), threading.Event(), 0

    def __call__(self) -> None:
        assert self.lock.acquire(timeout=LONG)
        self.during_fork += forks._fork is not None
        if not self.reached.is_set():
            self.reached.set()
            while forks._fork is None:
                threading.Event().wait(1e-3)
        self.lock.release()


def fork(in_child: Callable[[], int]) -> int:
    """The exit code of a forked process."""
    child = os.fork()
    if child == 0:
        threading.Timer(15, os._exit, (99,)).start()  # it hangs
        try:
            os._exit(in_child())
        except BaseException:
            os._exit(98)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_waits_for_the_running_stage_and_the_next_stage_for_the_fork(
    fakes: Any, logits: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "_PATIENCE", LONG)
    work, clock = Torch(), fakes.FakeClock()
    clock.sleep = lambda seconds: work()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    with Runner(engine, engine=engine, options=RunOptions(clock=clock, workers=1)) as runner:
        task = runner.submit(engine.rows)
        assert work.reached.wait(LONG)
        assert fork(lambda: runner.submit(engine.rows).result().exit) == 5
        assert task.result().exit == 5
    assert work.during_fork == 0


def test_a_fork_waits_for_an_answer_that_is_being_made(fakes: Any, logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_PATIENCE", LONG)
    work, after = Torch(), Product.after

    def slowly(rule: Product, *args: Any) -> Any:
        work()
        return after(rule, *args)

    monkeypatch.setattr(Product, "after", slowly)
    engine = fakes.FakeEngine(logits)
    with Runner(engine, Product(), engine=engine) as runner:
        thread = threading.Thread(target=runner.predict, args=(engine.rows,))
        thread.start()
        assert work.reached.wait(LONG)
        assert fork(lambda: runner.predict(engine.rows, deadline=10).exit) == 5
        thread.join()


def test_a_fork_does_not_wait_for_a_stage_that_hangs(fakes: Any, logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_PATIENCE", 0.01)
    reached, go_on, clock = threading.Event(), threading.Event(), fakes.FakeClock()

    def hang(seconds: float) -> None:
        reached.set()
        assert go_on.wait(LONG)

    clock.sleep = hang
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    with Runner(engine, engine=engine, options=RunOptions(clock=clock, workers=1)) as runner:
        task = runner.submit(engine.rows)
        assert reached.wait(LONG)
        assert fork(lambda: 7) == 7
        go_on.set()
        assert task.result().exit == 5


def test_a_stage_may_fork(fakes: Any, logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_PATIENCE", LONG)
    clock, codes = fakes.FakeClock(), list[int]()
    clock.sleep = lambda seconds: codes.append(fork(lambda: 7))
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    with Runner(engine, engine=engine, options=RunOptions(clock=clock, workers=1)) as runner:
        assert runner.submit(engine.rows).result().exit == 5
    assert codes == [7] * 5
    assert forks._fork is None
    assert forks._running == {}

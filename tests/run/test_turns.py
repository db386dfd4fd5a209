"""Many callers: which stage is next, what counts as stage time, and that no request is lost."""

from __future__ import annotations

import gc
import heapq
import itertools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import anytime
from anytime.errors import DeadlineTooShort, Overloaded, StateError
from anytime.models import MLP, MLPConfig
from anytime.models.modes import Modes
from anytime.run import Budget, Forecast, LoadStatus, Runner, RunOptions, Task

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")


class Held:
    """A clock's sleep that notes which stage runs, and waits for an event in one of them."""

    def __init__(self, clock: Any, engine: Any, *, at: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._engine, self._at = engine, at
        clock.sleep = self

    def __call__(self, seconds: float) -> None:
        if len(self._engine.begun) == self._at:
            self.reached.set()
            assert self.go_on.wait(20)


@pytest.mark.parametrize("deadline", [None, 1000.0])
def test_with_least_progress_every_request_gets_a_first_exit_before_any_gets_a_second(
    fakes: Any, logits: Tensor, deadline: float | None
) -> None:
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    held = Held(clock, engine, at=1)
    with Runner(engine, engine=engine, options=RunOptions(schedule="least-progress", clock=clock, workers=1)) as runner:
        first = runner.submit(engine.rows, deadline=deadline)
        assert held.reached.wait(20)
        tasks = [first, *(runner.submit(engine.rows, deadline=deadline) for _ in range(7))]
        held.go_on.set()
        assert [task.result().exit for task in tasks] == [5] * 8
    assert engine.begun == [exit for exit in range(5) for _ in range(8)]


def test_the_earliest_deadline_is_first_among_equals(fakes: Any, logits: Tensor) -> None:
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    held = Held(clock, engine, at=1)
    ended: list[float] = []
    with Runner(engine, engine=engine, options=RunOptions(clock=clock, workers=1)) as runner:
        tasks = [runner.submit(engine.rows, budget=Budget(exits=1))]
        assert held.reached.wait(20)
        for deadline in (300.0, 100.0, 200.0):
            task = runner.submit(engine.rows, budget=Budget(exits=1), deadline=deadline)
            task.notify = lambda deadline=deadline: ended.append(deadline)
            tasks.append(task)
        held.go_on.set()
        for task in tasks:
            task.result()
    assert ended == [100.0, 200.0, 300.0]


def test_waiting_for_others_does_not_count_as_stage_time(fakes: Any, logits: Tensor) -> None:
    clock, forecast = fakes.FakeClock(), Forecast()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    advance = clock.sleep
    held = Held(clock, engine, at=1)

    def sleep(seconds: float) -> None:
        held(seconds)
        advance(seconds)

    clock.sleep = sleep
    with Runner(engine, engine=engine, options=RunOptions(clock=clock, workers=1, forecast=forecast)) as runner:
        tasks = [runner.submit(engine.rows)]
        assert held.reached.wait(20)
        tasks += [runner.submit(engine.rows) for _ in range(7)]
        held.go_on.set()
        for task in tasks:
            assert task.result().exit == 5
    assert clock.time == 1040.0  # eight times five stages, one after the other
    assert [forecast.slow(stage, 6) for stage in range(1, 6)] == [1.0] * 5


def test_a_request_without_a_deadline_is_not_starved(fakes: Any, logits: Tensor) -> None:
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    held = Held(clock, engine, at=1)
    with Runner(engine, engine=engine, options=RunOptions(clock=clock, workers=1)) as runner:
        tasks = [runner.submit(engine.rows, deadline=1000.0)]
        assert held.reached.wait(20)
        patient = runner.submit(engine.rows)
        tasks += [runner.submit(engine.rows, budget=Budget(exits=1), deadline=1000.0) for _ in range(100)]
        left: list[int] = []
        patient.notify = lambda: left.append(sum(not task.settled for task in tasks))
        held.go_on.set()
        patient.result()
        for task in tasks:
            task.result()
    assert left[0] > 50  # most of the others were still to come


def test_a_request_in_its_callers_thread_takes_turns_with_the_others(fakes: Any, logits: Tensor) -> None:
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    held = Held(clock, engine, at=1)
    answers: list[Any] = []
    with Runner(engine, engine=engine, options=RunOptions(clock=clock, workers=1, preempt=False)) as runner:
        task = runner.submit(engine.rows)
        assert held.reached.wait(20)
        asked = [
            threading.Thread(target=lambda: answers.append(runner.predict(engine.rows, deadline=1000.0))),
            threading.Thread(target=lambda: answers.extend(list(runner.stream(engine.rows, deadline=1000.0))[-1:])),
        ]
        for count, thread in enumerate(asked, 1):
            thread.start()
            while runner.load_status.waiting < count:
                threading.Event().wait(0.001)
        assert engine.begun == [0]
        held.go_on.set()
        for thread in asked:
            thread.join()
        assert task.result().exit == 5
    assert [answer.exit for answer in answers] == [5, 5]
    for answer in answers:
        torch.testing.assert_close(answer.log_probs, anytime.Product()(logits).log_probs[-1], rtol=0, atol=0)


def test_a_very_long_stage_does_not_block_others(fakes: Any, logits: Tensor) -> None:
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    held = Held(clock, engine, at=1)
    with Runner(engine, engine=engine, options=RunOptions(clock=clock, workers=2)) as runner:
        hangs = runner.submit(engine.rows)  # without a deadline it is never given up
        assert held.reached.wait(20)
        task = runner.submit(engine.rows)
        clock.time += 10.0  # fake seconds
        assert task.result(20).exit == 5
        assert not hangs.settled
        held.go_on.set()
        assert hangs.result().exit == 5


# More callers than the machine can serve in full, simulated: one thread plays them all, and the worker.


class Simulation:
    """Callers that ask again as soon as they have an answer or a refusal, and one worker; time is made up."""

    def __init__(self, engine: Any, *, callers: int, allowed: float, forecast: Forecast | None = None) -> None:
        self.time, self.allowed, self.engine = 1000.0, allowed, engine
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._draw = random.Random(0)
        engine.clock = self
        self.runner = Runner(engine, engine=engine, options=RunOptions(clock=self, workers=1, forecast=forecast))
        self.executor = self.runner._executor
        self.executor._wake = lambda: None  # type: ignore[method-assign]
        self.refused, self.longest, self.exits = [0] * callers, [0] * callers, list[int]()
        for caller in range(callers):
            self._at(1e-4 * caller, lambda caller=caller: self._ask(caller))  # type: ignore[misc]

    def now(self) -> float:
        return self.time

    def wait(self, gate: Any, seconds: float | None) -> bool:
        raise AssertionError("nobody waits here")

    def sleep(self, seconds: float) -> None:
        """A stage, which takes up to a tenth longer or shorter; meanwhile callers come and go."""
        self._pass(self.time + seconds * self._draw.uniform(0.9, 1.1))

    def run(self, seconds: float) -> None:
        end, batch, modes, ended = self.time + seconds, None, Modes.now(), list[Any]()
        while self.time < end:
            batch = self.executor._next(batch, ended)
            self.executor._end(ended)
            if batch is not None:
                ended = self.executor._run(batch, modes)
            else:
                self._pass(self._events[0][0])
        self.runner.close()

    def _at(self, after: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.time + after, next(self._number), event))

    def _pass(self, target: float) -> None:
        while self._events and self._events[0][0] <= target:
            self.time, _, event = heapq.heappop(self._events)
            event()
        self.time = max(self.time, target)

    def _ask(self, caller: int) -> None:
        """As `Runner.predict`, without blocking."""
        task = self.runner._task(self.engine.rows[:1], Budget(time=self.allowed))
        task.notify = lambda: self._at(5e-5, lambda: self._take(caller, task, notified=True))
        task.refusals = self.refused[caller]
        self.executor.run(task)
        task.thread = caller + 1  # each is a thread of its own
        self._at(task.seconds_left() or 0.0, lambda: self._take(caller, task, notified=False))

    def _take(self, caller: int, task: Any, *, notified: bool) -> None:
        if task.settled and not notified:
            return  # the caller was notified
        if not task.settled:
            task.notify = None
            task.expire()
        try:
            answer = task.collect(since=task.settled_at if notified else self.time)
        except (DeadlineTooShort, Overloaded):
            self.refused[caller] += 1
            self.longest[caller] = max(self.longest[caller], self.refused[caller])
        else:
            assert answer.elapsed < self.allowed + 1e-4  # a wake-up takes 0.05 ms here
            self.refused[caller] = 0
            self.exits.append(answer.exit)
        self._at(1e-4, lambda: self._ask(caller))


SIMULATED = 3.0
SECONDS = [3.5e-3, 1.5e-3, 1.2e-3, 1.2e-3, 1e-3]
ENGINES = ["FakeEngine", "JoiningEngine"]


def in_time(fakes: Any, logits: Tensor, kind: str, callers: int) -> Simulation:
    simulation = Simulation(getattr(fakes, kind)(logits, SECONDS), callers=callers, allowed=0.02)
    simulation.run(SIMULATED)
    return simulation


@pytest.fixture(scope="module")
def few(fakes: Any, logits: Tensor) -> dict[str, int]:
    """The most answers on time with 1, 2 or 4 callers."""
    return {kind: max(len(in_time(fakes, logits, kind, count).exits) for count in (1, 2, 4)) for kind in ENGINES}


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("callers", [8, 16, 64])
def test_with_many_callers_as_many_are_answered_in_time_as_with_few(
    fakes: Any, logits: Tensor, few: dict[str, int], kind: str, callers: int
) -> None:
    many = in_time(fakes, logits, kind, callers)
    assert len(many.exits) >= 0.9 * few[kind]
    # First exits in turn: as often refused in a row as there are callers for a place, and a few more by chance.
    places = 20 / 3.5
    assert max(many.longest) <= 2 * callers / places + 3


@pytest.mark.parametrize("kind", ENGINES)
def test_a_single_caller_has_all_exits(fakes: Any, logits: Tensor, kind: str) -> None:
    alone = in_time(fakes, logits, kind, 1)
    assert set(alone.exits) == {5}
    assert len(alone.exits) > 0.9 * SIMULATED / sum(SECONDS)


@pytest.mark.parametrize("kind", ENGINES)
def test_durations_measured_under_contention_are_forgotten_within_a_second(fakes: Any, logits: Tensor, kind: str) -> None:
    """All stages looked ten times as slow for a while."""
    forecast = Forecast()
    for stage, seconds in enumerate(SECONDS, 1):
        forecast.seed(stage, 1, [10 * seconds] * 100)
    simulation = Simulation(getattr(fakes, kind)(logits, SECONDS), callers=8, allowed=0.02, forecast=forecast)
    simulation.run(2.0)
    assert max(simulation.longest) <= 1.1 / 0.02
    assert len(simulation.exits) > 150


# Nothing is lost.


def interrupt_at(number: int, work: Callable[[], object]) -> bool:
    """Do it, with an exception where Python would run a signal handler; whether there was such a place.

    Python looks for signals where a function of Python begins and where one of C has returned, and nowhere else in code
    without loops: so are the events of a profiler.
    """
    places, reached = itertools.count(), False
    folder = str(Path(sys.modules[Runner.__module__].__file__ or "").parent)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal reached
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(folder) and next(places) == number:
            reached = True
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    with suppress(KeyboardInterrupt):
        try:
            work()
        finally:
            sys.setprofile(None)
    return reached


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a generator that is being collected
@pytest.mark.parametrize("mode", ["thread", "task", "caller"])
def test_an_exception_at_any_moment_of_a_request_loses_that_request_alone(fakes: Any, logits: Tensor, mode: str) -> None:
    engine = fakes.FakeEngine(logits)
    with Runner(engine, engine=engine, options=RunOptions(workers=1, preempt=mode != "caller")) as runner:

        def ask() -> None:
            (runner.submit(engine.rows, deadline=60).result() if mode == "task" else runner.predict(engine.rows, deadline=60))

        ask()
        assert interrupt_at(0, ask)
        count = 1
        while interrupt_at(count, ask):
            task = runner.submit(engine.rows, deadline=60)
            assert task.result().exit == 5  # every thread is still there, every lock open
            count += 1
        assert count > 50
        assert len(runner._executor._threads) <= 1
        assert runner.load_status == LoadStatus(waiting=0, running=0, workers=1)


@pytest.mark.parametrize("ask", ["predict", "submit"])
def test_an_interrupt_while_the_requests_of_others_are_looked_at_loses_none(
    fakes: Any, logits: Tensor, ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anytime.run.executor.LOOK_AT", 4)
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    held = Held(clock, engine, at=1)
    with Runner(engine, engine=engine, options=RunOptions(clock=clock, workers=1)) as runner:
        first = runner.submit(engine.rows, budget=Budget(exits=1))
        assert held.reached.wait(20)
        executor, place, reached = runner._executor, 0, True
        while reached:
            others = [runner._task(engine.rows, Budget(exits=1)) for _ in range(5)]
            for task in others:
                executor.queue.arrived.append(task)  # as `predict` in other threads
            mine = runner._task(engine.rows, Budget(exits=1, time=1.0))
            clock.time += 2.0
            reached = interrupt_at(place, lambda mine=mine: executor.run(mine) if ask == "predict" else executor.submit(mine))
            kept = {*executor.queue.arrived, *executor.queue.waiting}
            assert all(task in kept for task in others)
            for task in others:
                task.interrupt()
            executor.queue.arrived.clear()
            place += 1
        assert place > 20
        held.go_on.set()
        assert first.result().exit == 1


class GivesUp:
    """A request whose caller gives up waiting for its turn, right after a thread has looked whether there is one."""

    def __init__(self) -> None:
        self.gate, self._looks = threading.Lock(), 0
        self.gate.acquire()

    @property
    def turn(self) -> Any:
        self._looks += 1
        return self.gate if self._looks == 1 else None


def test_a_caller_that_gives_up_waiting_for_its_turn_does_not_end_the_thread(fakes: Any, logits: Tensor) -> None:
    engine, request = fakes.FakeEngine(logits), GivesUp()
    with Runner(engine, engine=engine) as runner:
        runner._executor._end([request])  # type: ignore[list-item]
    assert not request.gate.locked()


@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_forked_while_every_lock_is_held_answers(fakes: Any, logits: Tensor) -> None:
    engine = fakes.FakeEngine(logits)
    with Runner(engine, engine=engine) as runner:
        assert runner.predict(engine.rows, deadline=60).exit == 5
        locks = [runner._forecast._lock, runner._executor._lock, runner._making, type(runner._threads)._changing]
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            for lock in locks:
                lock.acquire()
            held.set()
            go_on.wait(20)
            for lock in locks:
                lock.release()

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(20)
        child = os.fork()
        if child == 0:
            os._exit(_answer_in_child(runner, engine))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        go_on.set()
        thread.join()


def _answer_in_child(runner: Runner, engine: Any) -> int:
    threading.Timer(15, os._exit, (99,)).start()  # it hangs
    try:
        for _ in range(20):
            answer = runner.predict(engine.rows, deadline=10)
        runner.close()
        Runner(engine, engine=engine).close()
    except BaseException:
        return 98
    return int(answer.exit)


@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_task_of_the_other_process_is_settled_in_a_forked_one(fakes: Any, logits: Tensor) -> None:
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    held = Held(clock, engine, at=2)
    with Runner(engine, engine=engine, options=RunOptions(clock=clock, workers=1)) as runner:
        running = runner.submit(engine.rows)
        assert held.reached.wait(20)
        waiting = runner.submit(engine.rows)
        child = os.fork()
        if child == 0:
            threading.Timer(15, os._exit, (99,)).start()
            try:
                waiting.result()
            except StateError:
                os._exit(running.result().exit)
            os._exit(98)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        held.go_on.set()
        assert (running.result().exit, waiting.result().exit) == (5, 5)


def test_expired_requests_are_removed_while_threads_hang(fakes: Any, logits: Tensor) -> None:
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    held = Held(clock, engine, at=1)
    clock.wait = lambda gate, seconds: False  # the deadline comes at once
    with Runner(engine, engine=engine, options=RunOptions(clock=clock, workers=1)) as runner:
        runner.submit(engine.rows)
        assert held.reached.wait(20)
        for _ in range(300):
            with pytest.raises((DeadlineTooShort, Overloaded)):
                runner.predict(engine.rows, deadline=1.0)
            clock.time += 1.0
        assert runner.load_status.waiting <= 65
        gc.collect()
        assert sum(type(thing) is Task for thing in gc.get_objects()) <= 67
        held.go_on.set()


def test_a_full_queue_refuses_with_a_time_to_try_again(fakes: Any, logits: Tensor) -> None:
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    held = Held(clock, engine, at=1)
    with Runner(engine, engine=engine, options=RunOptions(clock=clock, workers=1, queue=3)) as runner:
        tasks = [runner.submit(engine.rows)]
        assert held.reached.wait(20)
        tasks += [runner.submit(engine.rows) for _ in range(3)]
        with pytest.raises(Overloaded) as error:
            runner.submit(engine.rows, deadline=60.0).result()
        assert error.value.retry_after > 0
        with pytest.raises(Overloaded):
            runner.submit(engine.rows).result()  # without a deadline as well
        held.go_on.set()
        assert [task.result().exit for task in tasks] == [5] * 4


# Engines that are built, and modes that are carried along.


@pytest.fixture
def model() -> MLP:
    torch.manual_seed(0)
    return MLP(MLPConfig(classes=5, inputs=8, exits=3)).eval()


@pytest.mark.parametrize("name", ["folded", "auto"])
def test_a_request_with_a_deadline_builds_no_engine(model: MLP, name: str) -> None:
    x = torch.randn(2, 8)
    with Runner(model, engine=name) as runner:
        for ask in (runner.predict, runner.submit, runner.stream):
            with pytest.raises(StateError, match=r"warm_up\(x\)"):
                ask(x, deadline="50ms")
        runner.warm_up(x)
        assert runner.predict(x, deadline=60).exit == 3
        assert runner._forecast.seconds(1, 2) > 0
    with Runner(model, engine=name) as runner:
        assert runner.predict(x).exit == 3  # it has the time
        assert runner.predict(x, deadline=60).exit == 3
    with Runner(model, engine=name, example=x) as runner:
        assert runner.predict(x, deadline=60).exit == 3


def test_a_request_with_a_deadline_does_not_wait_for_an_engine_that_another_builds(model: MLP) -> None:
    with Runner(model, engine="folded") as runner, runner._making, pytest.raises(StateError, match="warm_up"):
        runner.predict(torch.randn(2, 8), deadline="50ms")


class Observed(torch.overrides.TorchFunctionMode):
    """A mode of the caller's thread, as `with torch.device("cuda")` is one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Observing:
    """Notes in which modes its exits run."""

    num_exits = 2

    def __init__(self) -> None:
        self.seen: list[tuple[bool, torch.dtype, int]] = []

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        for _ in range(2):
            kind = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch._C._len_torch_function_stack()
            self.seen.append(kind)
            yield torch.zeros(len(x), 5)


@pytest.mark.parametrize("deadline", [None, 60.0])
def test_autocast_and_other_modes_around_a_request_hold_inside(deadline: float | None) -> None:
    model, x = Observing(), torch.zeros(1, 1)
    usual = torch.get_autocast_dtype("cpu")
    with Runner(model, "latest") as runner:
        with torch.autocast("cpu", dtype=torch.float16), Observed():
            runner.predict(x, deadline=deadline)
        runner.predict(x, deadline=deadline)
    assert model.seen == [(True, torch.float16, 1)] * 2 + [(False, usual, 0)] * 2


class LeftOn:
    """Leaves autocast on between its exits, and says whether it was on before the first one."""

    num_exits = 3

    def __init__(self) -> None:
        self.before: list[bool] = []
        self.inside: list[bool] = []
        self.reached, self.go_on = threading.Event(), threading.Event()

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        self.before.append(torch.is_autocast_enabled("cpu"))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(3):
                if not self.reached.is_set():
                    self.reached.set()
                    assert self.go_on.wait(20)
                self.inside.append(torch.is_autocast_enabled("cpu"))
                yield torch.zeros(len(x), 5)


def test_what_a_model_leaves_on_between_its_exits_stays_with_its_request() -> None:
    model, x = LeftOn(), torch.zeros(1, 1)
    with Runner(model, options=RunOptions(workers=1)) as runner:
        tasks = [runner.submit(x)]
        assert model.reached.wait(20)
        tasks += [runner.submit(x) for _ in range(5)]
        model.go_on.set()
        assert [task.result().exit for task in tasks] == [3] * 6
    assert model.before == [False] * 6
    assert model.inside == [True] * 18

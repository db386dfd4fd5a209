"""Requests of several callers share batches, and each gets exactly its own answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anytime
from anytime.conformal import Raps
from anytime.conformal.sets import fit_conformal_sets
from anytime.errors import NonFiniteError, OptionError, Overloaded, StateError
from anytime.models import MLP, MLPConfig
from anytime.policy import Confidence, Patience
from anytime.run import Budget, Forecast, Runner, RunOptions, StageReport, Task
from anytime.run.engines import make_engine
from anytime.run.export import export
from anytime.run.scheduler import POLICIES, StageBatch

CLASSES, EXITS = 5, 4


class Gate:
    """Holds the stages of a runner until it is opened, so that requests wait together."""

    def __init__(self, runner: Runner) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.reports: list[StageReport] = []
        self._begin = runner.engine.begin
        object.__setattr__(runner._setup, "begin", self._gated(runner._setup.begin))  # type: ignore[union-attr]
        runner.on_stage = self.reports.append

    def _gated(self, begin: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def gated(x: Tensor) -> Any:
            self.reached.set()
            assert self.go_on.wait(20)
            return begin(x)

        return gated

    def submit(self, runner: Runner, inputs: Sequence[Tensor], budgets: Sequence[Budget] = ()) -> list[Task]:
        """Submit a request that is held, then the others, which wait until all of them are there."""
        budgets = budgets or [Budget()] * len(inputs)
        first = runner.submit(inputs[0], budget=Budget(exits=1))
        assert self.reached.wait(20)
        tasks = [runner.submit(x, budget=budget) for x, budget in zip(inputs, budgets, strict=True)]
        self.go_on.set()
        first.result()
        return tasks

    @property
    def largest(self) -> int:
        """The largest number of requests that shared a stage."""
        return max(report.requests for report in self.reports)


@pytest.fixture
def model() -> MLP:
    torch.manual_seed(0)
    return MLP(MLPConfig(classes=CLASSES, inputs=8, exits=EXITS)).eval()


@pytest.fixture
def inputs() -> list[Tensor]:
    """Requests of one to three rows."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(1 + number % 3, 8, generator=draw) for number in range(7)]


def one_by_one(model: Any, inputs: Sequence[Tensor], rule: Any = None) -> list[Tensor]:
    """The log-probabilities of all exits, for each request alone."""
    with torch.no_grad():
        return [(rule or anytime.Product())(model(x)).log_probs for x in inputs]


@pytest.fixture(params=["eager", "folded", "onnxruntime", "exported"])
def runner(request: pytest.FixtureRequest, model: MLP, inputs: list[Tensor], tmp_path: Path) -> Iterator[Runner]:
    if request.param in ("onnxruntime", "exported"):
        pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    options = RunOptions(workers=1)
    if request.param == "exported":
        export(model, tmp_path / "exported", rule=anytime.Product(), example=inputs[2])
        with Runner.load(tmp_path / "exported", options=options) as runner:
            yield runner
    else:
        with Runner(model, anytime.Product(), request.param, example=inputs[2], options=options) as runner:
            yield runner


@pytest.mark.parametrize("schedule", sorted(POLICIES))
def test_requests_in_one_batch_get_their_own_answers(model: MLP, inputs: list[Tensor], schedule: str) -> None:
    with Runner(model, options=RunOptions(workers=1, schedule=schedule)) as runner:
        gate = Gate(runner)
        answers = [task.result(20) for task in gate.submit(runner, inputs)]
    assert gate.largest > 1
    for answer, expected in zip(answers, one_by_one(model, inputs), strict=True):
        assert (answer.exit, answer.reason) == (EXITS, "finished")
        torch.testing.assert_close(answer.log_probs, expected[-1], rtol=1e-5, atol=1e-5)


def test_all_engines_give_each_request_its_own_answer(runner: Runner, model: MLP, inputs: list[Tensor]) -> None:
    gate = Gate(runner)
    budgets = [Budget(exits=1 + number % EXITS) for number in range(len(inputs))]
    tasks = gate.submit(runner, inputs, budgets)
    for task, budget, expected in zip(tasks, budgets, one_by_one(model, inputs), strict=True):
        answer = task.result(20)
        assert answer.exit == budget.exits
        torch.testing.assert_close(answer.log_probs, expected[budget.exits - 1], rtol=1e-4, atol=1e-4)
    assert gate.largest > 1


def test_a_failing_input_fails_only_its_own_request(fakes: Any, logits: Tensor) -> None:
    for fail_at in range(5):
        engine = fakes.JoiningEngine(logits)
        engine.fail_at, engine.broken = fail_at, {3}
        with Runner(engine, engine=engine, options=RunOptions(workers=1)) as runner:
            gate = Gate(runner)
            tasks = gate.submit(runner, [engine.rows[row : row + 1] for row in range(6)])
            for row, task in enumerate(tasks):
                if row == 3:
                    with pytest.raises(ArithmeticError):
                        task.result(20)
                else:
                    answer = task.result(20)
                    assert answer.exit == 5
                    torch.testing.assert_close(answer.log_probs[0], anytime.Product()(logits).log_probs[-1, row])
        assert gate.largest > 1


@pytest.mark.parametrize("policy", [None, Confidence(0.999999), Patience(3)])
@pytest.mark.parametrize("exit", [0, 2])
def test_nan_in_a_batch_fails_only_its_own_request(fakes: Any, logits: Tensor, policy: Any, exit: int) -> None:
    broken = logits.clone()
    broken[exit, 2] = torch.nan
    engine = fakes.JoiningEngine(broken)
    with Runner(engine, "latest", engine, policy=policy, options=RunOptions(workers=1)) as runner:
        gate = Gate(runner)
        tasks = gate.submit(runner, [engine.rows[row : row + 1] for row in (0, 2, 4, 5)])
        for row, task in zip((0, 2, 4, 5), tasks, strict=True):
            if row == 2:
                with pytest.raises(NonFiniteError) as error:
                    task.result(20)
                assert (error.value.exit, error.value.row) == (exit + 1, 0)
            else:
                answer = task.result(20)
                at = int(answer.exit if isinstance(answer.exit, int) else answer.exit[0])
                torch.testing.assert_close(answer.log_probs[0], anytime.Latest()(logits).log_probs[at - 1, row])
                alone = runner.predict(engine.rows[row : row + 1])
                assert torch.as_tensor(alone.exit).equal(torch.as_tensor(answer.exit))
    assert gate.largest > 1


def test_rows_of_other_shapes_and_other_modes_do_not_share_a_batch(model: MLP) -> None:
    class Shapes(torch.nn.Module):
        """A staged model for rows of any length."""

        num_exits, classes = EXITS, CLASSES

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[tuple[int, ...], bool]] = []

        def stage(self, exit: int, carry: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
            self.seen.append((tuple(carry[0].shape), torch.is_autocast_enabled("cpu")))
            return carry, carry[0].sum(1, keepdim=True) * torch.arange(CLASSES)

        def exits(self, x: Tensor) -> Iterator[Tensor]:
            for exit in range(EXITS):
                yield self.stage(exit, (x,))[1]

    given = Shapes().eval()
    with Runner(given, "latest", options=RunOptions(workers=1)) as runner:
        gate = Gate(runner)
        first = runner.submit(torch.zeros(1, 2), budget=Budget(exits=1))
        assert gate.reached.wait(20)
        tasks = [runner.submit(torch.full((1, size), 1.0)) for size in (2, 3, 2, 3)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tasks += [runner.submit(torch.full((1, size), 1.0)) for size in (2, 3)]
        tasks.append(runner.submit(torch.full((1, 2), 1.0, dtype=torch.float64)))
        gate.go_on.set()
        first.result(20)
        for task, size in zip(tasks, (2, 3, 2, 3, 2, 3, 2), strict=True):
            expected = anytime.Latest()((size * torch.arange(CLASSES).float()).expand(EXITS, 1, CLASSES))
            torch.testing.assert_close(task.result(20).log_probs, expected.log_probs[-1], rtol=1e-2, atol=1e-2)
    assert gate.largest == 2  # two of each, and no more
    assert {shape for shape, autocast in given.seen if autocast} == {(1, 2), (1, 3)}


@pytest.mark.parametrize("policy", [Confidence(0.26), Patience(2)])
def test_inputs_stop_early_in_a_batch_as_they_do_alone(model: MLP, inputs: list[Tensor], policy: Any) -> None:
    with Runner(model, "latest", policy=policy, options=RunOptions(workers=1)) as runner:
        alone = [runner.predict(x) for x in inputs]
        gate = Gate(runner)
        answers = [task.result(20) for task in gate.submit(runner, inputs)]
    assert gate.largest > 1
    exits = torch.cat([torch.as_tensor(answer.exit) for answer in answers])
    assert len(exits.unique()) > 1  # not all stop at the same exit
    for one, together in zip(alone, answers, strict=True):
        assert torch.as_tensor(one.exit).equal(torch.as_tensor(together.exit))
        torch.testing.assert_close(together.log_probs, one.log_probs, rtol=1e-5, atol=1e-5)
        assert one.reason == together.reason


@pytest.mark.parametrize("randomised", [False, True])
def test_prediction_sets_in_a_batch_are_those_of_each_request(model: MLP, inputs: list[Tensor], randomised: bool) -> None:
    draw = torch.Generator().manual_seed(2)
    held_out = torch.randn(EXITS, 200, CLASSES, generator=draw)
    raps = Raps(alpha=0.2, randomised=randomised)
    sets = fit_conformal_sets(held_out, held_out[-1].argmax(-1), rule="latest", raps=raps)
    found = []
    for together in (False, True):
        with Runner(model, calibration=sets, options=RunOptions(workers=1), seed=3) as runner:
            gate = Gate(runner)
            if together:
                found.append([task.result(20) for task in gate.submit(runner, inputs)])
                assert gate.largest > 1
            else:
                gate.go_on.set()
                runner.predict(inputs[0], budget=Budget(exits=1))  # draws random numbers, as the held one does
                found.append([runner.predict(x) for x in inputs])
    for alone, answer in zip(*found, strict=True):
        assert answer.prediction_set is not None
        assert answer.prediction_set.equal(alone.prediction_set)


def test_a_confidence_ends_a_request_at_the_first_exit_that_has_it(model: MLP, inputs: list[Tensor]) -> None:
    expected = one_by_one(model, inputs)
    wanted = float(torch.cat([each[1].exp().amax(-1) for each in expected]).median())
    with Runner(model, options=RunOptions(workers=1)) as runner:
        alone = [runner.predict(x, budget=Budget(confidence=wanted)) for x in inputs]
        gate = Gate(runner)
        together = [task.result(20) for task in gate.submit(runner, inputs, [Budget(confidence=wanted)] * len(inputs))]
        least = runner.predict(inputs[0], budget=Budget(confidence=1e-6, min_exits=3))
    assert (least.exit, least.reason) == (3, "confidence")
    for one, other, probs in zip(alone, together, expected, strict=True):
        sure = [exit for exit in range(EXITS) if float(probs[exit].exp().amax(-1).min()) >= wanted]
        first = sure[0] + 1 if sure else EXITS
        assert one.exit == other.exit == first
        assert one.reason == other.reason == ("confidence" if sure else "finished")


def test_fewer_exits_than_the_least_are_no_answer(fakes: Any, logits: Tensor) -> None:
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    forecast = Forecast()
    for stage in range(1, 6):
        forecast.seed(stage, 6, [1.0] * 10)
    with Runner(engine, engine=engine, options=RunOptions(clock=clock, preempt=False, forecast=forecast)) as runner:
        answer = runner.predict(engine.rows, budget=Budget(time=3.5, min_exits=3))
        assert (answer.exit, answer.reason) == (3, "forecast")
        with pytest.raises(anytime.DeadlineTooShort) as error:
            runner.predict(engine.rows, budget=Budget(time=2.5, min_exits=3))
        assert error.value.forecast == 3.0
        assert [answer.exit for answer in runner.stream(engine.rows, budget=Budget(min_exits=3))] == [3, 4, 5]
        task = runner.submit(engine.rows, budget=Budget(until=lambda: len(engine.begun) >= 10, min_exits=5))
        assert task.current() is None or task.current().exit == 5  # type: ignore[union-attr]
        with pytest.raises((StateError, anytime.AnytimeError)):
            runner.predict(engine.rows, budget=Budget(exits=2, min_exits=3))
        with pytest.raises(OptionError):
            runner.predict(engine.rows, budget=Budget(min_exits=6))


# A policy of the user's, and an engine that hangs.


class Raises:
    """A scheduling policy with a mistake; it is asked only if several requests wait."""

    def choose(self, now: float, requests: Sequence[Any], times: Any) -> Any:
        raise ZeroDivisionError("a mistake in the policy")


class Invents(Raises):
    """Chooses a request that does not wait."""

    def choose(self, now: float, requests: Sequence[Any], times: Any) -> Any:
        return StageBatch(1, ["nobody"])


class Mixes(Raises):
    """Chooses requests that cannot share a batch."""

    def choose(self, now: float, requests: Sequence[Any], times: Any) -> Any:
        return StageBatch(1, list(requests))


class Nothing(Raises):
    """Chooses an empty batch."""

    def choose(self, now: float, requests: Sequence[Any], times: Any) -> Any:
        return StageBatch(1, [])


@pytest.mark.parametrize(
    ("policy", "error"),
    [(Raises(), ZeroDivisionError), (Invents(), StateError), (Nothing(), StateError), (Mixes(), StateError)],
)
def test_a_mistake_in_a_scheduling_policy_fails_its_requests_and_nothing_else(
    fakes: Any, logits: Tensor, policy: Any, error: type[Exception]
) -> None:
    engine = fakes.FakeEngine(logits)
    with Runner(engine, engine=engine, options=RunOptions(workers=1, schedule=policy)) as runner:
        gate = Gate(runner)
        for task in gate.submit(runner, [engine.rows] * 3):
            with pytest.raises(error):
                task.result(20)
        assert runner.predict(engine.rows, deadline=60).exit == 5
        assert runner.load_status.waiting == runner.load_status.running == 0


def test_on_stage_reports_what_ran(model: MLP, inputs: list[Tensor]) -> None:
    with Runner(model, options=RunOptions(workers=1)) as runner:
        gate = Gate(runner)
        for task in gate.submit(runner, inputs):
            task.result(20)
        assert sum(report.batch for report in gate.reports if report.stage == EXITS) == sum(map(len, inputs))
        assert sum(report.requests for report in gate.reports if report.stage == EXITS) == len(inputs)
        assert all(report.seconds >= 0 for report in gate.reports)


# Overload.


@pytest.fixture
def busy(fakes: Any, logits: Tensor) -> Iterator[tuple[Runner, Any, threading.Event]]:
    """A runner whose only thread is in a stage that is expected to take a second, and has a first stage waiting."""
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    reached, go_on = threading.Event(), threading.Event()
    clock.sleep = lambda seconds: (reached.set(), go_on.wait(20))
    forecast = Forecast()
    for stage in range(1, 6):
        forecast.seed(stage, 6, [1.0] * 10)
    with Runner(engine, engine=engine, options=RunOptions(clock=clock, workers=1, forecast=forecast)) as runner:
        tasks = [runner.submit(engine.rows, budget=Budget(exits=1))]
        assert reached.wait(20)
        tasks.append(runner.submit(engine.rows, budget=Budget(exits=1, time=3.0)))
        yield runner, engine, go_on
        go_on.set()
        assert [task.result(20).exit for task in tasks] == [1, 1]


def test_a_request_that_does_not_fit_behind_others_is_refused_at_once(busy: tuple[Runner, Any, threading.Event]) -> None:
    runner, engine, _ = busy
    task = runner.submit(engine.rows, deadline=1.5)
    assert task.settled  # the thread is still in its stage
    with pytest.raises(Overloaded) as error:
        task.result()
    assert 0 < error.value.retry_after <= 3.0
    assert isinstance(error.value, TimeoutError)
    with pytest.raises(Overloaded) as error:
        asyncio.run(runner.predict_async(engine.rows, deadline=1.5))
    assert error.value.retry_after > 0
    with pytest.raises(anytime.DeadlineTooShort):  # it would not fit without the others either
        runner.submit(engine.rows, deadline=0.5).result()


def test_the_prior_answers_in_place_of_an_overload(fakes: Any, logits: Tensor) -> None:
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    reached, go_on = threading.Event(), threading.Event()
    clock.sleep = lambda seconds: (reached.set(), go_on.wait(20))
    forecast = Forecast()
    forecast.seed(1, 6, [1.0] * 10)
    options = RunOptions(clock=clock, workers=1, forecast=forecast, on_too_short="prior", prior=[0.25] * 4)
    with Runner(engine, engine=engine, options=options) as runner:
        task = runner.submit(engine.rows, budget=Budget(exits=1))
        assert reached.wait(20)
        answer = runner.submit(engine.rows, deadline=1.5).result()
        assert (answer.exit, answer.reason) == (0, "forecast")
        go_on.set()
        assert task.result(20).exit == 1


def test_a_model_that_hangs_in_one_stage_does_not_block_others() -> None:
    class Hangs:
        num_exits = 2
        go_on = threading.Event()

        def exits(self, x: Tensor) -> Iterator[Tensor]:
            if x[0, 0] < 0:
                assert self.go_on.wait(20)
            for _ in range(2):
                yield torch.zeros(len(x), CLASSES)

    model = Hangs()
    with Runner(model, "latest", options=RunOptions(workers=3)) as runner:
        hung = [runner.submit(torch.tensor([[-1.0]])) for _ in range(2)]
        for _ in range(5):
            assert runner.submit(torch.tensor([[1.0]])).result(20).exit == 2
            assert runner.predict(torch.tensor([[1.0]]), deadline=20).exit == 2
        assert not any(task.settled for task in hung)
        model.go_on.set()
        assert [task.result(20).exit for task in hung] == [2, 2]


# An answer per exit, without blocking the event loop.


def test_an_asynchronous_stream_yields_every_exit_in_order(fakes: Any, logits: Tensor) -> None:
    engine = fakes.JoiningEngine(logits)
    offline = anytime.Product()(logits).log_probs

    async def read(runner: Runner, rows: slice, *, slow: bool) -> list[Any]:
        found = []
        async for answer in runner.stream_async(engine.rows[rows]):
            found.append(answer)
            await asyncio.sleep(0.01 if slow else 0)  # the stages are faster than the reader
        return found

    async def main(runner: Runner) -> list[list[Any]]:
        return await asyncio.gather(*(read(runner, slice(row, row + 1), slow=row % 2 == 0) for row in range(6)))

    with Runner(engine, engine=engine) as runner:
        for row, answers in enumerate(asyncio.run(main(runner))):
            assert [answer.exit for answer in answers] == [1, 2, 3, 4, 5]
            assert [answer.reason for answer in answers] == [None] * 4 + ["finished"]
            for exit, answer in enumerate(answers):
                torch.testing.assert_close(answer.log_probs[0], offline[exit, row])


def test_closing_an_asynchronous_stream_stops_the_work_at_the_next_exit(fakes: Any, logits: Tensor) -> None:
    clock = fakes.FakeClock()
    engine = fakes.FakeEngine(logits, [1.0] * 5, clock)
    reached, go_on = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        if len(engine.begun) == 3:
            reached.set()
            assert go_on.wait(20)

    clock.sleep = sleep

    async def main(runner: Runner) -> list[int]:
        stream = runner.stream_async(engine.rows)
        exits = [(await anext(stream)).exit, (await anext(stream)).exit]
        while not reached.is_set():
            await asyncio.sleep(0.001)
        await stream.aclose()  # type: ignore[attr-defined]
        go_on.set()
        return exits

    with Runner(engine, engine=engine, options=RunOptions(clock=clock)) as runner:
        assert asyncio.run(main(runner)) == [1, 2]
    assert engine.begun == [0, 1, 2]
    assert engine.open == 0


def test_an_asynchronous_stream_has_the_limits_and_errors_of_the_others(fakes: Any, logits: Tensor) -> None:
    engine = fakes.FakeEngine(logits)

    async def read(runner: Runner, **arguments: Any) -> list[int]:
        return [answer.exit async for answer in runner.stream_async(engine.rows, **arguments)]

    with Runner(engine, engine=engine) as runner:
        assert asyncio.run(read(runner, budget=Budget(exits=2))) == [1, 2]
        assert asyncio.run(read(runner, budget=Budget(min_exits=4))) == [4, 5]
        assert asyncio.run(read(runner, deadline=60)) == [1, 2, 3, 4, 5]
        with pytest.raises(anytime.DeadlineTooShort):
            asyncio.run(read(runner, deadline=0))
        engine.fail_at = 2
        with pytest.raises(ArithmeticError):
            asyncio.run(read(runner))


def test_engines_that_are_not_staged_share_no_batch(model: MLP) -> None:
    engine = make_engine(model, "eager")
    assert engine.joins  # type: ignore[attr-defined]

    class Generator:
        num_exits = 2

        def exits(self, x: Tensor) -> Iterator[Tensor]:
            for _ in range(2):
                yield torch.zeros(len(x), CLASSES)

    with Runner(Generator(), "latest", options=RunOptions(workers=1)) as runner:
        gate = Gate(runner)
        for task in gate.submit(runner, [torch.zeros(1, 2)] * 4):
            assert task.result(20).exit == 2
    assert gate.largest == 1


class OneStage:
    """Runs one stage of each request."""

    decides_depth = True

    def choose(self, now: float, requests: Any, times: Any) -> StageBatch[Any]:
        return StageBatch(1, [requests[0]])


def test_the_reason_is_the_forecast_if_a_policy_decides_the_depth(fakes: Any, logits: Tensor) -> None:
    engine = fakes.FakeEngine(logits)
    with Runner(engine, engine=engine, options=RunOptions(schedule=OneStage(), workers=1)) as runner:
        answers = [runner.submit(engine.rows).result(20) for _ in range(2)]
    assert [(answer.exit, answer.reason) for answer in answers] == [(1, "forecast")] * 2


def test_an_until_that_raises_fails_its_own_request_alone() -> None:
    model, x = MLP(MLPConfig(classes=3, exits=3)).eval(), torch.zeros(1, 2)
    with anytime.Runner(model, options=RunOptions(workers=1), example=x) as runner:
        good = [runner.submit(x) for _ in range(20)]
        bad = [runner.submit(x, budget=Budget(time=10.0, until=lambda: 1 / 0)) for _ in range(5)]
        good += [runner.submit(x) for _ in range(20)]
        assert all(task.result().exit == 3 for task in good)
        for task in bad:
            with pytest.raises(ZeroDivisionError):
                task.result()

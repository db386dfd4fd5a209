"""Stages that are queued before they are requested: which, what becomes of them, and what a runner lets an engine queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from anytime.policy import Patience
from anytime.run import Budget, Forecast, Runner, RunOptions, StageReport
from anytime.run.batch import Batch
from anytime.run.engines.base import Ahead
from anytime.run.engines.cuda import CudaGraphsEngine
from anytime.run.engines.folding import difference

ALL = Ahead(stages=9, seconds=1.0, resolution=1.0)
"""Lets an engine queue every stage."""


@pytest.fixture
def engine(make_network: Any, recorder: Any) -> CudaGraphsEngine:
    model, x = make_network("msdnet")
    return CudaGraphsEngine(model, x, sizes=(1, 2), pack=False, recorder=recorder)


def begun(engine: CudaGraphsEngine, x: torch.Tensor, ahead: Ahead) -> Any:
    run = engine.begin(x)
    run.ahead = ahead
    return run


@pytest.mark.parametrize(
    ("ahead", "started"),
    [
        (Ahead(), 1),
        (ALL, 3),
        (ALL._replace(stages=1), 2),
        (ALL._replace(resolution=1.5e-4), 2),  # a stage takes 0.1 ms
        (ALL._replace(seconds=2.5e-4), 2),
        (ALL._replace(seconds=-1.0), 1),  # the requested stage runs in any case
    ],
)
def test_stages_are_queued_within_the_limits(
    make_network: Any, engine: CudaGraphsEngine, recorder: Any, ahead: Ahead, started: int
) -> None:
    model, x = make_network("msdnet")
    recorder.started = 0
    run = begun(engine, x, ahead)
    first = run.advance()
    assert recorder.started == started
    assert run.queued == (started > 1)
    assert difference([first, run.advance(), run.advance()], list(model.exits(x))) < 1e-5
    assert recorder.started == 3  # none of them twice
    assert not run.queued


def test_the_first_stage_does_not_wait_for_those_behind_it(make_network: Any, engine: Any, recorder: Any) -> None:
    _, x = make_network("msdnet")
    recorder.replays = 0
    begun(engine, x, ALL).advance()
    assert recorder.replays == 1


def test_a_run_that_is_evicted_with_queued_stages_goes_on(make_network: Any, engine: Any, recorder: Any) -> None:
    model, x = make_network("msdnet")
    other = torch.randn_like(x)
    run, second = begun(engine, x, ALL), begun(engine, other, ALL)
    wanted, theirs = list(model.exits(x)), list(model.exits(other))
    found = [run.advance()]
    found_by_other = [second.advance()]
    assert not run.queued  # its queued stages have run in vain
    found += [run.advance()]
    found_by_other += [second.advance(), second.advance()]
    found += [run.advance()]
    assert difference(found, wanted) < 1e-5
    assert difference(found_by_other, theirs) < 1e-5


def test_rows_that_are_kept_joined_or_split_forget_queued_stages(make_network: Any, engine: Any) -> None:
    model, x = make_network("msdnet")
    wanted = list(model.exits(x))
    run = begun(engine, x, ALL)
    run.advance()
    run.keep(torch.tensor([1]))
    assert difference([run.advance(), run.advance()], [each[[1]] for each in wanted[1:]]) < 1e-5

    runs = [begun(engine, x[[row]], ALL) for row in (0, 1)]
    for one in runs:
        one.advance()
    joint = runs[0].join(runs[1:])
    joint.ahead = ALL
    assert difference([joint.advance()], wanted[1:2]) < 1e-5
    parts = joint.split([1, 1])
    assert difference([part.advance() for part in parts], [wanted[2][[0]], wanted[2][[1]]]) < 1e-5


def test_a_closed_run_with_queued_stages_does_not_disturb_the_next(make_network: Any, engine: Any) -> None:
    model, x = make_network("msdnet")
    other = torch.randn_like(x)
    run = begun(engine, x, ALL)
    run.advance()
    run.close()
    after = begun(engine, other, ALL)
    assert difference([after.advance() for _ in range(3)], list(model.exits(other))) < 1e-5


def test_threads_take_turns_with_queued_stages(make_network: Any, engine: Any) -> None:
    model, _ = make_network("msdnet")
    wrong: list[float] = []

    def work(seed: int) -> None:
        for number in range(20):
            batch = torch.randn(1 + number % 2, 3, 32, 32, generator=torch.Generator().manual_seed(100 * seed + number))
            run = begun(engine, batch, ALL)
            share = difference([run.advance() for _ in range(3)], list(model.exits(batch)))
            if share > 1e-4:
                wrong.append(share)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


Make = Callable[..., Runner]


def measured() -> Forecast:
    """A forecast that knows all stages."""
    forecast = Forecast()
    for stage in (1, 2, 3):
        for batch in (1, 2):
            forecast.seed(stage, batch, [1e-4] * 3)
    return forecast


@pytest.fixture
def make_runner(engine: CudaGraphsEngine) -> Iterator[Make]:
    runners: list[Runner] = []

    def make(**options: Any) -> Runner:
        arguments = {name: options.pop(name) for name in ("policy",) if name in options}
        options.setdefault("forecast", measured())
        runners.append(Runner(engine, "latest", engine, options=RunOptions(**options), **arguments))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def test_requests_queue_all_their_stages(make_network: Any, make_runner: Make, recorder: Any) -> None:
    model, x = make_network("msdnet")
    runner = make_runner()
    for budget in (Budget(), Budget(time=20.0)):
        recorder.started, seen = 0, []
        runner.on_stage = lambda _, seen=seen: seen.append(recorder.started)  # type: ignore[misc]
        answer = runner.predict(x, budget=budget)
        assert seen == [3, 3, 3]
        assert answer.exit == 3
        assert torch.allclose(answer.log_probs, list(model.exits(x))[-1].log_softmax(-1), atol=1e-4)


@pytest.mark.parametrize("budget", [Budget(exits=2), Budget(exits=2, time=20.0), Budget(macs=2.0)])
def test_nothing_after_the_last_requested_exit_is_queued(
    make_network: Any, engine: CudaGraphsEngine, recorder: Any, budget: Budget
) -> None:
    _, x = make_network("msdnet")
    with Runner(engine, "latest", engine, macs=(1, 2, 3), options=RunOptions(forecast=measured())) as runner:
        recorder.started = 0
        assert runner.predict(x, budget=budget).exit == 2
    assert recorder.started == 2


def test_without_resolution_each_stage_starts_when_it_is_requested(make_network: Any, make_runner: Make, recorder: Any) -> None:
    _, x = make_network("msdnet")
    runner, seen = make_runner(resolution=0), []
    recorder.started = 0
    runner.on_stage = lambda _: seen.append(recorder.started)
    runner.predict(x)
    assert seen == [1, 2, 3]


def test_nothing_is_queued_where_whether_to_go_on_is_decided_after_each_stage(
    make_network: Any, make_runner: Make, recorder: Any
) -> None:
    _, x = make_network("msdnet")
    recorder.started = 0
    next(iter(make_runner().stream(x)))
    assert recorder.started == 1
    make_runner(policy=Patience(1)).predict(x[:1])
    stages = recorder.started - 1
    recorder.started = 0
    answer = make_runner(policy=Patience(1)).predict(x[:1])
    assert recorder.started == stages == answer.last_exit
    recorder.started = 0
    assert make_runner().predict(x, budget=Budget(confidence=1e-6)).exit == 1
    assert recorder.started == 1


def test_an_interrupt_costs_what_was_queued_at_most(make_network: Any, make_runner: Make, recorder: Any) -> None:
    _, x = make_network("msdnet")
    runner, stop = make_runner(resolution="150us"), threading.Event()
    recorder.started = 0
    runner.on_stage = lambda _: stop.set()
    answer = runner.predict(x, budget=Budget(until=stop))
    assert (answer.exit, answer.reason) == (1, "interrupted")
    assert recorder.started == 2  # the running stage, and one of 0.1 ms behind it


@pytest.mark.parametrize(("waiting", "requests"), [(1, 1), (0, 2)])
def test_nothing_is_queued_while_others_wait(
    make_network: Any, make_runner: Make, recorder: Any, waiting: int, requests: int
) -> None:
    _, x = make_network("msdnet")
    runner = make_runner()
    tasks = [runner._task(x[:1], Budget()) for _ in range(requests)]
    batch = Batch(tasks, runner._ready(None), 0.0)
    recorder.started = 0
    batch.step(waiting=waiting)
    batch.step(waiting=waiting)
    assert recorder.started == 2
    for task in tasks:
        task.finish()


def test_a_scheduling_policy_that_decides_the_depth_limits_what_is_queued(
    make_network: Any, make_runner: Make, recorder: Any
) -> None:
    _, x = make_network("msdnet")
    runner = make_runner()
    task = runner._task(x, Budget())
    recorder.started = 0
    Batch([task], runner._ready(None), 0.0, stages=2, final=True).step(waiting=0)
    assert recorder.started == 2
    task.finish()


def test_the_forecast_learns_from_stages_that_start_when_they_are_requested(
    make_network: Any, make_runner: Make, recorder: Any
) -> None:
    _, x = make_network("msdnet")
    forecast = Forecast()
    runner, started, reports = make_runner(forecast=forecast), [], list[StageReport]()

    def note(report: StageReport) -> None:
        started.append(recorder.started)
        reports.append(report)

    runner.on_stage = note
    for _ in range(5):
        recorder.started = 0
        runner.predict(x)
    assert started == [*3 * [1, 2, 3], *2 * [3, 3, 3]]
    assert [len(forecast._stages[stage][2]) for stage in (1, 2, 3)] == [5, 3, 3]
    first, second, third = reports[-3:]
    assert (second.began, third.began) == pytest.approx((first.began + first.seconds, second.began + second.seconds))


@pytest.mark.parametrize("preempt", [True, False])
def test_a_queued_stage_that_hangs_makes_no_answer_late(
    make_network: Any, make_runner: Make, recorder: Any, preempt: bool
) -> None:
    _, x = make_network("msdnet")
    runner = make_runner(preempt=preempt)
    runner.predict(x)
    hung, goes_on = threading.Event(), threading.Event()

    def hang(report: StageReport) -> None:
        recorder.stuck = True
        hung.set()
        if preempt:
            goes_on.wait(20)  # as a thread does that waits for the next stage

    runner.on_stage = hang
    answer = runner.predict(x, deadline="2s")  # enough for the first stage on a busy machine
    goes_on.set()
    assert (answer.exit, answer.reason) == (1, "deadline")
    assert hung.is_set()
    recorder.stuck = False


def test_a_thread_does_not_wait_for_a_queued_stage_to_choose_what_is_next(
    make_network: Any, make_runner: Make, recorder: Any
) -> None:
    _, x = make_network("msdnet")
    runner = make_runner(preempt=False)
    setup = runner._ready(None)
    task = runner._task(x, Budget(time=1e6), mode="caller")
    Batch([task], setup, 0.0).step(waiting=0)
    assert task.run.queued
    recorder.stuck, task.turn = True, threading.Lock()
    assert task.fits(setup.clock.now())  # by the forecast, at once
    recorder.stuck, task.turn = False, None
    task.finish()


def test_the_time_of_a_queued_stage_does_not_include_a_wait_in_the_queue(make_network: Any, make_runner: Make) -> None:
    _, x = make_network("msdnet")
    runner = make_runner()
    setup = runner._ready(None)
    task = runner._task(x, Budget())
    Batch([task], setup, 0.0).step(waiting=0)
    assert task.run.queued
    picked = task.ended + 5.0
    later = Batch([task], setup, picked)
    later.step(waiting=1)
    assert later.began == picked
    task.finish()


def test_queued_stages_that_have_ended_are_taken_in_the_caller_s_own_thread(
    make_network: Any, make_runner: Make, recorder: Any
) -> None:
    model, x = make_network("msdnet")
    answer = make_runner(preempt=False).predict(x, deadline=20.0)
    assert (answer.exit, answer.reason) == (3, "finished")
    assert torch.allclose(answer.log_probs, list(model.exits(x))[-1].log_softmax(-1), atol=1e-4)

"""The runner's logic, on a clock that moves only when a stage says so."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import anytime
from anytime.combine import Cached, Rule, Scaled
from anytime.errors import AnytimeError, DeadlineTooShort, NonFiniteError, OptionError, ShapeError, StateError
from anytime.models import MLP, IntervalMLP, MLPConfig
from anytime.run import Answer, Budget, Forecast, Runner, RunOptions, Task, profile_model
from anytime.run.engines import make_engine

Make = Callable[..., tuple[Runner, Any, Any]]
OPTIONS = {field.name for field in dataclasses.fields(RunOptions)}


def make_runner(model: Any, **arguments: Any) -> Runner:
    """A runner for an engine; what is an option goes into its options."""
    options = RunOptions(**{name: arguments.pop(name) for name in OPTIONS & arguments.keys()})
    return Runner(model, **{"engine": model, **arguments}, options=options)


@pytest.fixture
def make(fakes: Any, logits: Tensor) -> Any:
    """A runner over a fake engine, its clock and its engine; closed afterwards."""
    made: list[tuple[Runner, Any]] = []

    def _make(*seconds: float, waited: bool = True, **options: Any) -> tuple[Runner, Any, Any]:
        clock = fakes.FakeClock(waited=waited)
        engine = fakes.FakeEngine(logits, seconds, clock if seconds else None)
        runner = make_runner(engine, clock=clock, **options)
        made.append((runner, clock))
        return runner, engine, clock

    yield _make
    for runner, clock in made:
        clock.resume()
        runner.close()


def seeded(*seconds: float, batch: int = 6) -> Forecast:
    forecast = Forecast()
    for stage, value in enumerate(seconds, 1):
        forecast.seed(stage, batch, [value] * 100)
    return forecast


RULES = [
    anytime.Product(),
    anytime.Product(weights="ones"),
    anytime.Product(weights=(0.0, 1.0, 0.0, 2.0, 1.0)),
    anytime.Product(weights=(0.0,) * 5),
    anytime.Product(activation=anytime.combine.Heaviside(1.0), shift="1/K"),
    anytime.Product(activation=anytime.combine.AdaptiveReLU(1.0, (0.5, -0.5), 0.0)),
    anytime.Latest(),
    anytime.Caching(),
    anytime.Mixture(),
    Cached(anytime.Product()),
    Scaled(anytime.Product(), temperatures=(1.0, 2.0, 3.0, 4.0, 5.0)),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("exits", [1, 2, 5])
def test_an_answer_is_the_rules_value_at_its_exit(make: Make, logits: Tensor, rule: Rule[Any], exits: int) -> None:
    runner, engine, _ = make(rule=rule)
    answer = runner.predict(engine.rows, budget=Budget(exits=exits))
    offline = rule(logits)
    torch.testing.assert_close(answer.log_probs, offline.log_probs[exits - 1])
    assert answer.fell_back.equal(offline.fell_back[exits - 1])
    assert answer.labels.equal(answer.probs.argmax(-1))
    torch.testing.assert_close(answer.confidence, answer.probs.amax(-1))
    assert (answer.exit, answer.exits, answer.reason) == (exits, 5, "exits" if exits < 5 else "finished")
    assert answer.deadline_met is None
    assert engine.begun == list(range(exits))
    assert engine.open == 0


def test_a_rule_may_be_named(make: Make) -> None:
    assert make(rule="caching")[0].rule == anytime.Caching()
    assert make()[0].rule == anytime.Product()


def test_a_stage_that_is_not_expected_to_finish_is_not_started(make: Make) -> None:
    runner, engine, _ = make(1.0, 1.0, 1.0, 1.0, 1.0, forecast=seeded(1.0, 1.0, 1.0, 1.0, 1.0))
    answer = runner.predict(engine.rows, deadline=3.5)
    assert (answer.exit, answer.reason, answer.deadline_met, answer.elapsed) == (3, "forecast", True, 3.0)
    assert engine.begun == [0, 1, 2]


def test_a_slow_forecast_stops_earlier_than_the_clock_would(make: Make) -> None:
    runner, engine, _ = make(1.0, 1.0, 1.0, 1.0, 1.0, forecast=seeded(1.0, 1.0, 5.0))
    answer = runner.predict(engine.rows, deadline=5.5)
    assert (answer.exit, answer.reason) == (2, "forecast")


def test_the_answer_is_there_at_the_deadline_while_a_stage_runs_which_ends_by_itself(make: Make, logits: Tensor) -> None:
    runner, engine, clock = make(1.0, 1.0, 9.0, 1.0, 1.0)
    answer = runner.predict(engine.rows, deadline=3.0)
    assert (answer.exit, answer.reason, answer.deadline_met, answer.elapsed) == (2, "deadline", True, 3.0)
    torch.testing.assert_close(answer.log_probs, anytime.Product()(logits).log_probs[1])
    assert engine.begun == [0, 1, 2]
    clock.resume()
    runner.close()
    assert engine.begun == [0, 1, 2]  # nothing was begun after it
    assert engine.open == 0


def test_a_slow_stage_is_known_from_then_on(make: Make) -> None:
    runner, engine, clock = make(1.0, 1.0, 9.0, 1.0, 1.0)
    runner.predict(engine.rows, deadline=3.0)
    clock.resume()
    while engine.open:  # the stage that was given up comes to its end in its own thread
        threading.Event().wait(0.001)
    begun = len(engine.begun)
    answer = runner.predict(engine.rows, deadline=5.0)
    assert (answer.exit, answer.reason) == (2, "forecast")
    assert engine.begun[begun:] == [0, 1]


def test_a_too_short_deadline_is_refused_at_once_with_the_forecast(make: Make) -> None:
    runner, engine, _ = make(2.0, 1.0, 1.0, 1.0, 1.0, forecast=seeded(2.0))
    with pytest.raises(DeadlineTooShort, match="2e\\+03 ms") as error:
        runner.predict(engine.rows, deadline=1.5)
    assert isinstance(error.value, TimeoutError)
    assert isinstance(error.value, anytime.AnytimeError)
    assert (error.value.forecast, error.value.budget) == (2.0, 1.5)
    assert "fix:" in str(error.value)
    assert engine.begun == []


def test_a_first_stage_that_overruns_is_too_short_as_well(make: Make) -> None:
    runner, engine, _ = make(2.0, 1.0, 1.0, 1.0, 1.0)
    with pytest.raises(DeadlineTooShort) as error:
        runner.predict(engine.rows, deadline=1.5)
    assert error.value.forecast >= 1.5
    assert engine.begun == [0]


@pytest.mark.parametrize("known", [True, False])
def test_the_prior_is_returned_on_request(make: Make, known: bool) -> None:
    prior = torch.tensor([0.1, 0.2, 0.3, 0.4])
    options: dict[str, Any] = {"forecast": seeded(2.0)} if known else {}
    runner, engine, _ = make(2.0, 1.0, 1.0, 1.0, 1.0, on_too_short="prior", prior=prior, **options)
    answer = runner.predict(engine.rows, deadline=1.5)
    torch.testing.assert_close(answer.probs, prior.expand(6, 4))
    assert (answer.exit, answer.reason, answer.deadline_met) == (0, "forecast" if known else "deadline", True)


def test_a_runner_that_refuses_finds_out_that_the_load_has_gone(make: Make) -> None:
    runner, engine, _ = make(1.0, 1.0, 1.0, 1.0, 1.0, forecast=seeded(9.0, 9.0, 9.0, 9.0, 9.0))
    exits = []
    for _ in range(120):
        try:
            exits.append(runner.predict(engine.rows, deadline=6.0).exit)
        except DeadlineTooShort:
            exits.append(0)
    assert exits[:100] == [0] * 99 + [1]  # no time passes between refusals: one in a hundred is tried
    assert exits[-1] == 5  # later stages are tried once a second of nothing but refusals has passed
    assert 0 not in exits[100:]


def test_waking_up_late_moves_the_next_waits_forward(make: Make) -> None:
    runner, engine, clock = make(1.0, 1.0, 1.0, 1.0, 1.0)
    for _ in range(2):
        runner._forecast.note_dispatch("thread", 0.25)
    runner.predict(engine.rows, deadline=6.0)
    assert clock.waits[-1] == 5.75


def test_without_preemption_stages_run_in_the_callers_thread(make: Make) -> None:
    runner, engine, _ = make(1.0, 1.0, 9.0, 1.0, 1.0, waited=False, preempt=False)
    answer = runner.predict(engine.rows, deadline=3.0)
    assert (answer.exit, answer.reason, answer.deadline_met, answer.elapsed) == (3, "deadline", False, 11.0)
    answer = runner.predict(engine.rows, deadline=3.0)  # now the third stage is known to be slow
    assert (answer.exit, answer.reason, answer.deadline_met) == (2, "forecast", True)
    with pytest.raises(DeadlineTooShort):
        runner.predict(engine.rows, deadline=0.5)
    assert not runner._executor._threads


def test_within_the_grace_period_an_answer_is_on_time_and_slow_stages_are_started(make: Make) -> None:
    runner, engine, _ = make(1.0, 1.0, 1.5, 1.0, 1.0, waited=False, preempt=False, grace="500ms")
    for _ in range(2):  # the second time it is known how long the third stage takes
        runner._forecast.note(3, len(engine.rows), 0.9)
        answer = runner.predict(engine.rows, deadline=3.0)
        assert (answer.exit, answer.deadline_met, answer.elapsed) == (3, True, 3.5)
    assert runner.predict(engine.rows, deadline=2.85).exit == 2


def test_zero_is_always_too_short(make: Make) -> None:
    runner, engine, _ = make(1.0, 1.0, 1.0, 1.0, 1.0, waited=False)
    with pytest.raises(DeadlineTooShort, match="was not reached by then"):
        runner.predict(engine.rows, deadline=0)


def test_a_process_that_was_suspended_has_no_time_left(make: Make) -> None:
    runner, engine, clock = make(1.0, 1.0, 1.0, 1.0, 1.0, waited=False)
    advance, held = clock.sleep, []

    def sleep(seconds: float) -> None:
        if len(engine.begun) == 2:
            clock.time += 3600.0  # stopped for an hour within the second stage
            held.append(True)
        advance(seconds)

    clock.sleep = sleep
    answer = runner.predict(engine.rows, deadline=10.0)
    assert held
    assert answer.reason == "deadline"
    assert answer.exit in (1, 2)
    assert all(wait is not None and 0 <= wait <= 10.0 for wait in clock.waits)


def test_a_clock_that_jumps_back_gives_no_endless_wait(make: Make) -> None:
    runner, engine, clock = make(waited=False)
    real, jumps = clock.now, iter([1000.0] + [0.0] * 50)
    clock.now = lambda: next(jumps, real())
    answer = runner.predict(engine.rows, deadline=5.0)
    assert answer.elapsed >= 0
    assert all(wait is not None and 0 <= wait <= 5.0 for wait in clock.waits)


def test_macs_are_a_budget_for_one_input(make: Make) -> None:
    runner, engine, _ = make(macs=(1e6, 2e6, 4e6, 5e6, 6e6))
    answer = runner.predict(engine.rows, budget=Budget(macs=4.5e6))
    assert (answer.exit, answer.reason, answer.macs) == (3, "macs", 4e6)
    assert runner.predict(engine.rows, budget=Budget(macs=4.5e6, exits=2)).reason == "exits"
    assert runner.predict(engine.rows, budget=Budget(macs=1e9)).reason == "finished"
    with pytest.raises(OptionError, match="first exit"):
        runner.predict(engine.rows, budget=Budget(macs=10))


def test_a_budget_in_macs_needs_known_macs(make: Make) -> None:
    runner, engine, _ = make()
    assert runner.predict(engine.rows).macs is None
    with pytest.raises(OptionError, match="macs="):
        runner.predict(engine.rows, budget=Budget(macs=1e6))


@pytest.mark.parametrize("as_function", [True, False])
@pytest.mark.parametrize("deadline", [None, 100.0])
def test_an_event_stops_after_the_running_stage(make: Make, as_function: bool, deadline: float | None) -> None:
    runner, engine, clock = make(1.0, 1.0, 1.0, 1.0, 1.0, waited=deadline is not None)
    event, advance = threading.Event(), clock.sleep

    def sleep(seconds: float) -> None:
        if len(engine.begun) == 3:
            event.set()
        advance(seconds)

    clock.sleep = sleep
    until = event.is_set if as_function else event
    answer = runner.predict(engine.rows, budget=Budget(until=until), deadline=deadline)
    assert (answer.exit, answer.reason) == (3, "interrupted")
    assert engine.begun == [0, 1, 2]


def test_an_event_that_has_happened_leaves_nothing_to_answer(make: Make) -> None:
    runner, engine, _ = make()
    with pytest.raises(StateError, match="interrupted"):
        runner.predict(engine.rows, budget=Budget(until=lambda: True))
    assert engine.begun == []


def test_a_task_has_its_best_answer_at_any_moment(make: Make, logits: Tensor) -> None:
    runner, engine, clock = make(1.0, 1.0, 1.0, 1.0, 1.0, waited=False)
    reached, go_on = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        if len(engine.begun) == 3:
            reached.set()
            assert go_on.wait(20)

    clock.sleep = sleep
    task = runner.submit(engine.rows)
    assert isinstance(task, Task)
    assert reached.wait(20)
    now = task.current()
    assert now is not None
    assert (now.exit, now.reason) == (2, None)
    torch.testing.assert_close(now.log_probs, anytime.Product()(logits).log_probs[1])
    with pytest.raises(TimeoutError):
        task.result(timeout=0)
    task.interrupt()
    answer = task.result()  # at once: the third stage is still running
    assert (answer.exit, answer.reason) == (2, "interrupted")
    go_on.set()
    runner.close()
    assert engine.begun == [0, 1, 2]
    assert task.result().exit == 2  # what was settled stays


def test_an_interrupt_before_the_first_exit_waits_for_the_running_stage(make: Make) -> None:
    runner, engine, clock = make(1.0, 1.0, 1.0, 1.0, 1.0, waited=False)
    reached, go_on = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        reached.set()
        assert go_on.wait(20)

    clock.sleep = sleep
    task = runner.submit(engine.rows)
    assert reached.wait(20)
    assert task.current() is None
    task.interrupt()
    go_on.set()
    assert (task.result().exit, task.result().reason) == (1, "interrupted")
    assert engine.begun == [0]


def test_a_submitted_task_keeps_its_deadline(make: Make) -> None:
    runner, engine, _ = make(1.0, 1.0, 9.0, 1.0, 1.0)
    task = runner.submit(engine.rows, deadline=3.0)
    answer = task.result()
    assert (answer.exit, answer.reason, answer.elapsed) == (2, "deadline", 3.0)


def test_a_submitted_task_may_be_too_short(make: Make) -> None:
    runner, engine, _ = make(2.0, 1.0, 1.0, 1.0, 1.0, forecast=seeded(2.0))
    task = runner.submit(engine.rows, deadline=1.0)
    assert task.current() is None
    with pytest.raises(DeadlineTooShort):
        task.result()
    assert engine.begun == []


def test_ctrl_c_leaves_no_stage_behind_the_running_one(make: Make) -> None:
    runner, engine, clock = make(1.0, 1.0, 1.0, 1.0, 1.0, waited=False)
    reached, go_on = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        if len(engine.begun) == 2:
            reached.set()
            assert go_on.wait(20)

    def wait(gate: Any, seconds: float | None) -> bool:
        assert reached.wait(20)
        raise KeyboardInterrupt

    clock.sleep, clock.wait = sleep, wait
    with pytest.raises(KeyboardInterrupt):
        runner.predict(engine.rows, deadline=100.0)
    go_on.set()
    runner.close()
    assert engine.begun == [0, 1]
    assert engine.open == 0


def test_ctrl_c_in_the_callers_own_thread_comes_out(make: Make) -> None:
    runner, engine, clock = make(1.0, 1.0, 1.0, 1.0, 1.0)

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    clock.sleep = sleep
    with pytest.raises(KeyboardInterrupt):
        runner.predict(engine.rows)
    assert engine.open == 0


@pytest.mark.parametrize("deadline", [None, 100.0])
def test_a_failing_stage_fails_the_request_and_no_other(make: Make, deadline: float | None) -> None:
    runner, engine, _ = make(1.0, 1.0, 1.0, 1.0, 1.0, waited=deadline is not None)
    engine.fail_at = 2
    with pytest.raises(ArithmeticError, match="a stage that fails"):
        runner.predict(engine.rows, deadline=deadline)
    assert engine.open == 0
    engine.fail_at = None
    assert runner.predict(engine.rows, deadline=deadline).exit == 5


def test_errors_of_a_stage_that_was_given_up_are_ignored(make: Make) -> None:
    runner, engine, clock = make(1.0, 9.0, 1.0, 1.0, 1.0)
    engine.fail_at = 1
    task = runner.submit(engine.rows, deadline=3.0)
    assert task.result().exit == 1
    clock.resume()
    runner.close()
    assert task.result().exit == 1


def test_nan_is_named(make: Make, fakes: Any, logits: Tensor) -> None:
    broken = logits.clone()
    broken[2, 3, 1] = torch.nan
    engine = fakes.FakeEngine(broken)
    with Runner(engine, engine=engine) as runner, pytest.raises(NonFiniteError) as error:
        runner.predict(engine.rows)
    assert (error.value.exit, error.value.row) == (3, 3)


def test_a_stream_yields_one_answer_per_exit_and_computes_no_more(make: Make, logits: Tensor) -> None:
    runner, engine, _ = make(1.0, 1.0, 1.0, 1.0, 1.0, waited=False)
    offline = anytime.Product()(logits).log_probs
    stream = runner.stream(engine.rows)
    for exit, answer in enumerate(stream):
        assert engine.begun == list(range(exit + 1))
        assert answer.exit == exit + 1
        torch.testing.assert_close(answer.log_probs, offline[exit])
        assert answer.reason is None
        if exit == 2:
            break
    del stream
    gc.collect()
    assert engine.begun == [0, 1, 2]
    assert engine.open == 0


def test_a_stream_ends_where_the_budget_does(make: Make) -> None:
    runner, engine, _ = make(1.0, 1.0, 1.0, 1.0, 1.0, waited=False, forecast=seeded(1.0, 1.0, 1.0, 1.0, 1.0))
    assert [answer.reason for answer in runner.stream(engine.rows)] == [None, None, None, None, "finished"]
    assert [answer.reason for answer in runner.stream(engine.rows, budget=Budget(exits=2))] == [None, "exits"]
    assert [answer.exit for answer in runner.stream(engine.rows, deadline=2.5)] == [1, 2]
    with pytest.raises(DeadlineTooShort):
        next(iter(runner.stream(engine.rows, deadline=0.5)))
    assert engine.open == 0


def test_a_stream_that_is_never_begun_computes_nothing(make: Make) -> None:
    runner, engine, _ = make()
    runner.stream(engine.rows)
    assert engine.begun == []


def test_answers_are_ordinary_tensors_without_gradients(make: Make) -> None:
    runner, engine, _ = make(waited=False)
    for answer in (runner.predict(engine.rows), runner.predict(engine.rows, deadline=60), *runner.stream(engine.rows)):
        assert not answer.log_probs.is_inference()
        assert not answer.log_probs.requires_grad
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_one_input_has_a_label(make: Make) -> None:
    runner, engine, _ = make()
    assert runner.predict(engine.rows[:1]).label == int(runner.predict(engine.rows).labels[0])
    with pytest.raises(ShapeError, match="labels"):
        _ = runner.predict(engine.rows).label
    with pytest.raises(StateError, match="interval"):
        _ = runner.predict(engine.rows).lower


@pytest.mark.parametrize("x", [torch.zeros(0, 1), torch.tensor(1.0), "image.png"])
def test_inputs_without_a_batch_are_refused(make: Make, x: Any) -> None:
    with pytest.raises(anytime.AnytimeError):
        make()[0].predict(x)


def test_a_closed_runner_refuses(make: Make) -> None:
    runner, engine, _ = make()
    runner.close()
    runner.close()
    for ask in (runner.predict, runner.submit, runner.stream):
        with pytest.raises(StateError, match="closed"):
            ask(engine.rows)


def test_closing_interrupts_what_runs_and_what_waits(make: Make) -> None:
    runner, engine, clock = make(1.0, 1.0, 1.0, 1.0, 1.0, waited=False, workers=1)
    reached, go_on = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        if len(engine.begun) == 2:
            reached.set()
            assert go_on.wait(20)

    clock.sleep = sleep
    running = runner.submit(engine.rows)
    assert reached.wait(20)
    waiting = runner.submit(engine.rows)
    closer = threading.Thread(target=runner.close)
    closer.start()
    assert (running.result().exit, running.result().reason) == (1, "interrupted")
    go_on.set()
    closer.join()
    with pytest.raises(StateError, match="interrupted"):
        waiting.result()
    assert engine.begun == [0, 1]


def test_requests_beyond_the_number_of_threads_wait(make: Make) -> None:
    runner, engine, _ = make(waited=False, workers=2)
    tasks = [runner.submit(engine.rows) for _ in range(20)]
    assert all(task.result().exit == 5 for task in tasks)
    assert len(runner._executor._threads) <= 2


def test_one_request_after_the_other_needs_one_thread(make: Make) -> None:
    runner, engine, _ = make(waited=False)
    for _ in range(50):
        runner.predict(engine.rows, deadline=60)
    assert len(runner._executor._threads) == 1


def test_a_stage_that_was_given_up_does_not_hold_up_the_next_request(make: Make) -> None:
    runner, engine, clock = make(1.0, 9.0, 1.0, 1.0, 1.0)
    assert runner.predict(engine.rows, deadline=3.0).exit == 1
    assert runner.predict(engine.rows, budget=Budget(exits=1), deadline=3.0).exit == 1  # the other thread is still at work
    assert engine.open == 1
    clock.resume()


def test_a_runner_that_was_not_closed_ends_its_threads(fakes: Any, logits: Tensor) -> None:
    engine = fakes.FakeEngine(logits)
    runner = Runner(engine, engine=engine)
    runner.predict(engine.rows, deadline=60)
    gone = weakref.ref(runner)
    del runner
    gc.collect()
    assert gone() is None


def test_a_task_keeps_its_runner(fakes: Any, logits: Tensor) -> None:
    engine = fakes.FakeEngine(logits)
    assert Runner(engine, engine=engine).submit(engine.rows).result().exit == 5


def test_deadline_met_does_not_depend_on_when_the_answer_is_fetched(make: Make) -> None:
    runner, engine, clock = make(1.0, 1.0, 1.0, 1.0, 1.0, waited=False)
    task = runner.submit(engine.rows, deadline=6.0)
    while not task.settled:
        threading.Event().wait(0.001)
    clock.time += 100
    for answer in (task.result(), task.current(), task.result()):
        assert answer is not None
        assert (answer.elapsed, answer.deadline_met) == (5.0, True)


def test_a_task_that_waits_for_a_thread_is_interrupted_at_once_and_not_kept(make: Make) -> None:
    runner, engine, clock = make(1.0, waited=False, workers=1)
    reached, go_on = threading.Event(), threading.Event()
    clock.sleep = lambda _: (reached.set(), go_on.wait(20))
    running = runner.submit(engine.rows)
    assert reached.wait(20)
    for _ in range(300):
        waiting = runner.submit(engine.rows)
        waiting.interrupt()
        with pytest.raises(StateError, match="interrupted"):
            waiting.result(20)
    assert runner.load_status.waiting == 0
    running.interrupt()
    go_on.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_begins_threads_of_its_own(fakes: Any, logits: Tensor) -> None:
    engine = fakes.FakeEngine(logits)
    with Runner(engine, engine=engine) as runner:
        runner.predict(engine.rows, deadline=60)
        child = os.fork()
        if child == 0:
            os._exit(runner.predict(engine.rows, deadline=10).exit)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def test_a_stage_that_hangs_does_not_keep_the_interpreter_from_ending() -> None:
    program = """
import time, torch
from anytime.run import Runner
class Hangs:
    num_exits = 2
    def exits(self, x):
        yield torch.zeros(len(x), 5)
        time.sleep(600)
print(Runner(Hangs()).predict(torch.zeros(1, 1), deadline=0.2).exit)
runner = Runner(Hangs())
print(runner.predict(torch.zeros(1, 1), deadline=0.2).exit)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == ["1", "1"]


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_of_overlapping_runners_restores_torchs_thread_count(fakes: Any, logits: Tensor, first: int) -> None:
    engine = fakes.FakeEngine(logits)
    torch.set_num_threads(2)
    try:
        runners = [Runner(engine, engine=engine) for _ in range(2)]
        runners[first].close()
        assert torch.get_num_threads() == 1
        runners[1 - first].close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_profile_of_another_model_is_refused() -> None:
    one, other = (MLP(MLPConfig(classes=classes)).eval() for classes in (5, 7))
    profile = profile_model(make_engine(one, "eager"), torch.zeros(1, 2), repeats=2)
    with pytest.raises(ShapeError, match="7 classes"):
        Runner(other, profile=profile)


def test_a_regression_needs_no_rule() -> None:
    with Runner(IntervalMLP(exits=3).eval()) as runner:
        assert runner.predict(torch.zeros(2, 1)).lower.shape == (2,)


def test_torchs_thread_count_is_set_and_restored(fakes: Any, logits: Tensor) -> None:
    engine = fakes.FakeEngine(logits)
    torch.set_num_threads(2)
    try:
        with Runner(engine, engine=engine):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with Runner(engine, engine=engine, options=RunOptions(threads=None)):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    "options",
    [
        {"rule": anytime.Product},
        {"rule": "prodct"},
        {"rule": anytime.Product(weights=(1.0, 2.0))},
        {"calibration": 3},
        {"policy": 0.9},
        {"on_too_short": "shrug"},
        {"on_too_short": "prior"},
        {"on_too_short": "prior", "prior": [0.5, 0.6]},
        {"on_too_short": "prior", "rule": anytime.Intersection(), "prior": [1.0]},
        {"grace": -1.0},
        {"preempt": "no"},
        {"schedule": "fifo"},
        {"schedule": 3},
        {"largest_batch": 0},
        {"queue": 0},
        {"threads": 0},
        {"workers": 0},
        {"engine": 3},
        {"profile": 3},
        {"forecast": 3},
        {"macs": (1.0, 2.0)},
        {"macs": (5.0, 4.0, 3.0, 2.0, 1.0)},
    ],
)
def test_invalid_arguments_are_refused(fakes: Any, logits: Tensor, options: dict[str, Any]) -> None:
    engine = fakes.FakeEngine(logits)
    with pytest.raises(anytime.AnytimeError):
        make_runner(engine, **options)


def test_a_model_without_exits_is_refused() -> None:
    with pytest.raises(OptionError, match="attach"):
        Runner(torch.nn.Linear(2, 2))
    with pytest.raises(OptionError, match="attach"):
        Runner(SimpleNamespace(num_exits=3))


@pytest.mark.parametrize("name", ["eager", "folded", "auto"])
@pytest.mark.parametrize("at_once", [True, False])
def test_engines_go_by_name_and_are_made_from_an_example_or_the_first_inputs(name: str, at_once: bool) -> None:
    torch.manual_seed(0)
    model, x = MLP(MLPConfig(classes=5, inputs=8, exits=3)).eval(), torch.randn(2, 8)
    with torch.no_grad():
        offline = anytime.Product()(model(x)).log_probs[-1]
    with Runner(model, engine=name, example=x if at_once else None) as runner:
        answer = runner.predict(x)
        assert isinstance(answer, Answer)
        assert name in (runner.engine.name, "auto")
    torch.testing.assert_close(answer.log_probs, offline, rtol=1e-4, atol=1e-4)


def test_an_unknown_engine_is_refused_at_once() -> None:
    with pytest.raises(OptionError, match="eager"):
        Runner(MLP(MLPConfig(classes=4)), engine="steam")


@pytest.mark.parametrize("preempt", [True, False], ids=["in a thread", "in its caller"])
def test_slow_dispatches_under_an_overload_refuse_nothing_after_it(make: Make, preempt: bool) -> None:
    forecast = seeded(1.0, 1.0, 1.0, 1.0, 1.0)
    for _ in range(100):
        forecast.note_dispatch("thread" if preempt else "caller", 12.0)
    runner, engine, clock = make(1.0, 1.0, 1.0, 1.0, 1.0, waited=False, forecast=forecast, preempt=preempt)
    clock.sleep = lambda seconds: setattr(clock, "time", clock.time + seconds)
    exits = [runner.predict(engine.rows, deadline=9.0).exit for _ in range(300)]
    assert min(exits) >= 1
    assert exits[-1] == 5


@pytest.mark.parametrize(("preempt", "exits"), [(True, 2), (False, 1)])
def test_only_a_caller_that_cannot_abandon_a_stage_needs_time_for_a_slow_one(make: Make, preempt: bool, exits: int) -> None:
    forecast = seeded(1.0)
    forecast.seed(2, 6, [1.0] * 90 + [5.0] * 10)
    runner, engine, _ = make(1.0, 1.0, 9.0, 1.0, 1.0, waited=preempt, forecast=forecast, preempt=preempt)
    answer = runner.predict(engine.rows, budget=Budget(exits=2), deadline=4.0)
    assert (answer.exit, answer.reason) == (exits, "exits" if exits == 2 else "forecast")


def test_the_repr_shows_the_engine_and_why_a_rule_is_not_run_as_graphs() -> None:
    pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    model, x = MLP(MLPConfig(classes=5, exits=2)).eval(), torch.zeros(1, 2)
    with Runner(model, anytime.Product(), "onnxruntime") as runner:
        assert repr(runner).endswith("engine='onnxruntime': not built yet)")
        runner.warm_up(x)
        assert "rule evaluated by ONNX Runtime graphs, exits=2, engine='onnxruntime' (requested)" in repr(runner)
    with Runner(model, anytime.Mixture(), "onnxruntime", example=x) as runner:
        assert "rule evaluated by torch: Mixture(" in repr(runner)
        assert "logaddexp" in repr(runner)


def test_threads_and_seeds_out_of_range_are_refused() -> None:
    with pytest.raises(OptionError, match="threads"):
        RunOptions(threads=10**6)
    for seed in (-1, "a"):
        with pytest.raises(AnytimeError, match="seed"):
            Runner(MLP(MLPConfig(classes=4, exits=3)), seed=seed)

"""Answers by a deadline from any model with exits, for one caller or many.

With a time budget the stages run in the runner's threads, and the caller waits for them or for its deadline, whichever comes
first. Without one they run in the caller's own thread, which is the fastest. Requests of many callers share batches and take
turns, stage by stage: see `anytime.run.scheduler` for the order and `anytime.run.executor` for the threads.

It is over 400 lines because it is the public class: a third of it is documentation.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch

from anytime.checks import Inputs, check_inputs, check_seed, count_rows, repeat_rows
from anytime.combine import Intersection, Rule
from anytime.combine.advice import warn_of_few_classes
from anytime.errors import OptionError, StateError
from anytime.models import IntervalMLP
from anytime.models.attach.exits import Head
from anytime.models.input_spec import make_inputs
from anytime.models.stored.networks import Build
from anytime.policy import FittedPolicy, Policy
from anytime.run.answer import Answer
from anytime.run.arguments import (
    check_dense,
    check_policy,
    check_profile,
    count_classes,
    count_exits,
    make_combiner,
    make_macs,
    make_prior,
    measure_macs,
    rule_inside,
)
from anytime.run.batch import StageReport
from anytime.run.budget import Budget, Duration, make_budget
from anytime.run.combining import ByRule, choose_rule
from anytime.run.engines import Engine, make_engine
from anytime.run.engines.choose import run_all
from anytime.run.event_loops import mailbox
from anytime.run.executor import Executor, LoadStatus
from anytime.run.export.loading import ExportedModel
from anytime.run.forks import renew_in_children
from anytime.run.options import RunOptions
from anytime.run.saved.reading import open_folder
from anytime.run.setup import RunSetup, limit_exits
from anytime.run.task import Mode, Task, overloaded
from anytime.run.timing.forecast import Forecast
from anytime.run.timing.profile import Profile
from anytime.run.timing.slots import count_slots, measure_slots, most_slots
from anytime.run.torch_threads import TorchThreads

_WARM_UP = 3
"""Runs of all exits that initialise the forecast."""
_PATIENCE = 2.0
"""Seconds to wait for running stages if close was not called: one that hangs must not keep the interpreter from ending."""


class Runner:
    """Runs a model with exits within budgets. Close it, or use it in a `with` statement, to end its threads.

    A runner that is pickled, copied or passed to a process that is spawned opens again there: with the same model, rule and
    arguments, the stage times so far, an engine of its own and no requests.

    While it is open, torch's thread count is 1 for the whole process; see `RunOptions.threads`. The model's training mode is
    never changed: stages run in eval mode. Threads are started by the first request with a time budget. Any number of threads
    and asyncio tasks may use one runner.

    Args:
        model: A model with `num_exits` and `exits(x)`, or an engine.
        rule: A rule, its text, or `Intersection()` for a regression. None is the rule of the calibration, or else the product;
            with fewer than five classes caching, as the paper recommends.
        engine: `eager`, `folded`, `onnxruntime`, `cuda-graphs`, `auto` for the fastest, or an engine.
        calibration: Fitted temperatures, a fitted rule or `ConformalSets`, or a tuple of these.
        policy: Lets inputs stop early; see `anytime.policy`.
        profile: Initial stage times: a `Profile` or its file. Without one the first requests are measured.
        macs: MACs per input up to each exit; by default the profile's, or measured for a budget in MACs.
        example: Inputs to build the engine with at once. Without it an engine that needs some is built by `warm_up`, or by the
            first request without a time budget.
        probabilities: Whether the exits yield probabilities or log-probabilities. Otherwise these are refused: rules that read
            the sign and size of a logit, such as the ReLU product, collapse on them.
        seed: The seed of randomised prediction sets.
        class_dim: For a model of pixels or tokens, the dimension of the classes in the logits of an exit: 1 for
            `(batch, classes, height, width)`. The eager engine runs it, without policy or prediction sets.
        options: Scheduling: threads, batches, what to do if a deadline is too short.

    Attributes:
        on_stage: Called with a `StageReport` after each stage, in the thread that ran it. It must be fast and not raise.

    Example:
        >>> from anytime.models import MLP, MLPConfig
        >>> with Runner(MLP(MLPConfig(classes=5, exits=3))) as runner:
        ...     answer = runner.predict(torch.zeros(1, 2), budget=Budget(exits=2))
        >>> answer.exit, answer.exits, answer.reason
        (2, 3, 'exits')
    """

    def __init__(
        self,
        model: Any,
        rule: Rule[Any] | Intersection | str | None = None,
        engine: str | Engine = "eager",
        *,
        calibration: Any = None,
        policy: Policy | FittedPolicy | None = None,
        profile: Profile | str | Path | None = None,
        macs: Sequence[float] | None = None,
        example: Inputs | None = None,
        probabilities: bool = False,
        seed: int = 0,
        class_dim: int | None = None,
        options: RunOptions | None = None,
    ) -> None:
        if not isinstance(options, RunOptions | None):
            raise OptionError(f"options is {options!r}", expected="an anytime.RunOptions", fix="pass RunOptions(...)")
        self._options = options = options or RunOptions()
        self._arguments = {"rule": rule, "engine": engine, "calibration": calibration, "policy": policy, "macs": macs}
        self._arguments |= {"probabilities": probabilities, "seed": seed, "class_dim": class_dim}
        if isinstance(model, ExportedModel):
            rule, engine = rule_inside(model, rule, calibration), cast(Engine, model)
            macs = model.macs if macs is None else macs
        self._model, self._exits = model, count_exits(model, engine)
        if rule is None and calibration is None and isinstance(model, IntervalMLP):
            rule = Intersection()
        own = count_classes(model)
        self._rule, self._sets = choose_rule(rule, calibration, own, policy)
        self._policy = check_policy(policy, self._rule)
        self._class_dim = check_dense(
            class_dim, engine, rule=self._rule, policy=policy, sets=self._sets, on_too_short=options.on_too_short
        )
        self._rule.start(self._exits)  # refuses a number of exits that it was not fitted for
        self._profile = check_profile(profile)
        for fitted in (self._sets, self._profile, self._policy if isinstance(self._policy, FittedPolicy) else None):
            if fitted is not None:
                fitted.check_fits(self._exits, own or fitted.classes or 1)
        classes = own or count_classes(None, self._sets, self._profile)
        self._prior = make_prior(options.on_too_short, options.prior, self._rule, classes)
        if classes is not None and calibration is None:  # a rule that was fitted or tuned was chosen by data
            warn_of_few_classes(self._rule, classes)
        self._macs = make_macs(macs, self._profile, self._exits)
        self._forecast = options.forecast or Forecast()
        self._clock = options.clock
        self._generator, self._seed = torch.Generator().manual_seed(check_seed(seed)), seed
        self._engine, self._probabilities = engine, probabilities
        self._example: Inputs | None = None
        self._setup: RunSetup | None = None
        self._making = threading.Lock()
        self._executor = Executor(
            options.workers,
            self._clock,
            options.policy,
            largest_batch=options.largest_batch,
            queue=options.queue,
            nice=options.nice,
        )
        self._threads = TorchThreads(options.threads)
        # Ends the threads if close is not called, and at the end of the interpreter.
        self._finalizer = weakref.finalize(self, _end, self._executor, self._threads, patience=_PATIENCE)
        renew_in_children(self)
        if example is not None or not isinstance(engine, str) or engine == "eager":
            self._ready(example)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        build: Build | Sequence[Build] | None = None,
        head: Head | None = None,
        trusted: bool = False,
        options: RunOptions | None = None,
        **arguments: Any,
    ) -> Self:
        """A runner for any folder that this library wrote, with the rule, calibration, policy and profile saved in it.

        Args:
            folder: A folder of `anytime.save`, `anytime train` or `anytime export`, or a published run. Exported stages have
                their rule inside.
            build: For a model of your own, the function that makes it; see `anytime.load`.
            head: The function that made the heads, if one was passed to `attach_exits`.
            trusted: Whether to read `.pt2` files, which can run any code while they are read; ONNX files need no trust.
            options: Scheduling.
            arguments: Further arguments of the class, which replace what was saved. With another rule, what was fitted for the
                saved one is left out.
        """
        threads = (options or RunOptions()).threads or torch.get_num_threads()
        opened = open_folder(folder, build=build, head=head, threads=threads, trusted=trusted)
        arguments = opened.runner_arguments(**arguments)
        if arguments.get("engine", "eager") != "eager" and opened.inputs:
            arguments.setdefault("example", make_inputs(opened.inputs, 1))
        return cls(opened.model, options=options, **arguments)

    def predict(self, x: Any, *, deadline: Duration | None = None, budget: Budget | None = None) -> Answer:
        """The best answer within a budget.

        Args:
            x: A tensor, or a tuple or dict of tensors as the model takes them, with the batch first; the deadline applies to
                the whole batch.
            deadline: A duration from now on: `"5ms"`, a timedelta, or seconds. The answer is returned by then even if a stage
                is running, whose result is then dropped.
            budget: Further limits.
        """
        limits = make_budget(budget, deadline)
        in_caller = limits.time is None or not self._options.preempt
        task = self._task(x, limits, mode="caller" if in_caller else "thread")
        caller = self._executor.caller
        task.refusals = caller.refusals
        try:
            if in_caller:
                for _ in self._executor.stages_here(task):
                    pass
                answer = task.collect(since=task.settled_at)
            else:
                self._executor.run(task)
                answer = task.result_in_time()
        except BaseException as error:  # such as Ctrl-C: no thread may start another stage
            caller.refusals += isinstance(error, TimeoutError)
            if not task.settled:
                task.interrupt()
            raise
        caller.refusals = 0
        return answer

    def stream(self, x: Any, *, deadline: Duration | None = None, budget: Budget | None = None) -> Iterator[Answer]:
        """Yield an answer after each exit; stop iterating and nothing more is computed.

        The stages run in the caller's thread, or in the runner's if other requests wait. A stage that is not expected to end
        before the deadline is not started, but a running one is not preempted. Arguments are those of `predict`.
        """
        task = self._task(x, make_budget(budget, deadline), mode="stream")
        return self._answers(task)

    def _answers(self, task: Task) -> Iterator[Answer]:
        for exit in self._executor.stages_here(task):
            if exit >= task.least:
                yield task.answer(exit, task.reason)
        if task.exit < task.least or task.failed:
            yield task.collect()

    def submit(self, x: Any, *, deadline: Duration | None = None, budget: Budget | None = None) -> Task:
        """Start in a thread of the runner; the task always has the best answer so far. Arguments as for `predict`."""
        task = self._task(x, make_budget(budget, deadline))
        try:
            self._executor.submit(task)
        except BaseException:
            task.interrupt()
            raise
        return task

    async def predict_async(
        self, x: Any, *, deadline: Duration | None = None, budget: Budget | None = None, arrived: float | None = None
    ) -> Answer:
        """As `predict`, without blocking the event loop; cancelling it interrupts the request.

        A request that does not fit behind those admitted before is refused at once, with `Overloaded`.

        Args:
            x: As for `predict`, as the next two.
            deadline: The same.
            budget: The same.
            arrived: When the request arrived, by `time.perf_counter`: its time counts from then on. Now by default.
        """
        limits = make_budget(budget, deadline)
        self.check_load(limits)
        task = self._task(x, limits, mode="asyncio", arrived=arrived)
        timer: asyncio.TimerHandle | None = None
        try:
            self._executor.submit(task)
            if task.settled:  # refused
                return task.collect()
            loop, left = asyncio.get_running_loop(), task.seconds_left()
            ready: asyncio.Future[None] = loop.create_future()
            wake = partial(_set, ready)
            task.notify = partial(mailbox(loop).post, wake)
            if task.settled:  # before it had whom to notify
                wake()
            elif left is not None:
                timer = loop.call_later(left, wake)
            wake_up = self._clock.now() + (left or 0.0)
            await ready
            if task.settled:
                return task.collect(since=task.settled_at)
            task.expire()
            return task.collect(since=wake_up)
        except BaseException:
            if not task.settled:
                task.interrupt()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def stream_async(
        self, x: Any, *, deadline: Duration | None = None, budget: Budget | None = None, arrived: float | None = None
    ) -> AsyncIterator[Answer]:
        """Yield an answer after each exit, without blocking the event loop; closing it stops the work at the next exit.

        Exits that are reached before the reader asks for them are yielded one by one all the same. Arguments are those of
        `predict_async`.
        """
        news = asyncio.Event()
        task = self._task(x, make_budget(budget, deadline), mode="asyncio", arrived=arrived)
        task.notify = task.on_exit = partial(mailbox(asyncio.get_running_loop()).post, news.set)
        given = task.least - 1
        try:
            self._executor.submit(task)
            while True:
                news.clear()
                ready, ends, settled = task.exit, task.reason is not None, task.settled
                # The last answer is held until the request is settled, which is at once: it has the reason.
                while given < (task.used if settled else ready - ends):
                    given += 1
                    yield task.answer(given, task.reason if settled and given == task.used else None)
                if settled:
                    break
                try:
                    await asyncio.wait_for(news.wait(), task.seconds_left())
                except TimeoutError:
                    task.expire()
            if given < task.least or task.failed:
                yield task.collect()
        finally:
            task.interrupt()

    def check_load(self, budget: Budget, rows: int = 1) -> None:
        """Raise `Overloaded` if a request like this one was refused a moment ago, and nothing has ended since.

        A server can refuse a request by it before its inputs are decoded. It costs a microsecond.
        """
        retry = self._executor.queue.retry_after(budget, rows, self._clock.now())
        if retry > 0:
            raise overloaded(budget, retry)

    def warm_up(self, x: Any) -> None:
        """Build the engine from typical inputs, and run all exits a few times to measure stage times for this batch size.

        If requests can share batches, one input is measured in batches up to `RunOptions.largest_batch` as well; if stages run
        many operations from Python, so is how many of them are best run at once. A request with a time budget never builds an
        engine, since that can take seconds.
        """
        inputs = check_inputs(x)
        setup = self._setup or self._ready(inputs)
        if getattr(setup.engine, "in_python", True):
            most = most_slots(setup.engine, self._options.workers, self._threads.wanted)
            self._executor.queue.slots = measure_slots(lambda: run_all(setup.engine, inputs), most)
        rows = count_rows(inputs)
        sizes = [rows]
        while setup.joins and rows == 1 and 2 * sizes[-1] <= self._options.largest_batch:
            sizes.append(2 * sizes[-1])
        for size in sizes:
            batch = repeat_rows(inputs, size)
            run_all(setup.engine, batch)  # the first run is slow, and is not measured
            for _ in range(_WARM_UP):
                self.predict(batch)

    def close(self) -> None:
        """End the threads, busy ones after their current stage, and restore torch's thread count."""
        if self._finalizer.alive:
            _end(self._executor, self._threads)
            self._finalizer.detach()  # last, so that an interrupted close can be repeated

    @property
    def engine(self) -> Engine:
        """The engine in use."""
        return self._ready(None).engine

    @property
    def rule(self) -> Rule[Any] | Intersection:
        """The rule in use, with its calibration."""
        return self._rule

    @property
    def policy(self) -> Policy | FittedPolicy | None:
        """What lets inputs stop early, if anything does."""
        return self._policy

    @property
    def load_status(self) -> LoadStatus:
        """How many requests wait and run."""
        return self._executor.load

    @property
    def on_stage(self) -> Callable[[StageReport], None] | None:
        """Called after each stage."""
        return self._executor.on_stage

    @on_stage.setter
    def on_stage(self, function: Callable[[StageReport], None] | None) -> None:
        self._executor.on_stage = function

    def __repr__(self) -> str:
        if self._setup is None:
            return f"Runner(rule={self._rule!r}, exits={self._exits}, engine={self._engine!r}: not built yet)"
        engine, combiner = self._setup.engine, self._setup.combiner
        why = f" ({engine.why})" if hasattr(engine, "why") else ""
        by = f", rule evaluated by {combiner.why}" if isinstance(combiner, ByRule) else ""
        return f"Runner(rule={self._rule!r}{by}, exits={self._exits}, engine={engine.name!r}{why})"

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: the model and the arguments, from which the copy makes its own engine and threads."""
        if not isinstance(self._engine, str | ExportedModel):
            raise StateError(
                f"a runner with an engine object, a {type(self._engine).__name__}, cannot be pickled or copied",
                expected="an engine by name, which the copy makes for itself",
                fix="pass engine='auto' or another name, or make the Runner in the other process",
            )
        options = replace(self._options, forecast=self._forecast)
        more = {"profile": self._profile, "example": self._example, "options": options}
        return _reopen, (type(self), self._model, {**self._arguments, **more})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _task(
        self,
        x: Any,
        budget: Budget,
        *,
        mode: Mode = "thread",
        arrived: float | None = None,
    ) -> Task:
        began = self._clock.now() if arrived is None else arrived
        if not self._finalizer.alive:
            raise StateError("the runner is closed", expected="an open runner", fix="make a new Runner")
        inputs = check_inputs(x)
        if self._setup is None and budget.time is not None:
            raise StateError(
                f"a request with a time budget, but the engine {self._engine!r} is not built yet",
                expected="an engine built beforehand, which can take seconds",
                fix="call runner.warm_up(x) first, or make the Runner with example=x",
            )
        if budget.confidence is not None and (self._policy is not None or isinstance(self._rule, Intersection)):
            what = "a policy, which decides itself when an input stops" if self._policy is not None else "a regression"
            raise OptionError(
                f"a budget with confidence={budget.confidence:g}, and the runner has {what}",
                expected="a confidence only for a classifier without a policy",
                fix="omit confidence, or make a Runner without the policy",
            )
        if budget.macs is not None and self._macs is None:
            self._macs = measure_macs(self._model, inputs)
        return Task(
            self._setup or self._ready(inputs),
            inputs,
            budget,
            executor=self._executor,
            began=began,
            last=limit_exits(budget, self._exits, self._macs),
            macs=self._macs,
            mode=mode,
            owner=self,
        )

    def _ready(self, example: Inputs | None) -> RunSetup:
        """What all requests share; made by the first of them if the engine needs inputs."""
        with self._making:
            if self._setup is None:
                self._setup = self._executor.queue.setup = self._make_setup(example)
            return self._setup

    def _make_setup(self, example: Inputs | None) -> RunSetup:
        engine, threads, self._example = self._engine, self._threads.wanted, example
        if isinstance(engine, str):
            # A policy, dense logits and probabilities need the rule's own step.
            own = self._policy is None and self._class_dim is None and not self._probabilities
            rule = self._rule if own and isinstance(self._rule, Rule) else None
            engine = make_engine(self._model, engine, example=example, threads=threads, rule=rule)
        if self._profile is not None:
            self._profile.check_engine(engine.name)
            self._profile.seed(self._forecast)
        self._executor.queue.slots = count_slots(engine, self._options.workers, threads)
        policy = self._policy.policy if isinstance(self._policy, FittedPolicy) else self._policy
        begin, combiner = make_combiner(self._rule, engine, self._probabilities, self._class_dim)
        return RunSetup(
            engine,
            begin,
            combiner,
            self._forecast,
            self._clock,
            policy,
            self._sets,
            self._generator,
            self._prior,
            cast(float, self._options.grace),
            cast(float, self._options.resolution),
        )

    def renew(self) -> None:
        """Make a new lock and generator, in a forked process: another thread may have used them."""
        self._making = threading.Lock()
        self._generator = torch.Generator().manual_seed(self._seed)
        if self._setup is not None:
            self._setup = self._executor.queue.setup = replace(self._setup, generator=self._generator)


def _reopen(kind: type[Runner], model: Any, arguments: dict[str, Any]) -> Runner:
    return kind(model, **arguments)


def _end(executor: Executor, threads: TorchThreads, *, patience: float | None = None) -> None:
    try:
        executor.close(patience=patience)
    finally:
        threads.restore()


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)

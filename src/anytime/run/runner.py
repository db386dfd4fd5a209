"""Answers by a deadline from any model with exits.

With a time budget the stages run in the runner's threads, and the caller waits for them or for its deadline, whichever comes
first. Without one they run in the caller's own thread, which is the fastest. If there are more requests than the machine can
run at once, they take turns, stage by stage.

This file is over 400 lines until the scheduler takes over the parts that decide when a stage runs.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, cast

import torch
from torch import Tensor

from anytime.checks import check_choice, check_costs, check_count
from anytime.combine import Intersection, Rule, parse_rule
from anytime.combine.advice import warn_of_few_classes
from anytime.errors import OptionError, StateError
from anytime.models import IntervalMLP, MultiExit, measure_cost
from anytime.models.base import ExitModel
from anytime.policy import FittedPolicy, Policy
from anytime.run.answer import Answer
from anytime.run.budget import Budget, Duration, make_budget, seconds
from anytime.run.combining import AsGiven, ByIntersection, ByRule, Combiner, choose_rule
from anytime.run.engines import ENGINES, Engine, make_engine
from anytime.run.engines.choose import run_all
from anytime.run.engines.onnx import OnnxRuntimeEngine
from anytime.run.engines.running import check_inputs
from anytime.run.executor import Executor
from anytime.run.export.loading import ExportedModel, load_exported
from anytime.run.export.rule_graph import ByGraph, by_graph
from anytime.run.forks import renew_in_children
from anytime.run.task import RunSetup, Task, limit_exits
from anytime.run.timing.clock import Clock, MonotonicClock
from anytime.run.timing.forecast import Forecast
from anytime.run.timing.pace import Pace
from anytime.run.timing.profile import Profile, count_cores

_WARM_UP = 3
"""Runs of all exits that initialise the forecast."""
_PATIENCE = 2.0
"""Seconds to wait for running stages if close was not called: one that hangs must not keep the interpreter from ending."""


class Runner:
    """Runs a model with exits within budgets. Close it, or use it in a `with` statement, to end its threads.

    While it is open, torch's thread count is set to `threads` (1) for the whole process; `threads=None` leaves it unchanged.
    The model's training mode is never changed: stages run in eval mode.

    Threads are started by the first request with a time budget. A stage that is still running when its request has been
    answered runs to its end in its thread; the next request takes another thread. Any number of threads may use one runner:
    see `anytime.run.executor` for the scheduling.

    Args:
        model: A model with `num_exits` and `exits(x)`, or an engine.
        rule: A rule, its text, or `Intersection()` for a regression. None is the rule of the calibration, or else the product;
            with fewer than five classes caching, as the paper recommends.
        engine: `eager`, `folded`, `onnxruntime`, `cuda-graphs`, `auto` for the fastest, or an engine.
        calibration: Fitted temperatures, a fitted rule or `ConformalSets`, or a tuple of these.
        policy: Lets inputs stop early; see `anytime.policy`.
        profile: Initial stage times: a `Profile` or its file. Without one the first requests are measured.
        on_too_short: What to do if not even the first exit fits: `raise` a `DeadlineTooShort`, or return the `prior`.
        prior: The class probabilities before anything is computed; uniform by default.
        preempt: Whether a deadline ends a request while a stage is running. If not, stages run in the caller's own thread: on
            a busy core this avoids most delays, but a stage that takes far longer than expected makes its answer late.
        grace: How long after its deadline an answer is not yet late. With a grace period, typical times are aimed at the
            deadline and only slow ones use the grace period; without one, slow times are aimed at the deadline as well.
        threads: Threads per stage, set by `torch.set_num_threads` for the whole process and restored by `close`. Two have a far
            worse latency tail than one on a busy machine.
        workers: How many threads may run stages, including those whose stages were given up. No more stages run at once than
            there are cores for, with `threads` each, and one on a GPU.
        macs: MACs per input up to each exit; by default the profile's, or measured for a budget in MACs.
        example: Inputs to build the engine with at once. Without it an engine that needs some is built by `warm_up`, or by the
            first request without a time budget.
        forecast: Forecasts the stage times.
        probabilities: Whether the exits yield probabilities or log-probabilities. Otherwise these are refused: rules that read
            the sign and size of a logit, such as the ReLU product, collapse on them.
        seed: The seed of randomised prediction sets.
        clock: The clock.

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
        on_too_short: Literal["raise", "prior"] = "raise",
        prior: Any = None,
        preempt: bool = True,
        grace: Duration = 0.0,
        threads: int | None = 1,
        workers: int = 4,
        macs: Sequence[float] | None = None,
        example: Tensor | None = None,
        forecast: Forecast | None = None,
        probabilities: bool = False,
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        if threads is not None:
            check_count(threads, "threads")
        check_count(workers, "workers")
        if isinstance(model, ExportedModel):
            rule, engine = _rule_inside(model, rule, calibration), cast(Engine, model)
            macs = model.macs if macs is None else macs
        self._model, self._exits = model, _count_exits(model, engine)
        if rule is None and calibration is None and isinstance(model, IntervalMLP):
            rule = Intersection()
        own = _count_classes(model)
        self._rule, self._sets = choose_rule(rule, calibration, own)
        self._policy = _check_policy(policy, self._rule)
        self._rule.start(self._exits)  # refuses a number of exits that it was not fitted for
        known = _check_profile(profile)
        for fitted in (self._sets, known, self._policy if isinstance(self._policy, FittedPolicy) else None):
            if fitted is not None:
                fitted.check_fits(self._exits, own or fitted.classes or 1)
        classes = own or _count_classes(None, self._sets, known)
        self._prior = _make_prior(on_too_short, prior, self._rule, classes)
        if classes is not None and calibration is None:  # a rule that was fitted or tuned was chosen by data
            warn_of_few_classes(self._rule, classes)
        self._macs = _make_macs(macs, known, self._exits)
        self._forecast = Forecast() if forecast is None else _check_forecast(forecast)
        self._clock = clock or MonotonicClock()
        self._generator, self._seed = torch.Generator().manual_seed(seed), seed
        self._profile, self._engine, self._probabilities = known, engine, probabilities
        self._setup: RunSetup | None = None
        self._making = threading.Lock()
        self._preempt, self._grace = preempt, seconds(grace)
        self._executor, self._workers = Executor(workers, self._clock), workers
        self._threads = _Threads(threads)
        # Ends the threads if close is not called, and at the end of the interpreter.
        self._finalizer = weakref.finalize(self, _end, self._executor, self._threads, patience=_PATIENCE)
        renew_in_children(self)
        if example is not None or not isinstance(engine, str) or engine == "eager":
            self._ready(example)

    @classmethod
    def load(cls, folder: str | Path, *, threads: int = 1, trusted: bool = False, **options: Any) -> Self:
        """A runner for exported stages, see `anytime.run.export`; the rule is inside them.

        Args:
            folder: The folder with `exported.json`.
            threads: Threads per stage.
            trusted: Whether to read `.pt2` files, which can run any code while they are read; ONNX files need no trust.
            options: Further arguments of the class.
        """
        return cls(load_exported(folder, threads=threads, trusted=trusted), threads=threads, **options)

    def predict(self, x: Any, *, deadline: Duration | None = None, budget: Budget | None = None) -> Answer:
        """The best answer within a budget.

        Args:
            x: Inputs with the batch first; the deadline applies to the whole batch.
            deadline: A duration from now on: `"5ms"`, a timedelta, or seconds. The answer is returned by then even if a stage
                is running, whose result is then dropped.
            budget: Further limits.
        """
        limits = make_budget(budget, deadline)
        in_caller = limits.time is None or not self._preempt
        task = self._task(x, limits, mode="caller" if in_caller else "thread")
        try:
            if not task.fits():
                task.refuse(hold=self._executor.at_work())
            elif not in_caller:
                self._executor.run(task)
            return task.run_in_caller() if in_caller or task.settled else task.wait()
        except BaseException:  # such as Ctrl-C: no thread may start another stage
            task.interrupt()
            task.drop()
            raise

    def stream(self, x: Any, *, deadline: Duration | None = None, budget: Budget | None = None) -> Iterator[Answer]:
        """Yield an answer after each exit; stop iterating and nothing more is computed.

        The stages run in the caller's thread. A stage that is not expected to end before the deadline is not started, but a
        running one is not preempted. Arguments are those of `predict`.
        """
        task = self._task(x, make_budget(budget, deadline), mode="stream")
        if not task.fits():
            task.refuse()
        return task.answers()

    def submit(self, x: Any, *, deadline: Duration | None = None, budget: Budget | None = None) -> Task:
        """Start in a thread of the runner; the task always has the best answer so far. Arguments as for `predict`."""
        task = self._task(x, make_budget(budget, deadline))
        try:
            self._begin(task)
        except BaseException:
            task.interrupt()
            raise
        return task

    async def predict_async(self, x: Any, *, deadline: Duration | None = None, budget: Budget | None = None) -> Answer:
        """As `predict`, without blocking the event loop; cancelling it interrupts the request."""
        loop = asyncio.get_running_loop()
        settled = asyncio.Event()

        def notify() -> None:
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(settled.set)

        task = self._task(x, make_budget(budget, deadline), mode="asyncio", notify=notify)
        try:
            self._begin(task)
            left = None if task.deadline is None else task.seconds_left()
            wake_up = None if left is None else self._clock.now() + left
            with suppress(TimeoutError):
                await asyncio.wait_for(settled.wait(), left)
            if settled.is_set():
                return task.collect(since=None if wake_up is None else task.ended)
            task.expire()
            return task.collect(since=wake_up)
        except BaseException:
            task.interrupt()
            raise

    def warm_up(self, x: Any) -> None:
        """Build the engine from typical inputs, and run all exits a few times to measure stage times for this batch size.

        A request with a time budget never builds an engine, since that can take seconds.
        """
        inputs = check_inputs(x)
        setup = self._setup or self._ready(inputs)
        run_all(setup.engine, inputs)  # the first run is slow, and is not measured
        for _ in range(_WARM_UP):
            self.predict(inputs)

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

    def __repr__(self) -> str:
        if self._setup is None:
            return f"Runner(rule={self._rule!r}, exits={self._exits}, engine={self._engine!r}: not built yet)"
        engine, combiner = self._setup.engine, self._setup.combiner
        why = f" ({engine.why})" if hasattr(engine, "why") else ""
        by = f", rule evaluated by {combiner.why}" if isinstance(combiner, ByRule) else ""
        return f"Runner(rule={self._rule!r}{by}, exits={self._exits}, engine={engine.name!r}{why})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _task(self, x: Any, budget: Budget, *, mode: str = "thread", notify: Callable[[], None] | None = None) -> Task:
        began = self._clock.now()
        if not self._finalizer.alive:
            raise StateError("the runner is closed", expected="an open runner", fix="make a new Runner")
        inputs = check_inputs(x)
        if self._setup is None and budget.time is not None:
            raise StateError(
                f"a request with a time budget, but the engine {self._engine!r} is not built yet",
                expected="an engine built beforehand, which can take seconds",
                fix="call runner.warm_up(x) first, or make the Runner with example=x",
            )
        if budget.macs is not None and self._macs is None:
            self._macs = _measure_macs(self._model, inputs)
        return Task(
            self._setup or self._ready(inputs),
            inputs,
            budget,
            executor=self._executor,
            began=began,
            limit=limit_exits(budget, self._exits, self._macs),
            macs=self._macs,
            mode=mode,
            notify=notify,
            owner=self,
        )

    def _begin(self, task: Task) -> None:
        if task.fits():
            self._executor.run(task)
        else:
            task.refuse()

    def _ready(self, example: Tensor | None) -> RunSetup:
        """What all requests share; made by the first of them if the engine needs inputs."""
        with self._making:
            if self._setup is None:
                self._setup = self._make_setup(example)
            return self._setup

    def _make_setup(self, example: Tensor | None) -> RunSetup:
        engine = self._engine
        if isinstance(engine, str):
            engine = make_engine(self._model, engine, example=example, threads=self._threads.wanted)
        if self._profile is not None:
            self._profile.check_engine(engine.name)
            self._profile.seed(self._forecast)
        self._executor.pace = Pace(_count_slots(engine, self._workers, self._threads.wanted))
        policy = self._policy.policy if isinstance(self._policy, FittedPolicy) else self._policy
        begin, combiner = _make_combiner(self._rule, engine, self._probabilities)
        return RunSetup(
            engine, begin, combiner, self._forecast, self._clock, policy, self._sets, self._generator, self._prior, self._grace
        )

    def renew(self) -> None:
        """Make a new lock and generator, in a forked process: another thread may have used them."""
        self._making = threading.Lock()
        self._generator = torch.Generator().manual_seed(self._seed)
        if self._setup is not None:
            self._setup = replace(self._setup, generator=self._generator)


class _Threads:
    """Sets torch's thread count until it is restored."""

    _open: ClassVar[list[_Threads]] = []
    _changing = threading.RLock()  # garbage collection may end one runner while another is made

    def __init__(self, threads: int | None) -> None:
        self.wanted = threads
        with self._changing:
            self._before = torch.get_num_threads()
            if threads is not None:
                self._open.append(self)
                if threads != self._before:
                    torch.set_num_threads(threads)

    def restore(self) -> None:
        """Restore the count unless it was changed since; if runners made later are open, the next one does so."""
        with self._changing:
            if self not in self._open:
                return
            place = self._open.index(self)
            self._open.remove(self)
            if place < len(self._open):
                self._open[place]._before = self._before
            elif self.wanted != self._before and torch.get_num_threads() == self.wanted:
                torch.set_num_threads(self._before)

    @classmethod
    def renew(cls) -> None:
        """Make a new lock, in a forked process."""
        cls._changing = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Threads.renew)


def _end(executor: Executor, threads: _Threads, *, patience: float | None = None) -> None:
    try:
        executor.close(patience=patience)
    finally:
        threads.restore()


def _count_slots(engine: Engine, workers: int, threads: int | None) -> int:
    """How many stages can run at once: one on a GPU, else one per `threads` cores."""
    device = getattr(engine, "device", None)
    if device is not None and device.type != "cpu":
        return 1
    return max(1, min(workers, count_cores() // (threads or torch.get_num_threads())))


def _make_combiner(
    rule: Rule[Any] | Intersection, engine: Engine, probabilities: bool
) -> tuple[Callable[[Tensor], Any], Combiner]:
    """How to start a run, and what combines its outputs."""
    if isinstance(engine, ExportedModel):
        return engine.begin, AsGiven()
    if isinstance(rule, Intersection):
        return engine.begin, ByIntersection(rule)
    if isinstance(engine, OnnxRuntimeEngine) and not probabilities:
        combiner = by_graph(rule, engine.num_exits, engine.classes)
        return engine.begin_arrays if isinstance(combiner, ByGraph) else engine.begin, combiner
    return engine.begin, ByRule(rule, probabilities=probabilities)


def _count_exits(model: Any, engine: str | Engine) -> int:
    exits = getattr(model, "num_exits", None)
    if not isinstance(exits, int) or not (isinstance(model, ExitModel) or hasattr(model, "begin")):
        raise OptionError(
            f"the model is a {type(model).__name__}",
            expected="a model with num_exits and exits(x), or an engine",
            fix="add exits to a network with anytime.models.attach_exits, or combine several in anytime.models.Ensemble",
        )
    if engine not in (*ENGINES, "auto") if isinstance(engine, str) else not hasattr(engine, "begin"):
        names = ", ".join(ENGINES)
        raise OptionError(f"engine is {engine!r}", expected=f"an engine, auto, or one of {names}", fix="use 'auto'")
    if not isinstance(engine, str) and engine.num_exits != exits:
        raise OptionError(
            f"the engine has {engine.num_exits} exits and the model {exits}",
            expected="an engine for this model",
            fix="pass the engine as both: Runner(engine, engine=engine)",
        )
    return exits


def _count_classes(model: Any, *fitted: Any) -> int | None:
    known = [each.classes for each in fitted if each is not None and each.classes is not None]
    own = getattr(getattr(model, "config", model), "classes", None)
    return known[0] if known else own if isinstance(own, int) else None


def _rule_inside(model: ExportedModel, rule: Any, calibration: Any) -> Rule[Any]:
    """The rule of exported stages; another rule, or a calibration that would change it, is refused."""
    inside = parse_rule(model.rule)
    if choose_rule(inside if rule is None else rule, calibration)[0] != inside:
        raise OptionError(
            f"the exported stages contain the rule {model.rule}",
            expected="no other rule, and no calibration that changes it; prediction sets for it are accepted",
            fix="export the model again with the rule you need",
        )
    return inside


def _check_forecast(forecast: Any) -> Forecast:
    if not isinstance(forecast, Forecast):
        raise OptionError(f"forecast is {forecast!r}", expected="an anytime.run.Forecast", fix="pass forecast=Forecast()")
    return forecast


def _check_profile(profile: Any) -> Profile | None:
    known = Profile.load(profile) if isinstance(profile, str | Path) else profile
    if not (known is None or isinstance(known, Profile)):
        raise OptionError(
            f"profile is {profile!r}",
            expected="a Profile, or its file",
            fix="measure one: anytime profile, or anytime.run.profile_model",
        )
    return known


def _check_policy(policy: Any, rule: Any) -> Policy | FittedPolicy | None:
    if policy is None:
        return None
    if not isinstance(policy, Policy | FittedPolicy):
        raise OptionError(f"policy is {policy!r}", expected="a policy of anytime.policy", fix="pass e.g. Confidence(0.9)")
    if isinstance(rule, Intersection):
        raise OptionError(
            "a policy was given for a regression",
            expected="a classification, whose probabilities it reads",
            fix="omit policy; Budget(exits=...) limits the exits of a regression",
        )
    return policy


def _make_prior(on_too_short: str, prior: Any, rule: Any, classes: int | None) -> Tensor | None:
    check_choice(on_too_short, "on_too_short", ("raise", "prior"))
    if on_too_short == "raise":
        return None
    if isinstance(rule, Intersection):
        raise OptionError(
            "on_too_short='prior' was given for a regression", expected="a classification", fix="use on_too_short='raise'"
        )
    if prior is None:
        if classes is None:
            raise OptionError(
                "the number of classes is unknown", expected="a prior", fix="pass prior=torch.full((classes,), 1 / classes)"
            )
        return torch.full((classes,), 1 / classes)
    given = torch.as_tensor(prior, dtype=torch.float32)
    if given.ndim != 1 or bool((given < 0).any()) or not abs(float(given.sum()) - 1) < 1e-3:
        raise OptionError(
            f"prior is {prior!r}",
            expected="one probability per class, with sum 1",
            fix="divide by the sum: prior / prior.sum(); omit it for the uniform one",
        )
    if classes is not None and len(given) != classes:
        raise OptionError(
            f"the prior has {len(given)} classes", expected=f"{classes}, as the model", fix="pass one number per class"
        )
    return given


def _make_macs(macs: Any, profile: Profile | None, exits: int) -> tuple[float, ...] | None:
    given = macs if macs is not None else None if profile is None else profile.macs
    return None if given is None else tuple(check_costs(given, exits=exits).tolist())


def _measure_macs(model: Any, example: Tensor) -> tuple[float, ...]:
    if not isinstance(model, MultiExit):
        raise OptionError(
            f"a budget in MACs was given for a {type(model).__name__}, whose MACs are unknown",
            expected="the MACs up to each exit",
            fix="pass macs=[...] to the Runner: multiply-accumulates per input up to each exit",
        )
    return tuple(float(macs) for macs in measure_cost(model, example).macs)

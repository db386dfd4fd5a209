"""One request: its stages are run by one thread at a time, and its best answer so far is available to any other thread.

After each stage the thread that ran it appends to lists, and nothing in the lists ever changes; threads share nothing else. The
first to settle the task (the thread at the end, the caller at its deadline, an interrupt) decides how many of these stages the
answer uses.

It is over 400 lines because the state that threads share without a lock, and all that reads it, is best read in one place.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from torch import Tensor

from anytime.checks import Inputs, count_rows
from anytime.combine import Prediction
from anytime.errors import DeadlineTooShort, Overloaded, StateError
from anytime.models.modes import Modes
from anytime.policy import RunningBatch, Stopped
from anytime.run.answer import Answer, Reason
from anytime.run.budget import Budget
from anytime.run.engines.base import NOTHING, Ahead, Stages
from anytime.run.forks import never_forked
from anytime.run.setup import RunSetup

if TYPE_CHECKING:
    from anytime.run.executor import Executor

Mode = Literal["thread", "asyncio", "caller", "stream"]
"""Execution modes: in a worker thread, awaited by a thread or by an event loop; or in the caller's own thread."""
PREEMPTING: tuple[Mode, ...] = ("thread", "asyncio")
"""Modes in which the caller has an answer at its deadline whatever is running."""


class _Outcome(NamedTuple):
    """How a task was settled."""

    used: int
    at: float
    reason: Reason
    failure: BaseException | None


class Task:
    """A request; made by `Runner.submit`.

    It has no lock: the first to settle it puts the outcome into a dictionary, in one step, and every waiter has a gate of its
    own. Neither a fork nor an exception in a signal handler can therefore leave it locked.

    Attributes:
        arrived: When it was made; this and the following are what `anytime.run.scheduler` reads.
        deadline: When its answer is due; infinity for none.
        exit: The exit it has reached; 0 before the first.
        last: The last exit it may use.
        least: The fewest exits of an answer.
        confidence: The mean confidence of its answer so far; 0 while unknown.
        group: Requests with equal groups can share a batch.
        rows: How many rows its next stage computes.
    """

    def __init__(
        self,
        setup: RunSetup,
        x: Inputs,
        budget: Budget,
        *,
        executor: Executor,
        began: float,
        last: int,
        macs: tuple[float, ...] | None,
        mode: Mode = "thread",
        owner: object = None,
    ) -> None:
        self._setup, self._executor, self.budget, self.arrived = setup, executor, budget, began
        deadline = budget.deadline(began)
        self.deadline = math.inf if deadline is None else deadline
        self.exit, self.last, self.least, self.confidence = 0, last, budget.min_exits or 1, 0.0
        self.rows = self._batch = count_rows(x)
        self.mode, self._macs = mode, macs
        self.notify: Callable[[], None] | None = None  # called when it is settled, in any thread
        self.on_exit: Callable[[], None] | None = None  # called after each exit, likewise
        self._owner = owner  # keeps a runner without other references alive until its task ends
        self._x: Inputs | None = x
        self._outputs: list[Any] = []
        self._predictions: list[Any] = []
        self._policy_state: tuple[RunningBatch, Any] | None = None
        self._stopped: list[Stopped] = []
        self._interrupted = False
        self._reason: Reason | None = None
        self._error: BaseException | None = None
        self._outcome: dict[None, _Outcome] = {}
        self._gates: list[threading.Lock] = []
        self._uniform = setup.draw(self._batch)
        self.dispatch = None if budget.time is None else setup.forecast.dispatch(mode, setup.grace, budget.time / 2)
        self.modes = Modes.now()
        # Not the task itself: a reference cycle would keep the runner alive until the next garbage collection.
        self.group: object = (_structure(x), self.modes) if setup.joins else object()
        self.run: Any = None  # what its next stage runs on
        self.ended = began
        self.waited = False  # whether it waited for its next stage; that time is not the stage's
        self.trial = False  # whether its next stage is tried although the forecast rules it out
        self.turn: threading.Lock | None = None  # if a single stage is requested: released after it, and when settled
        self.parks = False  # whether it waits until it fits, rather than being refused at once
        self.thread = 0  # of its caller, if it parks
        self.refusals = 0  # how many requests of its caller were refused in a row
        self.retry_after = 0.0

    # Public, from any thread.

    def current(self) -> Answer | None:
        """The best answer so far; None before the first exit, or before `Budget.min_exits`."""
        settled, used = self._outcome.get(None), self.used
        if used < self.least:
            return None
        return self.answer(used, self._reason) if settled is None else self.answer(used, settled.reason, at=settled.at)

    def interrupt(self) -> None:
        """Start no further stage and settle for the exits so far; without any, `result` waits for the running stage."""
        self._interrupted = True
        if self.exit >= self.least or not self._executor.is_running(self):
            self.settle("interrupted")
        self._executor.withdraw(self)

    def result(self, timeout: float | None = None) -> Answer:
        """The answer at the end, at the task's deadline, or after an interrupt, whichever comes first.

        Args:
            timeout: Seconds to wait at most before a TimeoutError; the task continues.
        """
        settled = self._outcome.get(None)
        if settled is not None:  # its time is when it was settled, not when it is fetched
            return self.collect(at=settled.at)
        left = self.seconds_left()
        shorter = timeout is not None and (left is None or timeout < left)
        if not self.wait(timeout if shorter else left):
            if shorter:
                raise TimeoutError(f"no answer within {timeout} s; the task continues")
            self.expire()
        return self.collect()

    # For the runner.

    @property
    def settled(self) -> bool:
        """Whether it is decided which exits the answer uses."""
        return bool(self._outcome)

    @property
    def settled_at(self) -> float:
        """When it was settled."""
        return self._outcome[None].at

    @property
    def used(self) -> int:
        """How many exits the answer uses, so far or for good."""
        return self._outcome[None].used if self._outcome else self.exit

    @property
    def reason(self) -> Reason | None:
        """Why it stopped; None while it may continue."""
        return self._outcome[None].reason if self._outcome else self._reason

    @property
    def failed(self) -> bool:
        """Whether a stage raised an error."""
        return self._error is not None

    def seconds_left(self) -> float | None:
        """Until the caller takes the best answer so far: the deadline less the dispatch time; None without a deadline.

        Not negative and not longer than the whole budget, even if the clock jumps.
        """
        if self.dispatch is None:
            return None
        # An event loop has many requests that end at their deadlines.
        reserve = self.dispatch.rare if self.mode == "asyncio" else self.dispatch.slow
        if self.mode not in PREEMPTING:
            reserve = self.dispatch.typical
        left: float = min(max(self.deadline - reserve - self._setup.clock.now(), 0.0), self.budget.time)
        return left

    def wait(self, seconds: float | None) -> bool:
        """Wait until the task is settled, at most so long; whether it is."""
        gate = threading.Lock()
        gate.acquire()
        self._gates.append(gate)
        try:
            return self.settled or self._setup.clock.wait(gate, seconds)
        finally:
            self._gates.remove(gate)

    def result_in_time(self) -> Answer:
        """The answer, no later than the deadline; the dispatch time is recorded."""
        left = self.seconds_left()
        wake_up = self._setup.clock.now() + (left or 0.0)
        if self.wait(left):
            return self.collect(since=self.settled_at)
        self.expire()
        return self.collect(since=wake_up)

    def expire(self) -> None:
        """The deadline has passed: settle for the exits so far."""
        self.settle("deadline")
        self._interrupted = True  # not before: the thread would report that as the reason
        self._executor.withdraw(self)

    def collect(self, *, since: float | None = None, at: float | None = None) -> Answer:
        """The answer of a settled task.

        Args:
            since: When the answer was available, to record the dispatch time.
            at: When it was delivered, if before now.
        """
        settled = self._outcome[None]
        if settled.failure is not None:
            raise settled.failure
        if settled.used < self.least:
            return self._without_exit(settled.reason)
        answer = self.answer(settled.used, settled.reason, at=at)
        if since is not None and self.dispatch is not None:
            self._setup.forecast.note_dispatch(self.mode, self.arrived + answer.elapsed - since)
        return answer

    @never_forked()
    def answer(self, used: int, reason: Reason | None, *, at: float | None = None) -> Answer:
        """The answer after so many exits."""
        exit: int | Tensor = used
        source: int | Tensor = used
        if self._stopped:
            stopped = self._stopped[used - 1]
            exit, prediction, source = stopped.exit.clone(), stopped.prediction.clone(), stopped.source
        else:
            prediction = self._predictions[used - 1]
            if prediction is None:
                prediction = self._setup.predict(self._outputs[:used])
        elapsed = max((self._setup.clock.now() if at is None else at) - self.arrived, 0.0)
        outputs = [] if self._outputs and isinstance(self._outputs[0], Prediction) else self._outputs[:used]
        return self._setup.answer(prediction, exit, elapsed, self.budget, reason, self._macs, source, self._uniform, outputs)

    # For the executor.

    def stops(self, now: float, *, poll: bool = True) -> bool:
        """Whether nothing more is to be run, apart from what the forecast says; records the reason.

        Args:
            now: The time.
            poll: Whether to ask the budget's `until`, a function of the caller's.
        """
        if self._outcome or self._reason is not None:
            return True
        if self._interrupted or (poll and self.budget.until is not None and self.budget.happened()):
            self._reason = "interrupted"
        elif self.dispatch is not None and self.deadline - now <= self._reserve():
            self._reason = "deadline"
        return self._reason is not None

    def needed(self) -> float:
        """The seconds to the deadline that the next stage needs in order to start."""
        assert self.dispatch is not None
        forecast, stage, rows = self._setup.forecast, self.exit + 1, self.rows
        mandatory = self.exit < self.least and self.waited  # it was admitted: an answer that may be late is better than none
        typical = forecast.seconds(stage, rows) + (self.dispatch.typical if mandatory else self.dispatch.slow)
        if self.mode in PREEMPTING:
            return typical
        return max(typical, forecast.slow(stage, rows) + self.dispatch.typical - self._setup.grace)

    def fits(self, now: float) -> bool:
        """Whether the next stage is expected to end in time, or is to be tried; records the reason if not."""
        if self.dispatch is None or self.trial:
            return True
        if self._setup.queues_ahead and self.run is not None and self.run.queued:
            # It runs in any case, and no caller waits for it beyond its deadline.
            if self.mode in PREEMPTING:
                return True
            if self.turn is None:  # else a thread asks, which must not wait
                in_time: bool = self.run.ready(self.deadline - self.dispatch.typical - now)
                self._reason = self._reason or (None if in_time else "deadline")
                return in_time
        if self.needed() <= self.deadline - now:
            return True
        self.trial = now < self.deadline and self._setup.forecast.decline(self.exit + 1, self.rows, self.mode, now)
        if not self.trial:
            self._reason = self._reason or ("deadline" if self.deadline - now <= self._reserve() else "forecast")
        return self.trial

    def ahead(self, now: float, stages: int | None) -> Ahead:
        """What may be computed before it is requested: nothing if whether to go on is decided after each stage.

        A stage that the forecast does not know starts when it is requested, which is how the forecast learns.

        Args:
            now: The time.
            stages: How many stages the scheduling policy allows; None for no limit.
        """
        if self.mode == "stream" or self.turn is not None or self.budget.confidence is not None:
            return NOTHING
        knows, first = self._setup.forecast.knows, self.exit + 2
        last = self.last if stages is None else min(self.last, self.exit + stages)
        known = next((stage for stage in range(first, last + 1) if not knows(stage, self.rows)), last + 1) - first
        seconds = math.inf if self.dispatch is None else self.deadline - self.dispatch.typical - now
        return Ahead(known, seconds, self._setup.resolution)

    def open(self) -> Stages:
        """Its run, alone."""
        if self.run is None:
            self.run = self._setup.begin(self.inputs)
        run: Stages = self.run
        return run

    @property
    def inputs(self) -> Inputs:
        """Its inputs, before the first stage."""
        assert self._x is not None
        return self._x

    @property
    def outputs(self) -> list[Any]:
        """What its stages returned so far."""
        return self._outputs

    def needs_prediction(self) -> bool:
        """Whether stopping depends on the prediction after each stage."""
        return self.budget.confidence is not None

    def take(self, output: Any, prediction: Any, confidence: Sequence[float] | None, run: Stages, now: float) -> bool:
        """Publish the output of the next stage; whether there is another stage.

        Args:
            output: The stage's output for its rows.
            prediction: The combined prediction, if it is known already.
            confidence: The confidence of each row, likewise.
            run: What the next stage runs on.
            now: When the stage ended.
        """
        self.run, self.ended, self.trial, exit = run, now, False, self.exit + 1
        if self._setup.policy is not None:
            self._apply_policy(exit, output, run)
        else:
            self._outputs.append(output)
            self._predictions.append(prediction)
        if confidence is not None:
            self.confidence = sum(confidence) / len(confidence)
            if self.budget.confidence is not None and exit >= self.least and min(confidence) >= self.budget.confidence:
                self._reason = self._reason or "confidence"
        if exit == self.last:
            self._reason = self._reason or self._limited()
        self.exit = exit
        if self.on_exit is not None:
            self.on_exit()
        return self._reason is None

    def fail(self, error: BaseException) -> None:
        """End with an error, which is raised where the caller waits."""
        self._error = error

    def stop_by_policy(self) -> None:
        """Record that the scheduling policy runs no further stage; `finish` follows."""
        self._reason = self._reason or "forecast"

    def finish(self) -> None:
        """Notify the waiters; the thread is free for other work."""
        self.drop()
        self.settle("interrupted")

    def drop(self) -> None:
        """Release the memory of the stages."""
        run, self.run, self._x = self.run, None, None
        if run is not None:
            run.close()

    def orphan(self) -> None:
        """Settle for the exits so far in a forked process, in which no thread continues it."""
        self._interrupted, self.notify = True, None  # the event loop belongs to the parent process
        self.settle("interrupted")

    def reject(self, retry_after: float) -> None:
        """Record that the first exit does not fit; `finish` follows."""
        self.retry_after, self._reason = retry_after, "forecast"

    def settle(self, reason: Reason) -> None:
        """Decide once which exits the answer uses, and release all waiters."""
        # Errors of a stage that was given up are ignored.
        outcome = _Outcome(self.exit, self._setup.clock.now(), self._reason or reason, self._error)
        first = self._outcome.setdefault(None, outcome) is outcome
        for gate in (*self._gates, self.turn):
            with suppress(RuntimeError):  # released already
                if gate is not None:
                    gate.release()
        if first and (notify := self.notify) is not None:
            notify()

    # Details.

    def _reserve(self) -> float:
        assert self.dispatch is not None
        return self.dispatch.slow if self.exit and self.mode in PREEMPTING else 0.0

    def _apply_policy(self, exit: int, output: Any, run: Stages) -> None:
        """One step under a policy: rows that stop leave the run."""
        setup, exits = self._setup, self._setup.engine.num_exits
        assert setup.policy is not None
        if self._policy_state is None:
            self._policy_state = RunningBatch(setup.policy, self._batch, exits), setup.combiner.start(exits)
        rows, state = self._policy_state
        state, prediction = cast(Any, setup.combiner).step(state, output)
        assert isinstance(prediction, Prediction)
        if exit == 1:
            setup.policy.check_fits(exits, prediction.log_probs.shape[1])
        keep, goes_on = rows.take(prediction)
        self._stopped.append(rows.stopped())
        if not goes_on and exit < exits:
            self._reason = self._reason or "policy"
        elif keep is not None and exit < self.last:
            run.keep(keep)
            self.rows, state = len(keep), state.select(keep)
        self._policy_state = rows, state

    def _limited(self) -> Reason:
        if self.last == self._setup.engine.num_exits:
            return "finished"
        return "exits" if self.last == self.budget.exits else "macs"

    def _without_exit(self, reason: Reason) -> Answer:
        """The prior, or an error, if not even the first exit was reached."""
        setup = self._setup
        if setup.prior is not None:
            elapsed = max(setup.clock.now() - self.arrived, 0.0)
            return setup.answer(setup.from_prior(self._batch), 0, elapsed, self.budget, reason, self._macs, 0, None)
        if reason in ("deadline", "forecast"):
            raise self._overloaded() if self.retry_after or self._held_up() else self._too_short()
        raise StateError(
            "the request was interrupted before its first exit",
            expected="an interrupt after the first exit",
            fix="interrupt once task.current() returns an answer, or use RunOptions(on_too_short='prior')",
        )

    def _held_up(self) -> bool:
        """Whether it was admitted, and others took the time that it would have needed."""
        return self.waited and self.first_at_best() < self.budget.time

    def _overloaded(self) -> Overloaded:
        return overloaded(self.budget, self.retry_after or self._setup.forecast.seconds(1, self._batch))

    def _too_short(self) -> DeadlineTooShort:
        # A first stage that was started and did not end took at least the whole budget.
        expected = max(self.first_needed(), self.budget.time)
        forecast = f"at least {1e3 * expected:.3g} ms, the forecast for the first exit"
        return DeadlineTooShort(
            f"a deadline of {1e3 * self.budget.time:.3g} ms for {self._batch} input{'s' if self._batch > 1 else ''}",
            expected=forecast if expected > self.budget.time else "more time: the first exit was not reached by then",
            fix="allow more time, use smaller batches or a smaller network, or use RunOptions(on_too_short='prior')",
            forecast=expected,
            budget=self.budget.time,
        )

    def first_needed(self) -> float:
        """The seconds in which the fewest exits of an answer are expected, without other requests."""
        assert self.dispatch is not None
        forecast = self._setup.forecast
        typical = sum(forecast.seconds(stage, self._batch) for stage in range(1, self.least + 1)) + self.dispatch.slow
        if self.mode in PREEMPTING:
            return typical
        return max(typical, forecast.slow(self.least, self._batch) + self.dispatch.typical - self._setup.grace)

    def first_at_best(self) -> float:
        """The seconds in which the fewest exits of an answer can be reached on a machine without other load."""
        assert self.dispatch is not None
        return sum(self._setup.forecast.shortest(stage, self._batch) for stage in range(1, self.least + 1))


def _structure(x: Inputs) -> object:
    """Equal for inputs that fit into one batch: the same names or number of tensors, and all sizes but the batch equal."""
    if isinstance(x, Tensor):
        return x.shape[1:], x.dtype, x.device
    return frozenset((name, _structure(x[name])) for name in x) if isinstance(x, Mapping) else tuple(map(_structure, x))


def overloaded(budget: Budget, retry_after: float) -> Overloaded:
    """The error of a request that does not fit behind others."""
    limit = "no deadline" if budget.time is None else f"a deadline of {1e3 * budget.time:.3g} ms"
    return Overloaded(
        f"a request with {limit} behind those that were admitted before",
        expected=f"room in the queue and time for the first exit; both are expected in {1e3 * retry_after:.3g} ms",
        fix="try again after error.retry_after seconds, allow more time, or use more cores",
        retry_after=retry_after,
    )

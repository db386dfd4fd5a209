"""One request: its stages are run by one thread at a time, and its best answer so far is available to any other thread.

After each stage the thread that ran it appends to a list, and nothing in the list ever changes; threads share nothing else. The
first to settle the task (the thread at the end, the caller at its deadline, an interrupt) decides how many of these stages the
answer uses.

This file is over 400 lines until the scheduler takes over the parts that decide when a stage runs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anytime.combine import Prediction
from anytime.conformal import ConformalSets
from anytime.errors import DeadlineTooShort, OptionError, StateError
from anytime.models.modes import Modes
from anytime.policy import Policy, RunningBatch, Stopped
from anytime.run.answer import Answer, Reason
from anytime.run.budget import Budget
from anytime.run.combining import Combiner
from anytime.run.engines.base import Engine, Stages
from anytime.run.executor import Executor
from anytime.run.timing.clock import Clock
from anytime.run.timing.forecast import Forecast, Outlook

_PATIENCE = 0.01
_STAGES = 4
"""A request waits for another one's stage as long as so many of its own are expected to take, at least these seconds."""
_HOLD = 0.01
_TIMELESS = Outlook(0.0, (0.0,))


@dataclass(frozen=True, eq=False)
class RunSetup:
    """What all requests of a runner share. `begin` is the engine's, or one whose logits are in the combiner's format."""

    engine: Engine
    begin: Callable[[Tensor], Stages]
    combiner: Combiner
    forecast: Forecast
    clock: Clock
    policy: Policy | None = None
    sets: ConformalSets | None = None
    generator: torch.Generator | None = None
    prior: Tensor | None = None
    grace: float = 0.0


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
    """

    def __init__(
        self,
        setup: RunSetup,
        x: Tensor,
        budget: Budget,
        *,
        executor: Executor,
        began: float,
        limit: int,
        macs: tuple[float, ...] | None,
        mode: str = "thread",
        notify: Callable[[], None] | None = None,
        owner: object = None,
    ) -> None:
        self._setup, self._executor, self.budget, self._began = setup, executor, budget, began
        self.deadline = budget.deadline(began)
        self._limit, self._macs, self._mode, self._notify = limit, macs, mode, notify
        self._owner = owner  # keeps a runner without other references alive until its task ends
        self._x: Tensor | None = x
        self._batch = len(x)
        self._seen: list[Tensor] = []
        self._rows: list[Stopped] = []
        self._stages: Generator[None, None, None] | None = None
        self._interrupted = self._started = self._ran = False
        self._refused = executor.caller.refused
        self._reason: Reason | None = None
        self._outcome: dict[None, _Outcome] = {}
        self._gates: list[threading.Lock] = []
        self._error: BaseException | None = None
        self.ended = self.picked = began
        self.waited = False  # whether it had to wait for its next stage; that time is not measured
        self.at_work = False  # whether a stage runs in the caller's own thread
        self.more = True  # whether there is another stage
        self.modes: Modes
        self.turn: threading.Lock | None = None  # if a single stage is requested: released after it, and when settled
        self._uniform = self._draw()
        self._outlook = self._look(self._batch)

    # Public, from any thread.

    def current(self) -> Answer | None:
        """The best answer so far; None before the first exit."""
        settled = self._outcome.get(None)
        used = self._used()
        if not used:
            return None
        return self._answer(used, self._reason) if settled is None else self._answer(used, settled.reason, at=settled.at)

    def interrupt(self) -> None:
        """Start no further stage and settle for the exits so far; without any, `result` waits for the running stage."""
        self._interrupted = True
        if self._used() or not self._started:
            self._settle("interrupted")
        self._executor.withdraw(self)

    def result(self, timeout: float | None = None) -> Answer:
        """The answer at the end, at the task's deadline, or after an interrupt, whichever comes first.

        Args:
            timeout: Seconds to wait at most before a TimeoutError; the task continues.
        """
        settled = self._outcome.get(None)
        if settled is not None:  # its time is when it was settled, not when it is fetched
            return self.collect(at=settled.at)
        left = None if self.deadline is None else self.seconds_left()
        shorter = timeout is not None and (left is None or timeout < left)
        if not self._wait(timeout if shorter else left):
            if shorter:
                raise TimeoutError(f"no answer within {timeout} s; the task continues")
            self.expire()
        return self.collect()

    # For the runner.

    @property
    def settled(self) -> bool:
        """Whether it is decided which exits the answer uses."""
        return bool(self._outcome)

    def seconds_left(self) -> float:
        """Until the caller takes the best answer so far: the deadline less the dispatch time."""
        assert self.deadline is not None
        return self._bounded(self.deadline - self._outlook.dispatch - self._setup.clock.now())

    def expected(self) -> float:
        """Seconds until the first exit's answer is expected to be delivered."""
        return self._outlook.needed[0]

    def fits(self) -> bool:
        """Whether the first exit is expected in time, or should be tried."""
        if self.deadline is None or self.expected() <= self.budget.time:
            return True
        setup, left = self._setup, self.budget.time
        if left > 0 and self._contends(left):
            self._outlook = self._outlook.under_contention(left)
            return True
        if left <= 0 or not setup.forecast.decline(0, self._batch, self._mode, left=left, now=setup.clock.now()):
            return False
        self._outlook = self._outlook.for_trial(left)
        return True

    def _contends(self, left: float) -> bool:
        """Whether to try because other requests compete for the same threads.

        Durations measured under contention are long for every request. Refusing all of them would leave none to show that the
        durations are short again: so a request waits for its turn if the shortest first exit would fit, and is tried if
        nothing is running because all others were refused.
        """
        at_work = self._executor.at_work()
        if at_work and self._mode != "caller":
            return self._outlook.shortest[0] + self._outlook.shortest_dispatch <= left
        return not at_work and self._executor.refused_another(self._setup.clock.now() - left)

    def refuse(self, *, hold: bool = False) -> None:
        """Settle without an answer, since the first exit is not expected in time.

        Args:
            hold: Whether to do so only after half of the time, or 10 ms: callers that retry in a loop take Python's lock from
                the stages of others, which then are as slow as the forecast says.
        """
        self._executor.note_refusal(self._setup.clock.now())
        if hold:
            self._wait(min(self.budget.time / 2, _HOLD))
        self._settle("forecast")

    def wait(self) -> Answer:
        """The answer, no later than the deadline; the dispatch time is recorded."""
        clock, left = self._setup.clock, self.seconds_left()
        wake_up = clock.now() + left
        if self._wait(left):
            return self.collect(since=self.ended)
        self.expire()
        return self.collect(since=wake_up)

    def run_in_caller(self) -> Answer:
        """The answer, by stages in the caller's own thread as long as no other request waits."""
        if not self.settled:
            while self._executor.turn(self):
                pass
            self.finish()
        return self.collect(since=None if self.deadline is None else self.ended)

    def expire(self) -> None:
        """The deadline has passed: settle for the exits so far."""
        self._settle("deadline")
        self._interrupted = True  # not before: the thread would report that as the reason
        self._executor.withdraw(self)

    def answers(self) -> Iterator[Answer]:
        """Run the stages as `run_in_caller`, and yield an answer after each."""
        try:
            while not self.settled and self.more:
                before = self._used()
                self._executor.turn(self)
                if self._error is not None:
                    raise self._error
                if self._used() > before:
                    yield self._answer(self._used(), self._reason)
        finally:
            self._interrupted = True
            self._executor.withdraw(self)
            self.drop()
        if not self._used():
            self._settle("interrupted")
            yield self._without_exit()

    def finish(self) -> None:
        """Notify the waiters; the thread is free for other work."""
        self._x = None
        self._settle("interrupted")

    def collect(self, *, since: float | None = None, at: float | None = None) -> Answer:
        """The answer of a settled task.

        Args:
            since: When the answer was available, to record the dispatch time.
            at: When it was delivered, if before now.
        """
        settled = self._outcome[None]
        if settled.failure is not None:
            raise settled.failure
        caller = self._executor.caller
        caller.refused = 0 if settled.used else caller.refused + 1
        if not settled.used:
            return self._without_exit()
        answer = self._answer(settled.used, settled.reason, at=at)
        if since is not None:
            self._setup.forecast.note_dispatch(self._mode, self._began + answer.elapsed - since)
        return answer

    # For the executor.

    def rank(self, now: float) -> tuple[float, ...]:
        """The sort key for the next turn, smallest first: fewest exits, then most refusals, then earliest deadline.

        A first stage that is not likely to end in time comes last: it would delay the others.
        """
        exits = len(self._seen) or len(self._rows)
        if self.deadline is None:
            return 0, exits, 0, math.inf, self._began
        return not exits and self.deadline - now < self._outlook.likely, exits, -self._refused, self.deadline, self._began

    @property
    def patience(self) -> float:
        """How many seconds to wait for another request's running stage."""
        needed = self._outlook.needed
        return max(_PATIENCE, _STAGES * needed[min(self._used(), len(needed) - 1)])

    @property
    def done(self) -> float | None:
        """The seconds that the last stage takes at best, if known; 0 if it ended after the deadline."""
        shortest, last = self._outlook.shortest, len(self._seen) or len(self._rows)
        if not (self._ran and 0 < last <= len(shortest)):
            return None
        return shortest[last - 1] if self.deadline is None or self.ended <= self.deadline else 0.0

    def holds(self, now: float, patience: float) -> bool:
        """Whether its running stage is worth waiting for.

        This includes requests that were given up: they still use the processor, and another stage beside them would make both
        so slow that they are given up as well.
        """
        return now - max(self.picked, self.ended) <= patience

    def step(self) -> bool:
        """Run the next stage, in any thread; whether there is another one."""
        self._started, self._ran = True, False
        try:
            if self._stages is None:
                self._stages = self._run_stages()
            next(self._stages)
            self._ran, self.more = True, self._reason is None
        except StopIteration:
            self.more = False
        except BaseException as error:  # raised where the caller waits
            self._error, self.more = error, False
        if not self.more:
            self.drop()
        return self.more

    def drop(self) -> None:
        """Release the memory of the stages."""
        stages, self._x = self._stages, None
        if stages is not None:
            with suppress(ValueError):  # a stage is running: its thread releases them afterwards
                stages.close()

    def orphan(self) -> None:
        """Settle for the exits so far in a forked process, in which no thread continues it."""
        self._interrupted, self._notify = True, None  # the event loop belongs to the parent process
        self.finish()

    # The stages.

    def _run_stages(self) -> Generator[None, None, None]:
        """Run one stage per iteration and publish its result."""
        setup, x, limit = self._setup, self._x, self._limit
        if x is None:  # dropped before it began
            return
        clock, policy = setup.clock, setup.policy
        exits, batch, now = setup.engine.num_exits, self._batch, clock.now()
        rows = None if policy is None else RunningBatch(policy, batch, exits)
        state = None if rows is None else setup.combiner.start(exits)
        # The wake-up is part of the first stage, waiting for a turn is not.
        before = now if self.waited or self._mode == "stream" else self._began
        if self._stopped(0, batch, now):
            return
        self.waited = False
        times: list[tuple[int, int, float]] = []
        stages = setup.begin(x)
        try:
            for exit in range(limit):
                if exit and self._stopped(exit, batch, before):
                    return
                logits = stages.advance()
                now = clock.now()
                times.append((exit, batch, now - before))
                self.ended = now
                keep: Tensor | None = None
                if rows is None:
                    self._seen.append(logits)
                else:
                    state, keep = self._take(exit, logits, state, rows)
                if exit + 1 == limit:
                    self._reason = self._reason or self._limited()
                elif keep is not None and self._reason is None:
                    stages.keep(keep)
                    batch = len(keep)
                    self._outlook = self._look(batch)
                yield
                before = now
                if self.waited or self._mode == "stream":  # the time between exits is the reader's
                    self.waited = False
                    self.ended = before = clock.now()
        finally:
            setup.forecast.note_all(times)  # all at once: between stages every microsecond counts
            stages.close()

    def _take(self, exit: int, logits: Tensor, state: Any, rows: RunningBatch) -> tuple[Any, Tensor | None]:
        """One step under a policy: the rule's new state and the rows to continue with, if not all."""
        setup = self._setup
        state, prediction = setup.combiner.step(state, logits)
        assert isinstance(prediction, Prediction)
        if exit == 0:
            assert setup.policy is not None
            setup.policy.check_fits(setup.engine.num_exits, prediction.log_probs.shape[1])
        keep, goes_on = rows.take(prediction)
        self._rows.append(rows.stopped())
        if not goes_on and exit + 1 < setup.engine.num_exits:
            self._reason = self._reason or "policy"
        return state if keep is None else state.select(keep), keep

    def _stopped(self, exit: int, batch: int, now: float) -> bool:
        """Whether to stop before the next stage; records the reason."""
        if self._interrupted or (self.budget.until is not None and self.budget.happened()):
            self._reason = "interrupted"
            return True
        if self.deadline is None:
            return False
        left, outlook = self.deadline - now, self._outlook
        if left <= outlook.dispatch:
            self._reason = "deadline"
        elif exit == 0:
            # Its time counts from the call, where its forecast was checked, unless it had to wait since.
            if self.waited and left < outlook.least:
                self._reason = "forecast"
        elif outlook.needed[exit] > left and not self._setup.forecast.decline(exit, batch, self._mode, left=left):
            self._reason = "forecast"
        return self._reason is not None

    def _look(self, batch: int) -> Outlook:
        """What to expect for a batch size; nothing without a deadline."""
        if self.deadline is None:
            return _TIMELESS
        return self._setup.forecast.outlook(self._limit, batch, self._mode, self._setup.grace)

    def _limited(self) -> Reason:
        if self._limit == self._setup.engine.num_exits:
            return "finished"
        return "exits" if self._limit == self.budget.exits else "macs"

    def _settle(self, reason: Reason) -> None:
        """Decide once which exits the answer uses, and release all waiters."""
        used = max(len(self._seen), len(self._rows))
        # Errors of a stage that was given up are ignored.
        outcome = _Outcome(used, self._setup.clock.now(), self._reason or reason, self._error)
        first = self._outcome.setdefault(None, outcome) is outcome
        self.more = False
        for gate in (*self._gates, self.turn):
            with suppress(RuntimeError):  # released already
                if gate is not None:
                    gate.release()
        if first and self._notify is not None:
            self._notify()

    def _wait(self, seconds: float | None) -> bool:
        """Wait until the task is settled, at most so long; whether it is."""
        gate = threading.Lock()
        gate.acquire()
        self._gates.append(gate)
        try:
            return self.settled or self._setup.clock.wait(gate, seconds)
        finally:
            self._gates.remove(gate)

    # The answer.

    def _used(self) -> int:
        settled = self._outcome.get(None)
        return max(len(self._seen), len(self._rows)) if settled is None else settled.used

    def _bounded(self, left: float) -> float:
        """Not negative and not longer than the whole budget, even if the clock jumps."""
        return min(max(left, 0.0), self.budget.time) if self.budget.time is not None else max(left, 0.0)

    def _answer(self, used: int, reason: Reason | None, *, at: float | None = None) -> Answer:
        prediction = self._prediction(used)
        members = self._sets(used, prediction)
        return self._make(used, prediction, members, self._setup.clock.now() if at is None else at, reason)

    def _prediction(self, used: int) -> Any:
        if self._rows:
            return self._rows[used - 1].prediction.clone()
        return self._setup.combiner.after(self._seen[:used], self._setup.engine.num_exits)

    def _make(self, used: int, prediction: Any, members: Tensor | None, now: float, reason: Reason | None) -> Answer:
        elapsed = max(now - self._began, 0.0)
        exit: int | Tensor = self._rows[used - 1].exit.clone() if self._rows and used else used
        macs: float | Tensor | None = None
        if self._macs is not None:
            paid = (0.0, *self._macs)
            macs = paid[exit] if isinstance(exit, int) else torch.tensor(paid, dtype=torch.float64)[exit]
        met = None if self.budget.time is None else elapsed <= self.budget.time + self._setup.grace
        return Answer(prediction, exit, self._setup.engine.num_exits, elapsed, met, reason, macs, members)

    def _draw(self) -> Tensor | None:
        sets = self._setup.sets
        if sets is None or not sets.randomised:
            return None
        return torch.rand(self._batch, 1 if sets.shared else sets.exits, generator=self._setup.generator)

    def _sets(self, used: int, prediction: Any) -> Tensor | None:
        sets = self._setup.sets
        if sets is None:
            return None
        log_probs, uniform = prediction.log_probs, self._uniform
        source = self._rows[used - 1].source - 1 if self._rows else torch.full((self._batch,), used - 1)
        members = torch.zeros(log_probs.shape, dtype=torch.bool)
        for exit in sorted(set(source.tolist())):
            rows = source == exit
            draw = None if uniform is None else uniform[rows, 0 if sets.shared else exit]
            members[rows] = sets.set_at(exit + 1, log_probs[rows], draw)
        return members

    def _without_exit(self) -> Answer:
        """The prior, or an error, if not even the first exit was reached."""
        if self._setup.prior is not None:
            return self._from_prior()
        if self._why() in ("deadline", "forecast"):
            raise self._too_short()
        raise StateError(
            "the request was interrupted before its first exit",
            expected="an interrupt after the first exit",
            fix="interrupt once task.current() returns an answer, or make the Runner with on_too_short='prior'",
        )

    def _from_prior(self) -> Answer:
        assert self._setup.prior is not None
        log_probs = self._setup.prior.log().expand(self._batch, -1).clone()
        prediction = Prediction(log_probs, torch.zeros(self._batch, dtype=torch.bool))
        members = None if self._setup.sets is None else torch.ones(log_probs.shape, dtype=torch.bool)
        return self._make(0, prediction, members, self._setup.clock.now(), self._why())

    def _why(self) -> Reason | None:
        settled = self._outcome.get(None)
        return self._reason if settled is None else settled.reason

    def _too_short(self) -> DeadlineTooShort:
        # A first stage that was started and did not end took at least the whole budget.
        expected = max(self.expected(), self.budget.time)
        forecast = f"at least {1e3 * expected:.3g} ms, the forecast for the first exit"
        return DeadlineTooShort(
            f"a deadline of {1e3 * self.budget.time:.3g} ms for {self._batch} input{'s' if self._batch > 1 else ''}",
            expected=forecast if expected > self.budget.time else "more time: the first exit was not reached by then",
            fix="allow more time, use smaller batches or a smaller network, or make the Runner with on_too_short='prior'",
            forecast=expected,
            budget=self.budget.time,
        )


def limit_exits(budget: Budget, exits: int, macs: tuple[float, ...] | None) -> int:
    """How many exits the budget allows, apart from time."""
    limit = exits if budget.exits is None else min(budget.exits, exits)
    if budget.macs is None:
        return limit
    assert macs is not None  # the runner has measured them
    affordable = sum(each <= budget.macs for each in macs)
    if affordable == 0:
        raise OptionError(
            f"a budget of {budget.macs:g} MACs",
            expected=f"at least {macs[0]:g}, the MACs of the first exit",
            fix=f"allow Budget(macs={macs[0]:g}) or more, or use a smaller network",
        )
    return min(limit, affordable)

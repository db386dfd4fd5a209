"""Requests that run a stage together: their rows are joined, run as one batch, and split again.

Runs that are all in their carry can join (`anytime.run.engines.running.Joinable`). A joint run is split only when its requests
go separate ways, so requests that stay together are not copied between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from anytime.checks import join_inputs
from anytime.combine import Prediction
from anytime.run.combining import ByRule, confidences
from anytime.run.engines.base import NOTHING, Stages
from anytime.run.engines.running import Joinable, join_rows
from anytime.run.forks import never_forked
from anytime.run.setup import RunSetup
from anytime.run.task import Task


@dataclass(frozen=True)
class StageReport:
    """A stage that has run.

    Attributes:
        stage: Which stage, counted from 1.
        requests: How many requests shared it.
        batch: How many rows it computed.
        began: When it began, on the runner's clock.
        seconds: How long it took.
        waiting: How many requests were waiting meanwhile.
    """

    stage: int
    requests: int
    batch: int
    began: float
    seconds: float
    waiting: int


class JointRun:
    """One run of several requests. The first of them to go its own way splits it."""

    def __init__(self, run: Any, tasks: Sequence[Task]) -> None:
        self.run, self.tasks, self.sizes = run, list(tasks), [task.rows for task in tasks]
        self._left = len(self.tasks)

    def split(self) -> None:
        """Give every request a run of its own."""
        for task, run in zip(self.tasks, self.run.split(self.sizes), strict=True):
            if task.run is self:
                task.run = run
        self.run.close()

    def close(self) -> None:
        """One of the requests ends; with the last one the memory is released."""
        self._left -= 1
        if self._left == 0:
            self.run.close()

    advance = keep = None  # a joint run is advanced by its batch
    queued = False


class Batch:
    """What one slot of the executor runs: requests at the same exit, for one stage or several.

    Attributes:
        tasks: The requests that have further stages.
        running: The requests whose stage runs, or ran last.
        stages: For how many stages they stay together.
        final: Whether they end after these, since their depth was decided at the start.
        began: When its stage began.
        expected: How many seconds its first stage is expected to take.
        took: How many seconds its last stage took; None if it failed.
    """

    def __init__(self, tasks: Sequence[Task], setup: RunSetup, now: float, *, stages: int = 1, final: bool = False) -> None:
        self.tasks, self.stages, self.final, self.began, self._setup = list(tasks), stages, final, now, setup
        self.running = self.tasks
        self.took: float | None = None
        self._picked, self._queued = now, False
        self._times: list[tuple[int, int, float]] = []
        self.expected = setup.forecast.seconds(self.tasks[0].exit + 1, sum(task.rows for task in self.tasks))

    @never_forked(stage=True)
    def step(self, *, waiting: int, on_stage: Callable[[StageReport], None] | None = None) -> list[Task]:
        """Run the next stage; the requests that have ended. The others stay in `tasks`."""
        now = self._setup.clock.now()
        self.running, self.tasks = self.tasks, []
        live = self.running
        ended = [task for task in live if _stops(task, now)]
        if ended:
            live = [task for task in live if task not in ended]
        if live:
            first, rows = live[0], sum(task.rows for task in live)
            # The wake-up of the thread is part of the first stage of a request that had not to wait for others.
            self.began = first.arrived if not (first.exit or first.waited or len(live) > 1) else now
            stage = first.exit + 1
            self._advance(live, ended, contended=waiting > 0 or len(live) > 1)
            if self.took is not None:
                # A queued stage began while Python was busy with the last one. Its time says nothing about a stage that starts
                # when it is requested, which is what the forecast decides on: a queued one runs whatever the forecast says.
                if not self._queued:
                    self._times.append((stage, rows, self.took))
                if on_stage is not None:
                    on_stage(StageReport(stage, len(live), rows, self.began, self.took, waiting))
        self.stages -= 1
        return ended

    def note_times(self) -> None:
        """Record how long its stages took: between stages every microsecond counts."""
        for stage, rows, took in self._times:
            self._setup.forecast.note(stage, rows, took)
        self._times = []

    def _advance(self, live: list[Task], ended: list[Task], *, contended: bool) -> None:
        """Run a stage for all of them; if a joint one fails, for each alone, so that only the culprit fails."""
        self.took = None
        try:
            run, order = self._joined(live)
            if self._setup.queues_ahead:
                self._look_ahead(run, live, contended=contended)
            output = run.advance()
        except BaseException as error:  # raised where the callers wait
            if len(live) == 1 or not isinstance(error, Exception):
                self._fail(live, error, ended)
                return
            for task in live:
                self._advance([task], ended, contended=contended)
            self.took = None
            return
        now = self._setup.clock.now()
        self.took = now - self.began
        try:
            if len(order) == 1:
                self._publish_one(order[0], run, output, now, ended, contended=contended)
            else:
                self._publish(order, run, output, now, ended)
        except BaseException as error:  # the stage has run: it must not run again
            self._fail([task for task in live if task not in ended and task not in self.tasks], error, ended)

    def _look_ahead(self, run: Any, live: list[Task], *, contended: bool) -> None:
        """Let the engine queue what a request that nobody waits behind will ask for next."""
        self._queued = run.queued
        if self._queued:
            self.began = max(live[0].ended, self._picked)  # when its last stage ended, unless it waited since
        run.ahead = NOTHING if contended else live[0].ahead(self._setup.clock.now(), self.stages if self.final else None)

    def _fail(self, tasks: list[Task], error: BaseException, ended: list[Task]) -> None:
        for task in tasks:
            task.fail(error)
        ended += tasks

    def _joined(self, live: list[Task]) -> tuple[Stages, list[Task]]:
        """One run for the requests, and their order in it."""
        if len(live) == 1 and not isinstance(live[0].run, JointRun):
            return live[0].open(), live
        joint = live[0].run
        if isinstance(joint, JointRun) and len(joint.tasks) == len(live) and all(task.run is joint for task in live):
            return joint.run, joint.tasks
        for task in live:
            if isinstance(task.run, JointRun):
                task.run.split()
        if len(live) == 1:
            return live[0].open(), live
        if live[0].exit == 0:
            return self._setup.begin(join_inputs(join_rows, [task.inputs for task in live])), live
        runs: list[Any] = [task.run for task in live]
        return runs[0].join(runs[1:]), live

    def _publish_one(self, task: Task, run: Stages, output: Any, now: float, ended: list[Task], *, contended: bool) -> None:
        prediction = None
        if (contended or task.needs_prediction()) and self._setup.policy is None:
            if isinstance(self._setup.combiner, ByRule):
                prediction = self._setup.predict([*task.outputs, output])
            elif isinstance(output, Prediction):  # of stages with their rule inside
                prediction = output
        confidence = None if prediction is None else confidences(prediction)
        if task.exit == 0 and isinstance(run, Joinable):
            task.group = (task.group, run.kind) if self._setup.merges else object()
        (self.tasks if task.take(output, prediction, confidence, run, now) else ended).append(task)

    def _publish(self, order: list[Task], run: Any, output: Any, now: float, ended: list[Task]) -> None:
        """Split the output of a joint stage."""
        setup = self._setup
        prediction: Prediction | None = None
        if isinstance(setup.combiner, ByRule) and setup.policy is None:
            before = [join_rows([task.outputs[exit] for task in order]) for exit in range(order[0].exit)]
            prediction = setup.predict_or_none([*before, output])
        elif isinstance(output, Prediction):
            prediction = output
        confidence = None if prediction is None else confidences(prediction)
        joint: Any = JointRun(run, order)
        together = object()  # not the run, which refers to its requests: they would be a reference cycle
        if setup.policy is not None:  # each request drops rows of its own
            for task in order:
                task.run = joint
            joint.split()
        for task, end in zip(order, accumulate(joint.sizes), strict=True):
            rows = slice(end - task.rows, end)
            if task.exit == 0:
                task.group = (task.group, run.kind) if setup.merges else together
            try:
                more = task.take(
                    output.at(rows) if isinstance(output, Prediction) else output[rows],
                    None if prediction is None else prediction.at(rows),
                    None if confidence is None else confidence[rows],
                    joint if setup.policy is None else task.run,
                    now,
                )
            except Exception as error:  # such as NaN in its rows, which a policy reads
                self._fail([task], error, ended)
            else:
                (self.tasks if more else ended).append(task)


def _stops(task: Task, now: float) -> bool:
    """Whether a request takes no further stage; an error of its own `until` is its alone."""
    try:
        return task.stops(now)
    except Exception as error:
        task.fail(error)
        return True

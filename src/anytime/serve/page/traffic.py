"""Traffic for the load view: a bounded load that the server sends to itself, through its own policy and through all exits.

Both systems get the same inputs at the same times. They take turns, slice by slice, so that neither slows the other; each slice
begins with an empty queue, which favours the system that falls behind. There is one generator per server, and it stops when
nobody watches. It runs in demo mode only.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from anytime.checks import Inputs, check_number
from anytime.errors import DeadlineTooShort, FewClassesWarning, Overloaded
from anytime.loading.models import input_shape, make_example
from anytime.run import Answer, Budget, Runner, RunOptions
from anytime.run.export import ExportedModel
from anytime.serve.page.examples import Examples
from anytime.serve.service import Service

SLICE = 0.5
"""Seconds of a system's turn."""
MOST_RATE, MOST_SECONDS = 2000.0, 60.0
DEADLINES = (0.5e-3, 0.5)
SYSTEMS = ("anytime", "all_exits")
_UNWATCHED = 5.0
_KEPT = 256
_logger = logging.getLogger("anytime.serve")


@dataclass(frozen=True)
class Settings:
    """Requests per second, seconds until a request's deadline, and how many seconds to go on."""

    rate: float
    deadline: float
    seconds: float = 30.0

    def __post_init__(self) -> None:
        check_number(self.rate, "rate", low=1.0, most=MOST_RATE)
        check_number(self.deadline, "deadline", low=DEADLINES[0], most=DEADLINES[1])
        check_number(self.seconds, "seconds", low=1.0, most=MOST_SECONDS)


@dataclass
class Counts:
    """What became of the requests of a slice.

    Attributes:
        sent: All requests.
        in_time: Answers in time.
        refused: Requests without an answer.
        exits: The sum of the exits of the answers in time.
        correct: Correct answers in time; None without labels.
    """

    sent: int = 0
    in_time: int = 0
    refused: int = 0
    exits: int = 0
    correct: int | None = 0

    def note(self, answer: Answer | None, label: int | None) -> None:
        """Count a request; None for one that was refused."""
        self.sent += 1
        self.refused += answer is None
        if answer is not None and answer.deadline_met is not False:
            self.in_time += 1
            self.exits += answer.last_exit
            if self.correct is not None:
                self.correct += answer.label == label


class Traffic:
    """The generator. Its events are kept, so that a page that was cut off can go on where it was.

    Args:
        service: The model.
        examples: The inputs.
        seen: Told about each input that is answered.
        closing: Whether the server is about to end.
    """

    def __init__(
        self, service: Service, examples: Callable[[], Examples], seen: Callable[[Inputs], None], closing: Callable[[], bool]
    ) -> None:
        self._service, self._examples, self._seen, self._closing = service, examples, seen, closing
        self._ordinary: Runner | None = None
        self._settings: Settings | None = None
        self._until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._events: dict[int, dict[str, Any]] = {}
        self._last, self._watchers, self._watched = 0, 0, 0.0
        self._news = asyncio.Event()

    @property
    def running(self) -> bool:
        """Whether requests are being sent."""
        return self._task is not None and not self._task.done()

    def start(self, settings: Settings) -> int:
        """Start, or go on with other settings; returns the number of the last event before."""
        self._settings, self._until, self._watched = settings, time.monotonic() + settings.seconds, time.monotonic()
        if not self.running:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(_log)
        return self._last

    def stop(self) -> None:
        """Send nothing more after the current slice."""
        self._until = 0.0

    async def follow(self, after: int) -> AsyncGenerator[tuple[int, str, dict[str, Any]], None]:
        """The events after a number, and then new ones until the traffic ends."""
        if after > self._last:  # of an earlier server
            after = 0
        self._watchers += 1
        try:
            while True:
                news = self._news
                for number in [number for number in self._events if number > after]:
                    after = number
                    yield number, "slice", self._events[number]
                if not self.running:
                    yield after, "end", {}
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), 1.0)
        finally:
            self._watchers -= 1
            self._watched = time.monotonic()

    async def close(self) -> None:
        """End the requests and the threads."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._ordinary is not None:
            await asyncio.to_thread(self._ordinary.close)

    async def _run(self) -> None:
        examples = await asyncio.to_thread(self._examples)
        if self._ordinary is None:
            self._ordinary = await asyncio.to_thread(_all_exits, self._service)
        runners = dict(zip(SYSTEMS, (self._service.runner, self._ordinary), strict=True))
        chance, began, turn = np.random.default_rng(), time.monotonic(), 0
        if self._until and self._settings is not None:  # its time begins now: the preparation may have taken seconds
            self._until, self._watched = began + self._settings.seconds, began
        try:
            while time.monotonic() < self._until and not self._closing() and not self._alone():
                settings = self._settings
                assert settings is not None
                arrivals, rows = draw(chance, settings.rate, examples.rows)
                names = SYSTEMS if turn % 2 == 0 else SYSTEMS[::-1]
                found = {name: await self._slice(name, runners[name], examples, arrivals, rows, settings) for name in names}
                turn += 1
                self._publish(
                    {
                        "at": round(time.monotonic() - began, 3),
                        "rate": settings.rate,
                        "deadline_ms": 1e3 * settings.deadline,
                        **{name: asdict(found[name]) for name in SYSTEMS},
                    }
                )
        finally:
            self._publish(None)

    async def _slice(
        self, name: str, runner: Runner, examples: Examples, arrivals: list[float], rows: list[int], settings: Settings
    ) -> Counts:
        """Send the requests of a slice and wait for all of them."""
        counts, loop = Counts(correct=0 if examples.labelled else None), asyncio.get_running_loop()
        # An ordinary server has no answer before the last exit.
        budget = Budget(settings.deadline, min_exits=None if name == "anytime" else self._service.exits)
        began = loop.time()
        async with asyncio.TaskGroup() as group:
            for at, row in zip(arrivals, rows, strict=True):
                left = began + at - loop.time()
                if left > 0:
                    await asyncio.sleep(left)
                group.create_task(self._one(runner, examples, row, budget, counts))
        return counts

    async def _one(self, runner: Runner, examples: Examples, row: int, budget: Budget, counts: Counts) -> None:
        x = examples.part(row, row + 1)
        answer: Answer | None = None
        with suppress(Overloaded, DeadlineTooShort):
            answer = await runner.predict_async(x, budget=budget)
        counts.note(answer, examples.label(row))
        self._seen(x)

    def _alone(self) -> bool:
        return self._watchers == 0 and time.monotonic() - self._watched > _UNWATCHED

    def _publish(self, event: dict[str, Any] | None) -> None:
        if event is not None:
            self._last += 1
            self._events[self._last] = event
            self._events.pop(self._last - _KEPT, None)
        news, self._news = self._news, asyncio.Event()
        news.set()


def _log(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _logger.error("the traffic of the page failed", exc_info=error)


def draw(chance: np.random.Generator, rate: float, rows: int) -> tuple[list[float], list[int]]:
    """The requests of a slice: times of a Poisson process, and a row for each."""
    count = int(chance.poisson(rate * SLICE))
    arrivals = np.sort(chance.uniform(0, SLICE, count))
    return arrivals.tolist(), chance.integers(rows, size=count).tolist()


def _all_exits(service: Service) -> Runner:
    """The same network on the same engine, as an ordinary server runs it."""
    model, options = service.opened.model, RunOptions(schedule="all-exits", threads=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewClassesWarning)
        if isinstance(model, ExportedModel):
            runner = Runner(model, options=options)
        else:
            runner = Runner(model, service.runner.rule, service.runner.engine, options=options)
    runner.warm_up(make_example(model, input_shape(model), 1))
    return runner

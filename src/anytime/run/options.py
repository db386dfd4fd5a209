"""How a runner schedules its requests: one object in place of many arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from anytime.checks import check_choice, check_count, check_flag, check_threads
from anytime.errors import OptionError
from anytime.run.budget import Duration, seconds
from anytime.run.scheduler import POLICIES, SchedulingPolicy
from anytime.run.timing.clock import Clock, MonotonicClock
from anytime.run.timing.forecast import Forecast

LARGEST_BATCH = 16


@dataclass(frozen=True)
class RunOptions:
    """Scheduling of a `Runner`. The defaults are for answers by a deadline on a shared machine.

    Attributes:
        schedule: What runs next if several requests wait: a policy of `anytime.run.scheduler`, or its name.
        largest_batch: How many inputs a shared batch may have; it has fewer where a larger one saves little time per request.
        queue: How many requests may wait; further ones are refused.
        workers: How many threads may run stages, including those whose stages were given up. No more stages run at once than
            there are cores for, with `threads` each, and one on a GPU.
        threads: Threads per stage, set by `torch.set_num_threads` for the whole process and restored by `Runner.close`; None
            leaves it unchanged. Two have a far worse latency tail than one on a busy machine.
        nice: By how much the priority of the threads that run stages is lower than that of the callers, 0 to 19, on Linux.
            A server on few cores reads requests and sends answers more promptly with 5.
        preempt: Whether a deadline ends a request while a stage is running. If not, stages run in the caller's own thread: on
            a busy core this avoids most delays, but a stage that takes far longer than expected makes its answer late.
        grace: How long after its deadline an answer is not yet late. With a grace period, typical times are aimed at the
            deadline and only slow ones use the grace period; without one, slow times are aimed at the deadline as well.
        resolution: For how long a GPU may compute stages that turn out not to be needed, after an interrupt for example.
            Engines with CUDA graphs queue so many stages behind the running one; with 0 each starts when it is requested.
        on_too_short: What to do if not even the first exit fits: `raise` a `DeadlineTooShort` or `Overloaded`, or return the
            `prior`.
        prior: The class probabilities before anything is computed; uniform by default.
        forecast: Forecasts the stage times; a new one for each runner by default.
        clock: The clock.

    Example:
        >>> RunOptions(schedule="least-progress", grace="0.5ms").grace
        0.0005
    """

    schedule: str | SchedulingPolicy = "gain"
    largest_batch: int = LARGEST_BATCH
    queue: int = 4096
    workers: int = 4
    threads: int | None = 1
    nice: int = 0
    preempt: bool = True
    grace: Duration = 0.0
    resolution: Duration = 0.5e-3
    on_too_short: Literal["raise", "prior"] = "raise"
    prior: Any = None
    forecast: Forecast | None = None
    clock: Clock = field(default_factory=MonotonicClock)

    def __post_init__(self) -> None:
        for name in ("largest_batch", "queue", "workers"):
            check_count(getattr(self, name), name)
        if self.threads is not None:
            check_threads(self.threads)
        check_count(self.nice, "nice", low=0, most=19)
        check_flag(self.preempt, "preempt")
        check_choice(self.on_too_short, "on_too_short", ("raise", "prior"))
        if isinstance(self.schedule, str):
            check_choice(self.schedule, "schedule", tuple(POLICIES))
        elif not hasattr(self.schedule, "choose"):
            raise OptionError(
                f"schedule is {self.schedule!r}",
                expected=f"a policy with choose(now, requests, times), or one of {', '.join(POLICIES)}",
                fix="omit it for the default, 'gain'",
            )
        if self.forecast is not None and not isinstance(self.forecast, Forecast):
            raise OptionError(
                f"forecast is {self.forecast!r}", expected="an anytime.run.Forecast", fix="pass forecast=Forecast()"
            )
        for name in ("grace", "resolution"):
            object.__setattr__(self, name, seconds(getattr(self, name)))

    @property
    def policy(self) -> SchedulingPolicy:
        """The scheduling policy."""
        return POLICIES[self.schedule]() if isinstance(self.schedule, str) else self.schedule

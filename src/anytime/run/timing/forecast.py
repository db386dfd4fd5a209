"""Forecasts of stage times, from recent durations of each stage and batch size.

An answer is late if a stage takes long or if its caller is woken late; both at once is rare. A caller that waits for a worker
thread has an answer at its deadline whatever is running: a stage is started if there is time for a typical stage (the median)
and a slow wake-up (a high quantile). A caller that runs the stages itself cannot abandon one: there must also be time for a
slow stage and a typical wake-up. With a grace period after the deadline, slow cases may use it: a stage is given up no earlier
than necessary for all but the rarest wake-ups to end within the grace period.

Every stage that runs is recorded, so a change of load shows after a few requests. A stage that is expected to take too long is
not started, and what is not started is not measured. To recover from an old load, one in a hundred of these is tried anyway,
and after four fast trials in a row the older durations are forgotten. A caller that cannot abandon a stage tries only what fits
the shortest time seen, or else one in a thousand. First runs are slow, and one spike among few durations looks typical. A
request that would not start at all is therefore tried at once if few durations are known and it may fit, as long as such trials
are fast; so is a batch size that was never seen. If requests are rare, one that can be answered at the deadline is tried after
a second of refusals.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from threading import RLock
from typing import NamedTuple

from anytime.checks import check_count, check_number
from anytime.run.forks import renew_in_children

_PREEMPTING = ("thread", "asyncio")
"""Execution modes in which the caller has an answer at its deadline whatever is running."""
_SLOW_DISPATCH = 0.95
"""The quantile of dispatch times that counts as slow. Rare, unpredictable spikes must not rule out every stage."""
_RARE_DISPATCH = 0.99
"""The quantile of dispatch times that should end within the grace period."""
_LIKELY = 0.9
"""The quantile of the times of a first stage that counts as likely."""
_TRY_EVERY = 100
_TRY_ANYWAY = 1000
_TRIALS = 4
_FAST = 0.8
"""A trial is fast if it takes less than this fraction of its forecast."""
_FEW = 20
"""Below so many durations a window is uncertain: its high quantile is its largest value."""
_STALE = 1.0
"""Seconds of nothing but refusals after which a trial follows."""
_BATCHES = 64
"""Batch sizes remembered per stage; the least recently used one is dropped."""
_TOGETHER = 8
"""Requests whose times are processed together: one by one, most of the time would go into cache misses. While few durations
are known, each is processed at once."""


class DurationWindow:
    """The most recent durations of one kind, ordered by time and by size.

    Args:
        length: How many to keep.
        quantile: The quantile that counts as slow.
        values: Initial durations, oldest first.

    Attributes:
        median: Their median; 0 if there are none, as the next two.
        slow: Their `quantile`.
        shortest: The shortest.
    """

    def __init__(self, length: int, quantile: float, values: Iterable[float] = ()) -> None:
        self._length, self._quantile = length, quantile
        self._recent: list[float] = []
        self._ordered: list[float] = []
        self.median = self.slow = self.shortest = 0.0
        self._declined, self._on_trial, self._hopeful = 0, False, True
        self._since: float | None = None
        self._fast: list[float] = []
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, value: float) -> None:
        """Add a duration and drop the oldest one beyond the length."""
        if self._on_trial:
            self._judge(value)
        recent, ordered = [*self._recent, value], self._ordered.copy()
        insort(ordered, value)
        if len(recent) > self._length:
            del ordered[bisect_left(ordered, recent.pop(0))]
        self._replace(recent, ordered)

    def _replace(self, recent: list[float], ordered: list[float]) -> None:
        """Set everything at once: an exception in a signal handler, or a fork, must not leave the lists inconsistent."""
        median, slow = ordered[(len(ordered) - 1) // 2], ordered[math.ceil(self._quantile * len(ordered)) - 1]
        self._recent, self._ordered, self.median, self.slow, self.shortest = recent, ordered, median, slow, ordered[0]
        self._declined, self._since = 0, None

    def at(self, quantile: float) -> float:
        """A quantile of the durations; 0 if there are none."""
        return self._ordered[math.ceil(quantile * len(self._ordered)) - 1] if self._ordered else 0.0

    def decline(self, *, every: int = _TRY_EVERY, uncertain: bool = False, now: float | None = None) -> bool:
        """Record that these durations rule something out; whether to try it anyway.

        Args:
            every: Try one in so many.
            uncertain: Whether to try at once while there are few durations.
            now: The time, to try after a second of refusals.
        """
        self._declined += 1
        if now is not None and self._since is None:
            self._since = now
        stale = now is not None and self._since is not None and now - self._since >= _STALE
        early = uncertain and self._hopeful and len(self) < _FEW
        if not (early or stale or self._declined >= every):
            return False
        self._on_trial, self._hopeful = True, False  # until this trial turns out fast
        self._declined, self._since = 0, None
        return True

    def _judge(self, value: float) -> None:
        """After enough fast trials in a row, forget all earlier durations."""
        self._on_trial, self._hopeful = False, value < _FAST * self.slow
        self._fast = [*self._fast, value] if self._hopeful else []
        if len(self._fast) == _TRIALS:
            self._recent, self._ordered, self._fast = self._fast[:-1], sorted(self._fast[:-1]), []


_UNKNOWN = DurationWindow(1, 1.0)
"""For what was never seen: it takes no time."""


class Outlook(NamedTuple):
    """What is expected of a request, in seconds.

    Attributes:
        dispatch: How long before its deadline a caller takes the best answer so far. In a preempting mode the slow time from
            there to the delivered answer, less what the grace period allows; for a caller that runs the stages the typical one.
        needed: The time each stage needs to start, up to the delivery of its answer.
        shortest_dispatch: As `dispatch`, at best.
        typical_dispatch: As `dispatch`, typically.
        least: A first stage that had to wait for its turn is not started with less time than this.
        likely: The time in which a first stage most likely ends.
        shortest: The time of each stage at best.
    """

    dispatch: float
    needed: tuple[float, ...]
    shortest_dispatch: float = 0.0
    typical_dispatch: float = 0.0
    least: float = 0.0
    likely: float = 0.0
    shortest: tuple[float, ...] = ()

    def for_trial(self, left: float) -> Outlook:
        """For a first stage that is tried although it is not expected to fit into the seconds left."""
        return self._replace(dispatch=self.shortest_dispatch if self.shortest_dispatch < left else 0.0, least=0.0)

    def under_contention(self, left: float) -> Outlook:
        """For a request that competes with others: the first stage is started if it may fit at all."""
        latest = max(self.shortest_dispatch, min(self.typical_dispatch, left / 2), left - self.likely)
        return self._replace(dispatch=min(self.dispatch, latest), least=0.0)


class Forecast:
    """Durations of the stages and of dispatching an answer; thread-safe.

    Args:
        quantile: The quantile of a stage's recent durations that counts as slow. The higher, the fewer late answers and the
            fewer exits: with 0.99, two interruptions in a hundred rule a stage out.
        window: How many durations count as recent.
    """

    def __init__(self, *, quantile: float = 0.97, window: int = 100) -> None:
        check_number(quantile, "quantile", above=0, most=1)
        self._quantile, self._length = quantile, check_count(window, "window")
        self._stages: dict[int, OrderedDict[int, DurationWindow]] = {}
        self._dispatch: dict[str, DurationWindow] = {}
        self._noted: deque[tuple[tuple[int, int, float], ...]] = deque()
        self._noted_dispatch: deque[tuple[str, float]] = deque()
        self._outlooks: dict[tuple[int, int, str, float], Outlook] = {}
        self._lock = RLock()  # garbage collection may end a request, and so note its times, while this thread holds it
        renew_in_children(self)

    def renew(self) -> None:
        """Make a new lock, in a forked process."""
        self._lock = RLock()

    def seed(self, exit: int, batch: int, values: Iterable[float]) -> None:
        """Start with these durations, which newer ones replace one by one."""
        with self._lock:
            self._digest()
            self._stages.setdefault(exit, OrderedDict())[batch] = DurationWindow(self._length, self._quantile, values)
            self._outlooks.clear()

    def stage(self, exit: int, batch: int) -> float:
        """The seconds of a slow run of a stage; 0 if unknown.

        For a batch size that was never seen, those of the next larger one, or in proportion to the largest.
        """
        with self._lock:
            self._digest()
            window, times = self._stage(exit, batch)
            return window.slow * times

    def outlook(self, exits: int, batch: int, mode: str, grace: float = 0.0) -> Outlook:
        """What to expect of the first `exits` stages, at once: between stages every microsecond counts.

        Args:
            exits: The number of stages.
            batch: The batch size.
            mode: The execution mode.
            grace: Seconds after the deadline in which an answer is not yet late.
        """
        key = exits, batch, mode, grace
        if len(self._noted) < _TOGETHER and (before := self._outlooks.get(key)) is not None:
            return before
        with self._lock:
            self._digest()
            dispatch = self._dispatch.get(mode, _UNKNOWN)
            stages = [self._stage(exit, batch) for exit in range(exits)]
            outlook = _outlook(dispatch, stages, grace, preempting=mode in _PREEMPTING)
            if min(len(dispatch), *[len(window) for window, _ in stages]) >= _FEW:
                self._outlooks[key] = outlook
            return outlook

    def _stage(self, exit: int, batch: int) -> tuple[DurationWindow, float]:
        """The durations to go by, and the factor to multiply them with."""
        known = self._stages.get(exit)
        if not known:
            return _UNKNOWN, 1.0
        window = known.get(batch)
        if window is not None and len(window):
            return window, 1.0
        other = _nearest(known, batch)
        return (_UNKNOWN, 1.0) if other is None else (known[other], max(1.0, batch / other))

    def note(self, exit: int, batch: int, taken: float) -> None:
        """Record the duration of a stage."""
        self.note_all(((exit, batch, taken),))

    def note_all(self, times: Iterable[tuple[int, int, float]]) -> None:
        """Record the durations of the stages of a request: exit, batch size and seconds of each."""
        self._noted.append(tuple(times))
        if len(self._noted) > 2 * _TOGETHER:  # no forecasts are requested
            with self._lock:
                self._digest()

    def note_dispatch(self, mode: str, taken: float) -> None:
        """Record how long it took to dispatch an answer."""
        self._noted_dispatch.append((mode, taken))

    def _digest(self) -> None:
        if self._noted or self._noted_dispatch:
            self._outlooks.clear()
        while self._noted_dispatch:
            mode, taken = self._noted_dispatch.popleft()
            self._dispatch.setdefault(mode, DurationWindow(self._length, _SLOW_DISPATCH)).add(max(taken, 0.0))
        while self._noted:
            for exit, batch, taken in self._noted.popleft():
                known = self._stages.setdefault(exit, OrderedDict())
                known.setdefault(batch, DurationWindow(self._length, self._quantile)).add(max(taken, 0.0))
                known.move_to_end(batch)  # the most recent
                if len(known) > _BATCHES:
                    del known[next(iter(known))]

    def decline(self, exit: int, batch: int, mode: str, *, left: float = 0.0, now: float = 0.0) -> bool:
        """Record that the forecast rules out a stage; whether to try it anyway.

        Args:
            exit: The stage, from 0; without the first there is no answer at all.
            batch: The batch size.
            mode: The execution mode.
            left: The seconds left.
            now: The time.
        """
        with self._lock:
            if exit == 0:  # not for later ones: between stages every microsecond counts
                self._digest()
            known: Mapping[int, DurationWindow] = self._stages.get(exit, {})
            near = batch if batch in known else _nearest(known, batch)
            windows = [known[near]] if near is not None else []
            if exit == 0 and mode in self._dispatch:
                windows.append(self._dispatch[mode])
            may_fit = sum(window.shortest for window in windows) <= left
            if near is not None and near != batch and may_fit:
                return True  # other batch sizes run often, and would never let this one run
            preempting = mode in _PREEMPTING
            every = _TRY_EVERY if preempting or may_fit else _TRY_ANYWAY
            moment = now if exit == 0 and preempting and may_fit else None
            trials = [
                window.decline(every=every, uncertain=exit == 0 and (may_fit or len(window) == 1), now=moment)
                for window in windows
            ]
            return True in trials  # every window has been notified


def _outlook(
    dispatch: DurationWindow, stages: Sequence[tuple[DurationWindow, float]], grace: float, *, preempting: bool
) -> Outlook:
    """What to expect of stages with these durations, each multiplied by a factor."""
    typical = dispatch.median
    reserve = max(0.0, min(dispatch.slow, dispatch.at(_RARE_DISPATCH) - grace))
    slow = max(typical, reserve)
    shortest = tuple(known.shortest * times for known, times in stages)
    first, times = stages[0]
    if preempting:
        needed = [known.median * times + slow for known, times in stages]
        likely = min(first.at(_LIKELY), 2 * first.median) * times + typical  # one spike among a few is not likely
        least = first.median * times + typical
        return Outlook(reserve, tuple(needed), dispatch.shortest, typical, least, likely, shortest)
    needed = [max(known.median * times + slow, known.slow * times + typical - grace) for known, times in stages]
    return Outlook(typical, tuple(needed), dispatch.shortest, typical, needed[0], needed[0], shortest)


def _nearest(known: Mapping[int, DurationWindow], batch: int) -> int | None:
    sizes = [size for size, window in known.items() if len(window)]
    larger = [size for size in sizes if size >= batch]
    return min(larger) if larger else max(sizes, default=None)

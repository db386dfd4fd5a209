"""Forecasts of stage times, from recent durations of each stage and batch size.

An answer is late if a stage takes long or if its caller is woken late; both at once is rare. A caller that waits for a worker
thread has an answer at its deadline whatever is running: a stage is started if there is time for a typical stage (the median)
and a slow wake-up (a high quantile). A caller that runs the stages itself cannot abandon one: there must also be time for a
slow stage and a typical wake-up. With a grace period after the deadline, slow cases may use it.

What is not started is not measured. So that an old load is not taken for the present one, one in a hundred of the stages that
the forecast rules out is tried anyway, and one after a second without any; if it is fast, the older durations are forgotten.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from threading import RLock
from typing import Any, NamedTuple

from anytime.checks import check_count, check_number
from anytime.run.forks import renew_in_children

SLOW_DISPATCH, RARE_DISPATCH = 0.95, 0.99
"""The quantiles of dispatch times that count as slow and as rare. Rare, unpredictable spikes must not rule out every stage."""
_TRY_EVERY = 100
_STALE = 1.0
"""Seconds of nothing but refusals after which a trial follows."""
_FAST = 0.8
"""A trial is fast if it takes less than this fraction of the median."""
_BATCHES = 64
"""Batch sizes remembered per stage; the least recently used one is dropped."""
_SOME = 3
"""Durations from which on a batch size is known."""
_PAYS = 0.9
"""A larger batch pays if a row takes less than this fraction of the time it takes in the next smaller one."""


class DurationWindow:
    """The most recent durations of one kind.

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
        self._declined, self._since, self._on_trial = 0, math.inf, False
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, value: float) -> None:
        """Add a duration and drop the oldest one beyond the length."""
        recent, ordered = [*self._recent, value], self._ordered.copy()
        if self._on_trial and value < _FAST * self.median:  # the load that the others were measured under has gone
            recent, ordered = [value], []
        insort(ordered, value)
        if len(recent) > self._length:
            del ordered[bisect_left(ordered, recent.pop(0))]
        # All at once: an exception in a signal handler, or a fork, must not leave the lists inconsistent.
        median, slow = ordered[(len(ordered) - 1) // 2], ordered[math.ceil(self._quantile * len(ordered)) - 1]
        self._recent, self._ordered, self.median, self.slow, self.shortest = recent, ordered, median, slow, ordered[0]
        self._declined, self._since, self._on_trial = 0, math.inf, False

    def at(self, quantile: float) -> float:
        """A quantile of the durations; 0 if there are none."""
        return self._ordered[math.ceil(quantile * len(self._ordered)) - 1] if self._ordered else 0.0

    def decline(self, now: float) -> bool:
        """Record that these durations rule something out; whether to try it anyway."""
        self._declined, self._since = self._declined + 1, min(self._since, now)
        if self._declined < _TRY_EVERY and now - self._since < _STALE:
            return False
        self._declined, self._since, self._on_trial = 0, math.inf, True
        return True


_UNKNOWN = DurationWindow(1, 1.0)
"""For what was never seen: it takes no time."""


class Dispatch(NamedTuple):
    """How long it takes from the end of a stage to the delivered answer, in seconds.

    Attributes:
        typical: The median.
        slow: A high quantile, less the part of the grace period that it may use.
        rare: A very high one, likewise.
    """

    typical: float = 0.0
    slow: float = 0.0
    rare: float = 0.0


class Forecast:
    """Durations of the stages and of dispatching an answer; thread-safe. Stages count from 1.

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
        self._lock = RLock()  # garbage collection may end a request, and so note its times, while this thread holds it
        renew_in_children(self)

    def renew(self) -> None:
        """Make a new lock, in a forked process."""
        self._lock = RLock()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: the durations, without the lock."""
        with self._lock:
            stages = {stage: known.copy() for stage, known in self._stages.items()}
            return {**self.__dict__, "_lock": None, "_stages": stages, "_dispatch": self._dispatch.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.renew()
        renew_in_children(self)

    def seed(self, stage: int, batch: int, values: Iterable[float]) -> None:
        """Start with these durations, which newer ones replace one by one."""
        with self._lock:
            self._stages.setdefault(stage, OrderedDict())[batch] = DurationWindow(self._length, self._quantile, values)

    def note(self, stage: int, batch: int, taken: float) -> None:
        """Record the duration of a stage."""
        with self._lock:
            known = self._stages.setdefault(stage, OrderedDict())
            window = known.get(batch)
            if window is None:
                known[batch] = window = DurationWindow(self._length, self._quantile)
                if len(known) > _BATCHES:
                    del known[next(iter(known))]
            else:
                known.move_to_end(batch)
            window.add(max(taken, 0.0))

    def note_dispatch(self, mode: str, taken: float) -> None:
        """Record how long it took to dispatch an answer."""
        with self._lock:
            self._dispatch.setdefault(mode, DurationWindow(self._length, SLOW_DISPATCH)).add(max(taken, 0.0))

    def seconds(self, stage: int, batch: int) -> float:
        """The typical duration of a stage; 0 if unknown. See `_at` for a batch size that was never seen."""
        known = self._stages.get(stage)
        window = None if known is None else known.get(batch)
        return self._at(stage, batch, "median") if window is None else window.median

    def knows(self, stage: int, batch: int) -> bool:
        """Whether a stage was measured some times for this batch size."""
        known = self._stages.get(stage)
        window = None if known is None else known.get(batch)
        return window is not None and len(window) >= _SOME

    def slow(self, stage: int, batch: int) -> float:
        """The duration of a slow run of a stage; 0 if unknown."""
        known = self._stages.get(stage)
        window = None if known is None else known.get(batch)
        return self._at(stage, batch, "slow") if window is None else window.slow

    def shortest(self, stage: int, batch: int) -> float:
        """The duration of a stage at best; 0 if unknown."""
        return self._at(stage, batch, "shortest")

    def dispatch(self, mode: str, grace: float = 0.0, longest: float = math.inf) -> Dispatch:
        """How long it takes to dispatch an answer in an execution mode.

        Args:
            mode: The execution mode.
            grace: Seconds after the deadline in which an answer is not yet late.
            longest: Longer times are not expected: what was measured under an overload must not refuse everything after it.
        """
        window = self._dispatch.get(mode, _UNKNOWN)
        slow, rare = max(window.slow - grace, 0.0), max(window.at(RARE_DISPATCH) - grace, 0.0)
        return Dispatch(min(window.median, longest), min(slow, longest), min(rare, longest))

    def decline(self, stage: int, batch: int, mode: str, now: float) -> bool:
        """Record that the forecast rules out a stage; whether to try it anyway."""
        with self._lock:
            near = self._nearest(stage, batch)
            windows = [self._stages[stage][near]] if near is not None else []
            if mode in self._dispatch:
                windows.append(self._dispatch[mode])
            trials = [window.decline(now) for window in windows]
            return True in trials or not trials  # every window has been notified

    def paying_batch(self, most: int) -> int:
        """The smallest batch size, by its first stage, beyond which larger ones save little time per row; at most `most`.

        As long as little is known of large batches they count as paying, so that they are run and measured. The shortest
        durations are compared: some sizes were measured under load and others before it.
        """
        with self._lock:  # other threads may note further sizes
            known: Mapping[int, DurationWindow] = dict(self._stages.get(1, {}))
        sizes = sorted(size for size, window in known.items() if size <= most and len(window) >= _SOME)
        if not sizes or sizes[-1] * 2 <= most:
            return most
        per_row = {size: known[size].shortest / size for size in sizes}
        best = min(per_row.values())
        return next(size for size in sizes if _PAYS * per_row[size] <= best)

    def _nearest(self, stage: int, batch: int) -> int | None:
        sizes = list(self._stages.get(stage, ()))
        return min((size for size in sizes if size >= batch), default=max(sizes, default=None))

    def _at(self, stage: int, batch: int, kind: str) -> float:
        """For an unknown batch size, a line through the next smaller and the next larger one, or in proportion beyond them."""
        with self._lock:
            known = self._stages.get(stage)
            if not known:
                return 0.0
            if batch in known:
                return float(getattr(known[batch], kind))
            below, above = max((s for s in known if s < batch), default=0), min((s for s in known if s > batch), default=0)
            if not below:
                return float(getattr(known[above], kind))
            low = float(getattr(known[below], kind))
            if not above:
                return low * batch / below
            high = float(getattr(known[above], kind))
            return low + (high - low) * (batch - below) / (above - below)

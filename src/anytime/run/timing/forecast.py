"""How long a stage will take: from how long it took lately, for each stage and batch size.

An answer is late where a stage takes long or where its caller is woken late; both at once is rare. A caller that waits for a
thread has an answer at its deadline whatever is running there: then a stage is begun if there is time for a usual one (the
median) and a caller woken slowly (a high quantile). A caller that runs the stages itself cannot leave one: there must be time
for a slow one and a caller woken as usual too. Where there is a grace after the deadline, what is slow may run into it: a stage
is given up no sooner than it must be for all but the rarest awakenings to end within the grace.

Every stage that runs is noted, so a machine that becomes busy, or idle again, is noticed after a few requests. A stage that
is expected to take too long is not started, and what is not started is not measured. So as not to believe in a load for ever,
one in a hundred of those is tried all the same, and when four tries in a row were quick, what was known before is forgotten.
A caller that cannot leave a stage tries only what fits if it is as quick as ever, or else one in a thousand.
A first run is slow by itself, and one spike among a few times looks like a rule. So a request that would not be begun at all is
tried at once where little is known and it may fit, as long as such tries are quick, and so is a batch size that was never seen.
Requests that come seldom do not wait for the hundredth: who can be answered at the deadline is tried after a second.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from threading import RLock
from typing import NamedTuple

from anytime.errors import OptionError
from anytime.run.forks import renew_in_children

_CUT_OFF = ("thread", "asyncio")
"""Ways of handing over an answer by which the caller has one at its deadline whatever is running."""
_WOKEN = 0.95
"""Which quantile of the times to wake up counts as slow. Rare spikes, which nothing foresees, must not rule out every stage."""
_RARELY = 0.99
"""Which quantile of them is to end within the grace."""
_LIKELY = 0.9
"""Which quantile of the times of a first stage it is likely to keep to."""
_TRY_EVERY = 100
_TRY_ANYWAY = 1000
_TRIES = 4
_QUICK = 0.8
"""A try is quick that takes less than this share of what was forecast."""
_YOUNG = 20
"""Durations below which a window knows little: its high quantile is no more than its largest value."""
_STALE = 1.0
"""Seconds of nothing but refusals after which it is tried whether they are still right."""
_BATCHES = 64
"""Batch sizes remembered for each stage; the one that was used least recently makes room."""
_TOGETHER = 8
"""Requests whose times are put in order together: one by one, most of the work would be to fetch what the last stages swept
from the caches. Where little is known yet, each counts at once."""


class Window:
    """The last few durations of one thing, kept in order of time and of size.

    Args:
        length: How many.
        quantile: Which quantile of them counts as slow.
        values: The first ones, oldest first.

    Attributes:
        usual: Their median; 0 without any, as the other two.
        slow: The smallest duration that a share `quantile` of them does not exceed.
        quickest: The smallest.
    """

    def __init__(self, length: int, quantile: float, values: Iterable[float] = ()) -> None:
        self._length, self._quantile = length, quantile
        self._recent: list[float] = []
        self._ordered: list[float] = []
        self.usual = self.slow = self.quickest = 0.0
        self._declined, self._trying, self._hopeful = 0, False, True
        self._since: float | None = None
        self._quick: list[float] = []
        for value in values:
            self.add(value)

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, value: float) -> None:
        """Note a duration; the oldest one beyond the length goes."""
        if self._trying:
            self._judge(value)
        recent, ordered = [*self._recent, value], self._ordered.copy()
        insort(ordered, value)
        if len(recent) > self._length:
            del ordered[bisect_left(ordered, recent.pop(0))]
        self._replace(recent, ordered)

    def _replace(self, recent: list[float], ordered: list[float]) -> None:
        """Both lists at once: an exception out of a signal handler, or a fork, must not leave one without the other."""
        usual, slow = ordered[(len(ordered) - 1) // 2], ordered[math.ceil(self._quantile * len(ordered)) - 1]
        self._recent, self._ordered, self.usual, self.slow, self.quickest = recent, ordered, usual, slow, ordered[0]
        self._declined, self._since = 0, None

    def at(self, share: float) -> float:
        """The smallest duration that such a share of them does not exceed; 0 without any."""
        return self._ordered[math.ceil(share * len(self._ordered)) - 1] if self._ordered else 0.0

    def decline(self, *, every: int = _TRY_EVERY, doubtful: bool = False, now: float | None = None) -> bool:
        """Something is not to be begun because of these durations; true where it should be tried all the same.

        Args:
            every: Which one in a row to try.
            doubtful: Whether to try it at once where they are few.
            now: The time, where it is to be tried after a while.
        """
        self._declined += 1
        if now is not None and self._since is None:
            self._since = now
        stale = now is not None and self._since is not None and now - self._since >= _STALE
        unsure = doubtful and self._hopeful and len(self) < _YOUNG
        if not (unsure or stale or self._declined >= every):
            return False
        self._trying, self._hopeful = True, False  # there is hope again when this was quick
        self._declined, self._since = 0, None
        return True

    def _judge(self, value: float) -> None:
        """After enough quick tries in a row they are all that is known."""
        self._trying, self._hopeful = False, value < _QUICK * self.slow
        self._quick = [*self._quick, value] if self._hopeful else []
        if len(self._quick) == _TRIES:
            self._recent, self._ordered, self._quick = self._quick[:-1], sorted(self._quick[:-1]), []


_UNKNOWN = Window(1, 1.0)
"""Of what was never seen: it takes no time."""


class Outlook(NamedTuple):
    """What is expected of a request.

    Attributes:
        waking: How many seconds before its deadline a caller takes what there is. For one that is woken those from there to an
            answer in its hands, where that is slow, less what the grace allows; for one that runs the stages the usual ones.
        needed: The seconds there should be for each stage to be begun, and for its answer to be in the caller's hands.
        at_best: As `waking`, where that is quickest.
        usual: As `waking`, where that is usual.
        least: The seconds below which a first stage that had to wait for its turn is not begun: a usual one would not fit.
        likely: The seconds in which a first stage most likely ends.
        quick: The seconds that each stage takes at best.
    """

    waking: float
    needed: tuple[float, ...]
    at_best: float = 0.0
    usual: float = 0.0
    least: float = 0.0
    likely: float = 0.0
    quick: tuple[float, ...] = ()

    def of_a_try(self, left: float) -> Outlook:
        """What to go by where it is tried all the same whether the first stage can be had in the seconds left."""
        return self._replace(waking=self.at_best if self.at_best < left else 0.0, least=0.0)

    def of_a_crowd(self, left: float) -> Outlook:
        """What to go by where others compete for the same turns: the first stage is begun if it may fit at all."""
        return self._replace(
            waking=min(self.waking, max(self.at_best, min(self.usual, left / 2), left - self.likely)), least=0.0
        )


class Forecast:
    """Durations of the stages and of handing over an answer; may be used by several threads.

    Args:
        quantile: Which quantile of the recent durations of a stage counts as slow. The higher, the fewer answers are late and
            the more exits are given up: with 0.99, two interruptions in a hundred rule a stage out.
        window: How many durations count as recent.
    """

    def __init__(self, *, quantile: float = 0.97, window: int = 100) -> None:
        if not 0 < quantile <= 1:
            raise OptionError(f"quantile is {quantile!r}", expected="a share above 0, at most 1", fix="0.97 is the default")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise OptionError(f"window is {window!r}", expected="a whole number, at least 1", fix="100 is the default")
        self._quantile, self._length = quantile, window
        self._stages: dict[int, OrderedDict[int, Window]] = {}
        self._handing: dict[str, Window] = {}
        self._noted: deque[tuple[tuple[int, int, float], ...]] = deque()
        self._handed: deque[tuple[str, float]] = deque()
        self._outlooks: dict[tuple[int, int, str, float], Outlook] = {}
        self._lock = RLock()  # a collection may end a request, and so note its times, while this thread holds it
        renew_in_children(self)

    def renew(self) -> None:
        """The lock anew, in a forked process."""
        self._lock = RLock()

    def seed(self, exit: int, batch: int, values: Iterable[float]) -> None:
        """Begin with these durations, which newer ones replace one by one."""
        with self._lock:
            self._digest()
            self._stages.setdefault(exit, OrderedDict())[batch] = Window(self._length, self._quantile, values)
            self._outlooks.clear()

    def stage(self, exit: int, batch: int) -> float:
        """The seconds that a slow run of a stage takes; 0 where nothing is known.

        A batch size that was never seen takes as long as the next larger one, or in proportion to the largest.
        """
        with self._lock:
            self._digest()
            window, times = self._stage(exit, batch)
            return window.slow * times

    def joint(self, exit: int, rows: int) -> float:
        """The usual seconds of a stage, counted from 0, in a batch of so many rows.

        Sizes never seen are guessed from the largest known below, at half of the time in proportion: batches pay, and how much
        is known after the first one.
        """
        with self._lock:
            self._digest()
            known = {size: window for size, window in self._stages.get(exit, {}).items() if len(window)}
            if rows in known or not known:
                return known[rows].usual if known else 0.0
            below = max((size for size in known if size < rows), default=None)
            if below is None:
                return known[min(known)].usual
            return known[below].usual * (1 + rows / below) / 2

    def outlook(self, exits: int, batch: int, way: str, grace: float = 0.0) -> Outlook:
        """What is expected of the first `exits` stages, in one go: between stages every microsecond is the caller's.

        Args:
            exits: How many stages.
            batch: How many inputs.
            way: How the answer will be handed over.
            grace: Seconds after its deadline in which an answer is not yet late: what is slow may take so much longer.
        """
        asked = exits, batch, way, grace
        if len(self._noted) < _TOGETHER and (before := self._outlooks.get(asked)) is not None:
            return before
        with self._lock:
            self._digest()
            handing = self._handing.get(way, _UNKNOWN)
            stages = [self._stage(exit, batch) for exit in range(exits)]
            outlook = _outlook(handing, stages, grace, safe=way in _CUT_OFF)
            if min(len(handing), *[len(window) for window, _ in stages]) >= _YOUNG:
                self._outlooks[asked] = outlook
            return outlook

    def _stage(self, exit: int, batch: int) -> tuple[Window, float]:
        """The durations to judge by, and by what to multiply them."""
        known = self._stages.get(exit)
        if not known:
            return _UNKNOWN, 1.0
        window = known.get(batch)
        if window is not None and len(window):
            return window, 1.0
        other = _nearest(known, batch)
        return (_UNKNOWN, 1.0) if other is None else (known[other], max(1.0, batch / other))

    def note(self, exit: int, batch: int, taken: float) -> None:
        """A stage took so long."""
        self.note_all(((exit, batch, taken),))

    def note_all(self, times: Iterable[tuple[int, int, float]]) -> None:
        """The stages of a request took so long: exit, batch size and seconds of each."""
        self._noted.append(tuple(times))
        if len(self._noted) > 2 * _TOGETHER:  # nobody asks for forecasts
            with self._lock:
                self._digest()

    def note_handing(self, way: str, taken: float) -> None:
        """Handing over took so long."""
        self._handed.append((way, taken))

    def _digest(self) -> None:
        if self._noted or self._handed:
            self._outlooks.clear()
        while self._handed:
            way, taken = self._handed.popleft()
            self._handing.setdefault(way, Window(self._length, _WOKEN)).add(max(taken, 0.0))
        while self._noted:
            for exit, batch, taken in self._noted.popleft():
                known = self._stages.setdefault(exit, OrderedDict())
                known.setdefault(batch, Window(self._length, self._quantile)).add(max(taken, 0.0))
                known.move_to_end(batch)  # the most recent
                if len(known) > _BATCHES:
                    del known[next(iter(known))]

    def decline(self, exit: int, batch: int, way: str, *, left: float = 0.0, now: float = 0.0) -> bool:
        """A stage is not to be begun because of its forecast; true where it should be tried all the same.

        Args:
            exit: Which stage; without the first there is no answer at all.
            batch: How many inputs.
            way: How the answer would have been handed over.
            left: The seconds there are.
            now: The time.
        """
        with self._lock:
            if exit == 0:  # later ones are looked at between stages, where every microsecond is the caller's
                self._digest()
            known: Mapping[int, Window] = self._stages.get(exit, {})
            near = batch if batch in known else _nearest(known, batch)
            blamed = [known[near]] if near is not None else []
            if exit == 0 and way in self._handing:
                blamed.append(self._handing[way])
            may_fit = sum(window.quickest for window in blamed) <= left
            if near is not None and near != batch and may_fit:
                return True  # other batch sizes run often, and would never let this one have its turn
            safe = way in _CUT_OFF
            every = _TRY_EVERY if safe or may_fit else _TRY_ANYWAY
            moment = now if exit == 0 and safe and may_fit else None
            doubtful = [exit == 0 and (may_fit or len(window) == 1) for window in blamed]
            tries = [
                window.decline(every=every, doubtful=doubt, now=moment) for window, doubt in zip(blamed, doubtful, strict=True)
            ]
            return True in tries  # every one of them has been told


def _outlook(handing: Window, stages: Sequence[tuple[Window, float]], grace: float, *, safe: bool) -> Outlook:
    """What is expected of stages whose durations are these, multiplied by so much."""
    usually = handing.usual
    waking = max(0.0, min(handing.slow, handing.at(_RARELY) - grace))
    slowly = max(usually, waking)
    quick = tuple(known.quickest * times for known, times in stages)
    first, times = stages[0]
    if safe:
        needed = [known.usual * times + slowly for known, times in stages]
        likely = min(first.at(_LIKELY), 2 * first.usual) * times + usually  # one spike among a few is not likely
        return Outlook(waking, tuple(needed), handing.quickest, usually, first.usual * times + usually, likely, quick)
    needed = [max(known.usual * times + slowly, known.slow * times + usually - grace) for known, times in stages]
    return Outlook(usually, tuple(needed), handing.quickest, usually, needed[0], needed[0], quick)


def _nearest(known: Mapping[int, Window], batch: int) -> int | None:
    sizes = [size for size, window in known.items() if len(window)]
    larger = [size for size in sizes if size >= batch]
    return min(larger) if larger else max(sizes, default=None)

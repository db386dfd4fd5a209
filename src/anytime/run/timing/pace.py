"""How many stages to run side by side: the number that gets the most done, by trial.

Cores alone do not say. Threads that run many small operations wait for Python's lock, and for each other's cores where other
programs use the machine: two of them can get less done than one. Where operations are long, or run outside of Python, as many
stages as cores are best. What was done is measured in the quickest times of the stages, so that their mix does not matter; a
stage that ended after its request's deadline counts as nothing done.
"""

from __future__ import annotations

_EPOCH = 16
"""Stages in one measurement."""
_EXPLORE = 12
"""After so many measurements a number next to the best one is measured again."""
_NEW = 0.3
"""The weight of a new measurement."""


class Pace:
    """Measures what is done per second with each number of stages side by side.

    Args:
        most: The largest number.

    Attributes:
        level: The number to run now.
    """

    def __init__(self, most: int) -> None:
        self.most = self.level = most
        self._rates: dict[int, float] = {}
        self._epochs = 0
        self.pause()

    def pause(self) -> None:
        """There was not enough fix: what comes next is measured anew."""
        self._since: float | None = None
        self._count, self._done = 0, 0.0

    def note(self, done: float, now: float) -> None:
        """A stage has ended while there was enough to do.

        Args:
            done: The seconds it takes at best.
            now: The time.
        """
        if self.most == 1:
            return
        if self._since is None or now <= self._since:
            self._since = now  # from the end of a stage on, which another number of stages may have slowed down
            return
        self._count += 1
        self._done += done
        if self._count < _EPOCH:
            return
        rate = self._done / (now - self._since)
        before = self._rates.get(self.level, rate)
        self._rates[self.level] = before + _NEW * (rate - before)
        self._choose()
        self.pause()

    def _choose(self) -> None:
        self._epochs += 1
        unknown = [level for level in range(1, self.most + 1) if level not in self._rates]
        best = max(self._rates, key=self._rates.__getitem__)
        if unknown:
            self.level = unknown[0]
        elif self._epochs % _EXPLORE == 0:
            up = self._epochs % (2 * _EXPLORE) == 0
            self.level = best + 1 if best == 1 or (up and best < self.most) else best - 1
        else:
            self.level = best

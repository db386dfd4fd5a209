"""What the environment allows: time, multiply-accumulates, a number of exits, or until something happens.

A time is a duration. It becomes a deadline on the monotonic clock when a request begins, see `Budget.deadline`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from anytime.checks import check_count, check_number
from anytime.errors import OptionError

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*([a-zµμ]*)\s*", re.IGNORECASE | re.ASCII)
_LONGEST = 1e9
"""Seconds, some thirty years: longer waits overflow the timers of some systems."""

Duration = str | float | timedelta
"""`"5ms"`, `"2s"`, `"300us"`, a timedelta, or seconds as a number."""


@runtime_checkable
class Event(Protocol):
    """Anything like a `threading.Event`."""

    def is_set(self) -> bool:
        """Whether it has happened."""
        ...


def seconds(value: Duration) -> float:
    """A duration in seconds.

    >>> seconds("5ms"), seconds(timedelta(seconds=2)), seconds(0.25)
    (0.005, 2.0, 0.25)
    """
    if type(value) is float:  # as in most requests; the other questions cost them microseconds
        found = value
    elif isinstance(value, timedelta):
        found = value.total_seconds()
    elif isinstance(value, str):
        found = _read(value)
    elif isinstance(value, Real) and not isinstance(value, bool):  # NumPy's numbers too
        found = _as_float(value)
    else:
        raise _no_duration(value)
    if not 0 <= found <= _LONGEST:  # NaN is neither
        raise OptionError(
            f"a duration of {value!r}",
            expected="at least 0, and at most thirty years",
            fix="for no deadline at all leave it out" if found > 0 else "give a positive duration, such as '5ms'",
        )
    return found


@dataclass(frozen=True, init=False)
class Budget:
    """Limits on one request; what is not given is not limited, and the first limit that is reached counts.

    Args:
        time: A duration from the call on: `"5ms"`, `"2s"`, `"300us"`, a timedelta, or seconds as a number.
        macs: Multiply-accumulates for one input, as `anytime.models.measure_cost` counts them.
        exits: How many exits at most.
        until: An event, or a function that says whether it has happened. It is looked at between stages, so after it at most
            the running stage completes.
        flops: In place of `macs`: floating-point operations for one input, of which a multiply-accumulate is two.

    Example:
        >>> Budget(time="5ms") & Budget(time=0.002, exits=3)
        Budget(time=0.002, macs=None, exits=3, until=None)
        >>> Budget(flops=2e9) == Budget(macs=1e9)
        True
    """

    time: Any = None
    macs: float | None = None
    exits: int | None = None
    until: Event | Callable[[], bool] | None = None

    def __init__(
        self,
        time: Any = None,
        macs: float | None = None,
        exits: int | None = None,
        until: Event | Callable[[], bool] | None = None,
        *,
        flops: float | None = None,
    ) -> None:
        if macs is not None and flops is not None:
            raise OptionError("macs and flops were both given", expected="one of them", fix="give macs alone")
        if flops is not None:
            macs = check_number(flops, "flops", above=0) / 2
        elif macs is not None:
            macs = check_number(macs, "macs", above=0)
        if exits is not None:
            exits = check_count(exits, "exits")
        if until is not None and (isinstance(until, type) or not (callable(until) or isinstance(until, Event))):
            raise OptionError(
                f"until is {until!r}",
                expected="an event with is_set(), or a function without arguments",
                fix="give a threading.Event",
            )
        object.__setattr__(self, "time", None if time is None else seconds(time))
        object.__setattr__(self, "macs", macs)
        object.__setattr__(self, "exits", exits)
        object.__setattr__(self, "until", until)

    @property
    def flops(self) -> float | None:
        """Twice the MACs."""
        return None if self.macs is None else 2 * self.macs

    def __and__(self, other: Budget) -> Budget:
        """Both limits at once."""
        if not isinstance(other, Budget):
            return NotImplemented
        return Budget(
            _least(self.time, other.time),
            _least(self.macs, other.macs),
            _least(self.exits, other.exits),
            _either(self.until, other.until),
        )

    def deadline(self, began: float) -> float | None:
        """When time is up on the clock that said `began`, or None without a time."""
        return None if self.time is None else began + self.time

    def happened(self) -> bool:
        """Whether what `until` waits for has happened."""
        if self.until is None:
            return False
        return bool(self.until.is_set() if isinstance(self.until, Event) else self.until())


_UNLIMITED = Budget()


def make_budget(budget: Any = None, deadline: Duration | None = None) -> Budget:
    """One budget from the two ways to say it."""
    if budget is not None and not isinstance(budget, Budget):
        raise OptionError(
            f"budget is {budget!r}",
            expected="an anytime.Budget",
            fix="for a time alone say deadline='5ms', or Budget(time='5ms')",
        )
    if deadline is None:
        return budget or _UNLIMITED
    return Budget(time=deadline) if budget is None else budget & Budget(time=deadline)


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number beyond all floats, and so beyond every limit
        return math.nan


def _read(text: str) -> float:
    found = _DURATION.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        raise _no_duration(text)
    return float(found[1]) * _UNITS[found[2].lower()]


def _no_duration(value: object) -> OptionError:
    return OptionError(
        f"{value!r} is no duration",
        expected=f"a number with a unit ({', '.join(unit for unit in _UNITS if unit.isascii())}), a timedelta, or seconds",
        fix="write '5ms', '2s' or '300us'",
    )


def _least(first: Any, second: Any) -> Any:
    return first if second is None else second if first is None else min(first, second)


def _either(first: Any, second: Any) -> Any:
    if first is None or second is None or first is second:
        return first if second is None else second
    both = Budget(until=first), Budget(until=second)
    return lambda: any(each.happened() for each in both)

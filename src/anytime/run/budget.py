"""What the environment allows: time, multiply-accumulates, a number of exits, or an interrupt.

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
"""Seconds, about thirty years: longer waits overflow the timers of some systems."""

Duration = str | float | timedelta
"""`"5ms"`, `"2s"`, `"300us"`, a timedelta, or seconds as a number."""


@runtime_checkable
class Event(Protocol):
    """Anything like a `threading.Event`."""

    def is_set(self) -> bool:
        """Whether the event has occurred."""
        ...


def seconds(value: Duration) -> float:
    """Convert a duration to seconds.

    >>> seconds("5ms"), seconds(timedelta(seconds=2)), seconds(0.25)
    (0.005, 2.0, 0.25)
    """
    if type(value) is float:  # the common case first: the other checks cost microseconds per request
        found = value
    elif isinstance(value, timedelta):
        found = value.total_seconds()
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value)) and match[2].lower() in _UNITS:
        found = float(match[1]) * _UNITS[match[2].lower()]
    elif isinstance(value, Real) and not isinstance(value, bool):  # includes NumPy's numbers
        found = _as_float(value)
    else:
        raise OptionError(
            f"{value!r} is not a valid duration",
            expected=f"a number with a unit ({', '.join(unit for unit in _UNITS if unit.isascii())}), a timedelta, or seconds",
            fix="write '5ms', '2s' or '300us'",
        )
    if not 0 <= found <= _LONGEST:  # false for NaN
        raise OptionError(
            f"the duration is {value!r}",
            expected="at least 0 and at most thirty years",
            fix="omit it for no deadline" if found > 0 else "pass a positive duration, such as '5ms'",
        )
    return found


@dataclass(frozen=True, init=False)
class Budget:
    """Limits on one request. A limit that is not given does not apply; the first limit that is reached ends the request.

    Args:
        time: A duration from the call on: `"5ms"`, `"2s"`, `"300us"`, a timedelta, or seconds as a number.
        macs: Multiply-accumulates per input, as counted by `anytime.models.measure_cost`.
        exits: The largest number of exits.
        until: An event, or a function that returns whether to stop. It is polled between stages, so at most the running
            stage completes afterwards.
        flops: Floating-point operations per input, in place of `macs`: twice the MACs.
        min_exits: The fewest exits of an answer. A request that does not reach them gets none, as if they were the first exit.
        confidence: Stop at the first exit, from `min_exits` on, at which the confidence of every input is at least this.

    Example:
        >>> budget = Budget(time="5ms") & Budget(time=0.002, exits=3)
        >>> budget.time, budget.exits
        (0.002, 3)
        >>> Budget(flops=2e9) == Budget(macs=1e9)
        True
    """

    time: Any = None
    macs: float | None = None
    exits: int | None = None
    until: Event | Callable[[], bool] | None = None
    min_exits: int | None = None
    confidence: float | None = None

    def __init__(
        self,
        time: Any = None,
        macs: float | None = None,
        exits: int | None = None,
        until: Event | Callable[[], bool] | None = None,
        *,
        flops: float | None = None,
        min_exits: int | None = None,
        confidence: float | None = None,
    ) -> None:
        if macs is not None and flops is not None:
            raise OptionError("both macs and flops are given", expected="one of them", fix="pass macs only: flops / 2")
        if until is not None and (isinstance(until, type) or not (callable(until) or isinstance(until, Event))):
            raise OptionError(
                f"until is {until!r}",
                expected="an event with is_set(), or a function without arguments",
                fix="pass a threading.Event()",
            )
        if flops is not None:
            macs = check_number(flops, "flops", above=0) / 2
        elif macs is not None:
            macs = check_number(macs, "macs", above=0)
        limits = {
            "time": None if time is None else seconds(time),
            "macs": macs,
            "exits": None if exits is None else check_count(exits, "exits"),
            "until": until,
            "min_exits": None if min_exits is None else check_count(min_exits, "min_exits"),
            "confidence": None if confidence is None else check_number(confidence, "confidence", above=0, most=1),
        }
        for name, limit in limits.items():
            object.__setattr__(self, name, limit)

    @property
    def flops(self) -> float | None:
        """Twice the MACs."""
        return None if self.macs is None else 2 * self.macs

    def __and__(self, other: Budget) -> Budget:
        """Both limits at once."""
        if not isinstance(other, Budget):
            return NotImplemented
        until = other.until if self.until is None else self.until
        if other.until is not None and until is not other.until:
            until = lambda: self.happened() or other.happened()  # noqa: E731
        return Budget(
            _smaller(self.time, other.time),
            _smaller(self.macs, other.macs),
            _smaller(self.exits, other.exits),
            until,
            min_exits=max((least for least in (self.min_exits, other.min_exits) if least is not None), default=None),
            confidence=_smaller(self.confidence, other.confidence),
        )

    def deadline(self, began: float) -> float | None:
        """When the time is up on the clock that `began` was read from; None without a time."""
        return None if self.time is None else began + self.time

    def happened(self) -> bool:
        """Whether the event of `until` has occurred."""
        if self.until is None:
            return False
        return bool(self.until.is_set() if isinstance(self.until, Event) else self.until())


_UNLIMITED = Budget()


def make_budget(budget: Any = None, deadline: Duration | None = None) -> Budget:
    """Combine a budget and a deadline."""
    if budget is not None and not isinstance(budget, Budget):
        raise OptionError(
            f"budget is {budget!r}",
            expected="an anytime.Budget",
            fix="pass Budget(time='5ms'), or deadline='5ms' for a time alone",
        )
    if deadline is None:
        return budget or _UNLIMITED
    return Budget(time=deadline) if budget is None else budget & Budget(time=deadline)


def _smaller(first: Any, second: Any) -> Any:
    return min((limit for limit in (first, second) if limit is not None), default=None)


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond the largest float, and so beyond every limit
        return math.nan

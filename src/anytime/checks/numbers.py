"""Checks of numbers and choices."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from anytime.errors import InputError, OptionError

LARGEST_SEED = 2**64 - 1
LARGEST_OLD_SEED = 2**32 - 1
"""The largest seed of `numpy.random.RandomState`."""
_ALWAYS_FREE = 1 << 28


def check_count(value: Any, name: str, *, low: int = 1, most: int | None = None, fix: str | None = None) -> int:
    """A whole number from `low` to `most`, also of NumPy; `fix` replaces the general advice.

    >>> check_count(3, "exits")
    3
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or int(value) < low or (most is not None and int(value) > most):
        expected = f"a whole number, at least {low}" + ("" if most is None else f" and at most {most}")
        raise OptionError(f"{name} is {value!r}", expected=expected, fix=fix or f"pass a whole number such as {name}={low}")
    return int(value)


def check_counts(values: Any, name: str, *, most: int | None = None, fix: str | None = None) -> tuple[int, ...]:
    """At least one whole number, each from 1 to `most`."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise OptionError(f"{name} is {values!r}", expected="a list of whole numbers", fix=fix or f"pass {name}=(1,)")
    return tuple(check_count(value, name, most=most, fix=fix) for value in values)


def check_number(
    value: Any,
    name: str,
    *,
    low: float | None = None,
    above: float | None = None,
    most: float = sys.float_info.max,
    below: float | None = None,
    fix: str | None = None,
) -> float:
    """A finite number within its limits: `low` ≤ or `above` < number ≤ `most` or < `below`; NumPy's numbers too.

    >>> check_number(0.1, "alpha", above=0, below=1)
    0.1
    """
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:  # an integer beyond all floats
        number = math.nan
    bounds = {"at least": low, "above": above, "at most": most if most < sys.float_info.max else None, "below": below}
    held = (low is None or number >= low, above is None or number > above, below is None or number < below)
    if not (all(held) and -sys.float_info.max <= number <= most):  # NaN is refused too
        words = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
        ends = [bound for bound in bounds.values() if bound is not None]
        raise OptionError(
            f"{name} is {value!r}",
            expected=f"a {'' if len(ends) == 2 else 'finite '}number {words}".rstrip(),
            fix=fix or f"pass a number such as {name}={sum(ends) / 2 if len(ends) == 2 else 1:g}",
        )
    return number


def check_fraction(value: Any, name: str, *, fix: str | None = None) -> float:
    """A number strictly between 0 and 1."""
    percent = isinstance(value, int | float) and 1 < value < 100
    example = f"{value / 100:g}" if percent else "0.1"
    return check_number(value, name, above=0, below=1, fix=fix or f"pass a fraction such as {name}={example}")


def check_choice(value: Any, name: str, choices: Sequence[Any], *, fix: str | None = None) -> None:
    """Refuse a value that is not one of the choices, and suggest the closest of them."""
    if value not in choices:
        close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        suggestion = f"did you mean {close[0]!r}?" if close else f"pass {name}={choices[0]!r}"
        expected = ", ".join(repr(choice) for choice in choices)
        raise OptionError(
            f"{name} is {value!r}", expected=f"one of {expected}" if len(choices) > 1 else expected, fix=fix or suggestion
        )


def check_flag(value: Any, name: str) -> bool:
    """True or False: a string such as "false" would count as true in a condition."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r}", expected="True or False", fix=f"pass {name}=True or {name}=False")
    return value


def check_seed(value: Any, *, most: int = LARGEST_SEED, name: str = "seed") -> int:
    """A seed for NumPy and torch: a whole number from 0 to `most`."""
    return check_count(value, name, low=0, most=most)


def check_threads(value: Any, *, name: str = "threads") -> int:
    """A number of threads or processes: from 1 to 64, or to the number of cores."""
    return check_count(value, name, most=max(64, os.cpu_count() or 1))


def check_memory(size: int, what: str, *, fix: str = "use fewer rows, or a machine with more memory") -> None:
    """Refuse what does not fit the free memory before it is allocated: the system may kill the program otherwise."""
    free = free_memory() if size > _ALWAYS_FREE else None
    if free is not None and size > free:
        raise InputError(
            f"{what} would take {size / 2**30:,.1f} GiB of memory",
            expected=f"at most {free / 2**30:,.1f} GiB, the free memory",
            fix=fix,
        )


def free_memory() -> int | None:
    """The bytes of memory that this process can still allocate, or None if unknown."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    except (OSError, ValueError, KeyError):
        pass
    try:  # in a container
        home = Path("/sys/fs/cgroup")
        found.append(int((home / "memory.max").read_text()) - int((home / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(0, min(found)) if found else None

"""Prediction sets without sorting: how many of a row's most probable classes a threshold admits.

`anytime.conformal.raps` sorts every row. Scores increase with the rank, so bisection over a cut finds the same size: the count
and the sum of the probabilities above a cut give the score of the last of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from anytime.evaluation.compiled.numbers import plain, smaller, vectorised

_DEEP = math.exp(-6)
_TINY = 1e-38
"""Smaller masses count as equal."""


class SetOptions(NamedTuple):
    """`anytime.conformal.Raps` for compiled code; `task` is one of the constants below."""

    task: int
    lam_reg: float
    k_reg: int
    randomised: bool
    original: bool
    empty: bool
    slack: float


NO_SETS, SCORES, SIZES = 0, 1, 2


@plain
def score(total: Any, value: Any, rank: Any, uniform: Any, options: Any) -> Any:
    """As `Raps._score`: of the class at `rank`, from 1, of probability `value`, `total` with those before it."""
    beyond = max(rank - options.k_reg, 0)
    whole = total + options.lam_reg * beyond
    if not options.randomised:
        return whole
    if options.original:
        return whole - (1.0 - uniform) * value
    return whole - uniform * (value + (options.lam_reg if beyond > 0 else 0.0))


@vectorised
def place(values: Any, masses: Any, count: Any, position: Any, value: Any) -> Any:
    """How many of the first `count` values come before the one at `position`, equal ones by their index, and their mass."""
    before = masses.dtype.type(0)
    mass = masses.dtype.type(0)
    none = masses.dtype.type(0)
    one = masses.dtype.type(1)
    for j in range(count):
        ahead = (values[j] > value) | ((values[j] == value) & (j < position))
        before += one if ahead else none
        mass += masses[j] if ahead else none
    return int(before), float(mass)


@plain
def above(values: Any, cut: Any, kept: Any) -> int:
    """Copy the values above a cut to the front of `kept`; how many there are."""
    count = 0
    for j in range(len(values)):
        kept[count] = values[j]
        count += values[j] > cut
    return count


@plain
def set_size(
    few: Any, found: Any, masses: Any, count: Any, total: Any, classes: Any, limit: Any, uniform: Any, options: Any
) -> int:
    """The size of a row's set.

    Args:
        few: The largest masses, in any order, of which there are `found`.
        masses: All masses, in any order: the probabilities of `count` classes, times `total`. The others have none.
        limit: The threshold.
    """
    if options.original and abs(limit - 1.0) <= options.slack:
        return int(classes)
    most = limit + options.slack
    if most == math.inf:
        return int(classes)
    size = _prefix(few, found, total, most, uniform, options)
    if size == found and found < count:
        size = _prefix(masses, count, total, most, uniform, options)
    while count <= size < classes and score(1.0, 0.0, size + 1, uniform, options) <= most:
        size += 1
    return int(size if options.empty else max(size, 1))


@plain
def _prefix(masses: Any, count: Any, total: Any, most: Any, uniform: Any, options: Any) -> int:
    """How many of the largest masses have a score of at most `most`."""
    # More than `high` are inside, `inside` of them; those above `low`, `all`, are too many unless `low` is negative.
    high, low, inside, all = masses.dtype.type(1), masses.dtype.type(-1), 0, count
    mass_inside, least = 0.0, 0.0
    cut = masses.dtype.type(_DEEP)
    while all - inside > 1 and low < cut < high:
        some, mass, smallest = _sum_above(masses, count, cut)
        if some == 0 or score(mass / total, smallest / total, some, uniform, options) <= most:
            high, inside, mass_inside = cut, some, mass
        else:
            low, all, least = cut, some, smallest
        cut = masses.dtype.type(math.sqrt(max(low, _TINY)) * math.sqrt(high))
    if low < 0 and inside < all:
        _, _, smallest = _sum_above(masses, count, low)
        least = smallest
    while inside < all:  # one is left, or equal ones
        mass_inside += least
        if score(mass_inside / total, least / total, inside + 1, uniform, options) > most:
            break
        inside += 1
    return inside


@vectorised
def _sum_above(masses: Any, count: Any, cut: Any) -> Any:
    """How many masses exceed a cut, their sum and the smallest of them."""
    none, one = masses.dtype.type(0), masses.dtype.type(1)
    some, mass, least = none, none, masses.dtype.type(2)
    for j in range(count):
        inside = masses[j] > cut
        some += one if inside else none
        mass += masses[j] if inside else none
        least = smaller(least, masses[j] if inside else one + one)
    return int(some), float(mass), float(least)

"""Prediction sets without sorting: how many of a row's most probable classes a threshold admits.

`anytime.conformal.raps` sorts every row. Scores increase with the rank, so bisection over a cut finds the same size: the count
and the sum of the probabilities above a cut give the score of the last of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from anytime.evaluation.compiled.numbers import chosen, plain, separate, smaller, vectorised

_FEW = 24
_LOWEST, _WIDTH = -710.0, 0.25  # every mass exceeds e^-710
_PART = 0.02
_OFTEN = 8
"""Every so many steps the cut is at a mass that is there, which ends the search among equal ones."""


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
        before += chosen(ahead, one, none)
        mass += chosen(ahead, masses[j], none)
    return int(before), float(mass)


@plain
def set_size(masses: Any, count: Any, total: Any, classes: Any, limit: Any, uniform: Any, options: Any, guess: Any) -> Any:
    """The size of a row's set, and the logarithm of the cut, of which `guess` is a guess.

    Of all classes the first `count` have the probabilities `masses` / `total`, in any order, and the others none.
    """
    if options.original and abs(limit - 1.0) <= options.slack:
        return classes, guess
    most = limit + options.slack
    if most == math.inf:
        return classes, guess
    if count <= _FEW:
        size, cut = _prefix_of_few(masses, count, total, most, uniform, options), guess
    else:
        size, cut = _prefix(masses, count, total, most, uniform, options, guess)
    while count <= size < classes and score(1.0, 0.0, size + 1, uniform, options) <= most:
        size += 1
    return size if options.empty else max(size, 1), cut


@plain
def _prefix_of_few(masses: Any, count: Any, total: Any, most: Any, uniform: Any, options: Any) -> int:
    """As `_prefix`, by taking one mass after the other, the largest first."""
    inside, mass, value, share_of = 0, 0.0, masses.dtype.type(2), 1.0 / total
    while inside < count:
        following, equal = masses.dtype.type(-1), 0
        for j in range(count):
            if masses[j] < value and masses[j] >= following:
                equal = equal + 1 if masses[j] == following else 1
                following = masses[j]
        value = following
        for _ in range(equal):
            mass += value
            if score(mass * share_of, value * share_of, inside + 1, uniform, options) > most:
                return inside
            inside += 1
    return inside


@separate
def _prefix(masses: Any, count: Any, total: Any, most: Any, uniform: Any, options: Any, depth: Any) -> Any:
    """How many of the largest masses have a score of at most `most`, and the logarithm of the last cut; `depth` is a guess.

    The guess only saves time: steps around it bracket the size, then regula falsi over the logarithm of the cut finds it.
    """
    # Those above e^high are inside, `inside` of them; those above e^low, `all`, are too many, or all there are.
    high, low, inside, all = 0.0, _LOWEST, 0, count
    mass_inside, least, share_of = 0.0, -1.0, 1.0 / total
    missing, excess, width, steps = 0.0, 0.0, _WIDTH, 0
    while all - inside > 1:
        steps += 1
        exact = steps % _OFTEN == 0 and least > 0
        if exact:
            depth = math.log(least)
        some, mass, smallest = _sum_above(masses, count, masses.dtype.type(least if exact else math.exp(depth)))
        over = score(mass * share_of, smallest * share_of, some, uniform, options) - most if some > 0 else -most
        if over <= 0:
            high, inside, mass_inside, missing, excess = depth, some, mass, -over, excess / 2
            if exact:
                break  # the others are equal
        else:
            low, all, least, excess, missing = depth, some, smallest, over, missing / 2
        if missing == 0 and excess > 0 and high == 0 and depth + width < 0:
            depth, width = depth + width, 4 * width
        elif excess == 0 and low == _LOWEST and depth - width > low:
            depth, width = depth - width, 4 * width
        else:
            share = missing / (missing + excess) if missing > 0 and excess > 0 else 0.5
            depth = high + min(max(share, _PART), 1 - _PART) * (low - high)
    if least < 0 and inside < all:
        least = _sum_above(masses, count, masses.dtype.type(-1))[2]
    while inside < all:  # one is left, or equal ones
        mass_inside += least
        if score(mass_inside * share_of, least * share_of, inside + 1, uniform, options) > most:
            break
        inside += 1
    return inside, depth


@vectorised
def _sum_above(masses: Any, count: Any, cut: Any) -> Any:
    """How many masses exceed a cut, their sum and the smallest of them."""
    none, one = masses.dtype.type(0), masses.dtype.type(1)
    unreached = one + one
    some, mass, least = none, none, unreached
    for j in range(count):
        inside = masses[j] > cut
        some += chosen(inside, one, none)
        mass += chosen(inside, masses[j], none)
        least = smaller(least, chosen(inside, masses[j], unreached))
    return int(some), float(mass), float(least)

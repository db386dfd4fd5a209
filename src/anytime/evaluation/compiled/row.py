"""What compiled code knows of a row, and the softmax of each of its exits, from which the rules start."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from anytime.combine.prediction import CERTAIN
from anytime.evaluation.compiled.numbers import exp, larger, plain, separate, vectorised
from anytime.evaluation.compiled.sets import NO_SETS, SCORES, place, score, set_size

_FAR = 1e-30


class Rules(NamedTuple):
    """The rules as arrays, see `anytime.evaluation.compiled.plan`.

    Attributes:
        codes: Kind and activation of each rule, `(rules, 2)`.
        evidence: Shift, gate, floor and cap of each rule, `(rules, 4)`, in the type of the logits.
        weights: Of each exit, `(rules, exits)`, in the type of the logits; 0 leaves an exit out.
        fractions: Logarithms of the fractions of a mean before an exit and of the exit, `(rules, exits, 2)`.
        limits: The threshold of the sets, `(rules, exits)`.
    """

    codes: Any
    evidence: Any
    weights: Any
    fractions: Any
    limits: Any


class Found(NamedTuple):
    """What is found, each `(quantities, rules, exits, rows)`; the quantities are numbered below."""

    whole: Any
    marks: Any
    real: Any


ANSWER, SUPPORT, SIZE = range(3)
FELL_BACK, CORRECT, COVERED = range(3)
CONFIDENCE, FINAL, ENTROPY, SQUARE, LABEL, LOG_ODDS, SCORE = range(7)


class Scratch(NamedTuple):
    """Memory for one row.

    Attributes:
        base: Of the softmax of each exit, and then of the current distribution, the numbers below, `(exits + 1, 8)`.
        where: Likewise the answer, the size of the support and, per exit, the one a cached answer is of, `(exits + 1, 3)`.
        masses: Likewise exp(z) of each class, with z relative to the largest logit, `(exits + 1, classes)`.
        work: Log-evidence, logits and means per class, `(3, classes)`.
        index: The classes that are left, and which classes had evidence at some exit, `(2, classes)`.
        track: Of the distribution of each exit, the largest log-evidence, the logarithm of the total and the number of classes
            (0 for a softmax), `(exits, 3)`.
        cuts: For each rule and exit, the log-evidence at which the last row's set ended, `(rules, exits)`.
    """

    base: Any
    where: Any
    masses: Any
    work: Any
    index: Any
    track: Any
    cuts: Any


# Sums over the other classes than the answer are of e, z·e and e² with e = exp(z).
TOP, OTHERS, LINEAR, SQUARES, LOG_TOTAL, MARGIN, BEFORE, MASS_BEFORE = range(8)
BEST, REACHED, SOURCE = range(3)
LARGEST, LOG, COUNT = range(3)


class Task(NamedTuple):
    """All arrays; `lowest` is the least number whose exponential is computed."""

    logits: Any
    draws: Any
    lowest: Any
    rules: Any
    options: Any
    found: Any
    scratch: Any


class Row(NamedTuple):
    """A row: its place among the logits and among the results, and its label or -1."""

    n: int
    i: int
    label: int


@vectorised
def largest(values: Any, count: Any) -> Any:
    """The largest of the first values."""
    top = values[0]
    for j in range(count):
        top = larger(top, values[j])
    return top


@vectorised
def first(values: Any, count: Any, value: Any) -> int:
    """The index of the first that equals `value`."""
    index = np.int32(count)
    for j in range(count):
        index = min(index, np.int32(j) if values[j] == value else np.int32(count))
    return int(index)


@vectorised
def widest(bits: Any, magnitude: Any) -> Any:
    """The largest magnitude, as bits: those of infinities and NaN exceed those of all numbers."""
    most = bits.dtype.type(0)
    for j in range(len(bits)):
        most = max(most, bits.dtype.type(bits[j] & magnitude))
    return most


@vectorised
def _exponentials(values: Any, count: Any, top: Any, best: Any, lowest: Any, masses: Any) -> Any:
    none = values.dtype.type(0)
    others, linear, squares = none, none, none
    for j in range(count):
        z = max(values[j] - top, lowest)
        e = exp(z)
        masses[j] = e
        e = none if j == best else e
        others += e
        linear += z * e
        squares += e * e
    return float(others), float(linear), float(squares)


@separate
def exact_margin(values: Any, count: Any, top: Any, best: Any) -> float:
    """The confidence as `anytime.combine.prediction.log_odds` computes it: equal distributions have equal ones."""
    second, others = -math.inf, 0.0
    for j in range(count):
        if j != best:
            second = max(second, float(values[j] - top))
            others += float(values.dtype.type(math.exp(float(values[j] - top))))
    if others >= _FAR:
        return -math.log(others)
    if second == -math.inf:
        return CERTAIN
    others = 0.0  # relative to the second, so that none underflows
    for j in range(count):
        if j != best:
            others += math.exp(float(values[j] - top) - second)
    return min(-second - math.log(others), CERTAIN)


@separate
def distribution(values: Any, count: Any, lowest: Any, m: Any, scratch: Any) -> None:
    """Normalise log-evidence: everything that is known of a distribution, as number m of `scratch`."""
    base, where = scratch.base[m], scratch.where[m]
    top = largest(values, count)
    best = first(values, count, top)
    others, linear, squares = _exponentials(values, count, top, best, lowest, scratch.masses[m])
    margin = -math.log(others) if others >= _FAR else exact_margin(values, count, top, best)
    base[TOP], base[OTHERS], base[LINEAR], base[SQUARES] = top, others, linear, squares
    base[LOG_TOTAL] = math.log1p(others)
    base[MARGIN] = values.dtype.type(margin)
    where[BEST], where[REACHED] = best, count


@separate
def softmax(task: Any, row: Any, m: Any, wide: Any) -> None:
    """The softmax of exit m; `wide` if the difference of two logits may overflow."""
    scratch, values = task.scratch, task.logits[m, row.n]
    classes = len(values)
    distribution(values, classes, task.lowest, m, scratch)
    if wide:
        top = values[scratch.where[m, BEST]]
        scratch.where[m, REACHED] = 0
        for value in values:
            scratch.where[m, REACHED] += value - top > -math.inf
    if task.options.task != NO_SETS:
        masses = scratch.masses[m]
        before = place(values, masses, classes, row.label, values[row.label])
        scratch.base[m, BEFORE], scratch.base[m, MASS_BEFORE] = before


@plain
def softmax_log_prob(task: Any, row: Any, m: Any, y: Any) -> Any:
    """The log-probability of class y under the softmax of exit m."""
    base = task.scratch.base
    return min(float(task.logits[m, row.n, y]) - base[m, TOP] - base[m, LOG_TOTAL], 0.0)


@plain
def write(task: Any, row: Any, r: Any, m: Any, s: Any, answer: Any, fell_back: Any) -> None:
    """Rule r answers at exit m with distribution s of `scratch`."""
    base, total = task.scratch.base[s], 1.0 + task.scratch.base[s, OTHERS]
    whole, marks, real = task.found
    whole[ANSWER, r, m, row.i] = answer
    whole[SUPPORT, r, m, row.i] = task.scratch.where[s, REACHED]
    marks[FELL_BACK, r, m, row.i] = fell_back
    marks[CORRECT, r, m, row.i] = answer == row.label
    real[CONFIDENCE, r, m, row.i] = 1.0 / total
    real[ENTROPY, r, m, row.i] = max(base[LOG_TOTAL] - base[LINEAR] / total, 0.0)
    real[SQUARE, r, m, row.i] = (1.0 + base[SQUARES]) / (total * total)
    real[LOG_ODDS, r, m, row.i] = base[MARGIN]


@plain
def write_set(task: Any, row: Any, r: Any, m: Any, s: Any, count: Any, label: Any) -> None:
    """The score of the label, which has this mass, or the size of the set and whether it contains the label."""
    options, base, masses = task.options, task.scratch.base[s], task.scratch.masses[s]
    total, uniform = 1.0 + base[OTHERS], task.draws[row.i, m]
    _, marks, real = task.found
    if options.task == SCORES:
        mass = (base[MASS_BEFORE] + label) / total
        real[SCORE, r, m, row.i] = score(mass, label / total, int(base[BEFORE]) + 1, uniform, options)
    else:
        classes, limit = task.logits.shape[2], task.rules.limits[r, m]
        cuts, top = task.scratch.cuts[r], base[TOP]
        guess = min(max(cuts[m] - top, -80.0), -0.01)
        size, cut = set_size(masses, count, total, classes, limit, uniform, options, guess)
        cuts[m] = cut + top
        task.found.whole[SIZE, r, m, row.i] = size
        marks[COVERED, r, m, row.i] = base[BEFORE] < size


@plain
def write_softmax(task: Any, row: Any, r: Any, m: Any, s: Any, fell_back: Any) -> None:
    """Rule r answers at exit m with the softmax of exit s."""
    scratch = task.scratch
    write(task, row, r, m, s, scratch.where[s, BEST], fell_back)
    if row.label >= 0:
        task.found.real[LABEL, r, m, row.i] = softmax_log_prob(task, row, s, row.label)
    if task.options.task != NO_SETS:
        write_set(task, row, r, m, s, task.logits.shape[2], scratch.masses[s, row.label])

"""The rules of the paper on one row after the other, while its logits are in the cache.

The plain counterparts are `anytime.combine.rules`, `anytime.combine.activations` and `anytime.metrics.trajectories`. Here a
product computes only with the classes that are left, a cached answer is not computed again, and nothing but a few numbers per
row is written.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from anytime.combine.encoded import CACHING_EARLIER, LATEST, LOGARITHM, MIXTURE, PRODUCT, SOFTPLUS
from anytime.evaluation.compiled.numbers import cached, exp, larger, log, log1p, plain, rounded, separate, smaller, vectorised
from anytime.evaluation.compiled.row import (
    ANSWER,
    BEFORE,
    BEST,
    COUNT,
    FINAL,
    LABEL,
    LARGEST,
    LOG,
    LOG_TOTAL,
    MARGIN,
    MASS_BEFORE,
    OTHERS,
    SOURCE,
    TOP,
    Row,
    distribution,
    exact_margin,
    first,
    largest,
    softmax,
    softmax_log_prob,
    widest,
    write,
    write_set,
    write_softmax,
)
from anytime.evaluation.compiled.sets import NO_SETS, place

KIND, ACTIVATION = range(2)
_TOTALS, _LOGITS, _MEAN = range(3)
_CLASSES, _ALIVE = range(2)
_EDGE = -15.0
_NEAR = 1e-5
"""Confidences that differ by less, as log-odds and relatively, are computed again in float64."""


@separate
def _softmaxes(task: Any, row: Any, r: Any, kind: Any) -> None:
    """`Latest`, and `Caching`, whose answers are softmaxes of earlier exits."""
    exits, final = len(task.logits), 0
    where = task.scratch.where
    for m in range(exits):  # `final` is the exit that answers at exit m
        if kind == LATEST or m == 0 or _newer(task, row, m, final, kind):
            final = m
        where[m, SOURCE] = final
        write_softmax(task, row, r, m, final, False)
    answer = where[final, BEST]
    for m in range(exits):
        log_prob = softmax_log_prob(task, row, where[m, SOURCE], answer)
        task.found.real[FINAL, r, m, row.i] = math.exp(log_prob)


@plain
def _newer(task: Any, row: Any, m: Any, s: Any, kind: Any) -> Any:
    """Whether exit m is more confident than exit s."""
    new, old = task.scratch.base[m, MARGIN], task.scratch.base[s, MARGIN]
    if abs(new - old) <= _NEAR * (1.0 + abs(old)):
        new, old = _exact(task, row, m), _exact(task, row, s)
    return new > old if kind == CACHING_EARLIER else new >= old


@plain
def _exact(task: Any, row: Any, m: Any) -> Any:
    values = task.logits[m, row.n]
    best = task.scratch.where[m, BEST]
    return values.dtype.type(exact_margin(values, len(values), values[best], best))


@separate
def _product(task: Any, row: Any, r: Any) -> None:
    """`Product`: after each exit only the classes with evidence so far are left."""
    exits, _, count = task.logits.shape
    index, totals = task.scratch.index[_CLASSES], task.scratch.work[_TOTALS]
    _begin(index, totals)
    for m in range(exits):
        weight = task.rules.weights[r, m]
        if weight > 0 and count > 0:
            count = _add_exit(task, row, r, m, count, weight)
        if count == 0:
            task.scratch.track[m, COUNT] = 0
            write_softmax(task, row, r, m, m, True)
        else:
            distribution(totals, count, task.lowest, exits, task.scratch)
            _remember(task, m, count)
            _write_own(task, row, r, m, count, index[task.scratch.where[exits, BEST]], False)
    _follow_class(task, row, r, task.found.whole[ANSWER, r, exits - 1, row.i], FINAL)
    if row.label >= 0:
        _follow_class(task, row, r, row.label, LABEL)


@separate
def _mixture(task: Any, row: Any, r: Any) -> None:
    """`Mixture`: the mean, per class, and in `totals` its logarithm for the classes that had evidence at some exit."""
    exits, _, classes = task.logits.shape
    scratch, answer, fell_back = task.scratch, 0, False
    index, alive, totals, mean = scratch.index[_CLASSES], scratch.index[_ALIVE], scratch.work[_TOTALS], scratch.work[_MEAN]
    alive[:] = 0
    mean[:] = 0
    for m in range(exits):
        kept, added = task.rules.fractions[r, m]
        if added > -math.inf:
            _begin(index, totals)
            count = _add_exit(task, row, r, m, classes, totals.dtype.type(1))
            s = exits if count > 0 else m
            if count > 0:
                distribution(totals, count, task.lowest, exits, scratch)
                answer = index[scratch.where[exits, BEST]]
                _remember(task, m, count)
            else:
                fell_back, count, answer = True, classes, scratch.where[m, BEST]
                _begin(index, totals)
                scratch.track[m, COUNT] = 0
            _add_to_mean(mean, alive, scratch.masses[s], index, count, kept, added - scratch.base[s, LOG_TOTAL])
            if kept > -math.inf:
                answer = first(mean, classes, largest(mean, classes))
        count = _logarithms(mean, alive, index, totals)
        distribution(totals, count, task.lowest, exits, scratch)
        _write_own(task, row, r, m, count, answer, fell_back)
    _follow_class(task, row, r, answer, FINAL)
    if row.label >= 0:
        _follow_class(task, row, r, row.label, LABEL)


@plain
def _begin(index: Any, totals: Any) -> None:
    for j in range(len(index)):
        index[j] = j
        totals[j] = 0


@plain
def _remember(task: Any, m: Any, count: Any) -> None:
    own, track = task.scratch.base[len(task.logits)], task.scratch.track[m]
    track[LARGEST], track[LOG], track[COUNT] = own[TOP], own[LOG_TOTAL], count


@plain
def _write_own(task: Any, row: Any, r: Any, m: Any, count: Any, answer: Any, fell_back: Any) -> None:
    """Rule r answers at exit m with the distribution over the classes in `index`, the last of `scratch`."""
    own = len(task.logits)
    write(task, row, r, m, own, answer, fell_back)
    if task.options.task != NO_SETS:
        index, masses, base = task.scratch.index[_CLASSES], task.scratch.masses[own], task.scratch.base[own]
        position, mass = _lower(index, count, row.label), 0.0
        if position < count and index[position] == row.label:
            totals = task.scratch.work[_TOTALS]
            base[BEFORE], base[MASS_BEFORE] = place(totals, masses, count, position, totals[position])
            mass = float(masses[position])
        else:
            base[BEFORE], base[MASS_BEFORE] = count + row.label - position, 1.0 + base[OTHERS]
        write_set(task, row, r, m, own, count, mass)


@vectorised
def _lower(index: Any, count: Any, label: Any) -> int:
    """How many of the classes come before the label."""
    lower = np.int32(0)
    for t in range(count):
        lower += np.int32(index[t] < label)
    return int(lower)


@separate
def _add_exit(task: Any, row: Any, r: Any, m: Any, count: Any, weight: Any) -> int:
    """Add the log-evidence of an exit to that of the classes left, and drop those without any; how many are left now."""
    index, totals, values = task.scratch.index[_CLASSES], task.scratch.work[_TOTALS], task.scratch.work[_LOGITS]
    shift, gate, floor, cap = task.rules.evidence[r]
    kept, logits = 0, task.logits[m, row.n]
    if gate == -math.inf:  # none drops out
        kept = count
        for t in range(count):
            values[t] = logits[t] + shift
    elif count == len(logits):
        for t in range(count):
            value = logits[t] + shift
            index[kept], totals[kept], values[kept] = t, totals[t], value
            kept += value > gate
    else:
        for t in range(count):
            value = logits[index[t]] + shift
            index[kept], totals[kept], values[kept] = index[t], totals[t], value
            kept += value > gate
    activation = task.rules.codes[r, ACTIVATION]
    top = totals.dtype.type(task.scratch.base[m, TOP]) + shift
    if activation == LOGARITHM:
        _add_logarithms(values, kept, floor, cap, weight, totals)
    elif activation == SOFTPLUS:
        _add_softplus(values, kept, floor, weight, totals)
    else:
        _add_exponentials(values, kept, top, floor, weight, totals)
    return kept


@vectorised
def _add_logarithms(values: Any, count: Any, floor: Any, cap: Any, weight: Any, totals: Any) -> None:
    for t in range(count):
        totals[t] = _add(totals[t], weight, _logarithm(values[t], floor, cap))


@vectorised
def _add_softplus(values: Any, count: Any, floor: Any, weight: Any, totals: Any) -> None:
    for t in range(count):
        totals[t] = _add(totals[t], weight, _softplus(values[t], floor))


@vectorised
def _add_exponentials(values: Any, count: Any, top: Any, floor: Any, weight: Any, totals: Any) -> None:
    for t in range(count):
        totals[t] = _add(totals[t], weight, max(values[t] - top, floor))


@rounded
def _add(total: Any, weight: Any, evidence: Any) -> Any:
    """Rounded twice, as the plain path does: equal products stay equal."""
    return total + weight * evidence


@plain
def _logarithm(value: Any, floor: Any, cap: Any) -> Any:
    return smaller(log(larger(value, floor)), cap)


@plain
def _softplus(value: Any, floor: Any) -> Any:
    """The logarithm of log(1 + e^f), which is f for very negative f."""
    none = value - value
    rest = log1p(exp(-abs(value)))
    return larger(value, floor) if value < _EDGE else log(larger(value, none) + rest)


@plain
def _evidence(task: Any, row: Any, r: Any, m: Any, y: Any) -> Any:
    """The log-evidence of exit m for class y, -inf for none."""
    shift, gate, floor, cap = task.rules.evidence[r]
    value = task.logits[m, row.n, y] + shift
    if not value > gate:
        return task.logits.dtype.type(-np.inf)
    activation = task.rules.codes[r, ACTIVATION]
    if activation == LOGARITHM:
        return _logarithm(value, floor, cap)
    if activation == SOFTPLUS:
        return _softplus(value, floor)
    top = task.logits[m, row.n, task.scratch.where[m, BEST]] + shift
    return max(value - top, floor)


@separate
def _follow_class(task: Any, row: Any, r: Any, y: Any, quantity: Any) -> None:
    """The logarithm of the label's probability at every exit, or the probability of the final answer."""
    product, log_prob = task.rules.codes[r, KIND] == PRODUCT, -math.inf
    total = task.logits.dtype.type(0)  # in the type of the logits, to be rounded as the totals of all classes are
    for m in range(len(task.logits)):
        top, log_total, count = task.scratch.track[m]
        if product:
            weight = task.rules.weights[r, m]
            if weight > 0 and total > -math.inf:
                total = _add(total, weight, _evidence(task, row, r, m, y))
            log_prob = float(total) - top - log_total if count > 0 else softmax_log_prob(task, row, m, y)
        else:
            kept, added = task.rules.fractions[r, m]
            if added > -math.inf:
                now = _evidence(task, row, r, m, y) - top - log_total if count > 0 else softmax_log_prob(task, row, m, y)
                log_prob = _log_add(log_prob + kept, now + added)
        log_prob = min(log_prob, 0.0)
        task.found.real[quantity, r, m, row.i] = log_prob if quantity == LABEL else math.exp(log_prob)


@plain
def _log_add(one: Any, other: Any) -> Any:
    most = max(one, other)
    return most if most == -math.inf else most + math.log1p(math.exp(min(one, other) - most))


@vectorised
def _add_to_mean(mean: Any, alive: Any, masses: Any, index: Any, count: Any, kept: Any, added: Any) -> None:
    before, now = mean.dtype.type(math.exp(kept)), mean.dtype.type(math.exp(added))
    for j in range(len(mean)):
        mean[j] *= before
    for t in range(count):
        mean[index[t]] += now * masses[t]
        alive[index[t]] = 1


@plain
def _logarithms(mean: Any, alive: Any, index: Any, totals: Any) -> int:
    """The classes that had evidence at some exit, and the logarithms of their means."""
    count = 0
    for j in range(len(mean)):
        index[count], totals[count] = j, mean[j]
        count += alive[j] > 0
    for t in range(count):
        totals[t] = log(totals[t])
    return count


def compile_rows(sources: str) -> Any:
    """The compiled function `follow_rows`.

    Args:
        sources: A digest of this package. Numba takes code from its cache by what a function refers to outside of it, but does
            not notice changes of other files.
    """

    @cached
    def follow_rows(task: Any, bits: Any, limits: Any, rows: Any, first_result: Any, labels: Any) -> int:
        """Follow rows under all rules, and give the first that has a logit which is not finite, or -1.

        Args:
            task: All arrays.
            bits: The logits as integers.
            limits: The bits of half the largest number, of the largest number, and of all but the sign.
            rows: Which samples.
            first_result: The place of the first of them among the results.
            labels: One per result, or none.
        """
        if not sources:
            return -1
        half, whole, magnitude = limits
        for k in range(len(rows)):
            i = first_result + k
            row = Row(rows[k], i, labels[i] if len(labels) else -1)
            for m in range(len(task.logits)):
                size = widest(bits[m, row.n], magnitude)
                if size > whole:
                    return int(row.n)
                softmax(task, row, m, size > half)
            for r in range(len(task.rules.codes)):
                kind = task.rules.codes[r, KIND]
                if kind == PRODUCT:
                    _product(task, row, r)
                elif kind == MIXTURE:
                    _mixture(task, row, r)
                else:
                    _softmaxes(task, row, r, kind)
        return -1

    return follow_rows

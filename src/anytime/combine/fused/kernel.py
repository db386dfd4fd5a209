"""Triton: what every kernel needs of the rules, and the product of all exits with one read and one write.

The readable counterparts are `anytime.combine.rules` and `anytime.combine.activations`. A program holds one row, or some rows
of few classes, in registers.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, no-untyped-call, untyped-decorator, unused-ignore"
from __future__ import annotations

import triton
import triton.language as tl

from anytime.combine import encoded
from anytime.combine.fused import is_interpreted

# Triton reads global names only if they are of its own type of constants.
_LOGARITHM, _SOFTPLUS = tl.constexpr(encoded.LOGARITHM), tl.constexpr(encoded.SOFTPLUS)
_EXPONENTIAL = tl.constexpr(encoded.EXPONENTIAL)
_INTERPRETED = tl.constexpr(is_interpreted())
_INF = tl.constexpr(float("inf"))
_EDGE = tl.constexpr(-15.0)
_PER_OCTAVE = tl.constexpr(1.4426950408889634)
# Their sum is log 2. The first has so few digits that its product with an exponent is exact.
_FIRST, _REST = tl.constexpr(355 / 512), tl.constexpr(-2.121944400546905827679e-4)
_LEAST, _NORMAL = tl.constexpr(0x3F3504F3), tl.constexpr(1.1754944e-38)  # the bits of √½, and the least normal number
# (log(1 + f) - f + f²/2) / f³ for f from √½ - 1 to √2 - 1, with the least largest error that 7 numbers allow.
_C0, _C1, _C2 = tl.constexpr(0.33333838), tl.constexpr(-0.25001732), tl.constexpr(0.19966072)
_C3, _C4 = tl.constexpr(-0.16566226), tl.constexpr(0.14871079)
_C5, _C6 = tl.constexpr(-0.14344762), tl.constexpr(0.08927375)


@triton.jit
def exp(x):
    """e^x, in float32 with a GPU's instruction for powers of two."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    return tl.exp2(x * _PER_OCTAVE)


@triton.jit
def log(x):
    """The logarithm of a positive number, without branches: within 1.3 units in the last place in float32."""
    if x.dtype == tl.float64:
        return tl.log(x)
    else:  # noqa: RET505 - Triton compiles what follows a return
        small = x < _NORMAL
        bits = tl.where(small, x * 8388608.0, x).to(tl.int32, bitcast=True) - _LEAST
        octaves = (bits >> 23).to(tl.float32) - tl.where(small, 23.0, 0.0)
        f = ((bits & 0x7FFFFF) + _LEAST).to(tl.float32, bitcast=True) - 1.0  # x = (1 + f)·2^octaves, 1 + f from √½ to √2
        p = tl.fma(tl.fma(tl.fma(_C6, f, _C5), f, _C4), f, _C3)
        p = tl.fma(tl.fma(tl.fma(tl.fma(p, f, _C2), f, _C1), f, _C0), f, -0.5)
        return tl.fma(octaves, _FIRST, f + tl.fma(p, f * f, octaves * _REST))


@triton.jit
def log1p(x):
    """log(1 + x) for x ≥ 0, to full precision."""
    rounded = 1.0 + x
    return log(rounded) + (x - (rounded - 1.0)) / rounded


@triton.jit
def _least_and_two(least, a, b, least_, a_, b_):
    return tl.minimum(least, least_), a + a_, b + b_


@triton.jit
def _least_and_five(least, a, b, c, d, e, least_, a_, b_, c_, d_, e_):
    return tl.minimum(least, least_), a + a_, b + b_, c + c_, d + d_, e + e_


@triton.jit
def least_and_two(least, a, b):
    """The smallest of the first and the sums of the others, over a row: together, as each reduction makes warps wait."""
    if _INTERPRETED:  # which would combine the numbers one by one
        return tl.min(least, 1), tl.sum(a, 1), tl.sum(b, 1)
    return tl.reduce((least, a, b), 1, _least_and_two)


@triton.jit
def _least_and_sums(least, a, b, c, d, e):
    if _INTERPRETED:
        return tl.min(least, 1), tl.sum(a, 1), tl.sum(b, 1), tl.sum(c, 1), tl.sum(d, 1), tl.sum(e, 1)
    return tl.reduce((least, a, b, c, d, e), 1, _least_and_five)


@triton.jit
def softmax(scores, top, columns, lowest: tl.constexpr, in_any_order: tl.constexpr):
    """The softmax of scores, of which `top` is the largest: its class, exp(z) per class, sums, and how many are possible.

    z is relative to the largest score. The sums are of exp(z) over the other classes, of z·exp(z) and of exp(2z) over all.
    """
    below = scores - top[:, None]
    masses, largest = exp(below), scores == top[:, None]
    rest = tl.where(largest, 0.0, masses)
    best, ties, others, linear, squares, support = _least_and_sums(
        tl.where(largest, columns, scores.shape[1]),
        largest.to(tl.int32),
        # In float64 the order of the classes does not change the sum: equal distributions stay equal.
        rest.to(tl.float64) if in_any_order else rest,
        tl.maximum(below, lowest) * masses,
        masses * masses,
        (below > -_INF).to(tl.int32),
    )
    return best, masses, others + (ties - 1), linear, squares, support


@triton.jit
def evidence(values, top, shift, gate, floor, cap, activation: tl.constexpr):
    """The log-evidence of logits, -inf for none; `top` is the largest logit of the row."""
    given = values + shift
    if activation == _LOGARITHM:
        found = tl.minimum(log(tl.maximum(given, floor)), cap)
    elif activation == _SOFTPLUS:
        soft = tl.maximum(given, 0.0) + log1p(exp(-tl.abs(given)))
        found = tl.where(given < _EDGE, tl.maximum(given, floor), log(soft))
    else:
        found = tl.maximum(given - (top + shift), floor)
    return tl.where(given > gate, found, -_INF)


# Without this, arguments that are 1 or a multiple of 16 would each trigger a compilation.
@triton.jit(do_not_specialize=["count", "exits", "classes", "exit_stride", "row_stride"])
def combine_product(
    logits, exit_stride, row_stride, numbers, weights, log_probs, fell_back, labels, count, exits, classes,
    activation: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """The prediction of a product at every exit; `width` is a power of two, at least the number of classes."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    valid = row < count
    exit_stride, whole = exit_stride.to(tl.int64), count.to(tl.int64)  # products of which may exceed 32 bits
    columns = tl.arange(0, width)[None, :]
    inside = columns < tl.where(valid, classes, 1)[:, None]  # a row that is not there is not empty
    cells = logits + tl.where(valid, row, 0)[:, None] * row_stride + columns
    shift, gate, floor, cap = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2), tl.load(numbers + 3)
    totals = tl.where(columns < classes, tl.zeros([rows, width], log_probs.dtype.element_ty), -_INF)
    for m in range(exits):
        values = tl.load(cells + m * exit_stride, mask=inside, other=-_INF)
        high = tl.max(values, 1) if activation == _EXPONENTIAL else tl.zeros([rows], values.dtype)
        weight = tl.load(weights + m)
        if weight > 0:
            totals = totals + weight * evidence(values, high[:, None], shift, gate, floor, cap, activation)
        lost = tl.max(totals, 1) == -_INF
        scores = tl.where(lost[:, None], values, totals)
        top = tl.max(scores, 1)
        best = tl.min(tl.where(scores == top[:, None], columns, width - 1), 1)
        below = scores - top[:, None]
        others = tl.sum(tl.where(columns == best[:, None], 0.0, exp(below)), 1)
        place = row + whole * m
        tl.store(log_probs + place[:, None] * classes + columns, below - log1p(others)[:, None], mask=inside & valid[:, None])
        tl.store(fell_back + place, lost.to(tl.int8), mask=valid)
        tl.store(labels + place, best, mask=valid)

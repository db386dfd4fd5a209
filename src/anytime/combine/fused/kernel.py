"""Triton: what every kernel needs of the rules, and the product of all exits with one read and one write.

The readable counterparts are `anytime.combine.rules` and `anytime.combine.activations`. A program holds one row, or some rows
of few classes, in registers.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, no-untyped-call, untyped-decorator, unused-ignore"
from __future__ import annotations

import triton
import triton.language as tl

from anytime.combine import encoded

# Triton reads global names only if they are of its own type of constants.
_LOGARITHM, _SOFTPLUS = tl.constexpr(encoded.LOGARITHM), tl.constexpr(encoded.SOFTPLUS)
_EXPONENTIAL = tl.constexpr(encoded.EXPONENTIAL)
_INF = tl.constexpr(float("inf"))
_EDGE = tl.constexpr(-15.0)


@triton.jit
def softmax(scores, columns, lowest: tl.constexpr, in_any_order: tl.constexpr):
    """The softmax of scores: the largest, its class, exp(z) per class, sums over the classes, and how many are possible.

    z is relative to the largest score. The sums are of exp(z) over the other classes, of z·exp(z) and of exp(2z) over all.
    """
    top = tl.max(scores, 1)
    best = tl.min(tl.where(scores == top[:, None], columns, scores.shape[1]), 1)
    below = scores - top[:, None]
    masses = tl.exp(below)
    rest = tl.where(columns == best[:, None], 0.0, masses)
    # In float64 the order of the classes does not change the sum: equal distributions stay equal.
    others = tl.sum(rest.to(tl.float64) if in_any_order else rest, 1)
    linear = tl.sum(tl.maximum(below, lowest) * masses, 1)
    return top, best, masses, others, linear, tl.sum(masses * masses, 1), tl.sum((below > -_INF).to(tl.int32), 1)


@triton.jit
def log_of_total(others):
    """log(1 + others), to full precision."""
    return tl.log(1.0 + others.to(tl.float64)).to(others.dtype)


@triton.jit
def evidence(values, top, shift, gate, floor, cap, activation: tl.constexpr):
    """The log-evidence of logits, -inf for none; `top` is the largest logit of the row."""
    given = values + shift
    if activation == _LOGARITHM:
        found = tl.minimum(tl.log(tl.maximum(given, floor)), cap)
    elif activation == _SOFTPLUS:
        small = tl.exp(-tl.abs(given))
        rounded = 1.0 + small
        rest = tl.log(rounded) + (small - (rounded - 1.0)) / rounded
        found = tl.where(given < _EDGE, tl.maximum(given, floor), tl.log(tl.maximum(given, 0.0) + rest))
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
        others = tl.sum(tl.where(columns == best[:, None], 0.0, tl.exp(below)), 1)
        place = row + whole * m
        tl.store(
            log_probs + place[:, None] * classes + columns, below - log_of_total(others)[:, None], mask=inside & valid[:, None]
        )
        tl.store(fell_back + place, lost.to(tl.int8), mask=valid)
        tl.store(labels + place, best, mask=valid)

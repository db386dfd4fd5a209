"""The Triton kernel that follows rows under all rules: from logits to a few numbers per exit and row, in one read.

A program holds some rows with all their classes in registers and goes through the exits once per kind of rule; after the first
time the logits are in the cache. Nothing with a class dimension is written. The readable counterparts are
`anytime.combine.rules`, `anytime.metrics.trajectories` and `anytime.conformal.raps`; the numbers agree up to rounding.

It is one file of over 400 lines because Triton compiles one function and what it calls.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, no-untyped-call, untyped-decorator, unused-ignore"
from __future__ import annotations

import triton
import triton.language as tl

from anytime.combine import encoded
from anytime.combine.fused.kernel import evidence as log_evidence
from anytime.combine.fused.kernel import exp, least_and_two, log, log1p, softmax
from anytime.metrics.fused import layout

# Triton reads global names only if they are of its own type of constants.
_PRODUCT, _MIXTURE = tl.constexpr(encoded.PRODUCT), tl.constexpr(encoded.MIXTURE)
_EXPONENTIAL = tl.constexpr(encoded.EXPONENTIAL)
_ANSWER, _SUPPORT, _SIZE = (tl.constexpr(each) for each in (layout.ANSWER, layout.SUPPORT, layout.SIZE))
_FELL_BACK, _CORRECT, _COVERED = (tl.constexpr(each) for each in (layout.FELL_BACK, layout.CORRECT, layout.COVERED))
_CONFIDENCE, _FINAL, _ENTROPY = (tl.constexpr(each) for each in (layout.CONFIDENCE, layout.FINAL, layout.ENTROPY))
_SQUARE, _LABEL, _SCORE = (tl.constexpr(each) for each in (layout.SQUARE, layout.LABEL, layout.SCORE))
_SCORES, _SIZES = tl.constexpr(layout.SCORES), tl.constexpr(layout.SIZES)
_INF = tl.constexpr(float("inf"))
_CERTAIN = tl.constexpr(3.4028234663852886e38)
_NONE = tl.constexpr(2**63 - 1)
_FAR = tl.constexpr(1e-30)


@triton.jit
def _far_margin(scores, top, best, columns):
    """The confidence as log-odds where the sum over the other classes underflows."""
    below = tl.where(columns == best[:, None], -_INF, scores - top[:, None])
    second = tl.max(below, 1)
    alone = second == -_INF
    rest = tl.sum(tl.exp(below - tl.where(alone, 0.0, second)[:, None]).to(tl.float64), 1)
    margin = -second.to(tl.float64) - tl.log(tl.where(alone, 1.0, rest))
    return tl.where(alone, _CERTAIN, tl.minimum(margin, _CERTAIN)).to(scores.dtype)


@triton.jit
def _at_label(values, columns, label):
    return tl.sum(tl.where(columns == label[:, None], values, 0.0), 1)


@triton.jit
def _above(masses, cut):
    """The smallest of the masses above a cut, how many there are, and their sum."""
    above = masses > cut
    return least_and_two(tl.where(above, masses, 2.0), above.to(tl.int32), tl.where(above, masses, 0.0))


@triton.jit
def _place(scores, masses, columns, classes, label):
    """How many classes come before the label, equal ones by their index, their mass, and the label's."""
    own = _at_label(scores, columns, label)[:, None]
    ahead = (columns < classes) & ((scores > own) | ((scores == own) & (columns < label[:, None])))
    own, before, mass = least_and_two(
        tl.where(columns == label[:, None], masses, 2.0), ahead.to(tl.int32), tl.where(ahead, masses, 0.0)
    )
    return before, mass, own


@triton.jit
def _score(total, value, rank, uniform, lam_reg, k_reg, randomised: tl.constexpr, original: tl.constexpr):
    """As `Raps._score`: of the class at `rank`, from 1, of probability `value`, `total` with those before it."""
    beyond = tl.maximum(rank - k_reg, 0)
    score = total + lam_reg * beyond
    if randomised:
        removed = (1.0 - uniform) * value if original else uniform * (value + tl.where(beyond > 0, lam_reg, 0.0))
        score = score - removed
    return score


@triton.jit
def _set_size(
    masses, others, classes, limit, uniform, lam_reg, k_reg, slack: tl.constexpr, randomised: tl.constexpr,
    original: tl.constexpr, empty: tl.constexpr,
):  # fmt: skip
    """How many of the most probable classes a threshold admits, without sorting: bisection over the bits of a cut.

    Positive floating-point numbers are ordered as their bits. Those above `high` are inside; those above `low` are too many.
    """
    bits: tl.constexpr = tl.int64 if masses.dtype == tl.float64 else tl.int32
    total = 1.0 + others
    most = (limit + slack + total * 0).to(masses.dtype)
    least, many, _ = _above(masses, 0.0)
    whole = _score(total / total, least / total, many, uniform, lam_reg, k_reg, randomised, original) <= most
    low = least.to(bits, bitcast=True) - 1
    high = tl.where(whole, low, (total * 0 + 1).to(bits, bitcast=True))
    inside, mass = tl.where(whole, many, 0), tl.where(whole, total, 0.0)
    reached = many
    searching = (reached - inside > 1) & (high - low > 1)
    while tl.max(searching.to(tl.int32), 0) > 0:
        middle = low + (high - low) // 2
        smallest, some, part = _above(masses, middle.to(masses.dtype, bitcast=True)[:, None])
        score = _score(part / total, smallest / total, some, uniform, lam_reg, k_reg, randomised, original)
        fits = (some == 0) | (score <= most)
        up, down = searching & fits, searching & (fits == 0)
        high, inside, mass = tl.where(up, middle, high), tl.where(up, some, inside), tl.where(up, part, mass)
        low, reached, least = tl.where(down, middle, low), tl.where(down, some, reached), tl.where(down, smallest, least)
        searching = (reached - inside > 1) & (high - low > 1)
    going = inside < reached  # one is left, or equal ones
    while tl.max(going.to(tl.int32), 0) > 0:
        mass = mass + least
        score = _score(mass / total, least / total, inside + 1, uniform, lam_reg, k_reg, randomised, original)
        going = going & (score <= most)
        inside = inside + going.to(tl.int32)
        going = going & (inside < reached)
    everything = most == _INF
    if original:
        everything = everything | (tl.abs(most - slack - 1.0) <= slack)
    inside = tl.where(everything, classes, inside)
    going = (inside >= many) & (inside < classes)  # classes without probability
    while tl.max(going.to(tl.int32), 0) > 0:
        score = _score(total / total, total * 0, inside + 1, uniform, lam_reg, k_reg, randomised, original)
        going = going & (score <= most)
        inside = inside + going.to(tl.int32)
        going = going & (inside < classes)
    if not empty:
        inside = tl.maximum(inside, 1)
    return inside


@triton.jit
def _log_add(one, other):
    most = tl.maximum(one, other)
    far = most == -_INF
    rest = exp(tl.minimum(one, other) - tl.where(far, 0.0, most))
    return tl.where(far, -_INF, most + log1p(rest))


@triton.jit
def _write(
    whole, marks, real, plane, place, shown, best, support, fell_back, others, linear, squares, final_log, label_log, label,
    labelled: tl.constexpr,
):  # fmt: skip
    """The numbers of one rule at all exits, `(rows, depth)`; `plane` is the size of one quantity."""
    total = 1.0 + others
    tl.store(whole + _ANSWER * plane + place, best, mask=shown)
    tl.store(whole + _SUPPORT * plane + place, support, mask=shown)
    tl.store(marks + _FELL_BACK * plane + place, (fell_back > 0).to(tl.int8), mask=shown)
    tl.store(real + _CONFIDENCE * plane + place, 1.0 / total, mask=shown)
    tl.store(real + _FINAL * plane + place, tl.exp(tl.minimum(final_log, 0.0)), mask=shown)
    tl.store(real + _ENTROPY * plane + place, tl.maximum(log1p(others) - linear / total, 0.0), mask=shown)
    tl.store(real + _SQUARE * plane + place, squares / (total * total), mask=shown)
    if labelled:
        tl.store(marks + _CORRECT * plane + place, (best == label[:, None]).to(tl.int8), mask=shown)
        tl.store(real + _LABEL * plane + place, tl.minimum(label_log, 0.0), mask=shown)


@triton.jit
def _write_set(
    whole, marks, real, plane, place, valid, masses, others, before, mass_before, own, classes, limit_at, uniform, lam_reg,
    k_reg, slack: tl.constexpr, randomised: tl.constexpr, original: tl.constexpr, empty: tl.constexpr, task: tl.constexpr,
):  # fmt: skip
    """The score of the label, or the size of the set and whether it contains the label."""
    if task == _SCORES:
        total = 1.0 + others
        score = _score((mass_before + own) / total, own / total, before + 1, uniform, lam_reg, k_reg, randomised, original)
        tl.store(real + _SCORE * plane + place, score, mask=valid)
    elif task == _SIZES:
        size = _set_size(
            masses, others, classes, tl.load(limit_at), uniform, lam_reg, k_reg, slack, randomised, original, empty
        )
        tl.store(whole + _SIZE * plane + place, size, mask=valid)
        tl.store(marks + _COVERED * plane + place, (before < size).to(tl.int8), mask=valid)


@triton.jit
def _note_fault(faults, values, inside, row, first_row, exits, m):
    """Note the first logit that is not finite, as row × exits + exit."""
    wrong = inside & ((values != values) | (tl.abs(values) == _INF))
    found = tl.max(wrong.to(tl.int32), 1) > 0
    number = tl.where(found, (first_row + row) * exits + m, _NONE)
    tl.atomic_min(faults, tl.min(number, 0))


@triton.jit
def _logs_of_class(
    start, y, shown, axis, exit_stride, highest, lost_at, tops, others, evidence, weights, fractions, exits,
    kind: tl.constexpr, activation: tl.constexpr,
):  # fmt: skip
    """The log-probability of a class at each exit under a product or a mixture, `(rows, depth)`."""
    values = tl.load(start[:, None] + y[:, None] + axis * exit_stride, mask=shown, other=0.0).to(tops.dtype)
    shift, gate, floor, cap = tl.load(evidence), tl.load(evidence + 1), tl.load(evidence + 2), tl.load(evidence + 3)
    found = log_evidence(values, highest, shift, gate, floor, cap, activation)
    norms = log1p(others)
    if kind == _PRODUCT:
        weight = tl.load(weights + axis, mask=axis < exits, other=0.0)
        total = tl.cumsum(tl.where(weight > 0, weight * found, 0.0), 1)
        return tl.where(lost_at > 0, values, total) - tops - norms
    experts = tl.where(lost_at > 0, values, found) - tops - norms
    log_prob = tl.max(tops, 1) * 0 - _INF
    logs = tops * 0
    for m in range(exits):
        kept, added = tl.load(fractions + 2 * m), tl.load(fractions + 2 * m + 1)
        if added > -_INF:
            now = tl.sum(tl.where(axis == m, experts, 0.0), 1) + added
            log_prob = tl.minimum(_log_add(log_prob + kept, now), 0.0)
        logs = tl.where(axis == m, log_prob[:, None], logs)
    return logs


@triton.jit
def _follow_softmaxes(
    start, cells, inside, columns, axis, shown, row, place, valid, label, draws, draws_exit, draws_row, exit_stride, limits,
    whole, marks, real, faults, plane, count, first_row, exits, classes, lam_reg, k_reg,
    latest: tl.constexpr, caching: tl.constexpr, later_ties: tl.constexpr, labelled: tl.constexpr, task: tl.constexpr,
    randomised: tl.constexpr, original: tl.constexpr, empty: tl.constexpr, number: tl.constexpr, lowest: tl.constexpr,
    slack: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Follow the rows under the latest exit and under caching, whose answers are softmaxes of earlier exits.

    `c_` is what caching keeps. Where both are wanted, each softmax is computed once.
    """
    none, zero = tl.zeros([rows], number), tl.zeros([rows], tl.int32)
    nowhere, nothing = tl.zeros([rows, depth], number), tl.zeros([rows, depth], tl.int32)
    best, c_best, c_support, source = zero, zero, zero, zero
    c_top, c_others, c_linear, c_squares, c_margin = none, none, none, none, none
    tops, sums, linears, squared, bests, supports = nowhere, nowhere, nowhere, nowhere, nothing, nothing
    c_tops, c_sums, c_linears, c_squared, c_bests, c_supports = nowhere, nowhere, nowhere, nowhere, nothing, nothing
    sources = nothing
    c_masses = tl.zeros([rows, width if task != 0 else 1], number)
    c_before, c_mass, c_own = zero, none, none
    for m in range(exits):
        values = tl.load(cells + m * exit_stride, mask=inside, other=-_INF).to(number)
        top = tl.max(values, 1)
        best, masses, precise, linear, squares, support = softmax(values, top, columns, lowest, caching >= 0)
        others = precise.to(number)
        best = tl.minimum(best, classes - 1)
        odd = valid & ((others != others) | (support < classes))
        if tl.max(odd.to(tl.int32), 0) > 0:
            _note_fault(faults, values, inside, row, first_row, exits, m)
        now = axis == m
        if latest >= 0:
            tops, sums = tl.where(now, top[:, None], tops), tl.where(now, others[:, None], sums)
            linears, squared = tl.where(now, linear[:, None], linears), tl.where(now, squares[:, None], squared)
            bests, supports = tl.where(now, best[:, None], bests), tl.where(now, support[:, None], supports)
        if caching >= 0:
            margin = -log(tl.maximum(others, _FAR))
            if tl.min(others, 0) < _FAR:
                margin = tl.where(others < _FAR, _far_margin(values, top, best, columns), margin)
            newer = (margin >= c_margin) if later_ties else (margin > c_margin)
            newer = newer | (m == 0)
            c_margin, source = tl.where(newer, margin, c_margin), tl.where(newer, m, source)
            c_top, c_others = tl.where(newer, top, c_top), tl.where(newer, others, c_others)
            c_linear, c_squares = tl.where(newer, linear, c_linear), tl.where(newer, squares, c_squares)
            c_best, c_support = tl.where(newer, best, c_best), tl.where(newer, support, c_support)
            c_tops, c_sums = tl.where(now, c_top[:, None], c_tops), tl.where(now, c_others[:, None], c_sums)
            c_linears, c_squared = tl.where(now, c_linear[:, None], c_linears), tl.where(now, c_squares[:, None], c_squared)
            c_bests, c_supports = tl.where(now, c_best[:, None], c_bests), tl.where(now, c_support[:, None], c_supports)
            sources = tl.where(now, source[:, None], sources)
        if task != 0:
            before, mass_before, own = _place(values, masses, columns, classes, label)
            uniform = tl.load(draws + place * draws_row + m * draws_exit, mask=valid, other=0.0).to(number)
            if latest >= 0:
                _write_set(
                    whole, marks, real, plane, (latest * exits + m) * count + place, valid, masses, others, before,
                    mass_before, own, classes, limits + latest * exits + m, uniform, lam_reg, k_reg, slack, randomised,
                    original, empty, task,
                )  # fmt: skip
            if caching >= 0:
                c_masses = tl.where(newer[:, None], masses, c_masses)
                c_before, c_mass = tl.where(newer, before, c_before), tl.where(newer, mass_before, c_mass)
                c_own = tl.where(newer, own, c_own)
                _write_set(
                    whole, marks, real, plane, (caching * exits + m) * count + place, valid, c_masses, c_others, c_before,
                    c_mass, c_own, classes, limits + caching * exits + m, uniform, lam_reg, k_reg, slack, randomised,
                    original, empty, task,
                )  # fmt: skip
    if task != _SCORES:
        first = start[:, None]
        if latest >= 0:
            logs = log1p(sums)
            ends = tl.load(first + best[:, None] + axis * exit_stride, mask=shown, other=0.0).to(number)
            labels = nowhere
            if labelled:
                labels = tl.load(first + label[:, None] + axis * exit_stride, mask=shown, other=0.0).to(number)
            _write(
                whole, marks, real, plane, (latest * exits + axis) * count + place[:, None], shown, bests, supports, nothing,
                sums, linears, squared, ends - tops - logs, labels - tops - logs, label, labelled,
            )  # fmt: skip
        if caching >= 0:
            logs = log1p(c_sums)
            ends = tl.load(first + c_best[:, None] + sources * exit_stride, mask=shown, other=0.0).to(number)
            labels = nowhere
            if labelled:
                labels = tl.load(first + label[:, None] + sources * exit_stride, mask=shown, other=0.0).to(number)
            _write(
                whole, marks, real, plane, (caching * exits + axis) * count + place[:, None], shown, c_bests, c_supports,
                nothing, c_sums, c_linears, c_squared, ends - c_tops - logs, labels - c_tops - logs, label, labelled,
            )  # fmt: skip


@triton.jit
def _follow_experts(
    start, cells, inside, columns, axis, shown, row, place, valid, label, draws, draws_exit, draws_row, exit_stride, limits,
    whole, marks, real, faults, plane, count, first_row, exits, classes, lam_reg, k_reg, evidence, weights, fractions, slot,
    kind: tl.constexpr, activation: tl.constexpr, checks: tl.constexpr, labelled: tl.constexpr, task: tl.constexpr,
    randomised: tl.constexpr, original: tl.constexpr, empty: tl.constexpr, number: tl.constexpr, lowest: tl.constexpr,
    slack: tl.constexpr, rows: tl.constexpr, width: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """Follow the rows under a product or a mixture; of a mixture, `tops` and `sums` are those of each exit's expert."""
    zero, nowhere = tl.zeros([rows], tl.int32), tl.zeros([rows, depth], number)
    nothing = tl.zeros([rows, depth], tl.int32)
    shift, gate, floor, cap = tl.load(evidence), tl.load(evidence + 1), tl.load(evidence + 2), tl.load(evidence + 3)
    totals = tl.where(columns < classes, tl.zeros([rows, width], number), -_INF)
    mean, alive = tl.zeros([rows, width if kind == _MIXTURE else 1], number), zero[:, None] > 0
    if kind == _MIXTURE:
        alive = totals > 0
    tops, sums, linears, squared, highest = nowhere, nowhere, nowhere, nowhere, nowhere
    bests, supports, fell_back, lost_at, best, ever_lost = nothing, nothing, nothing, nothing, zero, zero
    own_sums = nowhere
    for m in range(exits):
        values = tl.load(cells + m * exit_stride, mask=inside, other=-_INF).to(number)
        now = axis == m
        high = tl.zeros([rows], number)
        if activation == _EXPONENTIAL:
            high = tl.max(values, 1)
            highest = tl.where(now, high[:, None], highest)
        found = log_evidence(values, high[:, None], shift, gate, floor, cap, activation)
        if kind == _PRODUCT:
            weight = tl.load(weights + m)
            if weight > 0:
                totals = totals + weight * found
            scores, top = totals, tl.max(totals, 1)
            lost = (top == -_INF).to(tl.int32)
            if tl.max(lost, 0) > 0:
                scores = tl.where(lost[:, None] > 0, values, totals)
                top = tl.max(scores, 1)
            best, masses, others, linear, squares, support = softmax(scores, top, columns, lowest, False)
            tops, sums = tl.where(now, top[:, None], tops), tl.where(now, others[:, None], sums)
            ever_lost = lost
            lost_at = tl.where(now, lost[:, None], lost_at)
        else:
            kept, added = tl.load(fractions + 2 * m), tl.load(fractions + 2 * m + 1)
            if added > -_INF:
                lost = (tl.max(found, 1) == -_INF).to(tl.int32)
                expert = tl.where(lost[:, None] > 0, values, found)
                top = tl.max(expert, 1)
                first, masses, others, linear, squares, support = softmax(expert, top, columns, lowest, False)
                mean = mean * tl.exp(kept) + masses * exp(added - log1p(others))[:, None]
                alive = alive | (expert > -_INF)
                highest_mean = tl.max(mean, 1)
                largest = tl.min(tl.where(mean == highest_mean[:, None], columns, width), 1)
                best = tl.where(kept == -_INF, first, largest)
                tops, own_sums = tl.where(now, top[:, None], tops), tl.where(now, others[:, None], own_sums)
                ever_lost = tl.maximum(ever_lost, lost)
                lost_at = tl.where(now, lost[:, None], lost_at)
            scores = tl.where(alive, log(tl.where(alive, mean, 1.0)), -_INF)
            _, masses, others, linear, squares, support = softmax(scores, tl.max(scores, 1), columns, lowest, False)
            sums = tl.where(now, others[:, None], sums)
            support = tl.sum(alive.to(tl.int32), 1)
        best = tl.minimum(best, classes - 1)
        if checks:
            odd = valid & ((others != others) | (tl.min(tl.where(inside, values, 0.0), 1) == -_INF))
            odd = odd | (tl.max(tl.where(inside, values, 0.0), 1) == _INF)
            odd = odd | (tl.max((values != values).to(tl.int32), 1) > 0)
            if tl.max(odd.to(tl.int32), 0) > 0:
                _note_fault(faults, values, inside, row, first_row, exits, m)
        linears, squared = tl.where(now, linear[:, None], linears), tl.where(now, squares[:, None], squared)
        bests, supports = tl.where(now, best[:, None], bests), tl.where(now, support[:, None], supports)
        fell_back = tl.where(now, ever_lost[:, None], fell_back)
        if task != 0:
            before, mass_before, own = _place(scores, masses, columns, classes, label)
            uniform = tl.load(draws + place * draws_row + m * draws_exit, mask=valid, other=0.0).to(number)
            _write_set(
                whole, marks, real, plane, (slot * exits + m) * count + place, valid, masses, others, before, mass_before,
                own, classes, limits + slot * exits + m, uniform, lam_reg, k_reg, slack, randomised, original, empty, task,
            )  # fmt: skip
    if task != _SCORES:
        norms = own_sums if kind == _MIXTURE else sums
        final = _logs_of_class(
            start, best, shown, axis, exit_stride, highest, lost_at, tops, norms, evidence, weights, fractions, exits, kind,
            activation,
        )  # fmt: skip
        labels = nowhere
        if labelled:
            labels = _logs_of_class(
                start, label, shown, axis, exit_stride, highest, lost_at, tops, norms, evidence, weights, fractions, exits,
                kind, activation,
            )  # fmt: skip
        _write(
            whole, marks, real, plane, (slot * exits + axis) * count + place[:, None], shown, bests, supports, fell_back, sums,
            linears, squared, final, labels, label, labelled,
        )  # fmt: skip


# Without this, arguments that are 1 or a multiple of 16 would each trigger a compilation.
@triton.jit(do_not_specialize=["count", "first_row", "slots", "exits", "classes", "k_reg", "exit_stride", "row_stride"])
def follow_rows(
    logits, exit_stride, row_stride, picked, labels, draws, draws_exit, draws_row, evidence, weights, fractions, limits, whole,
    marks, real, faults, count, first_row, slots, exits, classes, lam_reg, k_reg,
    latest: tl.constexpr, caching: tl.constexpr, later_ties: tl.constexpr, kinds: tl.constexpr, activations: tl.constexpr,
    experts: tl.constexpr, chosen: tl.constexpr, labelled: tl.constexpr, task: tl.constexpr, randomised: tl.constexpr,
    original: tl.constexpr, empty: tl.constexpr, double: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
    depth: tl.constexpr,
):  # fmt: skip
    """Follow `rows` rows under all rules; see `anytime.metrics.fused.plan.FusedRules.follow`.

    The rules are numbered: `latest` and `caching` are their numbers or -1, and the others are the last ones, products and
    mixtures in the order of `kinds`. `width` and `depth` are powers of two, at least the numbers of classes and of exits.
    """
    number: tl.constexpr = tl.float64 if double else tl.float32
    lowest: tl.constexpr = -708.0 if double else -87.0
    slack: tl.constexpr = 8 * 1.1920928955078125e-07
    place = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    valid = place < count
    exit_stride, count = exit_stride.to(tl.int64), count.to(tl.int64)  # products of which may exceed 32 bits
    row = tl.load(picked + place, mask=valid, other=0) if chosen else tl.where(valid, place, 0)
    columns, axis = tl.arange(0, width)[None, :], tl.arange(0, depth)[None, :]
    inside = columns < tl.where(valid, classes, 1)[:, None]  # a row that is not there is not empty
    shown = (axis < exits) & valid[:, None]
    plane = slots * exits * count
    label = tl.load(labels + place, mask=valid, other=0) if labelled else tl.zeros([rows], tl.int64)
    start = logits + row * row_stride
    cells = start[:, None] + columns
    if latest >= 0 or caching >= 0:
        _follow_softmaxes(
            start, cells, inside, columns, axis, shown, row, place, valid, label, draws, draws_exit, draws_row, exit_stride,
            limits, whole, marks, real, faults, plane, count, first_row, exits, classes, lam_reg, k_reg, latest, caching,
            later_ties, labelled, task, randomised, original, empty, number, lowest, slack, rows, width, depth,
        )  # fmt: skip
    for x in tl.static_range(experts):
        _follow_experts(
            start, cells, inside, columns, axis, shown, row, place, valid, label, draws, draws_exit, draws_row, exit_stride,
            limits, whole, marks, real, faults, plane, count, first_row, exits, classes, lam_reg, k_reg, evidence + 4 * x,
            weights + x * exits, fractions + 2 * x * exits, slots - experts + x, kinds[x], activations[x],
            x == 0 and latest < 0 and caching < 0, labelled, task, randomised, original, empty, number, lowest, slack, rows,
            width, depth,
        )  # fmt: skip

"""Exponential, logarithm and comparisons that a compiler turns into vector instructions.

Those of the C library are called once per number. These are short polynomials without branches, accurate to about two units
in the last place, for float32 and float64. `vectorised` allows sums in any order, which vector instructions need, and nothing
else: infinities and signed zeros keep their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

inlined = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
plain = njit(**inlined, forceinline=True)
separate = njit(**inlined)
rounded = njit(**{**inlined, "fastmath": False}, forceinline=True)
vectorised = njit(**{**inlined, "fastmath": {"contract", "reassoc", "nsz"}})


def cached(function: Callable[..., Any]) -> Any:
    """Compile on the first call, or load what an earlier process compiled; without the cache if no folder can be written."""
    try:
        return njit(cache=True, **inlined)(function)
    except RuntimeError:  # numba finds neither the package's folder nor the user's
        return njit(**inlined)(function)


_FIRST, _REST = 355 / 512, -2.121944400546905827679e-4
"""Their sum is log 2. The first has so few digits that its product with an exponent is exact."""
LOWEST32, LOWEST64 = np.float32(-87.0), np.float64(-708.0)
"""The least numbers with normal exponentials; smaller ones are raised to them, as in `anytime.metrics.trajectories`."""

_OTHER = {types.float32: types.int32, types.int32: types.float32, types.float64: types.int64, types.int64: types.float64}


@intrinsic
def same_bits(context: Any, x: Any) -> Any:
    """The integer with the bits of a float, or the float with the bits of an integer."""
    other = _OTHER[x]
    return other(x), lambda context, builder, signature, values: builder.bitcast(values[0], context.get_value_type(other))


def exp(x: Any) -> Any:
    """e^x for x ≤ 0."""
    raise NotImplementedError("for compiled code")


def log(x: Any) -> Any:
    """The logarithm of a positive number."""
    raise NotImplementedError("for compiled code")


def log1p(x: Any) -> Any:
    """log(1 + x) for x from 0 to 1, to full relative precision."""
    raise NotImplementedError("for compiled code")


def _make_exp(real: Any, whole: Any, digits: int, bias: int, lowest: Any) -> Callable[[Any], Any]:
    double = real is np.float64
    per_octave, half, one = real(1 / math.log(2)), real(0.5), real(1)
    first, rest = real(_FIRST), real(_REST)
    c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, c13 = (real(1 / math.factorial(k)) for k in range(3, 14))
    bias, digits = whole(bias), whole(digits)

    def approximate(x: Any) -> Any:
        x = max(x, lowest)
        octaves = np.floor(x * per_octave + half)
        r = (x - octaves * first) - octaves * rest  # |r| ≤ log(2)/2: the Taylor series needs 7 or 13 terms
        p = c7
        if double:
            p = ((((((c13 * r + c12) * r + c11) * r + c10) * r + c9) * r + c8) * r) + c7
        p = (((((((p * r + c6) * r + c5) * r + c4) * r + c3) * r + half) * r) + one) * r + one
        return p * same_bits(whole(whole(whole(octaves) + bias) << digits))

    return approximate


def _make_log(real: Any, whole: Any, digits: int) -> Callable[[Any], Any]:
    double = real is np.float64
    info = np.finfo(real)
    normal, raised, raise_by, none = info.smallest_normal, real(2.0**digits), real(digits), real(0)
    one, two = real(1), real(2)
    first, rest = real(_FIRST), real(_REST)
    least = real(math.sqrt(0.5)).view(whole)
    mantissa, digits = whole((1 << digits) - 1), whole(digits)
    c3, c5, c7, c9, c11, c13, c15, c17, c19, c21 = (real(1 / k) for k in range(3, 22, 2))

    def approximate(x: Any) -> Any:
        small = x < normal
        scaled = x * (raised if small else one)
        bits = whole(same_bits(scaled) - least)
        octaves = real(whole(bits >> digits)) - (raise_by if small else none)
        f = same_bits(whole(whole(bits & mantissa) + least)) - one  # x = (1 + f)·2^octaves, 1 + f from √½ to √2
        s = f / (two + f)  # log(1 + f) = 2·artanh(s)
        q = s * s
        p = c9
        if double:
            p = (((((c21 * q + c19) * q + c17) * q + c15) * q + c13) * q + c11) * q + c9
        p = (((p * q + c7) * q + c5) * q + c3) * q
        return octaves * first + (two * s + (two * s * p + octaves * rest))

    return approximate


def _make_log1p(real: Any) -> Callable[[Any], Any]:
    one = real(1)

    def approximate(x: Any) -> Any:
        rounded = one + x
        return log(rounded) + (x - (rounded - one)) / rounded

    return approximate


_FORMATS = {types.float32: (np.float32, np.int32, 23), types.float64: (np.float64, np.int64, 52)}
_EXP = {
    types.float32: _make_exp(np.float32, np.int32, 23, 127, LOWEST32),
    types.float64: _make_exp(np.float64, np.int64, 52, 1023, LOWEST64),
}
_LOG = {kind: _make_log(*form) for kind, form in _FORMATS.items()}
_LOG1P = {kind: _make_log1p(form[0]) for kind, form in _FORMATS.items()}


def _provide(function: Callable[[Any], Any], by_type: dict[Any, Any]) -> None:
    @overload(function, jit_options=inlined)
    def choose(x: Any) -> Any:
        return by_type.get(x)


_provide(exp, _EXP)
_provide(log, _LOG)
_provide(log1p, _LOG1P)


@intrinsic
def chosen(context: Any, condition: Any, x: Any, y: Any) -> Any:
    """Choose x where the condition holds, else y: without the branch that `x if condition else y` may become."""
    return x(condition, x, x), lambda context, builder, signature, values: builder.select(*values)


def _choice(comparison: str) -> Any:
    def choose(context: Any, x: Any, y: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            flags = ("nnan", "nsz")  # without them the compiler takes one number after the other
            return builder.select(builder.fcmp_ordered(comparison, *values, flags=flags), *values, flags=flags)

        return x(x, x), generate

    return intrinsic(choose)


larger: Any = _choice(">")
smaller: Any = _choice("<")

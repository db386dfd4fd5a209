"""Numbers as text: short, and never rounded into a claim that does not hold."""

from __future__ import annotations

import math

Number = float | int | None

ABSENT = "–"


def percent(value: Number) -> str:
    """A percentage: `24 %`, `3.2 %`, `0.02 %`; `0 %` and `100 %` only where they are exact.

    Example:
        >>> percent(24.18), percent(99.98), percent(0.004), percent(0)
        ('24 %', '99.98 %', 'under 0.01 %', '0 %')
    """
    if value is None or math.isnan(value):
        return ABSENT
    size = abs(value)
    if 0 < size < 0.01 or 99.99 < size < 100:
        return "under 0.01 %" if size < 1 else "over 99.99 %"
    distance = min(size, abs(100 - size))
    digits = 0 if distance == 0 or 10 <= size <= 90 else 1 if distance >= 0.95 else 2
    return f"{value:.{digits}f} %".replace("-", "−")


def exact(value: Number, *, digits: int = 2) -> str:
    """A percentage with fixed decimals, for a table: `27.18 %`."""
    return ABSENT if value is None or math.isnan(value) else f"{value:.{digits}f} %"


def fraction(value: Number, *, digits: int = 2) -> str:
    """A fraction between 0 and 1 as a percentage: `72.80 %`."""
    return exact(None if value is None else 100 * value, digits=digits)


def number(value: Number) -> str:
    """A number with three or four significant digits: `0.165`, `11.2`, `5,000`.

    Example:
        >>> number(0.16513), number(11.234), number(260.3), number(5000), number(-0.5), number(None)
        ('0.165', '11.2', '260', '5,000', '−0.5', '–')
    """
    if value is None or math.isnan(value):
        return ABSENT
    if math.isinf(value):
        return "infinite" if value > 0 else "−infinite"
    size = abs(value)
    if float(value).is_integer() and size < 1e15:
        text = f"{int(value):,}"
    elif size >= 1000:
        text = f"{value:,.0f}"
    elif size >= 0.001:
        text = f"{value:,.{3 if size < 1 else 3 - len(str(int(size)))}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    else:
        text = f"{value:.1e}"
    return text.replace("-", "−")


def compact(value: float, *, digits: int = 0) -> str:
    """A number for an axis: `0.25`, `20k`, `15M`, `3.2G`."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.1f}".removesuffix(".0").replace("-", "−") + unit
    return f"{value:.{digits}f}".replace("-", "−")


def points(difference: float) -> str:
    """A difference of percentages without its sign: `0.2 points`, `1 point`."""
    text = f"{abs(difference):.1f}".removesuffix(".0")
    return f"{text} point{'' if text == '1' else 's'}"


def plural(count: int, noun: str) -> str:
    """A count with its noun: `1 input`, `5,000 inputs`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def rounded_up(fraction: float) -> str:
    """A percentage rounded up, so that an upper bound stays one.

    >>> rounded_up(0.003101), rounded_up(0.1371)
    ('0.32 %', '13.8 %')
    """
    digits = 2 if fraction < 0.01 else 1
    # The last bits of a float must not round a whole step up.
    return f"{math.ceil(100 * fraction * 10**digits - 1e-9) / 10**digits:.{digits}f} %"


def rounded_down(fraction: float) -> str:
    """A percentage rounded down.

    >>> rounded_down(0.8608), rounded_down(0.99999)
    ('86.0 %', '99.99 %')
    """
    digits = 2 if fraction > 0.99 else 1
    return f"{math.floor(100 * fraction * 10**digits + 1e-9) / 10**digits:.{digits}f} %"

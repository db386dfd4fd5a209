"""Options that several verbs share: flags, lists of numbers, and JSON on stdout."""

from __future__ import annotations

import json
from typing import Annotated, Any

from cyclopts import Parameter

from anytime.errors import OptionError
from anytime.safe_text import print_safely

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
"""A switch without a value or a negative form."""
_LARGEST_COUNT = 1 << 20


def print_json(document: Any) -> None:
    """Print one JSON document to stdout."""
    print_safely(json.dumps(document, allow_nan=False))


def numbers(text: str, name: str) -> list[float]:
    """Numbers from a comma-separated list.

    >>> numbers("1, 2.5,4e3", "costs")
    [1.0, 2.5, 4000.0]
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(
            f"--{name} is {text!r}", expected="a comma-separated list of numbers", fix=f"write --{name} 15.1,25.5,37.1"
        ) from None


def counts(text: str, name: str, *, example: str) -> tuple[int, ...]:
    """Positive integers from a comma-separated list.

    >>> counts("1, 8", "batch", example="1,8")
    (1, 8)
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or max(found) > _LARGEST_COUNT:
        expected = f"comma-separated integers from 1 to {_LARGEST_COUNT:,}"
        raise OptionError(f"--{name} is {text!r}", expected=expected, fix=f"write --{name} {example}")
    return found

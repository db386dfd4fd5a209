"""Checks that the networks share: fields of a config, and the shape of images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from anytime.checks import check_count
from anytime.errors import OptionError, ShapeError


def check_config(
    config: Any,
    *,
    counts: Mapping[str, int],
    choices: Mapping[str, Sequence[Any]] | None = None,
    fractions: Sequence[str] = (),
) -> None:
    """Check fields of a frozen dataclass.

    Args:
        config: The dataclass.
        counts: Integers from 1 to the given limit. Limits are far beyond any real network; they refuse a file that was made to
            exhaust memory.
        choices: The allowed values, the default first.
        fractions: Numbers from 0 to below 1.
    """
    for name, most in counts.items():
        object.__setattr__(config, name, check_count(getattr(config, name), name, most=most))
    for name, allowed in (choices or {}).items():
        check_choice(getattr(config, name), name, allowed)
    for name in fractions:
        value = getattr(config, name)
        if not is_number(value) or not 0 <= value < 1:
            raise OptionError(
                f"{name} is {value!r}", expected="a number from 0 to below 1", fix=f"pass {name}=0.1, for example"
            )


def require(valid: bool, got: str, *, expected: str, fix: str) -> None:
    """Raise an `OptionError` unless settings fit together."""
    if not valid:
        raise OptionError(got, expected=expected, fix=fix)


def check_choice(value: Any, name: str, allowed: Sequence[Any]) -> None:
    """Check that a value is one of a few."""
    valid = any(type(value) is type(choice) and value == choice for choice in allowed)
    expected = " or ".join(map(repr, allowed))
    require(valid, f"{name} is {value!r}", expected=expected, fix=f"pass {name}={allowed[0]!r}, the default")


def is_number(value: Any) -> bool:
    """Whether a value is a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_images(images: Tensor, size: int) -> None:
    """Check the shape of RGB images, `(batch, 3, size, size)`."""
    if images.shape[1:] != (3, size, size):
        raise ShapeError(
            f"images have shape {tuple(images.shape)}",
            expected=f"(batch, 3, {size}, {size})",
            fix="put the channels before height and width; for other sizes, create the network with another image_size",
        )

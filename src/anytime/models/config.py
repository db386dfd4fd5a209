"""Checks that the networks share: fields of a config, and the shape of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from anytime.checks import check_choice, check_count, check_number
from anytime.errors import OptionError, ShapeError


def check_config(
    config: Any,
    *,
    counts: Mapping[str, int],
    choices: Mapping[str, Sequence[Any]] | None = None,
    rates: Sequence[str] = (),
) -> None:
    """Check fields of a frozen dataclass.

    Args:
        config: The dataclass.
        counts: Integers from 1 to the given limit. The limits are far beyond any real network; they refuse a file that was made
            to exhaust memory.
        choices: The allowed values, the default first.
        rates: Numbers from 0 to below 1.
    """
    for name, most in counts.items():
        object.__setattr__(config, name, check_count(getattr(config, name), name, most=most))
    for name, allowed in (choices or {}).items():
        check_choice(getattr(config, name), name, allowed)
    for name in rates:
        check_number(getattr(config, name), name, low=0, below=1, fix=f"pass, e.g., {name}=0.1")


def require(valid: bool, got: str, *, expected: str, fix: str) -> None:
    """Raise an `OptionError` unless settings fit together."""
    if not valid:
        raise OptionError(got, expected=expected, fix=fix)


def check_heads(width: int, heads: int, *, even: bool = False) -> None:
    """Check that attention heads divide the channels of a token, into even numbers if `even`."""
    require(
        width % (2 * heads if even else heads) == 0,
        f"width is {width} with {heads} heads",
        expected=f"the same{' even' if even else ''} number of channels for each head",
        fix=f"use a multiple of {2 * heads if even else heads}",
    )


def check_images(images: Tensor, size: int) -> None:
    """Check the shape of RGB images, `(batch, 3, size, size)`."""
    if images.shape[1:] != (3, size, size):
        raise ShapeError(
            f"images have shape {tuple(images.shape)}",
            expected=f"(batch, 3, {size}, {size})",
            fix="put the channels before height and width; for other sizes, create the network with another image_size",
        )

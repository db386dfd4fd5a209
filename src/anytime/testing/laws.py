"""How a battery runs: each law is a function whose docstring says what must hold, and `fail` says how it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from anytime.errors import CheckError

Law = Callable[..., None]


class _ViolationError(Exception):
    """What `fail` raises; `run_laws` adds the law and the object to it."""


def run_laws(laws: Iterable[Law], subject: Any, *arguments: Any) -> None:
    """Call every law with the object; raise `CheckError` at the first that does not hold."""
    for law in laws:
        try:
            law(subject, *arguments)
        except Exception as error:
            how = str(error) if isinstance(error, _ViolationError) else f"it raised {type(error).__name__}: {error}"
            raise CheckError(
                f"{subject!r} violates {law.__name__!r}: {how}",
                expected=str(law.__doc__),
                fix=f"change {type(subject).__name__}; {law.__name__} in {law.__module__} shows the inputs",
            ) from error


def fail(how: str) -> NoReturn:
    """Report that the law does not hold."""
    raise _ViolationError(how)


def check_equal(found: Tensor, expected: Tensor, what: str) -> None:
    """Fail unless the tensors are identical."""
    if not torch.equal(found, expected):
        fail(f"{what} differs")


def check_close(found: Tensor, expected: Tensor, what: str, *, rtol: float | None = None, atol: float | None = None) -> None:
    """Fail unless the tensors agree, by default up to the rounding of a different processor, thread count or alignment."""
    try:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    except AssertionError as error:
        raise _ViolationError(f"{what}: {error}") from error


def check_raises(kind: type[Exception], attempt: Callable[[], Any], what: str) -> Any:
    """Fail unless the call raises an error of this kind; the error."""
    try:
        attempt()
    except kind as error:
        return error
    except Exception as error:
        raise _ViolationError(f"{what} raised {type(error).__name__} instead of {kind.__name__}") from error
    fail(f"{what} raised no {kind.__name__}")

"""How many threads torch's operations on a CPU use.

On a busy machine torch's own threads wait for each other after every small operation, so small work is done by one.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

_FEW = 1 << 22
"""Numbers up to which one thread is hardly slower on an idle machine."""

_own, _changing = threading.local(), threading.Lock()
_inside = SimpleNamespace(count=0, before=1)

_Function = TypeVar("_Function", bound=Callable[..., Any])


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Inside, torch's operations on a CPU use so many threads; None leaves their number as it is.

    Torch has one number for each thread and one for threads to come. Where several threads are inside at once, both return to
    what they were before the first of them.
    """
    if count is None:
        yield
        return
    mine = getattr(_own, "depth", 0)
    with _changing:
        if not _inside.count:
            _inside.before = torch.get_num_threads()
        _inside.count += 1
        before = torch.get_num_threads() if mine else _inside.before
        torch.set_num_threads(count)
    _own.depth = mine + 1
    try:
        yield
    finally:
        _own.depth = mine
        with _changing:
            _inside.count -= 1
            torch.set_num_threads(before)


def one_thread_for_few(function: _Function) -> _Function:
    """A function of logits, or of other arrays, that runs with one torch thread if the first of them has few numbers."""

    @wraps(function)
    def run(*given: Any, **named: Any) -> Any:
        first = next(iter((*given, *named.values())), None)
        parts = first if isinstance(first, list | tuple) else [first]
        few = sum(math.prod(getattr(part, "shape", ())) for part in parts) < _FEW
        with torch_threads(1 if few else None):
            return function(*given, **named)

    return run  # type: ignore[return-value]


def _renew() -> None:
    """In a forked process only its one thread is inside."""
    global _changing
    _changing, _inside.count = threading.Lock(), int(getattr(_own, "depth", 0) > 0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)

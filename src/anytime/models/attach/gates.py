"""Gates before the parts of a module: during a replay, in its own thread only, calls return what is known already."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_this_thread = threading.local()

Call = tuple[int, int]
"""A call: the identity of a part, and how often it ran before."""


class Reached(BaseException):
    """Ends a replay from inside forward; not an Exception, so that no module handles it."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


@dataclass
class Replay:
    """What the gates do.

    Attributes:
        known: What calls return that are skipped, with their hooks.
        kept: The calls whose outputs are wanted; afterwards these outputs.
        end: The call after which forward ends with `Reached`.
        copies: Whether `kept` holds copies, because forward overwrites outputs.
    """

    known: Mapping[Call, Callable[[], Any]]
    kept: dict[Call, Any]
    end: Call | None
    copies: bool = False
    _counts: Counter[int] = field(default_factory=Counter)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The calls of this thread inside the context are part of the replay."""
        outer = getattr(_this_thread, "replay", None)
        _this_thread.replay = self
        try:
            with _module_stack_restored():
                yield
        finally:
            _this_thread.replay = outer

    def call(self, part: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """The output of a part, computed or known."""
        key = id(part), self._counts[id(part)]
        self._counts[id(part)] += 1
        if key in self.known:
            return self.known[key]()
        output = nn.Module._call_impl(part, *args, **named)  # type: ignore[no-untyped-call]
        if key in self.kept:
            self.kept[key] = pytree.tree_map_only(Tensor, torch.clone, output) if self.copies else output
        if key == self.end:
            raise Reached(output)
        return output


class Gate:
    """Takes the place of a part's `_call_impl`. An attribute of the part, so a copy of the module has gates of its own."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part

    def __call__(self, *args: Any, **named: Any) -> Any:
        replay: Replay | None = getattr(_this_thread, "replay", None)
        if replay is None:
            return nn.Module._call_impl(self.part, *args, **named)  # type: ignore[no-untyped-call]
        return replay.call(self.part, args, named)


@contextmanager
def _module_stack_restored() -> Iterator[None]:
    """During `torch.export`, which keeps a stack of the modules that it is in and does not notice that forward ends early."""
    kind = torch._C._TorchDispatchModeKey.PROXY
    before_dispatch: Any = torch._ops._get_dispatch_mode_pre_dispatch
    mode = before_dispatch(kind) or torch._C._get_dispatch_mode(kind)
    before = None if mode is None else mode.tracer.module_stack.copy()
    try:
        yield
    finally:
        if mode is not None:
            mode.tracer.module_stack = before


def add_gates(parts: Iterable[nn.Module]) -> None:
    """Put gates before these parts; they do nothing outside of a replay, and are never removed."""
    for part in parts:
        part.__dict__.setdefault("_call_impl", Gate(part))

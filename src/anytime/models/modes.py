"""The modes of torch that belong to a thread, to be carried into another: gradients, inference, autocast, default device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import overrides
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

_KINDS = ("cpu", "cuda")
_functions: Any = overrides._get_current_function_mode_stack


class Modes(NamedTuple):
    """The modes of one thread.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether inference mode is on.
        autocast: For each kind of device whether autocast is on, and its type.
        cached: Whether autocast keeps converted weights.
        functions: Modes that change function calls, such as `with torch.device("cuda")`.
        watching: Modes that see every operation, such as a counter of MACs.
        gpu: The current GPU and, if it is not the default one, its current stream; None before CUDA is used.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    cached: bool
    functions: tuple[Any, ...]
    watching: tuple[Any, ...]
    gpu: Any = None

    @classmethod
    def now(cls) -> Modes:
        """Those of the calling thread."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS),
            torch.is_autocast_cache_enabled(),
            tuple(_functions()) if torch._C._len_torch_function_stack() else (),
            tuple(_get_current_dispatch_mode_stack()) if torch._C._len_torch_dispatch_stack() else (),
            _gpu(),
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """The calling thread has these modes inside, and afterwards its own again, whatever was left on inside."""
        before = Modes.now()
        with torch.inference_mode(self.inference):
            self.restore()
            try:
                yield
            finally:
                before.restore()
                torch.clear_autocast_cache()

    def restore(self) -> None:
        """Give the calling thread these modes; all but inference mode, which torch lets nobody set without a context."""
        torch._C._set_grad_enabled(self.grad)
        for kind, (enabled, dtype) in zip(_KINDS, self.autocast, strict=True):
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cached)
        for _ in range(torch._C._len_torch_function_stack()):
            overrides._pop_mode()  # type: ignore[no-untyped-call]
        for mode in self.functions:  # not entered again: a counter would begin anew
            overrides._push_mode(mode)  # type: ignore[no-untyped-call]
        for _ in range(torch._C._len_torch_dispatch_stack()):
            _pop_mode()
        for mode in self.watching:
            _push_mode(mode)
        if self.gpu is not None and self.gpu != _gpu():
            device, stream = self.gpu
            torch.cuda.set_device(device)
            torch.cuda.set_stream(stream or torch.cuda.default_stream())


def _gpu() -> Any:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    stream = torch.cuda.current_stream()
    return torch.cuda.current_device(), None if stream == torch.cuda.default_stream() else stream


@contextmanager
def without_autocast() -> Iterator[None]:
    """Inside, tensors have the types that the modules give them."""
    with ExitStack() as stack:
        for kind in _KINDS:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield

"""Torch's modes of a thread (gradients, inference, autocast, default device, CUDA stream), to be applied in another."""

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
        autocast: For CPU and CUDA, whether autocast is on, and its dtype.
        cached: Whether autocast caches converted weights.
        functions: Function modes, such as `with torch.device("cuda")`.
        watching: Dispatch modes, such as a FLOP counter.
        gpu: The current GPU, and the numbers that identify its current stream; None before CUDA is initialised.
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
        """The modes of the calling thread."""
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
        """Apply these modes to the calling thread inside the context, and restore its own afterwards."""
        before = Modes.now()
        with torch.inference_mode(self.inference):
            self.restore()
            try:
                yield
            finally:
                before.restore()
                torch.clear_autocast_cache()

    def restore(self) -> None:
        """Apply these modes to the calling thread, except inference mode, which needs a context."""
        torch._C._set_grad_enabled(self.grad)
        for kind, (enabled, dtype) in zip(_KINDS, self.autocast, strict=True):
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cached)
        for _ in range(torch._C._len_torch_function_stack()):
            overrides._pop_mode()  # type: ignore[no-untyped-call]
        for mode in self.functions:  # pushed, not entered: a counter would start again from 0
            overrides._push_mode(mode)  # type: ignore[no-untyped-call]
        for _ in range(torch._C._len_torch_dispatch_stack()):
            _pop_mode()
        for mode in self.watching:
            _push_mode(mode)
        if self.gpu is not None and self.gpu != _gpu():
            device, stream = self.gpu
            torch.cuda.set_device(device)
            stream_id, device_index, device_type = stream
            torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


def _gpu() -> Any:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    # The tuple of numbers that a stream object is made from: every request reads it, and objects cost ten times as much.
    device = torch._C._cuda_getDevice()
    return device, torch._C._cuda_getCurrentStream(device)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Switch autocast off for CPU and CUDA."""
    with ExitStack() as stack:
        for kind in _KINDS:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield

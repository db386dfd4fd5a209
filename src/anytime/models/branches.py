"""Independent parts of a network on parallel CUDA streams.

A layer of an MSDNet has up to five short paths, each too small to fill a GPU. On separate streams they overlap, in the backward
pass too, because autograd runs each operation on the stream of its forward pass. In a CUDA graph the streams become parallel
branches. Results do not change. On an H200 this makes training steps of MSDNet 1.2 to 1.3 times as fast (docs/training.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_PATHS = ("conv_down", "conv_normal")
_STREAMS = 5


def run_paths_side_by_side(network: nn.Module) -> None:
    """Run the paths of each layer of an MSDNet on separate streams from now on; other networks are not changed."""
    layers = [(layer, paths) for layer in network.modules() if len(paths := _paths(layer)) > 1]
    streams = [torch.cuda.Stream() for _ in range(_STREAMS)] if layers else []  # type: ignore[no-untyped-call]
    for layer, paths in layers:
        start = _Start(layer)
        for path, stream in zip(paths, streams, strict=False):
            _Branch(path, stream, start, join=True)


def run_beside(part: nn.Module, stream: torch.cuda.Stream) -> None:
    """Run a part on a stream from now on. Code on other streams must wait for this one before it reads the output."""
    _Branch(part, stream, _Start(part), join=False)


def _paths(layer: nn.Module) -> list[nn.Module]:
    """The paths of a layer of an MSDNet; none for other modules."""
    scales = getattr(layer, "layers", None)
    found = [getattr(scale, name, None) for scale in scales for name in _PATHS] if isinstance(scales, nn.ModuleList) else []
    return [path for path in found if isinstance(path, nn.Module)]


class _Start:
    """The event that branches wait for: the start of a module's call."""

    event: torch.cuda.Event

    def __init__(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.record)

    def record(self, *_: Any) -> None:
        self.event = torch.cuda.current_stream().record_event()


class _Branch:
    """Runs a module on a stream after the start event; with `join`, the main stream waits for it."""

    def __init__(self, module: nn.Module, stream: torch.cuda.Stream, start: _Start, *, join: bool) -> None:
        self.stream, self.start, self.join = stream, start, join
        module.register_forward_pre_hook(self.leave)
        module.register_forward_hook(self.back)

    def leave(self, *_: Any) -> None:
        self.main = torch.cuda.current_stream()
        self.stream.wait_event(self.start.event)
        torch.cuda.set_stream(self.stream)

    def back(self, *_: Any) -> None:
        torch.cuda.set_stream(self.main)
        if self.join:
            self.main.wait_stream(self.stream)

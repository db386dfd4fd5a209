"""Parts of a network that do not need each other, side by side on a GPU.

A layer of MSDNet is up to five short paths, each too small to fill a GPU. On streams of their own they overlap: in the
forward pass by what is done here, in the backward pass because autograd runs each part on the stream of its forward
pass. Captured as a CUDA graph, the streams become parallel branches of the graph. No number changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_PATHS = ("conv_down", "conv_normal")
_STREAMS = 5


def run_paths_side_by_side(network: nn.Module) -> None:
    """Put the paths of each layer of an MSDNet on streams of their own, from now on; other networks stay as they are."""
    layers = [(layer, paths) for layer in network.modules() if len(paths := _paths(layer)) > 1]
    streams = [torch.cuda.Stream() for _ in range(_STREAMS)] if layers else []  # type: ignore[no-untyped-call]
    for layer, paths in layers:
        start = _Start(layer)
        for path, stream in zip(paths, streams, strict=False):
            _Branch(path, stream, start, join=True)


def run_beside(part: nn.Module, stream: torch.cuda.Stream) -> None:
    """Put a part on a stream, from now on. Who reads what it gives on another stream waits for this one first."""
    _Branch(part, stream, _Start(part), join=False)


def _paths(layer: nn.Module) -> list[nn.Module]:
    """The paths of a layer of MSDNet, by the names its published weights have; none for other modules."""
    scales = getattr(layer, "layers", None)
    found = [getattr(scale, name, None) for scale in scales for name in _PATHS] if isinstance(scales, nn.ModuleList) else []
    return [path for path in found if isinstance(path, nn.Module)]


class _Start:
    """The moment from which on branches may run: when a module is called."""

    event: torch.cuda.Event

    def __init__(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.note)

    def note(self, *_: Any) -> None:
        self.event = torch.cuda.current_stream().record_event()


class _Branch:
    """Runs a module on a stream, after a start, and lets the main stream wait for it where it is to join."""

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

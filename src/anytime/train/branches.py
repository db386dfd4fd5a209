"""Parts of a network that do not need each other, side by side on a GPU.

A layer of MSDNet is up to five short paths, each too small to fill a GPU. On streams of their own they overlap: in the
forward pass by what is done here, in the backward pass because autograd runs each part on the stream of its forward
pass. Captured as a CUDA graph, the streams become parallel branches of the graph. No number changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.models.msdnet import MSDNet

_PATHS = ("conv_down", "conv_normal")


def run_side_by_side(network: MultiExit) -> None:
    """Put the paths of each layer, and the exits, on streams of their own, from now on."""
    if type(network) is not MSDNet:
        raise OptionError(
            f"streams were asked for with {type(network).__name__}",
            expected="MSDNet, whose layers have independent paths",
            fix="leave streams off",
        )
    streams = [torch.cuda.Stream() for _ in range(6)]  # type: ignore[no-untyped-call]
    for layer in network.modules():
        paths = _paths(layer)
        if len(paths) > 1:
            start = _Start()
            layer.register_forward_pre_hook(start.record)
            for path, stream in zip(paths, streams, strict=False):
                _Branch(path, stream, start, join=True)
    *early, last = network.classifier
    # An exit's logits are needed when all are there: the last one, on the main stream, waits for the others.
    for head in early:
        start = _Start()
        head.register_forward_pre_hook(start.record)
        _Branch(head, streams[-1], start, join=False)
    last.register_forward_hook(lambda *_: torch.cuda.current_stream().wait_stream(streams[-1]))


def _paths(layer: nn.Module) -> list[nn.Module]:
    """The paths of a layer of MSDNet, by the names its published weights have; none for other modules."""
    scales = getattr(layer, "layers", ())
    found = [getattr(scale, name, None) for scale in scales for name in _PATHS]
    return [path for path in found if isinstance(path, nn.Module)]


class _Start:
    """The moment from which on branches may run."""

    event: torch.cuda.Event

    def record(self, *_: Any) -> None:
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

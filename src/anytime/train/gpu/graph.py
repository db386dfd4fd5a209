"""Fewer and overlapping kernel launches: CUDA graphs, and streams for the independent parts of an MSDNet."""

from __future__ import annotations

from collections.abc import Callable

import torch

from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.models.branches import run_beside, run_paths_side_by_side
from anytime.models.msdnet import MSDNet

_WARM_UPS = 3


class Replayed:
    """Calls `function` normally a few times, then captures it as a CUDA graph and replays that.

    The first calls do real work. They let libraries choose kernels and allocate workspaces, which a capture cannot.

    Args:
        function: Reads and writes tensors at fixed addresses, and never waits for the device.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def __call__(self) -> None:
        if self.graph is None and self._calls < _WARM_UPS:
            self._calls += 1
            self._warm_up()
            return
        if self.graph is None:
            self.graph = self._capture()
        self.graph.replay()

    def _warm_up(self) -> None:
        # On a side stream, as the capture will be: some libraries keep state per stream.
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            self.function()
        main.wait_stream(side)

    def _capture(self) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.function()
        return graph


def use_streams(network: MultiExit) -> None:
    """Run the paths of each layer of an MSDNet, and its exits, on CUDA streams of their own from now on."""
    if type(network) is not MSDNet:
        raise OptionError(
            f"streams=true with {type(network).__name__}",
            expected="MSDNet, whose layers have independent paths",
            fix="set streams=false",
        )
    run_paths_side_by_side(network)
    exits = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    *early, last = network.classifier
    # The logits are read when all exits are done: the last exit, on the main stream, waits for the others.
    for head in early:
        run_beside(head, exits)
    last.register_forward_hook(lambda *_: torch.cuda.current_stream().wait_stream(exits))

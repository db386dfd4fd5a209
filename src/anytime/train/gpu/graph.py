"""A function over fixed buffers as a CUDA graph: one launch in place of a thousand."""

from __future__ import annotations

from collections.abc import Callable

import torch

_WARM_UPS = 3


class Replayed:
    """Calls `function` as it is a few times, then captures it and replays the capture from there on.

    The first calls are real ones, so nothing has to be undone: they let libraries choose their kernels and allocate
    their workspaces, which a capture cannot.

    Args:
        function: Reads and writes tensors that stay where they are, and never waits for the device.
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
        # On a stream of its own, as the capture will be: some libraries keep state by stream.
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

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from anytime.train.gpu.graph import Replayed


class FakeStream:
    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeGraph:
    """Captures without running, and runs when replayed, as a CUDA graph does."""

    function: Any = None

    def replay(self) -> None:
        self.function()


def test_every_call_runs_the_function_once_captured_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.zeros(())
    capturing = False
    captures = 0

    def function() -> None:
        if not capturing:
            value.add_(1)

    @contextmanager
    def capture(graph: FakeGraph) -> Iterator[None]:
        nonlocal capturing, captures
        capturing, captures = True, captures + 1
        yield
        capturing, graph.function = False, function

    @contextmanager
    def on_stream(stream: FakeStream) -> Iterator[None]:
        yield

    for name, stand_in in {
        "Stream": FakeStream,
        "current_stream": FakeStream,
        "stream": on_stream,
        "synchronize": lambda: None,
        "CUDAGraph": FakeGraph,
        "graph": capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    step = Replayed(function)
    for calls in range(1, 9):
        step()
        assert float(value) == calls
    assert captures == 1

"""Stages recorded as CUDA graphs on streams of their own.

A recorded stage reads and writes fixed memory, and its graph includes the copy of its result to pinned memory. Stages are
started one after another without waiting; an event says when each result is there. With a rule, its step is a graph of its own
on a second stream: the next stage does not wait for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anytime.errors import DeviceError
from anytime.models.base import Carry
from anytime.run.engines.cuda.rule import RuleColumns
from anytime.run.engines.folding import allow_tf32

Step = Callable[[Carry], tuple[Carry, Tensor]]
"""A stage: from its carry to the next carry and its logits."""
_WARM_UP = 3
_ROUNDS = 5  # to measure stage times


class Recorded(NamedTuple):
    """A recorded stage.

    Attributes:
        left: The memory of the next stage's carry, followed by the state of the rule.
        result: Its logits on the CPU, or with a rule its columns; overwritten by the next start.
        start: Queues the stage; call it inside `CudaGraphs.queue`.
        wait: Waits for the result of the last start.
        done: Whether it is there.
        seconds: How long the GPU takes for it.
    """

    left: Carry
    result: Tensor
    start: Callable[[], None]
    wait: Callable[[], None]
    done: Callable[[], bool]
    seconds: float


class CudaGraphs:
    """Records stages as CUDA graphs; tests replace it by one that works on the CPU.

    Args:
        device: The GPU.
        tf32: Whether factors may be rounded to ten bits.
    """

    def __init__(self, device: torch.device, *, tf32: bool) -> None:
        self.device, self._tf32 = device, tf32
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._beside: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, steps: Sequence[Step], carry: Carry, rule: RuleColumns | None = None) -> list[Recorded]:
        """Record stages, each on the carry of the one before; the first always reads the memory of `carry`."""
        # Graphs of one pool may share memory for temporary results: they are replayed in this order only.
        pool, beside = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        # The logits are kept: a later stage must not be captured on their memory, which the rule may still read then.
        taken: list[tuple[Carry, Tensor, Any, Any, Any]] = []
        state: Carry = ()
        with self.exact(), self.queue(self.mark(self.device)):
            for exit, step in enumerate(steps):
                carry, logits, host, graph = _capture(partial(step, carry), self._stream, pool, to_host=rule is None)
                then = None
                if rule is not None:
                    work = partial(rule.step, exit, logits, state)
                    state, _, host, then = _capture(work, self._beside, beside, to_host=True)
                taken.append(((*carry, *state), logits, host, graph, then))
            seconds = self._measure([graph for *_, graph, _ in taken])
        return [
            self._recorded(left, host, graph, then, each)
            for (left, _, host, graph, then), each in zip(taken, seconds, strict=True)
        ]

    def _recorded(self, left: Carry, host: Tensor, graph: Any, then: Any, seconds: float) -> Recorded:
        stream, beside, done = self._stream, self._beside, _event()
        if then is None:

            def start() -> None:
                graph.replay()
                done.record(stream)

        else:
            ready = _event()

            def start() -> None:
                graph.replay()
                ready.record(stream)
                beside.wait_event(ready)
                torch.cuda.set_stream(beside)
                try:
                    then.replay()
                finally:
                    torch.cuda.set_stream(stream)
                done.record(beside)

        return Recorded(left, host, start, done.synchronize, done.query, seconds)

    def _measure(self, graphs: Sequence[Any]) -> list[float]:
        """The median seconds of each, replayed without a gap, as stages that are queued ahead are."""
        rounds = []
        for _ in range(_ROUNDS):
            marks = [_event(timed=True) for _ in range(len(graphs) + 1)]
            marks[0].record(self._stream)
            for graph, mark in zip(graphs, marks[1:], strict=True):
                graph.replay()
                mark.record(self._stream)
            self._stream.synchronize()
            rounds.append([1e-3 * one.elapsed_time(other) for one, other in pairwise(marks)])
        return [statistics.median(values) for values in zip(*rounds, strict=True)]

    def mark(self, device: torch.device) -> Any:
        """An event after everything the caller has queued on a device."""
        return torch.cuda.current_stream(device).record_event()

    def queue(self, after: Any = None) -> AbstractContextManager[Any]:
        """Work queued inside runs in order with the stages, and after an event, if given."""
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Have work that is queued from now on run after the steps of rules as well."""
        self._stream.wait_stream(self._beside)

    def exact(self) -> AbstractContextManager[None]:
        """Inside, arithmetic has the precision of the recorded stages."""
        return allow_tf32(self._tf32)

    def seconds(self, work: Callable[[], None]) -> float:
        """How long work takes."""
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin


def _event(*, timed: bool = False) -> Any:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def _capture(work: Callable[[], tuple[Carry, Tensor]], stream: Any, pool: Any, *, to_host: bool) -> tuple[Carry, Any, Any, Any]:
    """Capture and run a graph: what it leaves, its result on the GPU and on the CPU, and itself."""
    with torch.cuda.stream(stream):
        # Libraries choose kernels and allocate memory, which is not possible during a capture.
        shape = [work()[1].shape for _ in range(_WARM_UP)][-1]
        host = torch.empty(shape, pin_memory=True) if to_host else None
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            left, result = work()
            if host is not None:
                host.copy_(result.float().contiguous(), non_blocking=True)
        graph.replay()  # a capture computes nothing, and what is captured next reads these results
        stream.synchronize()
    return left, result, host, graph


def make_recorder(where: torch.device, *, tf32: bool) -> CudaGraphs:
    """A recorder on a GPU: on `where` or else on the current one."""
    if not torch.cuda.is_available():
        raise DeviceError(
            "the engine 'cuda-graphs' was requested, but torch sees no GPU",
            expected="an NVIDIA GPU and a CUDA build of torch",
            fix="use engine='onnxruntime' or engine='eager' on a CPU; run `anytime doctor` to see what is installed",
        )
    device = where if where.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
    return CudaGraphs(device, tf32=tf32)

"""The CUDA graphs engine: each stage is one graph, captured once a batch size, on a copy with folded batch norms.

At small batches a GPU waits for the host to launch kernels. A graph is launched as a whole and reads and writes fixed memory;
copying its logits to pinned memory is part of it. Batches between the captured sizes are padded to the next one; larger ones,
and inputs of another form than the example's, run without a graph. The fixed memory of a size belongs to one run at a time:
one that another pushes out takes a copy of what it carries along, so that any number may be open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import RLock
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor, nn

from anytime.errors import DeviceError, OptionError
from anytime.models.base import Carry, StagedModel
from anytime.models.branches import run_paths_side_by_side
from anytime.run.engines.folding import apart, folded_copy, logits_of_stages, rounded_factors
from anytime.run.engines.packed import PackedMSDNet, Run, can_be_packed, run_with_torch
from anytime.run.engines.running import Running, as_answer, check_inputs, device_of

Precision = Literal["float32", "tf32", "float16", "bfloat16"]
TOLERANCES: dict[Precision, float] = {"float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}
"""How far logits may lie from the model's in float32, relative to the largest of an exit."""
SIZES = (1, 2, 4, 8, 16, 32, 64)
_ROWS = 8  # of the example, at most, that ways are compared on
_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Step = Callable[[Carry], tuple[Carry, Tensor]]
"""A stage: what it leaves and its logits, from what it is given."""


class Recorded(NamedTuple):
    """A stage that was recorded: the memory of what it leaves, its logits on the CPU, and what puts new ones there."""

    left: Carry
    logits: Tensor
    replay: Callable[[], None]


class Recorder(Protocol):
    """What records stages, to run them again and again on the same memory."""

    @property
    def device(self) -> torch.device:
        """Where the work is done."""
        ...

    def record(self, steps: Sequence[Step], given: Carry) -> list[Recorded]:
        """Record stages, of which each is given what the one before leaves; the first always reads the memory of `given`."""
        ...

    def mark(self, device: torch.device) -> Any:
        """A moment: what the caller has asked a device for comes before it."""
        ...

    def queue(self, after: Any = None) -> AbstractContextManager[Any]:
        """What is asked for inside is done in order with what is replayed inside, and after a moment, if one is given."""
        ...

    def exact(self) -> AbstractContextManager[Any]:
        """Inside, numbers are as precise as those of what is recorded."""
        ...

    def wait(self) -> None:
        """Until all that was asked for is done."""
        ...


class CudaGraphs:
    """Records with CUDA graphs, on a stream of its own.

    Args:
        device: Which GPU.
        tf32: Whether factors may be rounded to ten bits.
    """

    def __init__(self, device: torch.device, *, tf32: bool) -> None:
        self.device, self._tf32 = device, tf32
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, steps: Sequence[Step], given: Carry) -> list[Recorded]:
        # Graphs that share a pool may use the same memory for what they do not keep: they are replayed in this order only.
        pool = torch.cuda.graph_pool_handle()
        recorded: list[Recorded] = []
        with self.exact(), self.queue(self.mark(self.device)):
            for step in steps:
                # Libraries choose their kernels and take their memory, which they cannot while a graph is captured.
                shape = [step(given)[1].shape for _ in range(3)][-1]
                host = torch.empty(shape, pin_memory=True)
                self.wait()
                graph = torch.cuda.CUDAGraph()
                # Other threads may use the GPU meanwhile.
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    left, logits = step(given)
                    host.copy_(logits.float().contiguous(), non_blocking=True)
                graph.replay()  # a capture computes nothing, and the next stage reads these results
                recorded.append(Recorded(left, host, graph.replay))
                given = left
            self.wait()
        return recorded

    def mark(self, device: torch.device) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
        return event

    def queue(self, after: torch.cuda.Event | None = None) -> AbstractContextManager[Any]:
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def exact(self) -> AbstractContextManager[None]:
        return rounded_factors(self._tf32)

    def wait(self) -> None:
        self._stream.synchronize()


class CudaGraphsEngine:
    """Runs each stage as a CUDA graph.

    Args:
        model: A staged torch module; it stays as it is, and may lie anywhere.
        example: Inputs to fold and to capture with.
        sizes: Which batch sizes to capture, here and now; each takes seconds.
        precision: `float32` gives the model's logits to rounding; the others are quicker and may differ by `TOLERANCES`.
        pack: Whether an MSDNet for small images runs as few launches of one kernel, where Triton is there and it gives the
            same logits; `parallel` and `fuse` do not matter then.
        parallel: Whether the paths of an MSDNet's layers run side by side.
        fuse: Whether convolutions do the ReLU after them too, where cuDNN gives the same logits so.
        recorder: What records: CUDA graphs by default, where the model lies if that is a GPU, else on the current one.
    """

    name = "cuda-graphs"

    def __init__(
        self,
        model: StagedModel,
        example: Tensor,
        *,
        sizes: Sequence[int] = SIZES,
        precision: Precision = "float32",
        pack: bool = True,
        parallel: bool = True,
        fuse: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        _check_options(sizes, precision)
        example = check_inputs(example)
        self.num_exits = model.num_exits
        self.TOLERANCE = TOLERANCES[precision]
        self._dtype = _DTYPES[precision]
        self._recorder = recorder or _cuda_graphs(device_of(model), precision)
        # Without rounding to ten bits, cuDNN is quicker on maps in torch's own order.
        self._channels_last = example.ndim == 4 and precision != "float32"
        with self._recorder.queue(self._moment(example)):
            self._model, self.why = self._make_copy(model, example[:_ROWS], precision, pack, fuse)
            if isinstance(self._model, PackedMSDNet):
                self._channels_last = False
            elif parallel and self._recorder.device.type == "cuda":
                run_paths_side_by_side(self._model)
        inputs = self._prepared(example)
        self._form = inputs.shape[1:]
        with torch.inference_mode():
            self._lanes = [_Lane(self._recorder, self._model, inputs, size) for size in sorted(set(sizes))]
        self._lock = RLock()

    def begin(self, x: Tensor) -> Running[Tensor]:
        """Take inputs, batch first; nothing is computed yet."""
        return _Run(self, self._prepared(check_inputs(x)))

    def _make_copy(self, model: StagedModel, example: Tensor, precision: Precision, pack: bool, fuse: bool) -> tuple[Any, str]:
        """The folded copy where it is to run, in the way of the fewest kernels that gives the same logits there, and why."""
        folded = folded_copy(model, example)
        ways: list[tuple[str, Callable[[], nn.Module]]] = []
        if pack and can_be_packed(folded):
            ways.append(("packed", lambda: PackedMSDNet(folded, self._convolutions(precision))))
        if fuse:
            ways.append(("fused", lambda: folded_copy(model, example, with_relu=True)))
        x = example.to(self._recorder.device, self._dtype if example.is_floating_point() else example.dtype)
        plain, notes = self._moved(folded), []
        with self._recorder.exact():
            wanted = logits_of_stages(plain, x)
            for name, make in ways:
                try:
                    made = self._moved(make())
                    _spoil_memory(self._recorder.device)
                    share = apart(logits_of_stages(made, x), wanted)
                except Exception as error:  # whatever a library without such a kernel says
                    notes.append(f"{name} is left out: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
                    continue
                if share <= self.TOLERANCE:
                    return made, "; ".join(["asked for", name, *notes])
                notes.append(f"{name} is left out: its logits are {share:.2g} times the largest of their exit away")
        return plain, "; ".join(["asked for", "plain", *notes])

    def _convolutions(self, precision: Precision) -> Run:
        if self._recorder.device.type != "cuda":
            return run_with_torch
        from anytime.run.engines.kernel import run_with_triton

        return run_with_triton("tf32x3" if precision == "float32" else "tf32")

    def _moved(self, copy: nn.Module) -> Any:
        moved = copy.to(self._recorder.device, self._dtype)
        if self._channels_last and not isinstance(copy, PackedMSDNet):
            moved.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return moved

    def _prepared(self, x: Tensor) -> Tensor:
        cast = x.detach().to(self._dtype) if x.is_floating_point() else x
        return cast.contiguous(memory_format=torch.channels_last) if self._channels_last else cast.contiguous()

    def _moment(self, x: Tensor) -> Any:
        """From when on inputs are there: on a GPU they may still be on their way."""
        return self._recorder.mark(x.device) if x.is_cuda else None

    def _lane_for(self, rows: int) -> _Lane | None:
        return next((lane for lane in self._lanes if lane.size >= rows), None)


class _Lane:
    """The graphs of all stages for one batch size, and the memory that they read and write."""

    def __init__(self, recorder: Recorder, model: StagedModel, example: Tensor, size: int) -> None:
        self.size = size
        self.owner: _Run | None = None
        self._recorder = recorder
        first = torch.cat([example[:1]] * size).to(recorder.device)
        self._stages = recorder.record([partial(model.stage, exit) for exit in range(model.num_exits)], (first,))
        self._given: list[Carry] = [(first,), *(stage.left for stage in self._stages)]

    def load(self, exit: int, carry: Carry) -> None:
        """Put what a stage is given into its place."""
        for place, tensor in zip(self._given[exit], carry, strict=True):
            place[: len(tensor)].copy_(tensor, non_blocking=True)

    def run(self, exit: int, rows: int) -> Tensor:
        """Run a stage on what lies in its place; its logits for the first rows."""
        self._stages[exit].replay()
        self._recorder.wait()
        return self._stages[exit].logits[:rows].clone()

    def unload(self, exit: int, rows: int) -> Carry:
        """A copy of what lies ready for a stage, the first rows of it."""
        return tuple(tensor[:rows].clone() for tensor in self._given[exit])


class _Run(Running[Tensor]):
    """One run. What it carries lies in the lane that it owns or, while there is none, in memory of its own."""

    def __init__(self, engine: CudaGraphsEngine, x: Tensor) -> None:
        super().__init__(engine.num_exits, len(x))
        self._engine = engine
        self._fits = x.shape[1:] == engine._form  # texts may be longer, say
        self._lane: _Lane | None = None
        self._carry: Carry = (x,)
        self._begun = engine._moment(x)
        self._next = 0  # kept under the lock, as another thread may move this run out

    def _run(self, exit: int) -> Tensor:
        engine = self._engine
        with engine._lock, torch.inference_mode(), engine._recorder.queue(self._begun):
            carry = self._carry  # not let go of before the stage is done, as others may be given its memory then
            if self._lane is None:
                self._enter(exit, carry)
            logits = self._run_without_graph(exit, carry) if self._lane is None else self._lane.run(exit, self._batch)
            self._begun, self._next = None, exit + 1
            return logits

    def _enter(self, exit: int, carry: Carry) -> None:
        """Move into the lane for so many rows, if there is one."""
        lane = self._engine._lane_for(self._batch) if self._fits else None
        if lane is not None:
            if lane.owner is not None:
                lane.owner._leave()
            lane.load(exit, carry)
            lane.owner, self._lane, self._carry = self, lane, ()

    def _leave(self) -> None:
        """Move out, with all that is carried."""
        if self._lane is not None:
            self._carry = self._lane.unload(self._next, self._batch)
            self._lane.owner = None
            self._lane = None

    def _run_without_graph(self, exit: int, carry: Carry) -> Tensor:
        engine = self._engine
        there = tuple(tensor.to(engine._recorder.device) for tensor in carry)
        with engine._recorder.exact():
            self._carry, logits = engine._model.stage(exit, there)
            return as_answer(logits)

    def _select(self, rows: Tensor) -> None:
        with self._engine._lock, torch.inference_mode(), self._engine._recorder.queue(self._begun):
            self._leave()
            self._carry = tuple(tensor[rows.to(tensor.device)] for tensor in self._carry)

    def _drop(self) -> None:
        with self._engine._lock:
            if self._lane is not None:
                self._lane.owner = None
            self._lane, self._carry = None, ()


def _spoil_memory(device: torch.device) -> None:
    """Leave numbers that are none where the next results will lie: a kernel that reads them is found out."""
    if device.type == "cuda":
        held = [torch.full((size,), float("nan"), device=device) for size in (1 << 10, 1 << 16, 1 << 20) for _ in range(16)]
        held.clear()


def _cuda_graphs(where: torch.device, precision: Precision) -> CudaGraphs:
    if not torch.cuda.is_available():
        raise DeviceError(
            "the engine 'cuda-graphs' was asked for where torch sees no GPU",
            expected="an NVIDIA GPU and a build of torch for it",
            fix="use engine='onnxruntime' or engine='eager' on a CPU; `anytime doctor` shows what there is",
        )
    device = where if where.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
    return CudaGraphs(device, tf32=precision != "float32")


def _check_options(sizes: Sequence[int], precision: str) -> None:
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise OptionError(f"sizes are {sizes!r}", expected="whole numbers of at least 1", fix="(1, 8, 64), for one")
    if precision not in get_args(Precision):
        known = ", ".join(get_args(Precision))
        raise OptionError(f"precision is {precision!r}", expected=f"one of {known}", fix="'float32' is the model's own")

"""The CUDA graphs engine: each stage is one graph, captured once a batch size, on a copy with folded batch norms.

At small batches a GPU waits for the host to launch kernels. A graph is launched as a whole and reads and writes fixed memory;
its logits come back through pinned memory. Batches between the captured sizes are padded to the next one, larger ones run
without a graph. The fixed memory of a size belongs to one run at a time: one that another pushes out takes a copy of
what it carries along, so that any number may be open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import RLock
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor, nn

from anytime.errors import DeviceError, OptionError
from anytime.models.base import Carry, StagedModel
from anytime.run.engines.folding import apart, folded_copy, logits_of_stages
from anytime.run.engines.running import Running, as_answer, check_inputs

Precision = Literal["float32", "tf32", "float16", "bfloat16"]
TOLERANCES: dict[Precision, float] = {"float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}
"""How far logits may lie from the model's in float32, relative to the largest of an exit."""
SIZES = (1, 2, 4, 8, 16, 32, 64)
_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_PATHS = ("conv_down", "conv_normal")

Step = Callable[[Carry], tuple[Carry, Tensor]]
"""A stage: what it leaves and its logits, from what it is given."""


class Recorded(NamedTuple):
    """A stage that was recorded: the memory of its results, and what puts new ones there."""

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

    def queue(self) -> AbstractContextManager[Any]:
        """What is asked for inside is done in order with what is replayed inside."""
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
        for step in steps:
            with self.exact(), self.queue():
                for _ in range(3):  # cuDNN chooses its kernels, which it cannot while a graph is captured
                    step(given)
                self.wait()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=self._stream):
                    left, logits = step(given)
                graph.replay()  # a capture computes nothing, and the next stage reads these results
            recorded.append(Recorded(left, logits, graph.replay))
            given = left
        return recorded

    def queue(self) -> AbstractContextManager[Any]:
        # What the caller asked for, the input most of all, comes first.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    @contextmanager
    def exact(self) -> Iterator[None]:
        matmul = torch.backends.cuda.matmul
        before, matmul.allow_tf32 = matmul.allow_tf32, self._tf32
        try:
            with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=self._tf32):
                yield
        finally:
            matmul.allow_tf32 = before

    def wait(self) -> None:
        self._stream.synchronize()


class CudaGraphsEngine:
    """Runs each stage as a CUDA graph.

    Args:
        model: A staged torch module; it stays as it is, and may lie anywhere.
        example: Inputs to fold and to capture with.
        sizes: Which batch sizes to capture, here and now; each takes seconds.
        precision: `float32` gives the model's logits to rounding; the others are quicker and may differ by `TOLERANCES`.
        parallel: Whether the paths of an MSDNet's layers run side by side.
        fuse: Whether convolutions do the ReLU after them too, where cuDNN gives the same logits so.
        recorder: What records: CUDA graphs on the current GPU by default.
    """

    name = "cuda-graphs"

    def __init__(
        self,
        model: StagedModel,
        example: Tensor,
        *,
        sizes: Sequence[int] = SIZES,
        precision: Precision = "float32",
        parallel: bool = True,
        fuse: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        _check_options(sizes, precision)
        self.why = "asked for"
        self.num_exits = model.num_exits
        self.TOLERANCE = TOLERANCES[precision]
        self._dtype = _DTYPES[precision]
        # Without rounding to ten bits, cuDNN is quicker on maps in torch's own order.
        self._channels_last = example.ndim == 4 and precision != "float32"
        self._recorder = recorder or _cuda_graphs(precision)
        inputs = self._prepared(check_inputs(example))
        self._model = self._make_copy(model, example, inputs, fuse)
        if parallel and self._recorder.device.type == "cuda":
            run_side_by_side(self._model)
        with torch.inference_mode():
            self._lanes = [_Lane(self._recorder, self._model, inputs, size) for size in sorted(set(sizes))]
        self._lock = RLock()

    def begin(self, x: Tensor) -> Running[Tensor]:
        """Take inputs, batch first; nothing is computed yet."""
        return _Run(self, self._prepared(check_inputs(x)))

    def _make_copy(self, model: StagedModel, example: Tensor, inputs: Tensor, fuse: bool) -> StagedModel:
        """The folded copy where it is to run, with ReLUs in the convolutions where that gives the same logits there."""
        plain = self._moved(folded_copy(model, example))
        if not fuse:
            return plain
        fused, x = self._moved(folded_copy(model, example, with_relu=True)), inputs.to(self._recorder.device)
        try:
            with self._recorder.exact():
                share = apart(logits_of_stages(fused, x), logits_of_stages(plain, x))
        except RuntimeError:  # this cuDNN has no such convolution
            return plain
        return fused if share <= self.TOLERANCE else plain

    def _moved(self, copy: nn.Module) -> StagedModel:
        moved = copy.to(self._recorder.device, self._dtype)
        if self._channels_last:
            moved.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        assert isinstance(moved, StagedModel)
        return moved

    def _prepared(self, x: Tensor) -> Tensor:
        cast = x.detach().to(self._dtype) if x.is_floating_point() else x
        return cast.contiguous(memory_format=torch.channels_last) if self._channels_last else cast.contiguous()

    def _lane_for(self, rows: int) -> _Lane | None:
        return next((lane for lane in self._lanes if lane.size >= rows), None)


class _Lane:
    """The graphs of all stages for one batch size, and the memory that they read and write."""

    def __init__(self, recorder: Recorder, model: StagedModel, example: Tensor, size: int) -> None:
        self.size = size
        self.owner: _Run | None = None
        self._recorder = recorder
        rows = torch.cat([example[:1]] * size).to(recorder.device)
        first = rows.contiguous(memory_format=torch.channels_last) if _is_channels_last(example) else rows
        self._stages = recorder.record([partial(model.stage, exit) for exit in range(model.num_exits)], (first,))
        self._given: list[Carry] = [(first,), *(stage.left for stage in self._stages)]
        logits = [stage.logits for stage in self._stages]
        self._host = [torch.empty(each.shape, dtype=each.dtype, pin_memory=each.is_cuda) for each in logits]

    def load(self, exit: int, carry: Carry) -> None:
        """Put what a stage is given into its place."""
        for place, tensor in zip(self._given[exit], carry, strict=True):
            place[: len(tensor)].copy_(tensor, non_blocking=True)

    def run(self, exit: int, rows: int) -> Tensor:
        """Run a stage on what lies in its place; its logits for the first rows."""
        self._stages[exit].replay()
        self._host[exit].copy_(self._stages[exit].logits, non_blocking=True)
        self._recorder.wait()
        return as_answer(self._host[exit][:rows].clone())

    def unload(self, exit: int, rows: int) -> Carry:
        """A copy of what lies ready for a stage, the first rows of it."""
        return tuple(tensor[:rows].clone() for tensor in self._given[exit])


class _Run(Running[Tensor]):
    """One run. What it carries lies in the lane that it owns or, while there is none, in memory of its own."""

    def __init__(self, engine: CudaGraphsEngine, x: Tensor) -> None:
        super().__init__(engine.num_exits, len(x))
        self._engine = engine
        self._lane: _Lane | None = None
        self._carry: Carry = (x,)
        self._next = 0  # kept under the lock, as another thread may move this run out

    def _run(self, exit: int) -> Tensor:
        engine = self._engine
        with engine._lock, torch.inference_mode(), engine._recorder.queue():
            if self._lane is None:
                self._enter(exit)
            logits = self._run_without_graph(exit) if self._lane is None else self._lane.run(exit, self._batch)
            self._next = exit + 1
            return logits

    def _enter(self, exit: int) -> None:
        """Move into the lane for so many rows, if there is one."""
        lane = self._engine._lane_for(self._batch)
        if lane is not None:
            if lane.owner is not None:
                lane.owner._leave()
            lane.load(exit, self._carry)
            lane.owner, self._lane, self._carry = self, lane, ()

    def _leave(self) -> None:
        """Move out, with all that is carried."""
        if self._lane is not None:
            self._carry = self._lane.unload(self._next, self._batch)
            self._lane.owner = None
            self._lane = None

    def _run_without_graph(self, exit: int) -> Tensor:
        engine = self._engine
        carry = tuple(tensor.to(engine._recorder.device) for tensor in self._carry)
        with engine._recorder.exact():
            self._carry, logits = engine._model.stage(exit, carry)
            return as_answer(logits)

    def _select(self, rows: Tensor) -> None:
        with self._engine._lock, torch.inference_mode(), self._engine._recorder.queue():
            self._leave()
            self._carry = tuple(tensor[rows.to(tensor.device)] for tensor in self._carry)

    def _drop(self) -> None:
        with self._engine._lock:
            if self._lane is not None:
                self._lane.owner = None
            self._lane, self._carry = None, ()


def run_side_by_side(model: object) -> None:
    """Put the paths of each layer of an MSDNet on streams of their own, from now on; other networks stay as they are.

    Captured, the streams become parallel branches of the graph.
    """
    streams = [torch.cuda.Stream() for _ in range(6)]  # type: ignore[no-untyped-call]
    for layer in model.modules() if isinstance(model, nn.Module) else ():
        scales = getattr(layer, "layers", ())
        found = [getattr(scale, name, None) for scale in scales for name in _PATHS] if isinstance(scales, nn.ModuleList) else []
        paths = [path for path in found if isinstance(path, nn.Module)]
        if len(paths) > 1:
            start = _Start()
            layer.register_forward_pre_hook(start.note)
            for path, stream in zip(paths, streams, strict=False):
                branch = _Branch(stream, start)
                path.register_forward_pre_hook(branch.leave)
                path.register_forward_hook(branch.join)


class _Start:
    """The moment from which on the paths of a layer may run."""

    event: torch.cuda.Event

    def note(self, *_: Any) -> None:
        self.event = torch.cuda.current_stream().record_event()


class _Branch:
    """Runs a path on its stream, from the start of its layer on; the main stream waits for it."""

    def __init__(self, stream: torch.cuda.Stream, start: _Start) -> None:
        self.stream, self.start = stream, start

    def leave(self, *_: Any) -> None:
        self.main = torch.cuda.current_stream()
        self.stream.wait_event(self.start.event)
        torch.cuda.set_stream(self.stream)

    def join(self, *_: Any) -> None:
        torch.cuda.set_stream(self.main)
        self.main.wait_stream(self.stream)


def _cuda_graphs(precision: Precision) -> CudaGraphs:
    if not torch.cuda.is_available():
        raise DeviceError(
            "the engine 'cuda-graphs' was asked for where torch sees no GPU",
            expected="an NVIDIA GPU and a build of torch for it",
            fix="use engine='onnxruntime' or engine='eager' on a CPU; `anytime doctor` shows what there is",
        )
    return CudaGraphs(torch.device("cuda", torch.cuda.current_device()), tf32=precision != "float32")


def _check_options(sizes: Sequence[int], precision: str) -> None:
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise OptionError(f"sizes are {sizes!r}", expected="whole numbers of at least 1", fix="(1, 8, 64), for one")
    if precision not in get_args(Precision):
        known = ", ".join(get_args(Precision))
        raise OptionError(f"precision is {precision!r}", expected=f"one of {known}", fix="'float32' is the model's own")


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()

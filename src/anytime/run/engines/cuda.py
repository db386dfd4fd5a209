"""The CUDA graphs engine: each stage is one graph, captured once a batch size, on a copy with folded batch norms.

At small batches a GPU waits for the host to launch kernels. A graph is launched as a whole and reads and writes fixed memory;
copying its logits to pinned memory is part of it. Which way to run the stages is the quickest depends on the batch size: where
there are two, each size is captured in both, and the quicker one is kept. Batches between the captured sizes are padded to the
next one; larger ones, and inputs of another form than the example's, run without a graph. The fixed memory of a size belongs
to one run at a time: one that another pushes out takes a copy of what it carries along, so that any number may be open.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import RLock
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args

import torch
from torch import Tensor, nn

from anytime.checks import check_choice, check_counts
from anytime.errors import DeviceError
from anytime.models.base import Carry, StagedModel
from anytime.models.branches import run_paths_side_by_side
from anytime.models.modes import without_autocast
from anytime.run.engines.folding import apart, folded_copy, logits_of_stages, rounded_factors
from anytime.run.engines.packed import PackedMSDNet, Run, can_be_packed, run_with_torch
from anytime.run.engines.running import Running, as_answer, check_inputs, device_of
from anytime.run.forks import renew_in_children

Precision = Literal["float32", "tf32", "float16", "bfloat16"]
TOLERANCES: dict[Precision, float] = {"float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}
"""How far logits may lie from the model's in float32, relative to the largest of an exit."""
SIZES = (1, 2, 4, 8, 16, 32, 64)
_ROWS = 8  # of the example, at most, that ways are compared on
_ROUNDS = 11  # in which ways are timed
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

    def seconds(self, work: Callable[[], None]) -> float:
        """How long work takes."""
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

    def seconds(self, work: Callable[[], None]) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin


class CudaGraphsEngine:
    """Runs each stage as a CUDA graph.

    Args:
        model: A staged torch module; it stays as it is, and may lie anywhere.
        example: Inputs to fold and to capture with.
        sizes: Which batch sizes to capture, here and now; each takes about a second a way.
        precision: `float32` gives the model's logits to rounding; the others are quicker and may differ by `TOLERANCES`.
        pack: Whether an MSDNet for small images runs as few launches of one kernel, where Triton is there and it gives the
            same logits: at the sizes where that is quicker (None), at all or at none. `parallel` and `fuse` do not matter then.
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
        pack: bool | None = None,
        parallel: bool = True,
        fuse: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        _check_options(sizes, precision)
        example = check_inputs(example)
        self.num_exits = model.num_exits
        self.TOLERANCE = TOLERANCES[precision]
        self._recorder = recorder or _cuda_graphs(device_of(model), precision)
        self.device = self._recorder.device
        self._form = example.shape[1:]
        self._lock = RLock()
        renew_in_children(self)
        with self._recorder.queue(self._moment(example)):
            ways = _Ways(self._recorder, model, example[:_ROWS], precision, pack=pack, parallel=parallel, fuse=fuse)
            self._lanes = [ways.lane(size) for size in sorted(set(sizes))]
        self.why = "; ".join(["asked for", *ways.found()])

    def renew(self) -> None:
        """The lock anew, in a forked process."""
        self._lock = RLock()

    def begin(self, x: Tensor) -> Running[Tensor]:
        """Take inputs, batch first; nothing is computed yet."""
        x = check_inputs(x)
        lane = next((lane for lane in self._lanes if lane.size >= len(x)), self._lanes[-1])
        return _Run(self, lane.way, lane.way.prepared(x))

    def _moment(self, x: Tensor) -> Any:
        """From when on inputs are there: on a GPU they may still be on their way."""
        return self._recorder.mark(x.device) if x.is_cuda else None

    def _lane_for(self, rows: int, way: _Way) -> _Lane | None:
        """The smallest that takes so many rows; of one way, as each carries other things from stage to stage."""
        return next((lane for lane in self._lanes if lane.size >= rows and lane.way is way), None)


class _Way(NamedTuple):
    """The stages where they are to run, in one of the ways to run them."""

    name: str
    model: Any
    dtype: torch.dtype
    channels_last: bool

    def prepared(self, x: Tensor) -> Tensor:
        """Inputs as it takes them."""
        cast = x.detach().to(self.dtype) if x.is_floating_point() else x
        return cast.contiguous(memory_format=torch.channels_last) if self.channels_last else cast.contiguous()


class _Ways:
    """Makes the lanes, each in the quickest way that gives the model's logits, and notes why.

    On an H200 `packed` is the quickest for one image in an MSDNet, `fused` for 64. Paths side by side, and `fused` instead of
    `plain`, were quicker for both in float32, tf32 and float16, so these are not measured again.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: StagedModel,
        example: Tensor,
        precision: Precision,
        *,
        pack: bool | None,
        parallel: bool,
        fuse: bool,
    ) -> None:
        self._recorder, self._precision = recorder, precision
        self._parallel = parallel and recorder.device.type == "cuda"
        # Without rounding to ten bits, cuDNN is quicker on maps in torch's own order.
        self._channels_last = example.ndim == 4 and precision != "float32"
        folded = folded_copy(model, example)
        makers: dict[str, Callable[[], nn.Module]] = {"plain": lambda: folded}
        if fuse:
            makers["fused"] = lambda: folded_copy(model, example, with_relu=True)
        if pack is not False and can_be_packed(folded):
            makers["packed"] = lambda: PackedMSDNet(cast(Any, folded), _convolutions(recorder.device, precision))
        # The ways of one line are measured against each other; a line counts where no way before it gives the logits.
        rival = "fused" if fuse else "plain"
        lines = [["packed"] if pack else ["packed", rival], ["fused"], ["plain"]]
        self._lines = [[name for name in line if name in makers] for line in lines]
        self._makers, self._made = makers, dict[str, _Way]()
        self._chosen, self._notes = dict[int, str](), dict[str, str]()
        self._rows = example.to(recorder.device)
        plain = self._moved("plain", folded)
        with recorder.exact():
            self._wanted = logits_of_stages(plain.model, plain.prepared(self._rows))

    def lane(self, size: int) -> _Lane:
        """The stages, recorded for a batch size in the quickest way."""
        tried = ([lane for name in line if (lane := self._try(name, size)) is not None] for line in self._lines)
        lanes = next(lanes for lanes in tried if lanes)  # plain is always there
        times = self._times(lanes)
        order = sorted(range(len(lanes)), key=times.__getitem__)
        texts = [f"{lanes[place].way.name} {1e3 * times[place]:.3g} ms" for place in order]
        self._chosen[size] = ", ".join(texts) if len(lanes) > 1 else lanes[0].way.name
        return lanes[order[0]]

    def found(self) -> list[str]:
        """What was chosen, the quickest first, and what was left out."""
        only = set(self._chosen.values())
        if len(only) == 1 and only <= self._makers.keys():  # nothing was measured
            return [*only, *self._notes.values()]
        sizes = [f"{size}: {text}" for size, text in self._chosen.items()]
        return [f"all exits for a batch of {sizes[0]}", *(f"of {text}" for text in sizes[1:]), *self._notes.values()]

    def _try(self, name: str, size: int) -> _Lane | None:
        """The lane in one way, if its logits are right; else no lane is tried in this way again."""
        if name in self._notes:
            return None
        try:
            if name not in self._made:
                self._made[name] = self._moved(name, self._makers[name]())
                if self._parallel and name != "packed":
                    run_paths_side_by_side(self._made[name].model)
            way = self._made[name]
            first = way.prepared(self._rows[torch.arange(size, device=self._rows.device) % len(self._rows)])
            _spoil_memory(self._recorder.device)
            with self._recorder.exact():
                logits = [one[: len(self._rows)] for one in logits_of_stages(way.model, first)]
            share = apart(logits, [one[:size] for one in self._wanted])
            if share <= TOLERANCES[self._precision] or name == "plain":
                with torch.inference_mode():
                    return _Lane(self._recorder, way, first)
            self._notes[name] = f"{name} is left out: its logits are {share:.2g} times the largest of their exit away"
        except Exception as error:  # whatever a library without such a kernel says
            if name == "plain":
                raise
            self._notes[name] = f"{name} is left out: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return None

    def _times(self, lanes: Sequence[_Lane]) -> list[float]:
        """The median seconds of each for all exits; they take turns, so that a busy moment meets them all."""
        if len(lanes) == 1:
            return [0.0]
        turns = [[self._recorder.seconds(lane.run_all) for lane in lanes] for _ in range(_ROUNDS + 1)]
        return [statistics.median(values) for values in zip(*turns[1:], strict=True)]  # the first warms up

    def _moved(self, name: str, copy: nn.Module) -> _Way:
        """A way of a copy, where it is to run."""
        packed = name == "packed"
        dtype = _DTYPES[self._precision]
        copy.to(self._recorder.device, dtype)
        if self._channels_last and not packed:
            copy.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return _Way(name, copy, dtype, self._channels_last and not packed)


class _Lane:
    """The graphs of all stages for one batch size in one way, and the memory that they read and write."""

    def __init__(self, recorder: Recorder, way: _Way, first: Tensor) -> None:
        self.size, self.way = len(first), way
        self.owner: _Run | None = None
        self._recorder = recorder
        stages = [partial(way.model.stage, exit) for exit in range(way.model.num_exits)]
        self._stages = recorder.record(stages, (first,))
        self._given: list[Carry] = [(first,), *(stage.left for stage in self._stages)]

    def load(self, exit: int, carry: Carry) -> None:
        """Put what a stage is given into its place."""
        for place, tensor in zip(self._given[exit], carry, strict=True):
            place[: len(tensor)].copy_(tensor, non_blocking=True)

    def start(self, exit: int) -> None:
        """Start a stage on what lies in its place."""
        self._stages[exit].replay()

    def finish(self, exit: int, rows: int) -> Tensor:
        """Wait for it; its logits for the first rows."""
        logits = self._stages[exit].logits[:rows]
        self._recorder.wait()
        return logits.clone()

    def run_all(self) -> None:
        """Run all stages, each when the one before is done."""
        for exit in range(len(self._stages)):
            self.start(exit)
            self.finish(exit, self.size)

    def unload(self, exit: int, rows: int) -> Carry:
        """A copy of what lies ready for a stage, the first rows of it."""
        return tuple(tensor[:rows].clone() for tensor in self._given[exit])


class _Run(Running[Tensor]):
    """One run. What it carries lies in the lane that it owns or, while there is none, in memory of its own."""

    def __init__(self, engine: CudaGraphsEngine, way: _Way, x: Tensor) -> None:
        super().__init__(engine.num_exits, len(x))
        self._engine, self._way = engine, way
        self._fits = x.shape[1:] == engine._form  # texts may be longer, say
        self._lane: _Lane | None = None
        self._carry: Carry = (x,)
        self._begun = engine._moment(x)
        self._next = 0  # kept under the lock, as another thread may move this run out

    def _run(self, exit: int) -> Tensor:
        engine = self._engine
        with engine._lock:
            carry = self._carry  # not let go of before the stage is done, as others may be given its memory then
            with engine._recorder.queue(self._begun):
                if self._lane is None:
                    self._enter(exit, carry)
                if self._lane is None:
                    logits = self._run_without_graph(exit, carry)
                else:
                    self._lane.start(exit)
            if self._lane is not None:
                logits = self._lane.finish(exit, self._batch)
            self._begun, self._next = None, exit + 1
            return logits

    @torch.inference_mode()
    def _enter(self, exit: int, carry: Carry) -> None:
        """Move into the lane for so many rows, if there is one."""
        lane = self._engine._lane_for(self._batch, self._way) if self._fits else None
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

    @torch.inference_mode()
    def _run_without_graph(self, exit: int, carry: Carry) -> Tensor:
        engine = self._engine
        there = tuple(tensor.to(engine._recorder.device) for tensor in carry)
        with engine._recorder.exact(), without_autocast():  # as the graphs, which were captured so
            self._carry, logits = self._way.model.stage(exit, there)
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


def _convolutions(device: torch.device, precision: Precision) -> Run:
    """What runs the launches of a packed network."""
    if device.type != "cuda":
        return run_with_torch
    from anytime.run.engines.kernel import run_with_triton

    # On an H200 tf32x3, three rounded products for an exact one, took 10 % longer for one image and 50 % longer for 64.
    return run_with_triton("ieee" if precision == "float32" else "tf32")


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
    check_counts(sizes, "sizes", fix="pass batch sizes such as (1, 8, 64)")
    check_choice(precision, "precision", get_args(Precision))

"""The CUDA graphs engine: each stage is one graph per batch size, captured on a copy with folded batch norms.

At small batches a GPU waits for the host to launch kernels. A graph is launched as a whole and reads and writes fixed memory;
it includes the copy of its logits to pinned memory. Where a model has two variants (`packed` and `fused`), each batch size is
captured in both and the faster one is kept. Batches between the captured sizes are padded to the next one; larger ones, and
inputs of a shape other than the example's, run without a graph. The fixed memory of a size belongs to one run at a time: a run
that another one evicts takes a copy of its carry along, so that any number may be open.

It is slightly over 400 lines because recording, lanes and runs share one memory and one lock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import RLock
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from anytime.checks import Inputs, check_count, repeat_rows, tensors_of
from anytime.errors import DeviceError, OptionError
from anytime.models.base import Carry, StagedModel
from anytime.models.branches import run_paths_side_by_side
from anytime.models.given import check_like, flat_inputs, names_of
from anytime.models.modes import without_autocast
from anytime.run.engines.folding import allow_tf32, difference, folded_copy, logits_of_stages
from anytime.run.engines.packed import PackedMSDNet, Run, can_be_packed, run_with_torch
from anytime.run.engines.running import Joinable, Running, as_answer, device_of
from anytime.run.forks import renew_in_children

Precision = Literal["float32", "tf32", "float16", "bfloat16"]
TOLERANCES: dict[Precision, float] = {"float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}
"""How far logits may differ from the model's in float32, relative to the largest logit of an exit."""
SIZES = (1, 2, 4, 8, 16, 32, 64)
_ROWS = 8  # of the example, at most, to compare variants on
_ROUNDS = 11  # to time variants
_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Step = Callable[[Carry], tuple[Carry, Tensor]]
"""A stage: from its carry to the next carry and its logits."""


class Recorded(NamedTuple):
    """A recorded stage: the memory of its carry, its logits on the CPU, and the function that overwrites both."""

    left: Carry
    logits: Tensor
    replay: Callable[[], None]


class CudaGraphs:
    """Records stages as CUDA graphs, on a stream of its own; tests replace it by one that works on the CPU.

    Args:
        device: The GPU.
        tf32: Whether factors may be rounded to ten bits.
    """

    def __init__(self, device: torch.device, *, tf32: bool) -> None:
        self.device, self._tf32 = device, tf32
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, steps: Sequence[Step], carry: Carry) -> list[Recorded]:
        """Record stages, each on the carry of the one before; the first always reads the memory of `carry`."""
        # Graphs of one pool may share memory for temporary results: they are replayed in this order only.
        pool = torch.cuda.graph_pool_handle()
        recorded: list[Recorded] = []
        with self.exact(), self.queue(self.mark(self.device)):
            for step in steps:
                # Libraries choose kernels and allocate memory, which is not possible during a capture.
                shape = [step(carry)[1].shape for _ in range(3)][-1]
                host = torch.empty(shape, pin_memory=True)
                self.wait()
                graph = torch.cuda.CUDAGraph()
                # Other threads may use the GPU meanwhile.
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    left, logits = step(carry)
                    host.copy_(logits.float().contiguous(), non_blocking=True)
                graph.replay()  # a capture computes nothing, and the next stage reads these results
                recorded.append(Recorded(left, host, graph.replay))
                carry = left
            self.wait()
        return recorded

    def mark(self, device: torch.device) -> Any:
        """An event after everything the caller has queued on a device."""
        return torch.cuda.current_stream(device).record_event()

    def queue(self, after: Any = None) -> AbstractContextManager[Any]:
        """Work queued inside runs in order with replays, and after an event, if given."""
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def exact(self) -> AbstractContextManager[None]:
        """Inside, arithmetic has the precision of the recorded stages."""
        return allow_tf32(self._tf32)

    def wait(self) -> None:
        """Wait for all queued work."""
        self._stream.synchronize()

    def seconds(self, work: Callable[[], None]) -> float:
        """How long work takes."""
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin


class CudaGraphsEngine:
    """Runs each stage as a CUDA graph.

    Args:
        model: A staged torch module, on any device; it is unchanged.
        example: Inputs to fold and to capture with.
        sizes: The batch sizes to capture now; each takes about a second per variant.
        precision: `float32` returns the model's logits up to rounding; the others are faster and may differ by `TOLERANCES`.
        pack: Whether an MSDNet for small images runs as few launches of one kernel, provided that Triton is installed and the
            logits agree: at the sizes where that is faster (None), at all sizes or at none.
        recorder: Records the stages: CUDA graphs by default, on the model's GPU or else the current one.
    """

    name = "cuda-graphs"
    joins = True

    def __init__(
        self,
        model: StagedModel,
        example: Inputs,
        *,
        sizes: Sequence[int] = SIZES,
        precision: Precision = "float32",
        pack: bool | None = None,
        recorder: CudaGraphs | None = None,
    ) -> None:
        if precision not in get_args(Precision):
            known = ", ".join(get_args(Precision))
            raise OptionError(f"precision is {precision!r}", expected=f"one of {known}", fix="use 'float32', the default")
        if not sizes:
            raise OptionError("sizes is empty", expected="at least one batch size", fix="pass e.g. sizes=(1, 8, 64)")
        wanted = sorted({check_count(size, "sizes") for size in sizes})
        self.num_exits, self.input_names = model.num_exits, names_of(model)
        self._example = given = flat_inputs(example, self.input_names)
        self.TOLERANCE = TOLERANCES[precision]
        self._recorder = recorder or _make_recorder(device_of(model), precision)
        self.device = self._recorder.device
        self._lock = RLock()
        renew_in_children(self)
        with self._recorder.queue(self._ready_event(given)):
            variants = _Variants(self._recorder, model, tuple(x[:_ROWS] for x in given), precision, pack=pack)
            self._lanes = [variants.lane(size) for size in wanted]
        self.why = "; ".join(["requested", *variants.found()])

    def renew(self) -> None:
        """Make a new lock, in a forked process."""
        self._lock = RLock()

    def begin(self, x: Inputs) -> Running[Tensor]:
        """Take inputs, batch first; nothing is computed yet."""
        given = flat_inputs(x, self.input_names)
        check_like(given, self._example, self.input_names)  # copies into the fixed memory would convert them
        lane = next((lane for lane in self._lanes if lane.size >= len(given[0])), self._lanes[-1])
        return _Run(self, lane.variant, lane.variant.prepared(given))

    def _ready_event(self, given: Carry) -> Any:
        """The event after which inputs on a GPU are complete."""
        devices = [x.device for x in given if x.is_cuda]
        return self._recorder.mark(devices[0]) if devices else None


class _Variant(NamedTuple):
    """The stages on the GPU, in one of several implementations."""

    name: str
    model: Any
    dtype: torch.dtype
    channels_last: bool

    def prepared(self, given: Carry) -> Carry:
        """Inputs in the type and memory format of the variant."""
        return tuple(self._prepared(x.detach().to(self.dtype) if x.is_floating_point() else x) for x in given)

    def _prepared(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.ndim == 4 else x.contiguous()


class _Variants:
    """Makes the lanes, each in the fastest variant that returns the model's logits, and notes why.

    On an H200 `packed` is the fastest for one image in an MSDNet, `fused` for 64. Parallel paths, and `fused` instead of
    `plain`, were faster for both in float32, tf32 and float16, so these are not measured again.
    """

    def __init__(
        self, recorder: CudaGraphs, model: StagedModel, example: Carry, precision: Precision, *, pack: bool | None
    ) -> None:
        self._recorder, self._precision = recorder, precision
        # In float32 without TF32, cuDNN is faster on channels-first maps.
        self._channels_last = any(x.ndim == 4 for x in example) and precision != "float32"
        folded = folded_copy(model, example)
        self._makers: dict[str, Callable[[], nn.Module]] = {
            "plain": lambda: folded,
            "fused": lambda: folded_copy(model, example, with_relu=True),
        }
        # Variants of one group are timed against each other; a group is tried if no variant before it returns the logits.
        self._groups = [["fused"], ["plain"]]
        if pack is not False and can_be_packed(folded):
            self._makers["packed"] = lambda: PackedMSDNet(cast(Any, folded), _launcher(recorder.device, precision))
            self._groups.insert(0, ["packed"] if pack else ["packed", "fused"])
        self._made: dict[str, _Variant] = {}
        self._chosen: dict[int, str] = {}
        self._rejected: dict[str, str] = {}
        self._rows = tuple(x.to(recorder.device) for x in example)
        plain = self._moved("plain", folded)
        with recorder.exact():
            self._wanted = logits_of_stages(plain.model, plain.prepared(self._rows))

    def lane(self, size: int) -> _Lane:
        """The stages recorded for a batch size, in the fastest variant."""
        tried = ([lane for name in group if (lane := self._try(name, size)) is not None] for group in self._groups)
        lanes = next(lanes for lanes in tried if lanes)  # plain is never rejected
        times = self._times(lanes)
        order = sorted(range(len(lanes)), key=times.__getitem__)
        texts = [f"{lanes[place].variant.name} {1e3 * times[place]:.3g} ms" for place in order]
        self._chosen[size] = ", ".join(texts) if len(lanes) > 1 else lanes[0].variant.name
        return lanes[order[0]]

    def found(self) -> list[str]:
        """The choices, the fastest first, and what was left out."""
        only = set(self._chosen.values())
        if len(only) == 1 and only <= self._makers.keys():  # nothing was measured
            return [*only, *self._rejected.values()]
        sizes = [f"{size}: {text}" for size, text in self._chosen.items()]
        return [f"all exits for a batch of {sizes[0]}", *(f"of {text}" for text in sizes[1:]), *self._rejected.values()]

    def _try(self, name: str, size: int) -> _Lane | None:
        """The lane of one variant if its logits agree; else the variant is not tried again."""
        if name in self._rejected:
            return None
        try:
            if name not in self._made:
                self._made[name] = self._moved(name, self._makers[name]())
                if self._recorder.device.type == "cuda" and name != "packed":
                    run_paths_side_by_side(self._made[name].model)
            variant = self._made[name]
            rows = len(self._rows[0])
            first = variant.prepared(tensors_of(repeat_rows(self._rows, size)))
            _fill_memory_with_nan(self._recorder.device)
            with self._recorder.exact():
                logits = [one[:rows] for one in logits_of_stages(variant.model, first)]
            ratio = difference(logits, [one[:size] for one in self._wanted])
            if ratio <= TOLERANCES[self._precision] or name == "plain":
                with torch.inference_mode():
                    return _Lane(self._recorder, variant, first)
            self._rejected[name] = f"{name} is left out: its logits differ by {ratio:.2g} of the largest logit of an exit"
        except Exception as error:  # libraries that lack such a kernel raise errors of many types
            if name == "plain":
                raise
            self._rejected[name] = f"{name} is left out: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return None

    def _times(self, lanes: Sequence[_Lane]) -> list[float]:
        """The median seconds of each for all exits; they take turns, so that other load affects all of them."""
        if len(lanes) == 1:
            return [0.0]
        turns = [[self._recorder.seconds(lane.run_all) for lane in lanes] for _ in range(_ROUNDS + 1)]
        return [statistics.median(values) for values in zip(*turns[1:], strict=True)]  # the first is a warm-up

    def _moved(self, name: str, copy: nn.Module) -> _Variant:
        """A variant on the recorder's device."""
        dtype, channels_last = _DTYPES[self._precision], self._channels_last and name != "packed"
        copy.to(self._recorder.device, dtype)
        if channels_last:
            copy.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return _Variant(name, copy, dtype, channels_last)


class _Lane:
    """The graphs of all stages for one batch size in one variant, and the memory that they read and write."""

    def __init__(self, recorder: CudaGraphs, variant: _Variant, first: Carry) -> None:
        self.size, self.variant = len(first[0]), variant
        self.owner: _Run | None = None
        self._recorder = recorder
        stages = [partial(variant.model.stage, exit) for exit in range(variant.model.num_exits)]
        self._stages = recorder.record(stages, first)
        self._carries: list[Carry] = [first, *(stage.left for stage in self._stages)]

    def load(self, exit: int, carry: Carry) -> None:
        """Copy the carry of a stage into the fixed memory."""
        for place, tensor in zip(self._carries[exit], carry, strict=True):
            place[: len(tensor)].copy_(tensor, non_blocking=True)

    def start(self, exit: int) -> None:
        """Start a stage on the fixed memory."""
        self._stages[exit].replay()

    def finish(self, exit: int, rows: int) -> Tensor:
        """Wait for the stage; its logits of the first rows."""
        logits = self._stages[exit].logits[:rows]
        self._recorder.wait()
        return logits.clone()

    def run_all(self) -> None:
        """Run all stages, each when the one before is done."""
        for exit in range(len(self._stages)):
            self.start(exit)
            self.finish(exit, self.size)

    def unload(self, exit: int, rows: int) -> Carry:
        """A copy of the first rows of the carry of a stage."""
        return tuple(tensor[:rows].clone() for tensor in self._carries[exit])


class _Run(Joinable[Tensor]):
    """One run. Its carry is in the lane it owns, or else in memory of its own; runs of one variant have the same carry."""

    def __init__(self, engine: CudaGraphsEngine, variant: _Variant, given: Carry) -> None:
        super().__init__(engine.num_exits, len(given[0]))
        self._engine, self._variant, self.kind = engine, variant, variant.name
        # Texts, for example, may be longer.
        self._fits = all(x.shape[1:] == like.shape[1:] for x, like in zip(given, engine._example, strict=True))
        self._lane: _Lane | None = None
        self._carry: Carry = given
        self._ready = engine._ready_event(given)
        self._next = 0  # changed under the lock, since another thread may evict this run

    def _run(self, exit: int) -> Tensor:
        engine = self._engine
        with engine._lock:
            carry = self._carry  # held until the stage is done: its memory must not be reused before
            with engine._recorder.queue(self._ready):
                if self._lane is None:
                    self._enter(exit, carry)
                if self._lane is None:
                    logits = self._run_without_graph(exit, carry)
                else:
                    self._lane.start(exit)
            if self._lane is not None:
                logits = self._lane.finish(exit, self._batch)
            self._ready, self._next = None, exit + 1
            return logits

    @torch.inference_mode()
    def _enter(self, exit: int, carry: Carry) -> None:
        """Take over the smallest lane for so many rows, of the same variant, since each has a carry of its own."""
        fitting = (lane for lane in self._engine._lanes if lane.size >= self._batch and lane.variant is self._variant)
        if self._fits and (lane := next(fitting, None)) is not None:
            if lane.owner is not None:
                lane.owner._leave()
            lane.load(exit, carry)
            lane.owner, self._lane, self._carry = self, lane, ()

    def _leave(self) -> None:
        """Leave the lane with a copy of the carry."""
        if self._lane is not None:
            self._carry = self._lane.unload(self._next, self._batch)
            self._lane.owner, self._lane = None, None

    @torch.inference_mode()
    def _run_without_graph(self, exit: int, carry: Carry) -> Tensor:
        engine = self._engine
        moved = tuple(tensor.to(engine.device) for tensor in carry)
        with engine._recorder.exact(), without_autocast():  # as the graphs were captured
            self._carry, logits = self._variant.model.stage(exit, moved)
            return as_answer(logits)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        with self._engine._lock, torch.inference_mode(), self._engine._recorder.queue(self._ready):
            self._ready = None
            self._leave()
            yield

    def _drop(self) -> None:
        with self._engine._lock:
            if self._lane is not None:
                self._lane.owner = None
            self._lane, self._carry = None, ()


def _fill_memory_with_nan(device: torch.device) -> None:
    """Leave NaN in the memory that the next results will use, to detect kernels that read uninitialised memory."""
    if device.type == "cuda":
        _ = [torch.full((size,), float("nan"), device=device) for size in (1 << 10, 1 << 16, 1 << 20) for _ in range(16)]


def _launcher(device: torch.device, precision: Precision) -> Run:
    """The function that runs the launches of a packed network."""
    if device.type != "cuda":
        return run_with_torch
    from anytime.run.engines.kernel import run_with_triton

    # On an H200 tf32x3, three rounded products for an exact one, took 10 % longer for one image and 50 % longer for 64.
    return run_with_triton("ieee" if precision == "float32" else "tf32")


def _make_recorder(where: torch.device, precision: Precision) -> CudaGraphs:
    if not torch.cuda.is_available():
        raise DeviceError(
            "the engine 'cuda-graphs' was requested, but torch sees no GPU",
            expected="an NVIDIA GPU and a CUDA build of torch",
            fix="use engine='onnxruntime' or engine='eager' on a CPU; run `anytime doctor` to see what is installed",
        )
    device = where if where.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
    return CudaGraphs(device, tf32=precision != "float32")

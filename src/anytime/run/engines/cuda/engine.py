"""The CUDA graphs engine: each stage is one graph per batch size, captured on a copy with folded batch norms.

At small batches a GPU waits for the host to launch kernels. A graph is launched as a whole and reads and writes fixed memory.
Where a model has two variants (`packed` and `fused`), each batch size is captured in both and the faster one is kept. Batches
between the captured sizes are padded to the next one; larger ones, and inputs of a shape other than the example's, run without
a graph.

Stages that will be requested anyway are queued while one runs, so that the GPU does not wait for Python between them, and each
has a result of its own. The fixed memory of a size belongs to one run at a time: a run that another one evicts takes a copy of
its carry along, so that any number may be open; what was queued for it is computed again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any, get_args

import torch
from torch import Tensor

from anytime.checks import Inputs, check_count
from anytime.combine import Rule
from anytime.errors import OptionError
from anytime.models.base import Carry, StagedModel
from anytime.models.given import check_like, flat_inputs, names_of
from anytime.models.modes import without_autocast
from anytime.run.engines.cuda.lanes import Lane, Variant
from anytime.run.engines.cuda.recording import CudaGraphs, make_recorder
from anytime.run.engines.cuda.rule import make_columns
from anytime.run.engines.cuda.variants import ROWS, TOLERANCES, Precision, Variants
from anytime.run.engines.running import Joinable, Running, as_answer, device_of
from anytime.run.forks import renew_in_children

SIZES = (1, 2, 4, 8, 16, 32, 64)


class CudaGraphsEngine:
    """Runs each stage as a CUDA graph.

    Args:
        model: A staged torch module, on any device; it is unchanged.
        example: Inputs to fold and to capture with.
        sizes: The batch sizes to capture now; each takes about a second per variant.
        precision: `float32` returns the model's logits up to rounding; the others are faster and may differ by `TOLERANCES`.
        pack: Whether an MSDNet for small images runs as few launches of one kernel, provided that Triton is installed and the
            logits agree: at the sizes where that is faster (None), at all sizes or at none.
        rule: A rule whose steps run on the GPU as well, for `begin_with_rule`; `why` says if they cannot.
        recorder: Records the stages: CUDA graphs by default, on the model's GPU or else the current one.

    Attributes:
        rule: The rule that runs on the GPU; None if there is none.
        classes: The number of classes.
    """

    name = "cuda-graphs"
    joins = queues_ahead = True
    reads_modes = False

    def __init__(
        self,
        model: StagedModel,
        example: Inputs,
        *,
        sizes: Sequence[int] = SIZES,
        precision: Precision = "float32",
        pack: bool | None = None,
        rule: Rule[Any] | None = None,
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
        self._recorder = recorder or make_recorder(device_of(model), tf32=precision != "float32")
        self.device = self._recorder.device
        self._lock = RLock()
        renew_in_children(self)
        with self._recorder.queue(self._ready_event(given)):
            variants = Variants(self._recorder, model, tuple(x[:ROWS] for x in given), precision, pack=pack)
            self.classes = variants.classes
            columns = None
            reasons = ["requested"]
            if rule is not None:
                columns, reason = make_columns(rule, self.num_exits, self.classes, self._recorder)
                reasons.append(reason)
            self.rule, self._columns = None if columns is None else rule, columns
            self._lanes = [variants.lane(size, columns) for size in wanted]
        self.why = "; ".join([*reasons, *variants.found()])

    def renew(self) -> None:
        """Make a new lock, in a forked process."""
        self._lock = RLock()

    def begin(self, x: Inputs) -> Running[Tensor]:
        """Take inputs, batch first; nothing is computed yet."""
        return self._begin(x, None if self.rule is None else self.classes)

    def begin_with_rule(self, x: Inputs) -> Running[Tensor]:
        """As `begin`; stages return the columns of `anytime.run.engines.cuda.rule` in place of logits."""
        return self._begin(x, None)

    def _begin(self, x: Inputs, columns: int | None) -> Running[Tensor]:
        given = flat_inputs(x, self.input_names)
        check_like(given, self._example, self.input_names)  # copies into the fixed memory would convert them
        lane = next((lane for lane in self._lanes if lane.size >= len(given[0])), self._lanes[-1])
        return _Run(self, lane.variant, lane.variant.prepared(given), columns)

    def _ready_event(self, given: Carry) -> Any:
        """The event after which inputs on a GPU are complete."""
        devices = [x.device for x in given if x.is_cuda]
        return self._recorder.mark(devices[0]) if devices else None


class _Run(Joinable[Tensor]):
    """One run. Its carry is in the lane it owns, or else in memory of its own; runs of one variant have the same carry.

    What another thread may change by evicting this run is changed under the lock.
    """

    def __init__(self, engine: CudaGraphsEngine, variant: Variant, given: Carry, columns: int | None) -> None:
        super().__init__(engine.num_exits, len(given[0]))
        self._engine, self._variant, self.kind, self._columns = engine, variant, variant.name, columns
        # Texts, for example, may be longer.
        self._fits = all(x.shape[1:] == like.shape[1:] for x, like in zip(given, engine._example, strict=True))
        self._lane: Lane | None = None
        self._carry: Carry = given
        self._ready = engine._ready_event(given)
        self._next = self._started = 0  # the stages that were returned, and that were started on the lane

    @property
    def queued(self) -> bool:  # type: ignore[override]
        """Whether the next stage runs, or has run, before it is requested."""
        return self._started > self._next

    def ready(self, seconds: float) -> bool:
        """Whether the next stage, which is queued, ends within so many seconds; waits no longer than that."""
        until = time.perf_counter() + seconds
        while (lane := self._lane) is not None and not lane.done(self._next):
            if time.perf_counter() >= until:
                return False
        return lane is not None  # else another run has just evicted this one

    def _run(self, exit: int) -> Tensor:
        engine = self._engine
        with engine._lock:
            lane, carry = self._lane, self._carry  # held until the stage is done: its memory must not be reused before
            result = None
            if lane is None or lane.furthest(exit, self.ahead) >= self._started:
                with engine._recorder.queue(self._ready):
                    result = self._start(exit, carry)
            if result is None:
                assert self._lane is not None
                result = self._lane.finish(exit, self._batch)
            self._ready, self._next = None, exit + 1
            return result if self._columns is None else result[:, : self._columns]

    def _start(self, exit: int, carry: Carry) -> Tensor | None:
        """Start a stage and those that may follow it; its result, if it has run without a graph."""
        if self._lane is None:
            self._enter(exit, carry)
        if self._lane is None:
            return self._run_without_graph(exit, carry)
        for stage in range(self._started, self._lane.furthest(exit, self.ahead) + 1):
            self._lane.start(stage)
            self._started = stage + 1
        return None

    @torch.inference_mode()
    def _enter(self, exit: int, carry: Carry) -> None:
        """Take over the smallest lane for so many rows, of the same variant, since each has a carry of its own."""
        fitting = (lane for lane in self._engine._lanes if lane.size >= self._batch and lane.variant is self._variant)
        if self._fits and (lane := next(fitting, None)) is not None:
            if lane.owner is not None:
                lane.owner._leave()
            lane.load(exit, carry)
            lane.owner, self._lane, self._carry, self._started = self, lane, (), exit

    def _leave(self) -> None:
        """Leave the lane with a copy of the carry; stages that were queued and not requested are forgotten."""
        if self._lane is not None:
            self._carry, self._started = self._lane.unload(self._next, self._batch), self._next
            self._lane.owner, self._lane = None, None

    @torch.inference_mode()
    def _run_without_graph(self, exit: int, carry: Carry) -> Tensor:
        engine, model = self._engine, self._variant.model
        moved = tuple(tensor.to(engine.device) for tensor in carry)
        with engine._recorder.exact(), without_autocast():  # as the graphs were captured
            if engine._columns is None:
                self._carry, result = model.stage(exit, moved)
            else:
                self._carry, result = engine._columns.after_stage(exit, moved, partial(model.stage, exit))
            return as_answer(result)

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
            self._lane, self._carry, self._started = None, (), self._next

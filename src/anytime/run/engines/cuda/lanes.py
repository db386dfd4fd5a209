"""The recorded stages of one batch size, and the memory that they share."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anytime.models.base import Carry
from anytime.run.engines.base import Ahead
from anytime.run.engines.cuda.recording import CudaGraphs
from anytime.run.engines.cuda.rule import RuleColumns


class Variant(NamedTuple):
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


class Lane:
    """The graphs of all stages for one batch size in one variant, and the memory that they read and write.

    It belongs to one run at a time, its owner.

    Args:
        recorder: Records the stages.
        variant: The stages.
        first: The memory of the inputs.
        rule: Its step is part of the stages.
    """

    def __init__(self, recorder: CudaGraphs, variant: Variant, first: Carry, rule: RuleColumns | None) -> None:
        self.size, self.variant = len(first[0]), variant
        self.owner: Any = None
        self._recorder, self._has_rule = recorder, rule is not None
        stages = [partial(variant.model.stage, exit) for exit in range(variant.model.num_exits)]
        self._stages = recorder.record(stages, first, rule)
        self._carries: list[Carry] = [first, *(stage.left for stage in self._stages)]
        self._ends = [0.0, *accumulate(stage.seconds for stage in self._stages)]

    def furthest(self, exit: int, ahead: Ahead) -> int:
        """The last stage to queue behind stage `exit`, which runs now: one that ends in time, after a short wait at most."""
        if not ahead.stages:
            return exit
        ends, last = self._ends, exit
        latest = min(ends[exit] + ahead.seconds, ends[exit + 1] + ahead.resolution)
        most = min(exit + ahead.stages, len(self._stages) - 1)
        while last < most and ends[last + 2] <= latest:
            last += 1
        return last

    def load(self, exit: int, carry: Carry) -> None:
        """Copy the carry of a stage into the fixed memory."""
        if self._has_rule:
            self._recorder.join()
        for place, tensor in zip(self._carries[exit], carry, strict=True):
            place[: len(tensor)].copy_(tensor, non_blocking=True)

    def start(self, exit: int) -> None:
        """Start a stage on the fixed memory."""
        self._stages[exit].start()

    def done(self, exit: int) -> bool:
        """Whether a stage that was started has ended."""
        return self._stages[exit].done()

    def finish(self, exit: int, rows: int) -> Tensor:
        """Wait for a stage; its result for the first rows."""
        stage = self._stages[exit]
        stage.wait()
        return stage.result[:rows].clone()

    def run_all(self) -> None:
        """Run all stages, each when the one before is done."""
        for exit in range(len(self._stages)):
            self.start(exit)
            self.finish(exit, self.size)

    def unload(self, exit: int, rows: int) -> Carry:
        """A copy of the first rows of the carry of a stage, which later stages do not overwrite."""
        if self._has_rule:
            self._recorder.join()
        return tuple(tensor[:rows].clone() for tensor in self._carries[exit])

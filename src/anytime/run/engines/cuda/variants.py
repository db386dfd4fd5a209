"""Several implementations of the same stages, of which the fastest that returns the model's logits is recorded."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from anytime.checks import repeat_rows, tensors_of
from anytime.models.base import Carry, StagedModel
from anytime.models.branches import run_paths_side_by_side
from anytime.run.engines.cuda.lanes import Lane, Variant
from anytime.run.engines.cuda.recording import CudaGraphs
from anytime.run.engines.cuda.rule import RuleColumns
from anytime.run.engines.folding import difference, folded_copy, logits_of_stages
from anytime.run.engines.packed import PackedMSDNet, Run, can_be_packed, run_with_torch

Precision = Literal["float32", "tf32", "float16", "bfloat16"]
TOLERANCES: dict[Precision, float] = {"float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}
"""How far logits may differ from the model's in float32, relative to the largest logit of an exit."""
ROWS = 8  # of the example, at most, to compare variants on
_ROUNDS = 11  # to time variants
_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Variants:
    """Makes the lanes, each in the fastest variant that returns the model's logits, and notes why.

    On an H200 `packed` is the fastest for one image in an MSDNet, `fused` for 64. Parallel paths, and `fused` instead of
    `plain`, were faster for both in float32, tf32 and float16, so these are not measured again.

    Attributes:
        classes: The number of classes.
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
        self._made: dict[str, Variant] = {}
        self._chosen: dict[int, str] = {}
        self._rejected: dict[str, str] = {}
        self._rows = tuple(x.to(recorder.device) for x in example)
        plain = self._moved("plain", folded)
        with recorder.exact():
            self._wanted = logits_of_stages(plain.model, plain.prepared(self._rows))
        self.classes = self._wanted[0].shape[1]

    def lane(self, size: int, rule: RuleColumns | None) -> Lane:
        """The stages recorded for a batch size, in the fastest variant, with the steps of a rule."""
        tried = ([lane for name in group if (lane := self._try(name, size, rule)) is not None] for group in self._groups)
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

    def _try(self, name: str, size: int, rule: RuleColumns | None) -> Lane | None:
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
                    return Lane(self._recorder, variant, first, rule)
            self._rejected[name] = f"{name} is left out: its logits differ by {ratio:.2g} of the largest logit of an exit"
        except Exception as error:  # libraries that lack such a kernel raise errors of many types
            if name == "plain":
                raise
            self._rejected[name] = f"{name} is left out: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return None

    def _times(self, lanes: Sequence[Lane]) -> list[float]:
        """The median seconds of each for all exits; they take turns, so that other load affects all of them."""
        if len(lanes) == 1:
            return [0.0]
        turns = [[self._recorder.seconds(lane.run_all) for lane in lanes] for _ in range(_ROUNDS + 1)]
        return [statistics.median(values) for values in zip(*turns[1:], strict=True)]  # the first is a warm-up

    def _moved(self, name: str, copy: nn.Module) -> Variant:
        """A variant on the recorder's device."""
        dtype, channels_last = _DTYPES[self._precision], self._channels_last and name != "packed"
        copy.to(self._recorder.device, dtype)
        if channels_last:
            copy.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return Variant(name, copy, dtype, channels_last)


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

"""Evaluation on a GPU: rows are followed by the kernel of `anytime.metrics.fused`, and nothing but sums leaves the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anytime.conformal import Raps
from anytime.evaluation.blocks import BlockTask, Followed, LogitRows, to_device
from anytime.metrics.fused import NO_FAULT, FusedRules, SetTask, fused_rules


def known_rules(rows: LogitRows, request: BlockTask) -> FusedRules | None:
    """The rules that the kernel can follow on these logits, None if there are none."""
    if not isinstance(rows.logits, Tensor) or rows.probabilities:
        return None
    exits, _, classes = rows.logits.shape
    return fused_rules(
        request.combiners,
        exits=exits,
        classes=classes,
        dtype=rows.logits.dtype,
        device=rows.logits.device,
        but=request.log_odds,
    )


class TritonKernel:
    """The kernel for some rules on a device, where its results stay."""

    def __init__(self, rows: LogitRows, fused: FusedRules) -> None:
        self._rows, self._fused, self.names = rows, fused, fused.encoded
        self._faults = torch.full((1,), NO_FAULT, device=fused.device)

    def follow(self, request: BlockTask, block: int, chunk: slice, uniform: Tensor) -> dict[Any, Followed]:
        """The rows of a chunk under each rule."""
        rows, sets, task = self._rows, request.sets, None
        if sets is not None and rows.labels is not None:
            task = _set_task(sets.raps, to_device(uniform, self._fused.device), limits=sets.by_rule)
        logits: Any = rows.logits[:, chunk]
        found = self._fused.follow(logits, rows.labels_of(chunk), faults=self._faults, first_row=chunk.start, sets=task)
        return {name: Followed(each.seen, each.size, each.covered) for name, each in found.items()}

    def calibrate(
        self, request: BlockTask, raps: Raps | None, block: int, picked: Tensor, uniform: Tensor
    ) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
        """The scores of some rows' labels, `(exits, rows)` by rule; rules whose log-odds are wanted are not known.

        The rows are not checked: all of them are followed afterwards.
        """
        rows = self._rows
        if raps is None or rows.labels is None:
            return {}, {}
        device, logits = self._fused.device, rows.logits
        assert isinstance(logits, Tensor)
        task, numbers = _set_task(raps, to_device(uniform, device), limits=None), to_device(picked, device)
        found = self._fused.follow(logits, rows.labels_of(numbers), faults=self._faults, picked=numbers, sets=task)
        return {name: each.score for name, each in found.items() if each.score is not None}, {}

    def check(self) -> None:
        """Raise the error that the plain path raises for a logit that is not finite. This waits for the device."""
        fault = int(self._faults)
        if fault != NO_FAULT:
            row = fault // self._fused.exits
            self._rows.block(slice(row, row + 1), row)


def make_kernel(rows: LogitRows, request: BlockTask) -> TritonKernel:
    """The kernel for the rules of a request that it knows."""
    fused = known_rules(rows, request)
    assert fused is not None  # or this path would not have been chosen
    return TritonKernel(rows, fused)


def _set_task(raps: Raps, draws: Tensor, *, limits: Any) -> SetTask:
    return SetTask(
        lam_reg=raps.lam_reg,
        k_reg=raps.k_reg,
        randomised=raps.randomised,
        original=raps.variant == "original",
        empty=bool(raps.empty),
        draws=draws,
        limits=limits,
    )

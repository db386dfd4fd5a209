"""Evaluation on a GPU: rows are followed by the kernel of `anytime.metrics.fused`, and nothing but sums leaves the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anytime.conformal import Raps
from anytime.evaluation.blocks import NO_FINGERPRINTS, BlockTask, Chunk, Followed, LogitRows, calibrate_part
from anytime.evaluation.blocks import follow_chunk as follow_plainly
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


def follow_chunk(rows: LogitRows, request: BlockTask, block: int, chunk: slice, uniform: Tensor) -> Chunk:
    """As `anytime.evaluation.blocks.follow_chunk`; the results stay on the device."""
    fused, others = _split(rows, request)
    sets, task = request.sets, None
    if sets is not None and rows.labels is not None:
        task = _set_task(sets.raps, _to_device(uniform, rows), limits=sets.by_rule)
    found = _follow(fused, rows, chunk.start, rows.logits[:, chunk], rows.labels_of(chunk), task)
    followed = {name: Followed(each.seen, each.size, each.covered) for name, each in found.items()}
    prints = NO_FINGERPRINTS
    if others.combiners or others.fingerprints:
        plain = follow_plainly(rows, others, block, chunk, uniform)
        followed, prints = {**plain.rules, **followed}, plain.fingerprints
    return Chunk(chunk, {name: followed[name] for name in request.combiners}, prints)


def calibrate_rows(
    rows: LogitRows, request: BlockTask, raps: Raps | None, block: int, picked: Tensor, uniform: Tensor
) -> tuple[dict[Any, Tensor], dict[Any, Tensor], Tensor]:
    """As `anytime.evaluation.blocks.calibrate_part`."""
    fused, others = _split(rows, request)
    scores: dict[Any, Tensor] = {}
    log_odds: dict[Any, Tensor] = {}
    prints = NO_FINGERPRINTS
    if others.combiners or others.fingerprints:
        scores, log_odds, prints = calibrate_part(rows, others, raps, block, picked, uniform)
    if raps is not None and rows.labels is not None:
        task = _set_task(raps, _to_device(uniform, rows), limits=None)
        numbers = _to_device(picked, rows)
        found = _follow(fused, rows, 0, rows.logits, rows.labels_of(numbers), task, picked=numbers)
        scores |= {name: each.score for name, each in found.items() if each.score is not None}
    return scores, log_odds, prints


def _split(rows: LogitRows, request: BlockTask) -> tuple[FusedRules, BlockTask]:
    """The rules that the kernel follows, and the request for the others."""
    fused = known_rules(rows, request)
    assert fused is not None  # or this path would not have been chosen
    rest = {name: combine for name, combine in request.combiners.items() if name not in fused.encoded}
    return fused, replace(request, combiners=rest, path="plain")


def _follow(
    fused: FusedRules,
    rows: LogitRows,
    first: int,
    logits: Any,
    labels: Tensor | None,
    sets: SetTask | None,
    picked: Tensor | None = None,
) -> dict[Any, Any]:
    faults = torch.full((1,), NO_FAULT, device=fused.device)
    found = fused.follow(logits, labels, faults=faults, first_row=first, picked=picked, sets=sets)
    fault = int(faults)
    if fault != NO_FAULT:
        row = fault // fused.exits
        rows.block(slice(row, row + 1), row)  # raises the error that the plain path raises
    return found


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


def _to_device(values: Tensor, rows: LogitRows) -> Tensor:
    """On the device of the logits, without waiting for it."""
    device = rows.logits[:, :0].device
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)

"""Rows in blocks: how logits are read, and what is kept of them.

A *block* fits the cache; the rules work on one block at a time. A *chunk* is several blocks, processed by one thread; what
is kept of it are trajectories, which have no class dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from anytime.checks import check_logits, check_probabilities, fingerprints
from anytime.combine import Prediction
from anytime.combine.dense import DenseRows, Layout, block_size
from anytime.conformal import Raps, rank_of, sort_rows
from anytime.evaluation.source import Mapped
from anytime.evaluation.threads import MapInOrder
from anytime.metrics import Trajectories, follow

_CHUNK_BYTES = 32 << 20
_COMPILED_BYTES = 128 << 20  # of logits per call of compiled code, which copies none of them
_DEVICE_ROWS = 1 << 18  # whose trajectories under three rules take 200 MB of a GPU with 5 exits
_CHUNK_ROWS = 1 << 14  # whose trajectories under three rules take 14 MB with 5 exits
_PERMUTED = 5 << 17  # rows up to which a permutation of all is made

SETS_ROWS = 1 << 17
"""The most rows that calibrate prediction sets: their scores are held in memory."""
NO_FINGERPRINTS = torch.zeros(0, dtype=torch.int64)

Combine = Callable[[Tensor], Prediction]
ComputePath = Literal["plain", "compiled", "triton"]
"""How rows are computed: with torch's operations, compiled code on the CPU, or a Triton kernel on a GPU."""
_KERNELS = {"compiled": "anytime.evaluation.compiled.plan", "triton": "anytime.evaluation.triton_rows"}


def unchecked() -> None:
    """Nothing that can change has to be checked."""


@dataclass(frozen=True)
class LogitRows:
    """Logits of all rows, possibly mapped from a file, and their labels if there are any.

    Attributes:
        logits: `(exits, rows, classes)`; dense logits as rows.
        labels: One per row.
        probabilities: Whether these are probabilities or their logarithms.
        ignore_index: The label of positions of dense logits that are not among the rows.
        start: The number of the first of these rows in their file.
        file: The name of the file, if there are several.
        check: Raises if the file has changed since it was opened.
    """

    logits: Tensor | Mapped | DenseRows
    labels: Tensor | None
    probabilities: bool = False
    ignore_index: int | None = None
    start: int = 0
    file: str | None = None
    check: Callable[[], None] = unchecked

    @property
    def layout(self) -> Layout | None:
        """Where the rows are in dense logits; None for plain ones."""
        return self.logits.layout if isinstance(self.logits, DenseRows) else None

    def block(self, rows: slice | Tensor, first_row: int) -> Tensor:
        """Read and check some rows, as float32 or float64; `first_row` is for error messages."""
        place = self.logits.place if isinstance(self.logits, DenseRows) else None
        block = check_logits(self.logits[:, rows], first_row=self.start + first_row, place=place)
        return check_probabilities(block) if self.probabilities else block

    def labels_of(self, rows: slice | Tensor) -> Tensor | None:
        """The labels of some rows."""
        return None if self.labels is None else self.labels[rows]

    def fingerprints(self) -> Tensor:
        """One number per row, see `anytime.checks.fingerprints`, computed block by block."""
        exits, samples, classes = self.logits.shape
        size = block_size(exits, classes)
        parts = [fingerprints(self.block(slice(first, first + size), first)) for first in range(0, samples, size)]
        return torch.cat([NO_FINGERPRINTS, *parts])

    def locate(self, row: int) -> tuple[int, tuple[int, ...] | None]:
        """The input and, of dense logits, the position of a row."""
        return self.logits.locate(row) if isinstance(self.logits, DenseRows) else (self.start + row, None)

    def for_sets(self, seed: int) -> tuple[Tensor, Tensor]:
        """The rows that calibrate prediction sets, and those that must not test them, both in order; see `rows_for_sets`.

        The positions of an input are not independent, so of dense logits it is a fifth of the inputs, and of their positions
        at most `SETS_ROWS`.
        """
        if not isinstance(self.logits, DenseRows):
            chosen = rows_for_sets(self.logits.shape[1], seed)
            return chosen, chosen
        inputs = self.logits.layout.batch
        generator = np.random.default_rng([seed, 0])
        used = self.logits.among(some_rows(inputs, inputs // 5, generator).sort().values).nonzero()[:, 0]
        if len(used) <= SETS_ROWS:
            return used, used
        return used[torch.from_numpy(np.sort(generator.choice(len(used), SETS_ROWS, replace=False)))], used


def rows_for_sets(samples: int, seed: int) -> Tensor:
    """The rows that calibrate prediction sets, in order: a random fifth of all, at most `SETS_ROWS`."""
    return some_rows(samples, min(samples // 5, SETS_ROWS), np.random.default_rng([seed, 0])).sort().values


def some_rows(samples: int, most: int, generator: np.random.Generator) -> Tensor:
    """The numbers of some random rows, in random order; memory does not grow with the number of rows."""
    if samples <= _PERMUTED:
        return torch.from_numpy(generator.permutation(samples)[:most])
    return torch.from_numpy(generator.choice(samples, most, replace=False))


@dataclass(frozen=True)
class SetThresholds:
    """The calibrated prediction sets of each rule.

    Attributes:
        raps: Their settings.
        by_rule: The threshold per exit, `(exits,)`, for each rule.
        calibration_rows: How many rows they were calibrated on.
        used: The numbers of the test rows that set metrics leave out, in order; None if there are none.
    """

    raps: Raps
    by_rule: Mapping[Any, Tensor]
    calibration_rows: int
    used: Tensor | None = None

    def kept(self, rows: slice, device: torch.device) -> Tensor | slice:
        """Which of some rows the set metrics count: their numbers."""
        if self.used is None:
            return slice(None)
        mask = torch.ones(rows.stop - rows.start, dtype=torch.bool)
        return to_device(mask.index_fill_(0, rows_within(self.used, rows), False).nonzero()[:, 0], device)


@dataclass(frozen=True)
class Followed:
    """Trajectories of some rows under one rule, every tensor `(exits, rows)`.

    Attributes:
        seen: The trajectories.
        size, covered: The size of each prediction set and whether it contains the label, if there are sets.
        log_odds: The confidence as log-odds, if requested.
    """

    seen: Trajectories
    size: Tensor | None = None
    covered: Tensor | None = None
    log_odds: Tensor | None = None


@dataclass(frozen=True)
class BlockTask:
    """What a pass over rows computes.

    Attributes:
        combiners: The rules, by any keys.
        log_odds: The rules whose log-odds to keep.
        sets: Prediction sets to measure, for the rules they were calibrated for.
        fingerprints: Whether to compute the rows' fingerprints.
        path: How to compute the rules that this path knows; the others are computed plainly.
    """

    combiners: Mapping[Any, Combine]
    log_odds: Collection[Any] = ()
    sets: SetThresholds | None = None
    fingerprints: bool = False
    path: ComputePath = "plain"


@dataclass(frozen=True)
class Chunk:
    """The rows of a chunk under each rule, and their fingerprints (none unless requested).

    `check` raises the error for a logit that is not finite, if the rows were not checked yet because that waits for a GPU.
    """

    rows: slice
    rules: dict[Any, Followed]
    fingerprints: Tensor
    check: Callable[[], None] | None = None


def chunks(samples: int, block: int, row_values: int, path: ComputePath = "plain") -> list[slice]:
    """All rows in chunks of whole blocks; those for compiled code are larger, but enough for all threads."""
    most = _DEVICE_ROWS
    if path != "triton":
        compiled = min(_COMPILED_BYTES // (4 * row_values), samples // 8)
        most = min(_CHUNK_ROWS, compiled if path == "compiled" else _CHUNK_BYTES // (4 * row_values))
    rows = max(block, most)
    rows -= rows % block
    return [slice(start, min(start + rows, samples)) for start in range(0, samples, rows)]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy from the CPU on a device, without waiting for it."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def rows_within(chosen: Tensor, rows: slice) -> Tensor:
    """Those of the chosen rows, in order, that are among `rows`, counted from the first of these."""
    first, last = torch.searchsorted(chosen, chosen.new_tensor([rows.start, rows.stop])).tolist()
    inside: Tensor = chosen[first:last] - rows.start
    return inside


def uniforms(sizes: Iterable[int], exits: int, seed: Sequence[int], *, first: int = 0) -> Iterator[Tensor]:
    """Random numbers for randomised sets, `(exits, size)` per part; the values do not depend on how rows are split.

    Args:
        sizes: The numbers of rows.
        exits: The number of exits.
        seed: Of the generator.
        first: How many rows are before these.
    """
    generator = np.random.default_rng(seed)
    generator.bit_generator.advance(first * exits // 2)  # type: ignore[attr-defined]  # two numbers of 32 bits per step
    generator.random(first * exits % 2, dtype=np.float32)
    for size in sizes:
        yield torch.from_numpy(generator.random((size, exits), dtype=np.float32)).T


def calibrate_rows(
    rows: LogitRows, request: BlockTask, raps: Raps | None, chosen: Tensor, *, seed: int, block: int, map_in_order: MapInOrder
) -> tuple[SetThresholds | None, dict[Any, Tensor], Tensor]:
    """Read the chosen rows once: thresholds of prediction sets, log-odds `(exits, rows)` by rule, and fingerprints."""
    scores, log_odds, prints = score_rows(rows, request, raps, chosen, seed=seed, block=block, map_in_order=map_in_order)
    return None if raps is None else set_thresholds(raps, scores), log_odds, prints


def set_thresholds(raps: Raps, scores: Mapping[Any, Tensor]) -> SetThresholds:
    """Prediction sets from the scores of the calibration rows, `(exits, rows)` by rule."""
    thresholds = {name: raps.threshold(each) for name, each in scores.items()}
    return SetThresholds(raps, thresholds, max(each.shape[1] for each in scores.values()))


def score_rows(
    rows: LogitRows,
    request: BlockTask,
    raps: Raps | None,
    chosen: Tensor,
    *,
    seed: int,
    block: int,
    map_in_order: MapInOrder,
    before: int = 0,
) -> tuple[dict[Any, Tensor], dict[Any, Tensor], Tensor]:
    """Read the chosen rows once: scores and log-odds, `(exits, rows)` by rule, and fingerprints.

    Args:
        rows: All rows.
        request: What to compute.
        raps: Settings of the prediction sets; None for no scores.
        chosen: The numbers of the rows, at least one, in order.
        seed: For the randomised scores.
        block: How many rows a block has.
        map_in_order: See `workers`.
        before: How many rows were chosen before these.
    """
    exits, _, classes = rows.logits.shape
    sizes = [] if request.path == "plain" else chunks(len(chosen), block, exits * classes, request.path)
    parts = [chosen[part] for part in sizes] or torch.split(chosen, block)
    work = partial(calibrate_part, rows, request, raps, block)
    found = list(map_in_order(work, parts, uniforms(map(len, parts), exits, [seed, 1], first=before)))
    scores, log_odds = ({name: torch.cat([part[i][name] for part in found], 1) for name in found[0][i]} for i in (0, 1))
    return scores, log_odds, torch.cat([part[2] for part in found])


def _kernel(rows: LogitRows, request: BlockTask) -> tuple[Any, BlockTask]:
    """The code for a path that is not plain, and the request for the rules that it does not know."""
    kernel = import_module(_KERNELS[request.path]).make_kernel(rows, request)
    rest = {name: combine for name, combine in request.combiners.items() if name not in kernel.names}
    return kernel, replace(request, combiners=rest, path="plain")


@torch.inference_mode()
def calibrate_part(
    rows: LogitRows, request: BlockTask, raps: Raps | None, block: int, picked: Tensor, uniform: Tensor
) -> tuple[dict[Any, Tensor], dict[Any, Tensor], Tensor]:
    """The scores of some rows' labels, their log-odds, each `(exits, rows)` by rule, and their fingerprints."""
    if request.path == "plain":
        return _calibrate_plainly(rows, request, raps, picked, uniform)
    kernel, others = _kernel(rows, request)
    scores, log_odds = kernel.calibrate(request, raps, block, picked, uniform)
    prints = NO_FINGERPRINTS
    if others.combiners or others.fingerprints:
        plain_scores, plain_odds, prints = _calibrate_plainly(rows, others, raps, picked, uniform)
        scores, log_odds = {**plain_scores, **scores}, {**plain_odds, **log_odds}
    return scores, log_odds, prints


def _calibrate_plainly(
    rows: LogitRows, request: BlockTask, raps: Raps | None, picked: Tensor, uniform: Tensor
) -> tuple[dict[Any, Tensor], dict[Any, Tensor], Tensor]:
    logits, labels = rows.block(picked, int(picked[0])), rows.labels_of(picked)
    scores, log_odds = {}, {}
    for name, combine in request.combiners.items():
        prediction = combine(logits)
        if raps is not None and labels is not None:
            ascending = sort_rows(prediction.log_probs)
            rank = rank_of(prediction.log_probs, ascending, labels)
            scores[name] = raps.label_score(ascending, rank, uniform.to(logits.device))
        if name in request.log_odds:
            log_odds[name] = prediction.log_odds.double().cpu()
    return scores, log_odds, fingerprints(logits) if request.fingerprints else NO_FINGERPRINTS


@torch.inference_mode()
def follow_chunk(rows: LogitRows, request: BlockTask, block: int, chunk: slice, uniform: Tensor) -> Chunk:
    """Read a chunk and follow its rows under each rule."""
    if request.path == "plain":
        return _follow_plainly(rows, request, block, chunk, uniform)
    kernel, others = _kernel(rows, request)
    found, prints = kernel.follow(request, block, chunk, uniform), NO_FINGERPRINTS
    if others.combiners or others.fingerprints:
        plain = _follow_plainly(rows, others, block, chunk, uniform)
        found, prints = {**plain.rules, **found}, plain.fingerprints
    return Chunk(chunk, {name: found[name] for name in request.combiners}, prints, getattr(kernel, "check", None))


def _follow_plainly(rows: LogitRows, request: BlockTask, block: int, chunk: slice, uniform: Tensor) -> Chunk:
    """Read a chunk once, block by block, and follow its rows with torch's operations."""
    # Results are written into one tensor per quantity: kept in parts, the memory between them could not be reused.
    whole: dict[Any, Followed] = {}
    prints = [NO_FINGERPRINTS]
    for start in range(chunk.start, chunk.stop, block):
        some = slice(start, min(start + block, chunk.stop))
        logits, labels = rows.block(some, start), rows.labels_of(some)
        first = start - chunk.start
        draws = uniform[:, first : first + logits.shape[1]].to(logits.device)
        for name, combine in request.combiners.items():
            part = _follow(combine(logits), labels, request, name, draws)
            if name not in whole:
                whole[name] = _empty_like(part, chunk.stop - chunk.start)
            _write(whole[name], first, part)
        if request.fingerprints:
            prints.append(fingerprints(logits))
    return Chunk(chunk, whole, torch.cat(prints))


def _follow(prediction: Prediction, labels: Tensor | None, request: BlockTask, name: Any, draws: Tensor) -> Followed:
    size = covered = None
    if request.sets is not None and labels is not None and name in request.sets.by_rule:
        ascending = sort_rows(prediction.log_probs)
        size = request.sets.raps.size(ascending, request.sets.by_rule[name], draws)
        covered = rank_of(prediction.log_probs, ascending, labels) < size
    return Followed(follow(prediction, labels), size, covered, prediction.log_odds if name in request.log_odds else None)


def _empty_like(part: Any, rows: int) -> Any:
    """Uninitialised tensors for so many rows, in a `Followed` or `Trajectories` like `part`."""
    if isinstance(part, Tensor):
        return part.new_empty(part.shape[0], rows)
    return part and type(part)(**{field.name: _empty_like(getattr(part, field.name), rows) for field in fields(part)})


def _write(whole: Any, first: int, part: Any) -> None:
    """Copy `part` into the columns of `whole` from `first` on."""
    if isinstance(whole, Tensor):
        whole[:, first : first + part.shape[1]] = part
    elif whole is not None:
        for field in fields(whole):
            _write(getattr(whole, field.name), first, getattr(part, field.name))

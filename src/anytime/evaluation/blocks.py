"""Rows in blocks: what is read at a time, who works on it, and what comes of it.

A *block* fits the cache and is what the rules see. A *chunk* is some blocks, worked on by one thread; what is left of it
are trajectories, without the dimension of the classes. The threads are our own, each with one of torch's: on a busy
machine torch's own threads wait for each other after every small operation.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.checks import check_logits, check_probabilities, fingerprints
from anytime.combine import Prediction
from anytime.conformal import Raps, rank_of, sort_rows
from anytime.evaluation.source import Mapped
from anytime.metrics import Trajectories, follow

_CACHE_BYTES = 2 << 20
_CHUNK_BYTES = 32 << 20
_MOST_THREADS = 8  # each keeps some 100 MB of freed memory to itself

Combine = Callable[[Tensor], Prediction]
MapInOrder = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class Rows:
    """All rows: logits, perhaps mapped from a file, and labels if there are any."""

    logits: Tensor | Mapped
    labels: Tensor | None
    probabilities: bool

    def block(self, rows: slice | Tensor, first_row: int) -> Tensor:
        """Some rows, checked, in float32 or float64."""
        block = check_logits(self.logits[:, rows], first_row=first_row)
        return check_probabilities(block) if self.probabilities else block

    def fingerprints(self) -> Tensor:
        """One number per row, see `anytime.checks.fingerprints`; only a block of rows is in memory at a time."""
        exits, samples, classes = self.logits.shape
        block = block_size(exits, classes)
        parts = [fingerprints(self.block(slice(first, first + block), first)) for first in range(0, samples, block)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def labels_of(self, rows: slice | Tensor) -> Tensor | None:
        """The labels of some rows."""
        return None if self.labels is None else self.labels[rows]


@dataclass(frozen=True)
class Split:
    """Which rows calibrate the prediction sets: a fifth, by lot. With fewer than five rows, or no labels, none."""

    calibration: Tensor
    is_calibration: Tensor
    seed: int

    @staticmethod
    def draw(samples: int, sets: Raps | None, seed: int, *, labelled: bool) -> Split:
        """The split that `seed` gives."""
        chosen = samples // 5 if sets is not None and labelled else 0
        rows = torch.from_numpy(np.sort(np.random.default_rng([seed, 0]).permutation(samples)[:chosen]))
        mask = torch.zeros(samples, dtype=torch.bool)
        mask[rows] = True
        return Split(rows, mask, seed)


@dataclass(frozen=True)
class Followed:
    """Trajectories of some rows under one rule, and what else was asked for; every tensor is `(exits, rows)`.

    Attributes:
        seen: The trajectories.
        size, covered: How many classes each prediction set holds, and whether the label is among them.
        odds: The confidence as log-odds.
    """

    seen: Trajectories
    size: Tensor | None = None
    covered: Tensor | None = None
    odds: Tensor | None = None

    def room(self, rows: int) -> Followed:
        """Empty tensors of the same kinds for so many rows, on the CPU."""
        return Followed(self.seen.empty_like(rows), *(_room(values, rows) for values in (self.size, self.covered, self.odds)))

    def put(self, first: int, part: Followed) -> None:
        """Copy what became of some rows in, from row `first` on."""
        self.seen.write(first, part.seen)
        for mine, theirs in ((self.size, part.size), (self.covered, part.covered), (self.odds, part.odds)):
            if mine is not None and theirs is not None:
                mine[:, first : first + theirs.shape[1]] = theirs


def _room(values: Tensor | None, rows: int) -> Tensor | None:
    return None if values is None else torch.empty(values.shape[0], rows, dtype=values.dtype)


def block_size(exits: int, classes: int) -> int:
    """How many rows of float32 logits fit the cache."""
    return max(1, _CACHE_BYTES // (4 * exits * classes))


def chunks(samples: int, block: int, row_values: int) -> list[slice]:
    """Rows in chunks of whole blocks, each of moderate size."""
    rows = max(block, min(1 << 16, _CHUNK_BYTES // (4 * row_values)))
    rows -= rows % block
    return [slice(start, min(start + rows, samples)) for start in range(0, samples, rows)]


def uniforms(chunks: Sequence[slice], exits: int, seed: Sequence[int]) -> Iterator[Tensor]:
    """One draw an exit and row, `(exits, rows)` a chunk; the same rows get the same draws however they are cut."""
    generator = np.random.default_rng(seed)
    for chunk in chunks:
        yield torch.from_numpy(generator.random((chunk.stop - chunk.start, exits), dtype=np.float32)).T


@contextmanager
def workers(most: int) -> Iterator[MapInOrder]:
    """A `map` that runs in a few threads and yields in order, never far ahead of its consumer."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, min(available, most, _MOST_THREADS))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def map_in_order(work: Callable[..., Any], *arguments: Iterable[Any]) -> Iterator[Any]:
        waiting: deque[Future[Any]] = deque()
        for each in zip(*arguments, strict=True):
            waiting.append(pool.submit(work, *each))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    try:
        yield map_in_order
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def set_thresholds(
    rows: Rows, combiners: Mapping[str, Combine], sets: Raps, split: Split, block: int, map_in_order: MapInOrder
) -> dict[str, Tensor]:
    """The threshold of the prediction sets at each exit, `(exits,)`, for each rule."""
    count = split.calibration.numel()
    blocks = [slice(start, min(start + block, count)) for start in range(0, count, block)]

    @torch.inference_mode()
    def scores(chosen: slice, uniform: Tensor) -> dict[str, Tensor]:
        picked = split.calibration[chosen]
        logits, labels = rows.block(picked, int(picked[0])), rows.labels_of(picked)
        assert labels is not None
        found = {}
        for name, combine in combiners.items():
            log_probs = combine(logits).log_probs
            ascending = sort_rows(log_probs)
            rank = rank_of(log_probs, ascending, labels)
            found[name] = sets.label_score(ascending, rank, uniform.to(logits.device))
        return found

    parts = list(map_in_order(scores, blocks, uniforms(blocks, rows.logits.shape[0], [split.seed, 1])))
    return {name: sets.threshold(torch.cat([part[name] for part in parts], 1)) for name in combiners}


@torch.inference_mode()
def follow_chunk(
    rows: Rows,
    combiners: Mapping[str, Combine],
    block: int,
    sets: Raps | None,
    thresholds: Mapping[str, Tensor],
    chunk: slice,
    uniform: Tensor,
    odds: bool = False,
) -> dict[str, Followed]:
    """What becomes of the rows of a chunk under each rule, with log-odds where they are asked for."""
    # Results go to one place: were they kept in pieces, the memory between them could not be used again.
    whole: dict[str, Followed] = {}
    for start in range(chunk.start, chunk.stop, block):
        some = slice(start, min(start + block, chunk.stop))
        logits, labels = rows.block(some, start), rows.labels_of(some)
        first = start - chunk.start
        draws = uniform[:, first : first + logits.shape[1]].to(logits.device)
        for name, combine in combiners.items():
            prediction = combine(logits)
            size = covered = None
            if sets is not None and labels is not None and name in thresholds:
                ascending = sort_rows(prediction.log_probs)
                size = sets.size(ascending, thresholds[name], draws)
                covered = rank_of(prediction.log_probs, ascending, labels) < size
            part = Followed(follow(prediction, labels), size, covered, prediction.log_odds if odds else None)
            if name not in whole:
                whole[name] = part.room(chunk.stop - chunk.start)
            whole[name].put(first, part)
    return whole

"""From rules and requests to the arrays of compiled code and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.combine.encoded import Encoded, encode_known
from anytime.conformal import Raps
from anytime.conformal.raps import SLACK
from anytime.evaluation.blocks import BlockTask, Followed, LogitRows
from anytime.evaluation.compiled import row, rules
from anytime.evaluation.compiled.numbers import LOWEST32, LOWEST64
from anytime.evaluation.compiled.sets import NO_SETS, SCORES, SIZES, SetOptions
from anytime.evaluation.source import Mapped
from anytime.metrics import Trajectories

Array = np.ndarray[Any, Any]
_HERE = Path(__file__).parent
_WHOLE: dict[Any, Any] = {np.float32: np.int32, np.float64: np.int64}


def make_kernel(rows: LogitRows, request: BlockTask) -> CompiledKernel:
    """Compiled code for the rules of a request that it knows."""
    exits, _, classes = rows.logits.shape
    known = encode_known(request.combiners, request.log_odds, exits, classes, real_type(rows))
    return CompiledKernel(rows, list(known), list(known.values()))


def load(rows: LogitRows, request: BlockTask) -> None:
    """Compile, or load, the code for such rows."""
    exits, _, classes = rows.logits.shape
    one = LogitRows(
        torch.zeros(exits, 1, classes, dtype=torch.float64 if real_type(rows) is np.float64 else torch.float32), None
    )
    unset = replace(request, sets=None, log_odds=())
    prepare = partial(make_kernel(one, unset).follow, unset, 1, slice(0, 0), torch.zeros(exits, 0))
    try:
        prepare()
    except Exception:  # of any type: numba unpickles its cache, which may be damaged or on a full disk
        cache = _follow_rows()._cache
        try:
            cache.flush()
        except OSError:
            cache.disable()
        prepare()


def real_type(rows: LogitRows) -> Any:
    """The type to compute in."""
    return np.float64 if rows.logits[:, :0].dtype == torch.float64 else np.float32


@dataclass(frozen=True)
class CompiledKernel:
    """Compiled code for some rules on logits of one shape and type.

    Args:
        rows: The logits and labels.
        names: Of the rules.
        encoded: The rules.
    """

    rows: LogitRows
    names: Sequence[Any]
    encoded: Sequence[Encoded]

    def calibrate(
        self, request: BlockTask, raps: Raps | None, block: int, picked: Tensor, uniform: Tensor
    ) -> tuple[dict[Any, Tensor], dict[Any, Tensor]]:
        """The scores of some rows' labels, and their log-odds where requested, each `(exits, rows)` by rule."""
        options = _options(raps or Raps(), NO_SETS if raps is None or self.rows.labels is None else SCORES)
        real = self._run(picked, uniform, options, {}, block).real
        scores = (
            {} if options.task == NO_SETS else {name: torch.from_numpy(real[row.SCORE, r]) for r, name in enumerate(self.names)}
        )
        margins = {
            name: torch.from_numpy(real[row.LOG_ODDS, r]) for r, name in enumerate(self.names) if name in request.log_odds
        }
        return scores, {name: each.double() for name, each in margins.items()}

    def follow(self, request: BlockTask, block: int, chunk: slice, uniform: Tensor) -> dict[Any, Followed]:
        """The rows of a chunk under each rule."""
        sets, log_odds = request.sets, request.log_odds
        labelled = self.rows.labels is not None
        thresholds: Mapping[Any, Tensor] = {} if sets is None or not labelled else sets.by_rule
        options = _options(Raps() if sets is None else sets.raps, SIZES if thresholds else NO_SETS)
        found = self._run(torch.arange(chunk.start, chunk.stop), uniform, options, thresholds, block)
        whole, marks, real = ([[torch.from_numpy(part) for part in each] for each in array] for array in found)
        followed = {}
        for r, name in enumerate(self.names):
            has_sets = name in thresholds
            seen = Trajectories(
                answer=whole[row.ANSWER][r],
                confidence=real[row.CONFIDENCE][r],
                final=real[row.FINAL][r],
                entropy=real[row.ENTROPY][r],
                square=real[row.SQUARE][r],
                support=whole[row.SUPPORT][r],
                fell_back=marks[row.FELL_BACK][r],
                label=real[row.LABEL][r] if labelled else None,
                correct=marks[row.CORRECT][r] if labelled else None,
            )
            size, covered = (whole[row.SIZE][r], marks[row.COVERED][r]) if has_sets else (None, None)
            followed[name] = Followed(seen, size, covered, real[row.LOG_ODDS][r] if name in log_odds else None)
        return followed

    @property
    def _real(self) -> Any:
        return real_type(self.rows)

    def _run(
        self, picked: Tensor, draws: Tensor, options: SetOptions, thresholds: Mapping[Any, Tensor], block: int
    ) -> row.Found:
        exits, _, classes = self.rows.logits.shape
        real, count = self._real, len(picked)
        size = (len(self.names), exits, count)
        found = row.Found(np.empty((3, *size), np.int64), np.empty((3, *size), np.bool_), np.empty((7, *size), real))
        scratch = _scratch(len(self.names), exits, classes, real)
        known = self.rows.labels_of(picked)
        labels = np.zeros(0, np.int64) if known is None else known.numpy()
        uniform = np.ascontiguousarray(draws.T.numpy())
        arrays = self._rules(thresholds)
        lowest = LOWEST32 if real is np.float32 else LOWEST64
        for logits, samples, first in self._blocks(picked, block):
            task = row.Task(logits, uniform, lowest, arrays, options, found, scratch)
            bad = _follow_rows()(task, logits.view(_WHOLE[real]), _limits(real), samples, first, labels)
            if bad >= 0:
                self.rows.block(slice(bad, bad + 1), bad)  # raises the error that the plain path raises
        return found

    def _blocks(self, picked: Tensor, block: int) -> Iterator[tuple[Array, Array, int]]:
        """Logits, the rows to take from them, and the place of the first of these among the results."""
        whole = _as_they_are(self.rows)
        if whole is not None:
            yield whole, picked.numpy(), 0
            return
        for first in range(0, len(picked), block):
            part = picked[first : first + block]
            start, stop = int(part[0]), int(part[-1]) + 1
            some = slice(start, stop) if stop - start == len(part) else part  # a slice is read without gathering
            logits = self.rows.block(some, start).contiguous().numpy()
            logits.flags.writeable = False
            yield logits, np.arange(len(part)), first

    def _rules(self, thresholds: Mapping[Any, Tensor]) -> row.Rules:
        exits = self.rows.logits.shape[0]
        unknown = torch.full((exits,), math.nan)
        return row.Rules(
            np.array([(each.kind, each.activation) for each in self.encoded]),
            np.array([each.evidence for each in self.encoded], self._real),
            np.array([each.weights for each in self.encoded], self._real),
            np.array([each.fractions for each in self.encoded], np.float64),
            np.array([thresholds.get(name, unknown).double().numpy() for name in self.names]),
        )


@cache
def _follow_rows() -> Any:
    parts = sorted(_HERE.glob("*.py"))
    return rules.compile_rows(sha256(b"".join(part.read_bytes() for part in parts)).hexdigest())


def _as_they_are(rows: LogitRows) -> Array | None:
    """The logits as a read-only array that compiled code can read in place, or None if blocks must be converted."""
    if rows.probabilities:
        return None
    if isinstance(rows.logits, Mapped):
        array = rows.logits.array
        if rows.logits.bfloat16:
            return None
    elif isinstance(rows.logits, Tensor) and rows.logits.dtype in (torch.float32, torch.float64):
        array = rows.logits.numpy()
    else:
        return None
    usable = array.dtype in (np.float32, np.float64) and array.dtype.isnative
    if not usable or not array.flags.c_contiguous or not array.flags.aligned:
        return None
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view


def _options(raps: Raps, task: int) -> SetOptions:
    return SetOptions(
        task,
        float(raps.lam_reg),
        int(raps.k_reg),
        bool(raps.randomised),
        raps.variant == "original",
        bool(raps.empty),
        SLACK,
    )


def _scratch(rules: int, exits: int, classes: int, real: Any) -> row.Scratch:
    return row.Scratch(
        np.empty((exits + 1, 8)),
        np.empty((exits + 1, 3), np.int64),
        np.empty((exits + 1, classes), real),
        np.empty((3, classes), real),
        np.empty((2, classes), np.int32),
        np.empty((exits, 3)),
        np.zeros((rules, exits)),
    )


def _limits(real: Any) -> tuple[Any, ...]:
    """The bits of half the largest number, of the largest number, and of all but the sign."""
    whole = _WHOLE[real]
    most = np.array([np.finfo(real).max / 2, np.finfo(real).max], real).view(whole)
    return most[0], most[1], whole(np.iinfo(whole).max)

"""From rules and requests to the arrays of compiled code and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.combine import Rule
from anytime.combine.activations import ClippedReLU, Exponential, Heaviside, ReLU, Softplus, ThresholdReLU
from anytime.combine.rules import Caching, Latest, Mixture, Product, log_fractions, weights_of
from anytime.conformal import Raps
from anytime.evaluation.blocks import Followed, LogitRows, SetThresholds
from anytime.evaluation.compiled import row, rules
from anytime.evaluation.compiled.numbers import LOWEST32, LOWEST64
from anytime.evaluation.compiled.sets import NO_SETS, SCORES, SIZES, SetOptions
from anytime.evaluation.source import Mapped
from anytime.metrics import Trajectories

Array = np.ndarray[Any, Any]
_WHOLE = {np.float32: np.int32, np.float64: np.int64}
_ACTIVATIONS = (ReLU, ClippedReLU, Heaviside, ThresholdReLU, Softplus, Exponential)  # not their subclasses


@dataclass(frozen=True)
class Encoded:
    """A rule in numbers, see `anytime.evaluation.compiled.row.Rules`."""

    kind: int
    activation: int
    evidence: tuple[float, float, float, float]
    weights: Sequence[float]
    fractions: Sequence[tuple[float, float]]


def encode(rule: Any, exits: int, classes: int, real: Any) -> Encoded | None:
    """The rule in numbers, or None if compiled code does not know it."""
    nothing = [(-math.inf, 0.0)] * exits
    match rule:
        case Latest() | Caching() if type(rule) in (Latest, Caching):
            kinds = {"earlier": rules.CACHING_EARLIER, "later": rules.CACHING_LATER}
            kind = kinds[rule.ties] if isinstance(rule, Caching) else rules.LATEST
            return Encoded(kind, rules.LOGARITHM, (0.0, 0.0, 0.0, 0.0), [0.0] * exits, nothing)
        case Product() | Mixture() if type(rule) in (Product, Mixture):
            known = _evidence(rule.activation, real)
            if known is None:
                return None
            weights = weights_of(rule.weights, exits)
            shift = 1.0 / classes if isinstance(rule.shift, str) else float(rule.shift)
            activation, *numbers = known
            gate, floor, cap = numbers
            if isinstance(rule, Product):
                return Encoded(rules.PRODUCT, activation, (shift, gate, floor, cap), weights, nothing)
            fractions = [log_fractions(weights, exit) for exit in range(exits)]
            return Encoded(rules.MIXTURE, activation, (shift, gate, floor, cap), [0.0] * exits, fractions)
    return None


def _evidence(activation: Any, real: Any) -> tuple[int, float, float, float] | None:
    """Kind, gate, floor and cap of an activation's evidence."""
    if type(activation) not in _ACTIVATIONS:
        return None
    least = float(np.finfo(real).min) / 1e9
    match activation:
        case ReLU():
            return rules.LOGARITHM, 0.0, 0.0, math.inf
        case ClippedReLU(limit):
            return rules.LOGARITHM, 0.0, 0.0, math.log(limit)
        case Heaviside(threshold):
            return rules.LOGARITHM, threshold, 1.0, 0.0
        case ThresholdReLU(threshold, "clamp") if threshold > 0:
            return rules.LOGARITHM, -math.inf, threshold, math.inf
        case ThresholdReLU(threshold):
            return rules.LOGARITHM, threshold, 0.0, math.inf
        case Softplus():
            return rules.SOFTPLUS, -math.inf, least, math.inf
        case Exponential():
            return rules.EXPONENTIAL, -math.inf, least, math.inf
    return None


@dataclass(frozen=True)
class Kernel:
    """Compiled code for some rules on logits of one shape and type.

    Args:
        rows: The logits and labels.
        names: Of the rules.
        encoded: The rules.
    """

    rows: LogitRows
    names: Sequence[Any]
    encoded: Sequence[Encoded]

    def scores(self, picked: Tensor, draws: Tensor, raps: Raps, block: int) -> dict[Any, Tensor]:
        """The scores of the labels of some rows, `(exits, rows)` by rule, and their log-odds."""
        found = self._run(picked, draws, _options(raps, SCORES, self._real), {}, block)
        return {name: _tensor(found.real[row.SCORE, r]) for r, name in enumerate(self.names)}

    def follow(
        self, chunk: slice, draws: Tensor, sets: SetThresholds | None, log_odds: Sequence[Any], block: int
    ) -> dict[Any, Followed]:
        """The rows of a chunk under each rule."""
        labelled = self.rows.labels is not None
        thresholds: Mapping[Any, Tensor] = {} if sets is None or not labelled else sets.by_rule
        options = _options(Raps() if sets is None else sets.raps, SIZES if thresholds else NO_SETS, self._real)
        found = self._run(torch.arange(chunk.start, chunk.stop), draws, options, thresholds, block)
        whole, marks, real = ([[_tensor(part) for part in each] for each in array] for array in found)
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
        """The type to compute in."""
        return np.float64 if self.rows.logits[:, :0].dtype == torch.float64 else np.float32

    def _run(
        self, picked: Tensor, draws: Tensor, options: SetOptions, thresholds: Mapping[Any, Tensor], block: int
    ) -> row.Found:
        exits, _, classes = self.rows.logits.shape
        real, count = self._real, len(picked)
        size = (len(self.names), exits, count)
        found = row.Found(np.empty((3, *size), np.int64), np.empty((3, *size), np.bool_), np.empty((7, *size), real))
        scratch = _scratch(exits, classes, real)
        known = self.rows.labels_of(picked)
        labels = np.zeros(0, np.int64) if known is None else known.numpy()
        uniform = np.ascontiguousarray(draws.T.numpy())
        arrays = self._rules(thresholds)
        lowest = LOWEST32 if real is np.float32 else LOWEST64
        for logits, samples, first in self._blocks(picked, block):
            bits = logits.view(_WHOLE[real])
            bad = rules.follow_rows(
                logits, bits, samples, first, labels, uniform, lowest, _limits(real), arrays, options, found, scratch
            )
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
            logits = self.rows.block(part, int(part[0])).contiguous().numpy()
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


def _as_they_are(rows: LogitRows) -> Array | None:
    """The logits as a read-only array that compiled code can read in place, or None if blocks must be converted."""
    if rows.probabilities:
        return None
    if isinstance(rows.logits, Mapped):
        array = rows.logits.array
        if rows.logits.bfloat16:
            return None
    else:
        if rows.logits.dtype not in (torch.float32, torch.float64):
            return None
        array = rows.logits.numpy()
    usable = array.dtype in (np.float32, np.float64) and array.dtype.isnative
    if not usable or not array.flags.c_contiguous or not array.flags.aligned:
        return None
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view


def _options(raps: Raps, task: int, real: Any) -> SetOptions:
    return SetOptions(
        task,
        float(raps.lam_reg),
        int(raps.k_reg),
        bool(raps.randomised),
        raps.variant == "original",
        bool(raps.empty),
        8 * float(np.finfo(real).eps),
    )


def _scratch(exits: int, classes: int, real: Any) -> row.Scratch:
    return row.Scratch(
        np.empty((exits + 1, 8)),
        np.empty((exits + 1, 3), np.int64),
        np.empty((exits + 1, classes), real),
        np.empty((exits, classes), real),
        np.empty((3, classes), real),
        np.empty((2, classes), np.int32),
        np.empty((exits, 3)),
    )


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(array)


def _limits(real: Any) -> tuple[Any, ...]:
    """The bits of half the largest number, of the largest number, and of all but the sign."""
    whole = _WHOLE[real]
    most = np.array([np.finfo(real).max / 2, np.finfo(real).max], real).view(whole)
    return most[0], most[1], whole(np.iinfo(whole).max)

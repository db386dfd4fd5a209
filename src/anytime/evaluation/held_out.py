"""Which calibration rows do what: some fit, the others calibrate what was fitted, and none of them is a test row.

Data sets hold the same image twice now and then, so a few rows that test and calibration share are left out of the
calibration; from one in a hundred on, the two are no longer held apart and are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anytime.checks import shared_rows
from anytime.errors import ShapeError
from anytime.evaluation.blocks import Rows

FITTING_ROWS = 5000
FITTING_NUMBERS = 1 << 26
"""At most so many logits are fitted on, a quarter of a gigabyte: these are held in memory, all others are read in blocks."""


@dataclass(frozen=True)
class HeldOut:
    """Calibration rows by what they are for.

    Attributes:
        rows: All of them, those that are left out too.
        fitting: The places of the rows that temperatures and powers are fitted on.
        calibrating: The places of the others, for whatever must not have seen its rows before.
        dropped: How many are left out, as they are among the test rows.
    """

    rows: Rows
    fitting: Tensor
    calibrating: Tensor
    dropped: int


def hold_out(calibration: Rows, test: Rows, *, seed: int) -> HeldOut:
    """Share the calibration rows out by lot: half of them fit, at most `FITTING_ROWS`, and the others calibrate."""
    (exits, _, classes), (test_exits, _, test_classes) = calibration.logits.shape, test.logits.shape
    if (exits, classes) != (test_exits, test_classes):
        raise ShapeError(
            f"the calibration rows have {exits} exits and {classes} classes",
            expected=f"{test_exits} exits and {test_classes} classes, as the test rows have",
            fix="give logits of the same model for both",
        )
    shared = shared_rows(calibration.fingerprints(), test.fingerprints(), names=("calibration rows", "the test rows"))
    kept = (~shared).nonzero()[:, 0]
    if len(kept) < 2:
        raise ShapeError(f"{len(kept)} calibration rows", expected="at least two, better a thousand", fix="hold out more rows")
    order = kept[torch.from_numpy(np.random.default_rng([seed, 4]).permutation(len(kept)))]
    fit = max(1, min(len(kept) // 2, FITTING_ROWS, FITTING_NUMBERS // (exits * classes)))
    return HeldOut(calibration, order[:fit].sort().values, order[fit:].sort().values, int(shared.sum()))

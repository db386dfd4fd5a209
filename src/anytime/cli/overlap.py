"""Calibration rows and test rows are kept apart, for every command that takes both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from anytime.errors import OverlapError
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from torch import Tensor


def refuse_same_file(calibration: Path, calibration_labels: Tensor | None, test: Path, test_labels: Tensor | None) -> None:
    """Refuse one file for both, also under two names, and files whose `indices` name the same rows of a data set.

    Two data sets count from 0 alike, so equal indices are the same rows only where all their labels agree.
    """
    if calibration.samefile(test):
        raise OverlapError(
            f"{calibration} came for calibration and test", expected="different files", fix="split the rows by lot"
        )
    known = _labels_by_index(calibration, calibration_labels)
    here = _labels_by_index(test, test_labels)
    again = known.keys() & here.keys()
    if again and all(known[index] == here[index] for index in again):
        raise OverlapError(
            f"{len(again)} of the 'indices' in {test} are in {calibration} too, with the same labels",
            expected="different rows for each",
            fix="split the held-out rows by lot",
        )


def leave_out_shared(calibration: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """The calibration rows without the few that are test rows too, which is said; from one in a hundred on, refused."""
    from anytime.checks import fingerprints, shared_rows

    if calibration[0].shape[::2] != test[0].shape[::2]:
        return calibration  # of another model, which is refused where the sets are used
    prints = fingerprints(calibration[0]), fingerprints(test[0])
    shared = shared_rows(*prints, names=("calibration rows", "the test rows"))
    count = int(shared.sum())
    if count:
        print(f"anytime: {count} of the rows of {name} are among those to measure on and left out", file=sys.stderr)
    return calibration[0][:, ~shared], calibration[1][~shared]


def _labels_by_index(path: Path, labels: Tensor | None) -> dict[int, int]:
    from anytime.arrays import open_npz

    if labels is None or path.suffix.lower() != ".npz":
        return {}
    found = open_npz(path, ("indices",)).get("indices")
    if found is None or found.shape != labels.shape or found.dtype.kind not in "iu":
        return {}
    return dict(zip(found[...].tolist(), labels.tolist(), strict=True))

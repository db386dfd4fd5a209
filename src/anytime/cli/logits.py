"""Files of logits on the command line: their labels, and calibration rows that are kept apart from test rows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from anytime.errors import LabelError, OverlapError
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from anytime.evaluation import LogitsFile


def logits_files(paths: Sequence[Path]) -> list[Path]:
    """The files that paths, folders and globs name, with a message for the folder of a run."""
    from anytime.evaluation.files import RUN_LOGITS, paths_of
    from anytime.outputs import exists

    found = paths_of(list(paths)) or []
    if len(paths) == len(found) == 1 and exists(paths[0], Path.is_dir) and found[0].name in RUN_LOGITS:
        whole = "all test rows" if found[0].name == RUN_LOGITS[0] else "a random sample of the test rows"
        print(f"anytime: evaluating {found[0]}, {whole}", file=sys.stderr)
    return found


def labels_of(source: LogitsFile, *, option: str | None = "--labels") -> Tensor:
    """The labels, or an error with the option that passes them, if there is one."""
    if source.labels is None:
        save = "save both: numpy.savez('logits.npz', logits=logits, labels=labels)"
        raise LabelError(
            f"{source.path} has no labels",
            expected="logits and labels",
            fix=f"pass {option} FILE, or {save}" if option else save,
        )
    return source.labels


def refuse_same_file(calibration: Path, calibration_labels: Tensor | None, test: Path, test_labels: Tensor | None) -> None:
    """Raise if both are one file, also under two names, or if their `indices` name the same rows of a data set.

    Every data set counts from 0, so equal indices are the same rows only if all their labels agree.
    """
    fix = "randomly split the held-out rows into two files"
    if calibration.samefile(test):
        raise OverlapError(f"{calibration} for both calibration and test", expected="two files", fix=fix)
    known = _labels_by_index(calibration, calibration_labels)
    here = _labels_by_index(test, test_labels)
    shared = known.keys() & here.keys()
    if shared and all(known[index] == here[index] for index in shared):
        raise OverlapError(
            f"{len(shared)} of the 'indices' in {test} are also in {calibration}, with the same labels",
            expected="different rows in the two files",
            fix=fix,
        )


def leave_out_shared(calibration: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """The calibration rows without those that are also test rows, with a message; 1 % or more shared rows are an error."""
    from anytime.checks import fingerprints, shared_rows

    if calibration[0].shape[::2] != test[0].shape[::2]:
        return calibration  # of another model, which is refused where the sets are used
    prints = fingerprints(calibration[0]), fingerprints(test[0])
    shared = shared_rows(*prints, names=("calibration rows", "the test rows"))
    if count := int(shared.sum()):
        print(f"anytime: left out {count} rows of {name} that are also among the test rows", file=sys.stderr)
    return calibration[0][:, ~shared], calibration[1][~shared]


def _labels_by_index(path: Path, labels: Tensor | None) -> dict[int, int]:
    from anytime.arrays import open_npz

    if labels is None or path.suffix.lower() != ".npz":
        return {}
    found = open_npz(path, ("indices",)).get("indices")
    if found is None or found.shape != labels.shape or found.dtype.kind not in "iu":
        return {}
    return dict(zip(found[...].tolist(), labels.tolist(), strict=True))

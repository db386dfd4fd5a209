"""Many files of logits as one set of rows: which files, how many rows each has, and the parts they are cut into.

Rows are numbered over all files, in their order. A part is a file or, of a large file, a range of its rows; how files are cut
depends on their shapes alone, so the sums over parts do not depend on who computes them.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from anytime.artifacts import bundle_names, typed_errors
from anytime.checks import check_labels, check_logits, check_scale
from anytime.errors import FormatError, IntegrityError, LabelError, MissingFileError, OptionError, OverlapError, ShapeError
from anytime.evaluation.arrow import ARROW, arrow_shape, read_arrow
from anytime.evaluation.blocks import LogitRows
from anytime.evaluation.source import READERS, Mapped, open_arrays, shape_of
from anytime.outputs import exists
from anytime.reading import stat_file

RUN_LOGITS = ("test.npz", "test-sample.npz")
"""The test logits in the folder of a run, and a sample of them."""
_SEPARATE = ".labels.npy"
_SUFFIXES = (*READERS, *ARROW)
_MAPPED_NUMBERS, _READ_NUMBERS = 1 << 28, 1 << 26
"""The most logits of a part: of files that are mapped, and of those that are read into memory."""
_SCALE_BYTES = 64 << 20

Stamp = tuple[int, ...]


@dataclass(frozen=True)
class FilePart:
    """Rows of a file.

    Attributes:
        file: Its path.
        labels: The file with the labels, if they are in another one.
        start: The first row of the part in the file.
        stop: The row after the last one.
        first: How many rows of all files are before the part.
        stamps: Size and times of both files.
        probabilities: Whether these are probabilities.
        name: The path of the file from the folder that has all of them, if there are several.
    """

    file: Path
    labels: Path | None
    start: int
    stop: int
    first: int
    stamps: tuple[Stamp, ...]
    probabilities: bool
    name: str | None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    def open(self) -> LogitRows:
        """The rows, checked; refused if the file has changed."""
        self.check()
        logits, found = _read(self)
        check_logits(logits[:, :0])
        place = f" of {self.file}"
        labels = (
            None
            if found is None
            else check_labels(
                found, batch=self.rows, classes=logits.shape[2], place=lambda row: f"row {self.start + row}{place}"
            )
        )
        rows = LogitRows(logits, labels, self.probabilities, start=self.start, file=self.name)
        if not self.probabilities and self.start == 0:
            check_scale(rows.block(scale_rows(logits.shape), 0))
        return rows

    def check(self) -> None:
        """Raise if a file has changed since it was listed."""
        for path, stamp in zip(_both(self.file, self.labels), self.stamps, strict=True):
            check_stamp(path, stamp)

    def identity(self) -> list[Any]:
        """What tells this part from another, or from the same one after a change of its file."""
        place = [str(self.file.absolute()), str(self.labels), self.name, self.start, self.stop, self.first]
        return [*place, self.probabilities, self.stamps]


def scale_rows(shape: Sequence[int]) -> slice:
    """The rows by which probabilities are told from logits: at most 2,048, and 64 MiB."""
    exits, samples, classes = shape
    return slice(0, min(2048, max(1, _SCALE_BYTES // (4 * exits * classes)), samples))


def paths_of(given: Any) -> list[Path] | None:
    """The files that a caller names by paths, folders or globs, or a list of these; None for anything else.

    A folder stands for its files with logits, by name; the folder of a run for its test logits.
    """
    if isinstance(given, str | Path):
        return _expand(given)
    if isinstance(given, list | tuple) and given and all(isinstance(each, str | Path) for each in given):
        return [*chain.from_iterable(map(_expand, given))]
    return None


def cut(files: Sequence[Path], labels: Sequence[Path] | None, *, probabilities: bool) -> list[FilePart]:
    """The parts of some files; files without rows have none.

    Args:
        files: The files.
        labels: Files with their labels, if these are elsewhere.
        probabilities: Whether they hold probabilities.
    """
    _check_different(files)
    parts: list[FilePart] = []
    known: tuple[Path, tuple[int, int], bool] | None = None
    first = 0
    for file, name, other in zip(files, _names_of(files), _labels_of(files, labels), strict=True):
        stamps = tuple(stamp_of(path) for path in _both(file, other))
        shape, labelled = arrow_shape(file) if file.suffix.lower() in ARROW else shape_of(file, other)
        if len(shape) != 3 or (len(files) == 1 and not shape[1]):
            _refuse_shape(file, shape)
        exits, samples, classes = shape
        if not samples:
            continue
        if min(exits, classes) < 2:
            _refuse_shape(file, shape)
        known = known or (file, (exits, classes), labelled)
        _check_same(known, file, (exits, classes), labelled)
        most = _READ_NUMBERS if file.suffix.lower() in ARROW else _MAPPED_NUMBERS
        count = -(-samples * exits * classes // most)
        for start, stop in pairwise(samples * part // count for part in range(count + 1)):
            parts.append(FilePart(file, other, start, stop, first + start, stamps, probabilities, name))
        first += samples
    if not parts:
        raise ShapeError(
            f"none of the {len(files)} files has a row", expected="at least one row", fix="pass files that hold logits"
        )
    return parts


def check_stamp(path: Path, stamp: Stamp) -> None:
    """Raise if a file has changed since `stamp_of` looked at it."""
    if stamp_of(path) != stamp:
        raise IntegrityError(
            f"{path} has changed while it was evaluated",
            expected="files that stay as they are until the evaluation ends",
            fix="wait until the files are written, and evaluate again",
            path=path,
        )


def stamp_of(path: Path) -> Stamp:
    """What changes when a file is written: its size, and the times of its content and of its entry."""
    found = stat_file(path, expected="a file with logits or labels")
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def forget() -> None:
    """Close the files that are kept open."""
    _open.cache_clear()


def _read(part: FilePart) -> tuple[Mapped, Any]:
    whole = slice(part.start, part.stop)
    if part.file.suffix.lower() in ARROW:
        logits, labels = read_arrow(part.file, whole)
        return Mapped(logits), labels
    mapped, found = _open(part.file, part.labels, part.stamps)
    if found is not None and found.ndim == 1 and found.shape[0] != mapped.shape[1]:
        raise LabelError(
            f"{part.labels or part.file} has {found.shape[0]} labels for the {mapped.shape[1]} rows of {part.file}",
            expected="one label per row",
            fix="save the labels of these logits; if their rows come first, save logits.swapaxes(0, 1): (exits, rows, classes)",
        )
    if part.rows < mapped.shape[1]:
        return Mapped(mapped.array[:, whole], mapped.bfloat16), None if found is None else found[whole]
    return mapped, None if found is None else found[...]


@lru_cache(maxsize=2)
def _open(file: Path, labels: Path | None, stamps: tuple[Stamp, ...]) -> tuple[Mapped, Mapped | None]:
    """Kept, since parts that follow each other share a file, and a compressed one is unpacked when it is opened."""
    return open_arrays(file, labels)


def _expand(given: str | Path) -> list[Path]:
    path = Path(given)
    if exists(path, Path.is_dir):
        run = next((path / name for name in RUN_LOGITS if exists(path / name, Path.is_file)), None)
        return [run] if run is not None else _in_folder(path)
    if exists(path) or not glob.has_magic(str(given)):
        return [path]
    names = glob.glob(str(given), recursive=True)  # noqa: PTH207 - of absolute patterns too
    found = sorted(name for name in names if not name.endswith(_SEPARATE))
    if not found:
        raise MissingFileError(
            f"no file matches {given}",
            expected=f"files with logits ({', '.join(_SUFFIXES)})",
            fix="check the pattern",
            path=path,
        )
    return [Path(name) for name in found]


def _in_folder(folder: Path) -> list[Path]:
    with typed_errors(folder, verb="read"):
        names = {path.name for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES}
    with suppress(FormatError):  # a manifest.json of another program
        # Weights of a saved model; the logits of a demonstration are in its manifest too, and count.
        names -= {name for name in bundle_names(folder) if name.endswith(".safetensors")}
    found = [folder / name for name in sorted(names) if not name.startswith(".") and not name.endswith(_SEPARATE)]
    if not found:
        raise MissingFileError(
            f"the folder {folder} has no logits",
            expected=f"{' or '.join(RUN_LOGITS)}, as a training run and a published run have them, or files with logits "
            f"({', '.join(_SUFFIXES)})",
            fix="make logits: anytime.collect_logits(model, loader, out='logits.npz'), and pass their file",
            path=folder,
        )
    return found


def _names_of(files: Sequence[Path]) -> list[str | None]:
    """What tells the files apart; nothing for one file."""
    if len(files) == 1:
        return [None]
    folder = os.path.commonpath([file.parent.absolute() for file in files])
    return [str(file.absolute().relative_to(folder)) for file in files]


def _labels_of(files: Sequence[Path], labels: Sequence[Path] | None) -> Iterable[Path | None]:
    """The file with the labels of each file: as given, or `x.labels.npy` beside `x.npy`, as `collect_logits` writes it."""
    if labels is None:
        return [_beside(file) for file in files]
    if len(labels) != len(files):
        raise LabelError(
            f"{len(labels)} files with labels for {len(files)} files with logits",
            expected="one for each, in the same order",
            fix="name them alike, and pass the folder or a glob of the labels",
        )
    if arrow := next((file for file in files if file.suffix.lower() in ARROW), None):
        raise OptionError(
            f"labels in other files for {arrow}",
            expected="a column 'labels' beside the logits",
            fix="add the labels as a column",
        )
    return labels


def _beside(file: Path) -> Path | None:
    beside = file.with_suffix(_SEPARATE)
    return beside if file.suffix.lower() == ".npy" and exists(beside, Path.is_file) else None


def _both(file: Path, labels: Path | None) -> list[Path]:
    return [file] if labels is None else [file, labels]


def _check_different(files: Sequence[Path]) -> None:
    known: dict[tuple[int, int], Path] = {}
    for file in files:
        entry = stat_file(file, expected="a file with logits")
        before = known.setdefault((entry.st_dev, entry.st_ino), file)
        if before is not file:
            raise OverlapError(
                f"{file} is listed twice" if before == file else f"{file} and {before} are one file",
                expected="each file once, so that each row counts once",
                fix="remove one of them",
            )


def _check_same(known: tuple[Path, tuple[int, int], bool], file: Path, sizes: tuple[int, int], labelled: bool) -> None:
    before, expected, has_labels = known
    if sizes != expected:
        raise ShapeError(
            f"{file} has {sizes[0]} exits and {sizes[1]} classes, {before} has {expected[0]} and {expected[1]}",
            expected="logits of one model in all files",
            fix="evaluate the files of each model on their own",
        )
    if labelled != has_labels:
        without, with_labels = (before, file) if labelled else (file, before)
        raise LabelError(
            f"{without} has no labels, {with_labels} has some",
            expected="labels in all files or in none",
            fix="add the labels, or evaluate these files on their own",
        )


def _refuse_shape(file: Path, shape: Sequence[int]) -> None:
    why, fix = f"rank {len(shape)}", "stack the exits: numpy.stack(list_of_exits)"
    if len(shape) == 3 and not shape[1]:
        why, fix = "no samples", "pass a file that holds logits"
    elif len(shape) == 3:
        why = "one exit" if shape[0] < 2 else "one class"
        fix = "reorder the dimensions with numpy.transpose; a model with a single exit has nothing to compare"
    elif len(shape) > 3:
        fix = "name the dimension of the classes of pixels or tokens: --class-dim 2 or class_dim=2, one file at a time"
    elif len(shape) < 2:
        fix = "pass the file with logits, and labels with --labels or labels=; in a folder, every file is read as logits"
    raise ShapeError(
        f"logits of shape {tuple(shape)} in {file}: {why}",
        expected="shape (exits, samples, classes) with at least two exits, one sample and two classes",
        fix=fix,
    )

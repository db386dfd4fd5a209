"""Logits from Parquet and Arrow files, read through pyarrow's datasets (extra `parquet`).

Either a column `logits` holds a list of lists, or a tensor, of shape (exits, classes) per row, or each exit has a column of
lists, `exit_1`, `exit_2`, …. Labels are a column `labels` or `label`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anytime.columns import as_array, import_arrow
from anytime.errors import FormatError, ShapeError
from anytime.reading import open_file, parsing

ARROW = {".parquet": "parquet", ".arrow": "ipc", ".feather": "feather"}
"""pyarrow's format of each suffix."""
_WHOLE = "a complete Parquet or Arrow file"
_BATCH = 1 << 13


def arrow_shape(file: Path) -> tuple[tuple[int, ...], bool]:
    """`(exits, rows, classes)` of a file, and whether it has labels."""
    dataset = _open(file)
    columns, labels = _columns(file, dataset.schema.names)
    with parsing(file, expected=_WHOLE):
        rows = dataset.count_rows()
        one = dataset.head(1, columns=columns, use_threads=False)
    exits, _, classes = _stacked(file, [_array(one[name], file) for name in columns]).shape if rows else (0, 0, 0)
    return (exits, rows, classes), labels is not None


def read_arrow(file: Path, rows: slice) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Some rows of a file: logits `(exits, rows, classes)`, and labels if there are any."""
    dataset = _open(file)
    columns, labels = _columns(file, dataset.schema.names)
    found: NDArray[Any] | None = None
    known: list[NDArray[Any]] = []
    done = 0
    for batch in _batches(file, dataset, [*columns, *([] if labels is None else [labels])], rows):
        part = _stacked(file, [_array(batch.column(name), file) for name in columns])
        if found is None:
            found = np.empty((part.shape[0], rows.stop - rows.start, part.shape[2]), part.dtype)
        if part.shape[::2] != found.shape[::2]:
            raise ShapeError(
                f"row {rows.start + done} of {file} has {part.shape[0]} exits and {part.shape[2]} classes, those before have "
                f"{found.shape[0]} and {found.shape[2]}",
                expected="the same in every row",
                fix="write the logits of each model to files of its own",
            )
        found[:, done : done + part.shape[1]] = part
        done += part.shape[1]
        if labels is not None:
            known.append(_array(batch.column(labels), file))
    if found is None or done != rows.stop - rows.start:
        raise FormatError(f"{file} ends after row {rows.start + done}", expected=_WHOLE, fix="write it again", path=file)
    return found, np.concatenate(known) if known else None


def _open(file: Path) -> Any:
    dataset = import_arrow("dataset")
    with open_file(file, expected=_WHOLE), parsing(file, expected=_WHOLE):
        return dataset.dataset(str(file), format=ARROW[file.suffix.lower()])


def _columns(file: Path, names: Sequence[str]) -> tuple[list[str], str | None]:
    """The columns with the logits, and that with the labels."""
    labels = next((name for name in ("labels", "label") if name in names), None)
    exits = sorted((name for name in names if re.fullmatch(r"exit_[1-9]\d{0,4}", name)), key=lambda name: int(name[5:]))
    columns = ["logits"] if "logits" in names else exits
    if not columns or (columns == exits and exits != [f"exit_{exit + 1}" for exit in range(len(exits))]):
        raise FormatError(
            f"{file} has the columns {', '.join(map(repr, names)) or 'nothing'}",
            expected="a column 'logits' of lists of lists, (exits, classes) per row, or columns exit_1, exit_2, … of lists",
            fix="rename the columns",
            path=file,
        )
    return columns, labels


def _batches(file: Path, dataset: Any, columns: list[str], rows: slice) -> Iterator[Any]:
    """The batches of some rows, in order; of Parquet files only the row groups that hold them are read."""
    first = 0
    for part, count in _pieces(file, dataset):
        if first < rows.stop and rows.start < first + count:
            yield from _rows_of(file, part, columns, slice(max(rows.start - first, 0), rows.stop - first))
        first += count


def _pieces(file: Path, dataset: Any) -> Iterator[tuple[Any, int]]:
    """The row groups of a Parquet file, or the whole of another file, with their numbers of rows."""
    with parsing(file, expected=_WHOLE):
        (fragment,) = dataset.get_fragments()
        if file.suffix.lower() != ".parquet":
            yield fragment, fragment.count_rows()
            return
        for group in fragment.split_by_row_group():  # whose count_rows() counts those of the file
            yield group, sum(each.num_rows for each in group.row_groups)


def _rows_of(file: Path, fragment: Any, columns: list[str], rows: slice) -> Iterator[Any]:
    first = 0
    with parsing(file, expected=_WHOLE):
        batches = fragment.to_batches(columns=columns, batch_size=_BATCH, use_threads=False, batch_readahead=1)
        for batch in batches:
            begin, end = max(rows.start - first, 0), min(rows.stop - first, batch.num_rows)
            part = batch.slice(begin, max(0, end - begin))
            first += batch.num_rows
            if part.num_rows:
                yield part
            if first >= rows.stop:
                break


def _array(values: Any, file: Path) -> NDArray[Any]:
    """A column, or a part of it, as an array; tensors lose their Arrow type in tables of several chunks."""
    return as_array(values.combine_chunks() if hasattr(values, "combine_chunks") else values, file)


def _stacked(file: Path, parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """`(exits, rows, classes)` from one column of shape (rows, exits, classes), or one (rows, classes) per exit."""
    if len(parts) == 1 and parts[0].ndim == 3:
        return np.moveaxis(parts[0], 1, 0)
    if len(parts) < 2 or len({part.shape for part in parts}) > 1 or parts[0].ndim != 2:
        raise ShapeError(
            f"{file} has logits of shape {', '.join(str(part.shape[1:]) for part in parts)} per row",
            expected="(exits, classes) in a column 'logits', or (classes) in each of several columns exit_1, exit_2, …",
            fix="write a list of lists per row",
        )
    return np.stack(parts)

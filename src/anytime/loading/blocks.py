"""Files of inputs, larger than memory or many, cut into blocks of rows that any process can read alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from anytime.arrays import open_npy, open_npz
from anytime.checks import check_count
from anytime.columns import as_array, import_arrow, is_list
from anytime.errors import FormatError, OptionError, ShapeError
from anytime.loading.inputs import only_name
from anytime.reading import open_file, parsing

_FILES = "a .npy, .npz or .parquet file of inputs"


@dataclass(frozen=True)
class Block:
    """Rows of a file.

    Attributes:
        file: Its path.
        column: The array or column with the inputs.
        group: The row group of a Parquet file; 0 otherwise.
        start: The first row, of the group or the file.
        stop: The row after the last one.
        first: The number of the first row among the rows of all files.
    """

    file: str
    column: str
    group: int
    start: int
    stop: int
    first: int

    def read(self) -> NDArray[Any]:
        """The inputs, `(rows, ...)`."""
        return _open(self.file, self.column, self.group)[self.start : self.stop]


def cut_files(files: Iterable[str | Path], *, rows: int = 64, column: str | None = None) -> list[Block]:
    """Cut files into blocks of at most so many rows.

    Args:
        files: `.npy`, `.npz` or `.parquet` files with the rows first.
        rows: The most rows of a block.
        column: The array or column with the inputs; by default the only one, or the one named x.
    """
    blocks, first = [], 0
    for file in map(Path, files):
        name, groups = _layout(file, column)
        for group, length in enumerate(groups):
            for start in range(0, length, check_count(rows, "rows")):
                stop = min(start + rows, length)
                blocks.append(Block(str(file), name, group, start, stop, first))
                first += stop - start
    if not blocks:
        raise OptionError("files without rows", expected=_FILES, fix="pass at least one file that has inputs")
    return blocks


def _layout(file: Path, column: str | None) -> tuple[str, list[int]]:
    """The name of the inputs in a file, and the rows of its row groups."""
    kind = file.suffix.lower()
    if kind == ".parquet":
        with _parquet(file) as opened:
            name = _named(opened.schema_arrow.names, column, file)
            return name, [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
    if kind == ".npz":
        name = _named(list(open_npz(file, ())), column, file)
    elif kind == ".npy":
        name = ""
    else:
        raise FormatError(f"{file} is a {kind or 'file without a suffix'}", expected=_FILES, fix="convert it", path=file)
    array = _open(str(file), name, 0)
    if array.ndim == 0:
        raise ShapeError(f"{file} holds one number", expected="an array with the rows first", fix="save a batch of inputs")
    return name, [len(array)]


def _named(names: Sequence[str], column: str | None, file: Path) -> str:
    if column is None:
        return only_name(names, file)
    if column not in names:
        raise FormatError(
            f"{file} has {', '.join(names)}", expected=f"one named {column}", fix="pass column with its name", path=file
        )
    return column


@lru_cache(maxsize=2)
def _open(file: str, column: str, group: int) -> NDArray[Any]:
    """The inputs of a file or row group: memory-mapped, except for Parquet. Kept, since neighbouring blocks share them."""
    path = Path(file)
    if path.suffix.lower() == ".npy":
        return open_npy(path, texts=True)
    if path.suffix.lower() == ".npz":
        found = open_npz(path, (column,), texts=True)[column]
        assert found is not None
        return found
    with _parquet(path) as opened, parsing(path, expected="a Parquet file"):
        values = opened.read_row_group(group, columns=[column]).column(0).combine_chunks()
    found = as_array(values, path)
    return found.reshape(len(found), -1) if is_list(values.type) else found


def _parquet(path: Path) -> Any:
    parquet = import_arrow("parquet")
    with open_file(path, expected=_FILES), parsing(path, expected="a Parquet file"):
        return parquet.ParquetFile(path)

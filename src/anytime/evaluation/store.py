"""Logits written block by block: a folder beside the file holds what is done, and becomes the file at the end.

The exits of the final file come before its rows, and the number of rows is not known before the end, so each exit is appended
to a file of its own. `progress.json` says how many rows of them count; it is replaced atomically after the bytes are on disk.
What a killed process wrote after them is overwritten by the next one, so every row counts exactly once.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anytime.artifacts import make_folder, overwrites, replace_file, typed_errors, write_json
from anytime.errors import FormatError, OptionError, OverwriteError
from anytime.outputs import LOCK, check_file
from anytime.reading import parsing, read_json

_CHUNK = 1 << 24
_ALIGNED = 64
_PROGRESS, _LABELS, _WHOLE = "progress.json", "labels", "whole"
_MAGIC = b"\x93NUMPY"
_OURS: dict[str, Callable[[bytes], bool]] = {
    ".npz": lambda head: head[30:40] in (b"logits.npy", b"labels.npy"),
    ".npy": lambda head: head.startswith(_MAGIC),
    ".safetensors": lambda head: head[8:].startswith((b'{"logits"', b'{"labels"')),
}
"""Whether a file that would be replaced holds logits, from its first bytes: it could be weights or data."""
_TYPES = {"<f2": "F16", "<f4": "F32", "<f8": "F64"}


class LogitsStore:
    """The rows of a file of logits that is being written.

    Args:
        path: The file, which ends in `.npz`, `.npy` or `.safetensors`. An earlier file is replaced at the end.

    Attributes:
        state: What counts: rows, exits, classes, type and further entries; empty at the beginning.
    """

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | os.PathLike) or Path(path).suffix.lower() not in _OURS:
            raise OptionError(
                f"out is {path!r}",
                expected="a .npz, .npy or .safetensors file",
                fix="pass a path with such an ending: logits.npz",
            )
        self.path = Path(path)
        self.folder = self.path.with_name(self.path.name + ".partial")
        self.state: dict[str, Any] = {}
        for file in (self.path, self.labels_path):
            check_file(file, ours=_OURS[self.path.suffix.lower()])
        with typed_errors(self.folder):
            make_folder(self.folder)

    @property
    def rows(self) -> int:
        """The rows that count."""
        return int(self.state.get("rows", 0))

    @property
    def labels_path(self) -> Path:
        """Where the labels are: a `.npy` file holds one array, so they get a file of their own."""
        return self.path.with_suffix(".labels.npy") if self.path.suffix.lower() == ".npy" else self.path

    def check_unlabelled(self) -> None:
        """Refuse labels of other logits beside a `.npy` file of logits without labels: readers would take them for theirs."""
        if self.labels_path != self.path and self.labels_path.exists():
            raise OverwriteError(
                f"{self.labels_path} exists, and the new logits have no labels",
                expected=f"no labels beside {self.path.name}, where they would be read with it",
                fix="remove or rename that file, or use another name",
                path=self.labels_path,
            )

    def resume(self) -> None:
        """Continue after what an earlier process completed."""
        path = self.folder / _PROGRESS
        if not path.exists():
            self.restart()
            return
        expected, fix = "the progress of collect_logits", f"remove the folder {self.folder}, or pass resume=False"
        state = read_json(path, expected=expected, fix=fix)
        with parsing(path, expected=expected, fix=fix, kind=FormatError):
            for name, width in _widths(state).items():
                if (self.folder / name).stat().st_size < int(state["rows"]) * width:
                    raise ValueError(f"{name} has fewer than {state['rows']} rows")
            if not isinstance(state["batches"], int) or not isinstance(state["digest"], str):
                raise ValueError("batches or digest is missing")
        self.state = state

    def restart(self) -> None:
        """Remove what an earlier process left."""
        names = {path.name for path in self.folder.iterdir()}
        foreign = sorted(name for name in names if not _is_ours(name))
        if foreign:
            raise overwrites(self.folder, f"holds {foreign[0]!r}, which collect_logits did not write")
        with typed_errors(self.folder):
            for name in [_PROGRESS, *sorted(names - {_PROGRESS, LOCK})]:  # first what would count the others
                (self.folder / name).unlink(missing_ok=True)

    def append(self, logits: Tensor, labels: Tensor | None, *, batches: int, digest: str) -> None:
        """Add rows, `(exits, rows, classes)` on the CPU; when this returns, they count and survive a kill.

        Args:
            logits: Their logits.
            labels: Their labels, or None.
            batches: How many batches are then done.
            digest: The fingerprint of the last of them.
        """
        array = logits.numpy()
        exits, rows, classes = array.shape
        shape = {"exits": exits, "classes": classes, "type": array.dtype.str, "labelled": labels is not None}
        parts = {_exit_name(exit): array[exit] for exit in range(exits)}
        if labels is not None:
            parts[_LABELS] = labels.numpy().astype("<i8")
        with typed_errors(self.folder):
            for name, part in parts.items():
                path = self.folder / name
                with path.open("r+b" if path.exists() else "wb") as file:
                    file.seek(self.rows * (part.nbytes // max(1, rows)))
                    file.write(np.ascontiguousarray(part).data)
                    file.truncate()
                    file.flush()
                    os.fsync(file.fileno())
        state = {"rows": self.rows + rows, "batches": batches, "digest": digest, **shape}
        write_json(self.folder / _PROGRESS, state)
        self.state = state

    def last_rows(self, rows: int) -> Tensor:
        """The last rows that count, `(exits, rows, classes)`."""
        kind, classes = np.dtype(self.state["type"]), self.state["classes"]
        start = (self.rows - rows) * classes * kind.itemsize
        parts = [
            np.fromfile(self.folder / _exit_name(exit), kind, rows * classes, offset=start).reshape(rows, classes)
            for exit in range(self.state["exits"])
        ]
        return torch.from_numpy(np.stack(parts))

    def finish(self) -> None:
        """Make the file and remove the folder."""
        with typed_errors(self.path):
            if self.labels_path != self.path and self.state["labelled"]:
                self._make(self.labels_path, self._write_labels)
            self._make(self.path, self._write)
            self.state = {}
            self.restart()

    def discard_folder(self) -> None:
        """Remove the folder if nothing is left in it; after its lock is released."""
        with suppress(OSError):
            self.folder.rmdir()

    def _make(self, path: Path, write: Any) -> None:
        whole = self.folder / _WHOLE
        with whole.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        replace_file(whole, path)

    def _write(self, file: BinaryIO) -> None:
        {".npy": self._write_npy, ".npz": self._write_npz, ".safetensors": self._write_safetensors}[self.path.suffix.lower()](
            file
        )

    def _write_npy(self, file: BinaryIO) -> None:
        file.write(_npy_header(self._shape, self.state["type"]))
        self._copy_logits(file)

    def _write_labels(self, file: BinaryIO) -> None:
        file.write(_npy_header((self.rows,), "<i8"))
        self._copy(file, _LABELS)

    def _write_npz(self, file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            members = {"logits.npy": self._write_npy, "labels.npy": self._write_labels}
            for name, write in members.items() if self.state["labelled"] else [*members.items()][:1]:
                info = zipfile.ZipInfo(name)
                # An extra field of zeros aligns the data, so that a map of it can be read at full speed. The local header has
                # 30 bytes, the name and 20 bytes of sizes.
                before = file.tell() + 30 + len(name) + 20 + 4
                info.extra = struct.pack("<HH", 0, -before % _ALIGNED) + bytes(-before % _ALIGNED)
                with archive.open(info, "w", force_zip64=True) as member:
                    write(member)  # type: ignore[arg-type]

    def _write_safetensors(self, file: BinaryIO) -> None:
        # Labels first: their size is a multiple of 8, so both arrays are aligned.
        labelled, kind = bool(self.state["labelled"]), np.dtype(self.state["type"])
        first, size = 8 * self.rows * labelled, kind.itemsize * int(np.prod(self._shape))
        header = {"labels": {"dtype": "I64", "shape": [self.rows], "data_offsets": [0, first]}} if labelled else {}
        header["logits"] = {
            "dtype": _TYPES[self.state["type"]],
            "shape": [*self._shape],
            "data_offsets": [first, first + size],
        }
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNED)
        file.write(struct.pack("<Q", len(text)) + text)
        if labelled:
            self._copy(file, _LABELS)
        self._copy_logits(file)

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.state["exits"], self.rows, self.state["classes"]

    def _copy_logits(self, file: BinaryIO) -> None:
        for exit in range(self.state["exits"]):
            self._copy(file, _exit_name(exit))

    def _copy(self, file: BinaryIO, name: str) -> None:
        with (self.folder / name).open("rb") as part:
            for chunk in _chunks(part):
                file.write(chunk)


def mapped_tensor(path: Path, array: NDArray[Any]) -> Tensor:
    """An array that is mapped from a file, as a tensor: it is not read, and writes to it stay in this process."""
    if not isinstance(array, np.memmap):
        return torch.from_numpy(np.array(array))
    private: Any = np.memmap(path, array.dtype, "c", array.offset, array.shape)
    return torch.from_numpy(private)


def _npy_header(shape: Sequence[int], kind: str) -> bytes:
    text = repr({"descr": kind, "fortran_order": False, "shape": tuple(shape)}).encode()
    text += b" " * (-(10 + len(text) + 1) % _ALIGNED) + b"\n"
    return _MAGIC + b"\x01\x00" + struct.pack("<H", len(text)) + text


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk


def _widths(state: dict[str, Any]) -> dict[str, int]:
    """Bytes per row of each file."""
    if state["type"] not in _TYPES or not 0 < int(state["exits"]) < 1 << 16:
        raise ValueError("the type or the number of exits is not known")
    widths = {_exit_name(exit): int(state["classes"]) * np.dtype(state["type"]).itemsize for exit in range(state["exits"])}
    return {**widths, _LABELS: 8} if state["labelled"] else widths


def _exit_name(exit: int) -> str:
    return f"exit-{exit + 1}"


def _is_ours(name: str) -> bool:
    return name in (_PROGRESS, _LABELS, _WHOLE, LOCK) or name.startswith(("exit-", ".anytime-file-"))

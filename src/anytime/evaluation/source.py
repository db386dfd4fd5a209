"""Logits from files: `.npz`, `.npy` and `.safetensors`, mapped into memory so that they may be larger than it.

Nothing is ever unpickled. Maps are read-only: they cost no memory of their own, and nobody can change a file through
them. A compressed `.npz` cannot be mapped and is read whole.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from anytime.artifacts import check_sealed
from anytime.errors import DtypeError, FileError, FormatError, IntegrityError, MissingFileError

_PICKLES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".joblib"}
_SAVE = "numpy.savez('logits.npz', logits=logits, labels=labels)"


@dataclass(frozen=True, eq=False)
class Mapped:
    """An array, perhaps mapped from a file, whose parts become tensors when they are asked for: `mapped[:, 10:20]`.

    Args:
        array: Numbers of at most 64 bits in any byte order.
        bfloat16: Whether the array holds the bits of bfloat16 numbers, which NumPy does not know, as uint16.
        name: What to call it in an error.
    """

    array: np.ndarray[Any, Any]
    bfloat16: bool = False
    name: str = "logits"

    def __post_init__(self) -> None:
        if self.array.dtype.kind not in "fiub" or self.array.dtype.itemsize > 8:
            raise DtypeError(
                f"{self.name} is an array of {self.array.dtype}",
                expected="numbers of at most 64 bits",
                fix="convert it, e.g. with .astype('float32')",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return self.array.ndim

    def __getitem__(self, key: Any) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        part = self.array[tuple(each.numpy() if isinstance(each, Tensor) else each for each in keys)]
        values = torch.from_numpy(np.array(part, dtype=part.dtype.newbyteorder("="), order="C"))
        return values.view(torch.bfloat16) if self.bfloat16 else values


@dataclass(frozen=True)
class LogitsFile:
    """Logits, `(exits, samples, classes)`, not yet loaded, and labels if there are any."""

    path: Path
    logits: Mapped
    labels: Tensor | None


def open_logits(path: str | Path, labels: str | Path | None = None) -> LogitsFile:
    """Open logits for evaluation.

    Args:
        path: `.npz` or `.safetensors` with `logits` and perhaps `labels`, or `.npy` with logits.
        labels: A file with the labels, if they are not in `path`.
    """
    file = Path(path)
    arrays = _open(file, ("logits", "labels"))
    check_sealed(file)
    if "logits" not in arrays:
        raise FormatError(
            f"{file} has no 'logits' (it holds {_listing(arrays)})",
            expected="an array called 'logits' of shape (exits, samples, classes)",
            fix=f"save it as {_SAVE}",
            path=file,
        )
    found = arrays.get("labels")
    if labels is not None:
        other = Path(labels)
        more = _open(other, ("labels", "logits"))
        # A .npy file has no names: its only array is what it was given for.
        found = more.get("labels", more.get("logits") if other.suffix == ".npy" else None)
        if found is None:
            raise FormatError(
                f"{other} has no 'labels' (it holds {_listing(more)})",
                expected="an array called 'labels', or a .npy file",
                fix="save it with numpy.save('labels.npy', labels)",
                path=other,
            )
    return LogitsFile(file, arrays["logits"], None if found is None else found[...])


def _open(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    if not path.exists():
        raise MissingFileError(f"there is no file {path}", expected="a file with logits", fix="check the path", path=path)
    if path.is_dir():
        raise FormatError(f"{path} is a folder", expected="a file", fix="name the file inside it", path=path)
    if path.stat().st_size == 0:
        raise IntegrityError(f"{path} is empty (0 bytes)", expected="a file with logits", fix="write it again", path=path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        pickled = path.suffix.lower() in _PICKLES
        raise FormatError(
            f"{path} ends in {path.suffix or 'nothing'!r}"
            + (": such files are pickles, which run code when they are read, so they are never opened" if pickled else ""),
            expected="a file that ends in .npz, .npy or .safetensors",
            fix=f"save it as {_SAVE}",
            path=path,
        )
    try:
        return reader(path, names)
    except PermissionError as error:
        raise FileError(
            f"{path} cannot be read ({error.strerror})", expected="a readable file", fix="check its permissions", path=path
        ) from None


def _read_npy(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    with path.open("rb") as file:
        return {names[0]: _map_array(path, file, end=path.stat().st_size)}


def _read_npz(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            arrays = {name: _read_member(path, archive, members[name]) for name in names if name in members}
            return arrays | {name: None for name in members if name not in arrays}
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, PermissionError):
            raise
        raise _damaged(path, str(error)) from None


def _read_member(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    if info.compress_type == zipfile.ZIP_STORED:
        with archive.open(info) as member:
            while member.read(1 << 22):  # reading to the end compares the checksum
                pass
        with path.open("rb") as file:
            start = _data_start(file, info.header_offset)
            file.seek(start)
            return _map_array(path, file, end=start + info.file_size)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**34
    if info.file_size > memory // 2:
        raise FormatError(
            f"{info.filename} in {path} is compressed and unpacks to {info.file_size / 2**30:.1f} GiB",
            expected="an uncompressed array when it is that large, so that it need not be loaded",
            fix="save it with numpy.savez instead of numpy.savez_compressed",
            path=path,
        )
    with archive.open(info) as member:
        shape, order, dtype = _header(path, member)
        data = bytearray(member.read())
    if len(data) != dtype.itemsize * int(np.prod(shape, dtype=object)):
        raise _damaged(path, f"{info.filename} holds {len(data)} bytes of data, its header says otherwise")
    return _mapped(np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if order else "C"), path)


def _data_start(file: BinaryIO, header_offset: int) -> int:
    """Where a zip member's bytes begin: after its local header of 30 bytes, its name and its extra field."""
    file.seek(header_offset + 26)
    name, extra = int.from_bytes(file.read(2), "little"), int.from_bytes(file.read(2), "little")
    return header_offset + 30 + name + extra


def _map_array(path: Path, file: BinaryIO, *, end: int) -> Any:
    shape, order, dtype = _header(path, file)
    start = file.tell()
    size = dtype.itemsize * int(np.prod(shape, dtype=object))
    if start + size > end:
        raise _damaged(path, f"{size} bytes of data were promised, {end - start} are there")
    return _map(path, dtype, start, shape, order="F" if order else "C")


def _header(path: Path, file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, order, dtype = read(file)
    except (ValueError, EOFError, SyntaxError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from None
    if dtype.hasobject:
        raise FormatError(
            f"{path} holds an array of Python objects, that is a pickle, which runs code when it is read",
            expected="arrays of numbers",
            fix="stack the exits into one array first: numpy.stack(list_of_exits).astype('float32')",
            path=path,
        )
    if any(length < 0 for length in shape):
        raise _damaged(path, f"its header claims shape {shape}")
    return shape, order, dtype


def _read_safetensors(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):  # refuses whatever is not well-formed
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, PermissionError):
            raise
        raise _damaged(path, str(error)) from None
    header.pop("__metadata__", None)
    return {name: _map_tensor(path, 8 + length, entry) if name in names else None for name, entry in header.items()}


def _map_tensor(path: Path, data_start: int, entry: dict[str, Any]) -> Mapped:
    kind = entry["dtype"]
    if kind not in _SAFETENSORS:
        raise FormatError(
            f"{path} holds a tensor of type {kind}",
            expected=f"one of {', '.join(_SAFETENSORS)}",
            fix="convert it, e.g. with .float()",
            path=path,
        )
    start = data_start + entry["data_offsets"][0]
    mapped = _map(path, np.dtype(_SAFETENSORS[kind]), start, tuple(entry["shape"]), order="C")
    return Mapped(mapped.array, bfloat16=kind == "BF16")


_SAFETENSORS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}


def _map(path: Path, dtype: np.dtype[Any], start: int, shape: tuple[int, ...], *, order: Any) -> Mapped:
    if 0 in shape or not shape:
        return _mapped(np.zeros(shape, dtype), path)
    return _mapped(np.memmap(path, dtype=dtype, mode="r", offset=start, shape=shape, order=order), path)


def _mapped(array: np.ndarray[Any, Any], path: Path) -> Mapped:
    try:
        return Mapped(array)
    except DtypeError as error:
        raise FormatError(f"{path}: {error.came}", expected=error.expected, fix=error.fix, path=path) from None


def _listing(arrays: dict[str, Any]) -> str:
    return ", ".join(repr(name) for name in arrays) or "nothing"


def _damaged(path: Path, why: str) -> IntegrityError:
    return IntegrityError(
        f"{path} is damaged or not what its name says: {why}", expected="a whole file", fix="copy or write it again", path=path
    )


_READERS: dict[str, Callable[[Path, tuple[str, ...]], dict[str, Any]]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
}

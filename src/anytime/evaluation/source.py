"""Logits from `.npz`, `.npy` and `.safetensors` files, memory-mapped, so that a file may be larger than memory.

Nothing is ever unpickled, and maps are read-only. A large compressed `.npz` cannot be mapped; it is decompressed in chunks
(`anytime.arrays`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.arrays import npz_headers, open_npy, open_npz
from anytime.artifacts import check_sealed
from anytime.checks import check_memory
from anytime.errors import DtypeError, FormatError, IntegrityError, LabelError
from anytime.reading import is_file, open_file, parsing

_PICKLES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".joblib"}
_SAVE = "numpy.savez('logits.npz', logits=logits, labels=labels)"
_WHOLE = "a complete file with logits"
_MANY = 1 << 20
_SIZES = {"F": (8, 4, 2), "I": (8, 4, 2, 1), "U": (1,)}
_DTYPES = {f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind, sizes in _SIZES.items() for size in sizes}
_DTYPES |= {"BF16": "<u2", "BOOL": "?"}
"""NumPy's name of each safetensors type; bfloat16, which NumPy does not have, is read as uint16."""


@dataclass(frozen=True, eq=False)
class Mapped:
    """An array, possibly mapped from a file; indexing reads a part of it as a tensor: `mapped[:, 10:20]`.

    Args:
        array: Numbers of at most 64 bits in any byte order.
        bfloat16: Whether the array holds the bits of bfloat16 numbers as uint16.
        name: Its name in error messages.
    """

    array: np.ndarray[Any, Any]
    bfloat16: bool = False
    name: str = "logits"

    def __post_init__(self) -> None:
        if self.array.dtype.kind not in "fiub" or self.array.dtype.itemsize > 8:
            raise DtypeError(
                f"{self.name} is an array of {self.array.dtype}",
                expected="numbers of at most 64 bits",
                fix="convert it with .astype('float32')",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return tuple(self.array.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.array.ndim

    def __getitem__(self, key: Any) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        return self.read(self.array[tuple(each.numpy() if isinstance(each, Tensor) else each for each in keys)])

    def read(self, part: np.ndarray[Any, Any]) -> Tensor:
        """A view of a part of the array as a tensor of its own, contiguous and in the machine's byte order."""
        check_memory(part.nbytes, f"{part.shape[1] if part.ndim > 1 else part.size:,} rows of {self.name}")
        values = torch.from_numpy(np.array(part, dtype=part.dtype.newbyteorder("="), order="C"))
        return values.view(torch.bfloat16) if self.bfloat16 else values


@dataclass(frozen=True, eq=False)
class LogitsFile:
    """Logits, `(exits, samples, classes)`, which are not loaded yet, and labels if there are any."""

    path: Path
    logits: Mapped
    labels: Tensor | None


@dataclass(frozen=True, eq=False)
class CollectedLogits:
    """The result of `anytime.collect_logits`; `anytime.evaluate` takes it.

    Attributes:
        logits: `(exits, rows, classes)`, on the CPU; mapped, if they are in a file.
        labels: `(rows,)` class indices, or None.
        path: The file, or None.
    """

    logits: Tensor
    labels: Tensor | None
    path: Path | None = None

    def __repr__(self) -> str:
        exits, rows, classes = self.logits.shape
        known = "labels" if self.labels is not None else "no labels"
        return f"CollectedLogits({exits} exits, {rows} rows, {classes} classes, {known}, {self.path or 'in memory'})"


def open_logits(path: str | Path, labels: str | Path | None = None) -> LogitsFile:
    """Open logits for evaluation.

    Args:
        path: `.npz` or `.safetensors` with `logits` and optionally `labels`, or `.npy` with logits.
        labels: A file with the labels, if they are not in `path`.
    """
    logits, found = open_arrays(Path(path), None if labels is None else Path(labels))
    return LogitsFile(Path(path), logits, None if found is None else _labels(found, logits.shape))


def open_arrays(file: Path, labels: Path | None = None) -> tuple[Mapped, Mapped | None]:
    """The logits and the labels of files, as for `open_logits`, both mapped."""
    arrays = _open(file, ("logits", "labels"))
    check_sealed(file)
    return _named(file, arrays, labels)


def shape_of(file: Path, labels: Path | None = None) -> tuple[tuple[int, ...], bool]:
    """The shape of the logits in a file, and whether there are labels, from what the file says about itself."""
    if file.suffix.lower() == ".npz" and is_file(file) and file.stat().st_size:
        logits, found = _named(file, npz_headers(file, ("logits", "labels")), labels)
    else:
        logits, found = _named(file, _open(file, ("logits", "labels")), labels)
    return tuple(logits.shape), found is not None


def _named(file: Path, arrays: dict[str, Any], labels: Path | None) -> tuple[Any, Any]:
    if "logits" not in arrays:
        raise FormatError(
            f"{file} has no 'logits' (it contains {_listing(arrays)})",
            expected="an array named 'logits' of shape (exits, samples, classes)",
            fix=f"save it as {_SAVE}",
            path=file,
        )
    return arrays["logits"], arrays.get("labels") if labels is None else _labels_in(labels)


def open_labels(path: str | Path, shape: tuple[int, ...]) -> Tensor:
    """The labels in a file, for logits of a shape."""
    return _labels(_labels_in(Path(path)), shape)


def _labels_in(path: Path) -> Mapped:
    arrays = _open(path, ("labels", "logits"))
    if (found := arrays.get("labels")) is None:
        raise FormatError(
            f"{path} has no 'labels' (it contains {_listing(arrays)})",
            expected="an array named 'labels', or a .npy file",
            fix="save it with numpy.save('labels.npy', labels)",
            path=path,
        )
    return found  # type: ignore[no-any-return]


def _labels(found: Mapped, shape: tuple[int, ...]) -> Tensor:
    """Read the labels; an array that is far too large for labels is refused before it is read."""
    if math.prod(found.shape) > max(_MANY, math.prod(shape)):
        raise LabelError(
            f"the labels have shape {found.shape}, the logits {shape}",
            expected=f"one class index per input, shape ({shape[1] if len(shape) > 1 else 'samples'},)",
            fix=f"save the labels of these logits: {_SAVE}",
        )
    return found[...]


def _open(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    with open_file(path, expected="a file with logits") as file:
        empty = file.seek(0, 2) == 0
    if empty:
        raise IntegrityError(
            f"{path} is empty (0 bytes)", expected="a file with logits", fix=f"write it again: {_SAVE}", path=path
        )
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        pickled = path.suffix.lower() in _PICKLES
        raise FormatError(
            f"{path} has the suffix {path.suffix!r}"
            + (": such files are pickles, which run code when they are read, so they are never opened" if pickled else ""),
            expected="a .npz, .npy or .safetensors file",
            fix=f"save it as {_SAVE}",
            path=path,
        )
    return reader(path, names)


def _read_npy(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    return {names[0]: Mapped(open_npy(path))}


def _read_npz(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: None if array is None else Mapped(array) for name, array in open_npz(path, names).items()}


def _read_safetensors(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    from safetensors import safe_open

    with parsing(path, expected=_WHOLE), open_file(path, expected=_WHOLE) as file:
        with safe_open(path, framework="np"):  # raises if the file is not well-formed
            pass
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _map_tensor(path, 8 + length, entry) if name in names else None for name, entry in header.items()}


def _map_tensor(path: Path, data_start: int, entry: dict[str, Any]) -> Mapped:
    kind = entry["dtype"]
    if kind not in _DTYPES:
        raise FormatError(
            f"{path} contains a tensor of type {kind}",
            expected=f"one of {', '.join(_DTYPES)}",
            fix="convert it with .float() before saving",
            path=path,
        )
    dtype, shape, start = np.dtype(_DTYPES[kind]), tuple(entry["shape"]), data_start + entry["data_offsets"][0]
    if 0 in shape or not shape:
        return Mapped(np.zeros(shape, dtype), bfloat16=kind == "BF16")
    return Mapped(np.memmap(path, dtype=dtype, mode="r", offset=start, shape=shape), bfloat16=kind == "BF16")


def _listing(arrays: dict[str, Any]) -> str:
    return ", ".join(repr(name) for name in arrays) or "nothing"


READERS: dict[str, Callable[[Path, tuple[str, ...]], dict[str, Any]]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
}

"""Logits from files: `.npz`, `.npy` and `.safetensors`, mapped into memory so that they may be larger than it.

Nothing is ever unpickled. Maps are read-only: they cost no memory of their own, and nobody can change a file through
them. A large compressed `.npz` cannot be mapped; it is unpacked in chunks (`anytime.arrays`).
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

from anytime.arrays import open_npy, open_npz
from anytime.artifacts import check_sealed
from anytime.checks import check_memory
from anytime.errors import DtypeError, FormatError, IntegrityError, LabelError
from anytime.reading import open_file, parsing

_PICKLES = {".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".bin", ".joblib"}
_SAVE = "numpy.savez('logits.npz', logits=logits, labels=labels)"
_WHOLE = "a whole file with logits"
_MANY = 1 << 20


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
        check_memory(part.nbytes, f"{part.shape[1] if part.ndim > 1 else part.size:,} rows of {self.name}")
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
    logits = arrays["logits"]
    return LogitsFile(file, logits, None if found is None else _labels(found, logits.shape))


def _labels(found: Mapped, shape: tuple[int, ...]) -> Tensor:
    """The labels in memory; what cannot be one an input is refused before that, where it is large."""
    if math.prod(found.shape) > max(_MANY, math.prod(shape)):
        raise LabelError(
            f"the labels have shape {found.shape}, and the logits {shape}",
            expected="one class index per input",
            fix="check how the file was written",
        )
    return found[...]


def _open(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    with open_file(path, expected="a file with logits") as file:
        empty = file.seek(0, 2) == 0
    if empty:
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
    return reader(path, names)


def _read_npy(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    return {names[0]: Mapped(open_npy(path))}


def _read_npz(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: None if array is None else Mapped(array) for name, array in open_npz(path, names).items()}


def _read_safetensors(path: Path, names: tuple[str, ...]) -> dict[str, Any]:
    from safetensors import safe_open

    with parsing(path, expected=_WHOLE), open_file(path, expected=_WHOLE) as file:
        with safe_open(path, framework="np"):  # refuses whatever is not well-formed
            pass
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
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
    dtype, shape, start = np.dtype(_SAFETENSORS[kind]), tuple(entry["shape"]), data_start + entry["data_offsets"][0]
    if 0 in shape or not shape:
        return Mapped(np.zeros(shape, dtype), bfloat16=kind == "BF16")
    return Mapped(np.memmap(path, dtype=dtype, mode="r", offset=start, shape=shape), bfloat16=kind == "BF16")


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


def _listing(arrays: dict[str, Any]) -> str:
    return ", ".join(repr(name) for name in arrays) or "nothing"


_READERS: dict[str, Callable[[Path, tuple[str, ...]], dict[str, Any]]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
}

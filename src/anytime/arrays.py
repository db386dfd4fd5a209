"""NumPy's files, `.npy` and `.npz`, read without unpickling and in bounded memory.

What a header claims is compared with the file before anything is allocated. Arrays that are not compressed are memory-mapped.
Small compressed arrays are unpacked into memory, large ones into a temporary file that is then mapped. Only arrays of numbers,
booleans and, on request, texts are read; objects never.
"""

from __future__ import annotations

import ast
import math
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from anytime.errors import FormatError, IntegrityError
from anytime.reading import open_file, parsing

_WHOLE = "a complete .npy or .npz file, as numpy.save or numpy.savez writes it"
_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 10_000
_HELD = 64 << 20
"""Compressed arrays of up to this many bytes are unpacked into memory."""
_CHUNK = 1 << 22


class Header(NamedTuple):
    """What the beginning of a `.npy` file says about its array."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """The number of bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def open_npy(path: Path, *, texts: bool = False) -> NDArray[Any]:
    """The array of a `.npy` file, memory-mapped; `texts` also accepts an array of strings."""
    with parsing(path, expected=_WHOLE), open_file(path, expected=_WHOLE) as file:
        return _map(path, file, end=_length(file), texts=texts)


def open_npz(path: Path, names: Sequence[str], *, texts: bool = False) -> dict[str, NDArray[Any] | None]:
    """The named arrays of a `.npz` file, mapped where they are large; None for the other arrays of the file."""
    with parsing(path, expected=_WHOLE), open_file(path, expected=_WHOLE) as file, zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        found = {name: _open_member(path, file, archive, members[name], texts) for name in names if name in members}
        return {**dict.fromkeys(members), **found}


def npz_headers(path: Path, names: Sequence[str]) -> dict[str, Header | None]:
    """What a `.npz` file says about the named arrays, without reading them; None for the other arrays of the file."""
    with parsing(path, expected=_WHOLE), open_file(path, expected=_WHOLE) as file, zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        found: dict[str, Header | None] = dict.fromkeys(members)
        for name in members.keys() & set(names):
            with archive.open(members[name]) as member:
                found[name] = _read_header(path, cast(BinaryIO, member), texts=False)
        return found


def read_npz(path: Path, names: Sequence[str] | None = None, *, most: int, texts: bool = False) -> dict[str, NDArray[Any]]:
    """Those of the named arrays that a `.npz` file has, or all of its arrays, in memory: at most `most` bytes together."""
    wanted = list(open_npz(path, ())) if names is None else names
    opened = {name: array for name, array in open_npz(path, wanted, texts=texts).items() if array is not None}
    total = sum(array.nbytes for array in opened.values())
    if total > most:
        raise FormatError(
            f"{path} unpacks to {total:,} bytes",
            expected=f"at most {most:,} bytes",
            fix="save only the arrays that are needed, in a smaller type",
            path=path,
        )
    return {name: np.array(array) for name, array in opened.items()}


def _open_member(path: Path, file: BinaryIO, archive: zipfile.ZipFile, info: zipfile.ZipInfo, texts: bool) -> NDArray[Any]:
    if info.flag_bits & 1:
        raise _damaged(path, f"{info.filename} is encrypted")
    if info.compress_type == zipfile.ZIP_STORED:
        with archive.open(info) as member:
            while member.read(_CHUNK):  # reading to the end checks the CRC
                pass
        file.seek(_data_start(file, info.header_offset))
        return _map(path, file, end=min(file.tell() + info.file_size, _length(file)), texts=texts)
    if info.compress_type != zipfile.ZIP_DEFLATED:
        raise _damaged(path, f"{info.filename} is compressed with method {info.compress_type}, which NumPy does not use")
    with archive.open(info) as member:
        header = _read_header(path, cast(BinaryIO, member), texts=texts)
        begin = member.tell()
        if begin + header.size != info.file_size:
            raise _damaged(path, f"{info.filename} has {info.file_size - begin} bytes of data, its header says {header.size}")
        if header.size <= _HELD:
            return _array(member.read(), header)
        return _unpack(path, info.filename, cast(BinaryIO, member), header)


def _unpack(path: Path, name: str, member: BinaryIO, header: Header) -> NDArray[Any]:
    """Unpack a member into a temporary file, which goes away with the array that maps it."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if header.size > free:
        raise FormatError(
            f"{name} in {path} unpacks to {header.size:,} bytes",
            expected=f"at most {free:,} bytes, the free space for temporary files",
            fix="set TMPDIR to a disk with more space, or save without compression: numpy.savez",
            path=path,
        )
    with tempfile.TemporaryFile() as unpacked:
        shutil.copyfileobj(member, unpacked, _CHUNK)  # reading to the end checks the CRC
        unpacked.flush()
        return _mapped(unpacked, header, 0)


def _map(path: Path, file: BinaryIO, *, end: int, texts: bool) -> NDArray[Any]:
    header = _read_header(path, file, texts=texts)
    start = file.tell()
    if start + header.size > end:
        raise _damaged(path, f"its header claims {header.size} bytes of data, there are {end - start}")
    if header.size == 0 or not header.shape:
        return _array(file.read(header.size), header)
    return _mapped(file, header, start)


def _mapped(file: Any, header: Header, start: int) -> NDArray[Any]:
    order: Any = "F" if header.fortran else "C"
    return np.memmap(file, dtype=header.dtype, mode="r", offset=start, shape=header.shape, order=order)


def _array(data: bytes, header: Header) -> NDArray[Any]:
    if len(data) != header.size:
        raise ValueError(f"it ends after {len(data)} of {header.size} bytes")
    if not data:
        return np.zeros(header.shape, header.dtype)
    return np.frombuffer(data, header.dtype).reshape(header.shape, order="F" if header.fortran else "C")


def _read_header(path: Path, file: BinaryIO, *, texts: bool) -> Header:
    magic = file.read(8)
    if len(magic) < 8 or magic[:6] != _MAGIC or magic[6] not in (1, 2, 3):
        raise _damaged(path, "it does not begin like a .npy file")
    width = 2 if magic[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    text = file.read(length) if length <= _LONGEST_HEADER else b""
    if len(text) != length:
        raise _damaged(path, f"its header claims a length of {length}")
    try:
        stored = ast.literal_eval(text.decode("utf-8" if magic[6] == 3 else "latin1").strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # the last two from nested brackets
        raise _damaged(path, "its header cannot be read") from None
    return _checked(path, stored, texts=texts)


def _checked(path: Path, stored: object, *, texts: bool) -> Header:
    match stored:
        case {"descr": str() | list() as kind, "fortran_order": bool() as fortran, "shape": tuple() as shape, **more} if (
            not more
        ):
            pass
        case _:
            raise _damaged(path, "its header does not describe an array")
    with parsing(path, expected=_WHOLE):
        dtype: np.dtype[Any] = np.dtype(kind)
    if dtype.hasobject:
        raise FormatError(
            f"{path} holds an array of Python objects: a pickle, which can run code when it is read",
            expected="arrays of numbers",
            fix="stack the exits into one array first: numpy.stack(list_of_exits).astype('float32')",
            path=path,
        )
    if (dtype.kind not in "fiub" or dtype.itemsize > 8) and not (texts and dtype.kind == "U"):
        raise FormatError(
            f"{path} holds an array of {dtype}",
            expected="numbers of at most 64 bits",
            fix="convert it, e.g. with .astype('float32')",
            path=path,
        )
    if len(shape) > 32 or any(type(length) is not int or length < 0 for length in shape):
        raise _damaged(path, f"its header claims shape {shape}"[:300])
    # NumPy also checks the size of an empty array, without its empty dimensions.
    if math.prod(length or 1 for length in shape) * max(dtype.itemsize, 1) >= 2**62:
        raise _damaged(path, f"its header claims shape {shape}"[:300])
    return Header(shape, fortran, dtype)


def _data_start(file: BinaryIO, header_offset: int) -> int:
    """Where a zip member's bytes begin: after its local header of 30 bytes, its name and its extra field."""
    file.seek(header_offset + 26)
    name, extra = int.from_bytes(file.read(2), "little"), int.from_bytes(file.read(2), "little")
    return header_offset + 30 + name + extra


def _length(file: BinaryIO) -> int:
    place = file.tell()
    length = file.seek(0, 2)
    file.seek(place)
    return length


def _damaged(path: Path, why: str) -> IntegrityError:
    return IntegrityError(
        f"{path} is damaged or not what its name says: {why}", expected=_WHOLE, fix="copy or write it again", path=path
    )

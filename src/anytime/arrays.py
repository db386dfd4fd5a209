"""NumPy's files, `.npy` and `.npz`, without unpickling anything and without more memory than the caller asks for.

What a header claims is held against the file before anything is allocated. Arrays that are not compressed are mapped.
A small compressed one is unpacked; of a large one only the chunks in use are, so that a file of two megabytes that unpacks to
four gigabytes takes a few megabytes. Numbers and booleans are read, and texts where a caller asks for them; objects never.
"""

from __future__ import annotations

import ast
import math
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from anytime.checks import check_memory
from anytime.errors import FormatError, IntegrityError
from anytime.reading import open_file, parsing

_WHOLE = "a whole .npy or .npz file, as numpy.save or numpy.savez writes it"
_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 10_000
_HELD = 64 << 20
"""Compressed arrays of up to so many bytes are unpacked at once."""
_CHUNKS, _PIECE = 512, 1 << 14
_KEPT = 256 << 20
"""At most so many bytes of unpacked chunks are kept."""


class Header(NamedTuple):
    """What the beginning of a `.npy` says of the array behind it."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """The bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def open_npy(path: Path, *, texts: bool = False) -> NDArray[Any]:
    """The array in a `.npy`, mapped.

    Args:
        path: The file.
        texts: Whether an array of texts will do.
    """
    with parsing(path, expected=_WHOLE), open_file(path, expected=_WHOLE) as file:
        return _map(path, file, end=_length(file), texts=texts)


def open_npz(path: Path, names: Sequence[str], *, texts: bool = False) -> dict[str, NDArray[Any] | Inflated | None]:
    """The named arrays of a `.npz`, not yet in memory, and None under the names of the others.

    Args:
        path: The file.
        names: Which arrays to open.
        texts: Whether arrays of texts will do.
    """
    with parsing(path, expected=_WHOLE), open_file(path, expected=_WHOLE) as file, zipfile.ZipFile(file) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        found = {name: _open_member(path, file, archive, members[name], texts) for name in names if name in members}
        return {**dict.fromkeys(members), **found}


def read_npz(path: Path, names: Sequence[str] | None = None, *, most: int, texts: bool = False) -> dict[str, NDArray[Any]]:
    """The named arrays of a `.npz`, or all of them, in memory; those that are not there are left out.

    Args:
        path: The file.
        names: Which arrays to read; none for all.
        most: How many bytes they may have together.
        texts: Whether arrays of texts will do.
    """
    wanted = list(open_npz(path, ())) if names is None else names
    opened = {name: array for name, array in open_npz(path, wanted, texts=texts).items() if array is not None}
    total = sum(math.prod(array.shape) * array.dtype.itemsize for array in opened.values())
    if total > most:
        raise FormatError(
            f"{path} unpacks to {total:,} bytes", expected=f"at most {most:,}", fix="check how it was written", path=path
        )
    return {name: np.array(array[...]) for name, array in opened.items()}


def _open_member(
    path: Path, file: BinaryIO, archive: zipfile.ZipFile, info: zipfile.ZipInfo, texts: bool
) -> NDArray[Any] | Inflated:
    if info.flag_bits & 1:
        raise _damaged(path, f"{info.filename} is encrypted")
    if info.compress_type == zipfile.ZIP_STORED:
        with archive.open(info) as member:
            while member.read(1 << 22):  # reading to the end compares the checksum
                pass
        file.seek(_data_start(file, info.header_offset))
        return _map(path, file, end=min(file.tell() + info.file_size, _length(file)), texts=texts)
    if info.compress_type != zipfile.ZIP_DEFLATED:
        raise _damaged(path, f"{info.filename} is compressed by method {info.compress_type}, which NumPy does not use")
    with archive.open(info) as member:
        header = _read_header(path, cast(BinaryIO, member), texts=texts)
        begin = member.tell()
        if begin + header.size != info.file_size:
            raise _damaged(path, f"{info.filename} has {info.file_size - begin} bytes of data, its header says {header.size}")
        if header.size <= _HELD:
            data = member.read()
            if len(data) != header.size:
                raise _damaged(path, f"{info.filename} ends after {len(data)} of {header.size} bytes")
            return _array(data, header)
    if header.fortran and len(header.shape) > 1:
        raise FormatError(
            f"{info.filename} in {path} is compressed, unpacks to {header.size:,} bytes and cannot be read row by row",
            expected="an array in C order, or one that is not compressed",
            fix="save it with numpy.savez(path, logits=numpy.ascontiguousarray(logits))",
            path=path,
        )
    packed = _Packed(_data_start(file, info.header_offset), info.compress_size, info.file_size, info.CRC)
    return Inflated(path, packed, begin, header)


class _Packed(NamedTuple):
    """Where the compressed bytes of a member are, and what becomes of them."""

    start: int
    length: int
    size: int
    crc: int


class _Mark(NamedTuple):
    """A place from which a member can be unpacked on: the state of the unpacker, and how many bytes it has taken."""

    state: Any
    taken: int


class Inflated:
    """A compressed array in C order that is unpacked in chunks when its rows are asked for.

    The file is read once to compare its checksum; on the way the unpacker's state is kept at the beginning of each chunk, so
    that later any chunk can be unpacked by itself. Several threads may read it.
    """

    def __init__(self, path: Path, packed: _Packed, begin: int, header: Header) -> None:
        self._path, self._packed, self._begin = path, packed, begin
        self.shape, self.dtype, self.ndim = header.shape, header.dtype, len(header.shape)
        self._chunk = max(1 << 20, -(-packed.size // _CHUNKS))
        # Each exit is at a place of its own in the file.
        self._most = max(2, min(2 * self.shape[0] + 2, _KEPT // self._chunk))
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._marks = self._read_marks()

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Some of the outer two dimensions, by slices or lists of places, as an array of the same number of dimensions."""
        keys = tuple(slice(None) if each is Ellipsis else each for each in (key if isinstance(key, tuple) else (key,)))
        if self.ndim == 1:
            row: NDArray[Any] = self._rows(np.arange(1), np.arange(self.shape[0])[keys[0]])[0]
            return row
        outer, inner = (np.arange(size)[each] for size, each in zip(self.shape, (*keys, slice(None))[:2], strict=False))
        return self._rows(outer, inner)[(slice(None), slice(None), *keys[2:])]

    def _rows(self, outer: NDArray[Any], inner: NDArray[Any]) -> NDArray[Any]:
        count, rest = self.shape[min(1, self.ndim - 1)], self.shape[2:]
        width = math.prod(rest) * self.dtype.itemsize
        check_memory(len(outer) * len(inner) * width, f"these rows of {self._path}")
        found = np.empty((len(outer), len(inner), *rest), self.dtype)
        for place, exit in enumerate(outer.tolist()):
            # No more than a chunk at a time, so that reading all of it takes little more than its own size.
            for first, rows in _runs(inner, most=max(1, self._chunk // max(1, width))):
                start = self._begin + (exit * count + int(inner[first])) * width
                part = np.frombuffer(self._read(start, start + rows * width), self.dtype)
                found[place, first : first + rows] = part.reshape(rows, *rest)
        return found

    def _read(self, start: int, end: int) -> bytes:
        first, last = start // self._chunk, -(-end // self._chunk)
        data = b"".join(self._unpacked(index) for index in range(first, last))
        return data[start - first * self._chunk : end - first * self._chunk]

    def _unpacked(self, index: int) -> bytes:
        with self._lock:
            if index in self._kept:
                self._kept.move_to_end(index)
                return self._kept[index]
            self._kept[index] = data = self._unpack(self._marks[index])
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
            return data

    def _unpack(self, mark: _Mark) -> bytes:
        state, tail, parts, missing = mark.state.copy(), b"", [], self._chunk
        with parsing(self._path, expected=_WHOLE), open_file(self._path, expected=_WHOLE) as file:
            file.seek(self._packed.start + mark.taken)
            while missing and not state.eof:
                data = tail or file.read(_PIECE)
                part = state.decompress(data, missing)
                if not part and not data:
                    raise ValueError("it has become shorter while it was read")
                tail, missing = state.unconsumed_tail, missing - len(part)
                parts.append(part)
        return b"".join(parts)

    def _read_marks(self) -> list[_Mark]:
        """Unpack all of it once, keeping nothing but the states at the beginnings of the chunks."""
        state: Any = zlib.decompressobj(-zlib.MAX_WBITS)
        marks, tail, taken, crc, size = [], b"", 0, 0, 0
        with parsing(self._path, expected=_WHOLE), open_file(self._path, expected=_WHOLE) as file:
            file.seek(self._packed.start)
            while size < self._packed.size:
                marks.append(_Mark(state.copy(), taken - len(tail)))
                missing = min(self._chunk, self._packed.size - size)
                while missing:
                    data = tail or file.read(min(_PIECE, self._packed.length - taken))
                    taken += 0 if tail else len(data)
                    part = state.decompress(data, missing)
                    if not part and (state.eof or not data):
                        raise ValueError(f"it ends after {size} of {self._packed.size} bytes")
                    tail = state.unconsumed_tail
                    crc, size, missing = zlib.crc32(part, crc), size + len(part), missing - len(part)
            if crc != self._packed.crc:
                raise ValueError("its checksum is off")
        return marks


def _runs(places: NDArray[Any], *, most: int) -> Iterator[tuple[int, int]]:
    """Where places that follow each other begin, and how many they are, at most `most`.

    >>> list(_runs(np.array([4, 5, 6, 9]), most=2))
    [(0, 2), (2, 1), (3, 1)]
    """
    cuts = (np.flatnonzero(np.diff(places) != 1) + 1).tolist()
    for first, end in zip([0, *cuts], [*cuts, len(places)], strict=True):
        yield from ((start, min(most, end - start)) for start in range(first, end, most))


def _map(path: Path, file: BinaryIO, *, end: int, texts: bool) -> NDArray[Any]:
    header = _read_header(path, file, texts=texts)
    start = file.tell()
    if start + header.size > end:
        raise _damaged(path, f"its header promises {header.size} bytes of data, {end - start} are there")
    if header.size == 0 or not header.shape:
        return _array(file.read(header.size), header)
    order: Any = "F" if header.fortran else "C"
    return np.memmap(file, dtype=header.dtype, mode="r", offset=start, shape=header.shape, order=order)


def _array(data: bytes, header: Header) -> NDArray[Any]:
    if not data:
        return np.zeros(header.shape, header.dtype)
    return np.frombuffer(data, header.dtype).reshape(header.shape, order="F" if header.fortran else "C")


def _read_header(path: Path, file: BinaryIO, *, texts: bool) -> Header:
    magic = file.read(8)
    if len(magic) < 8 or magic[:6] != _MAGIC or magic[6] not in (1, 2, 3):
        raise _damaged(path, "it does not begin as a .npy file does")
    width = 2 if magic[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    text = file.read(length) if length <= _LONGEST_HEADER else b""
    if len(text) != length:
        raise _damaged(path, f"its header claims a length of {length}")
    try:
        stored = ast.literal_eval(text.decode("utf-8" if magic[6] == 3 else "latin1").strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # the last two of brackets in brackets
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
            f"{path} holds an array of Python objects, that is a pickle, which runs code when it is read",
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
    # NumPy counts the bytes of an empty array too, with its empty sides left out.
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

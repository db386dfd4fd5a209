"""Reading untrusted files: every file is opened here, and whatever a parser raises on damaged bytes becomes a typed error.

`open_file` accepts regular files only: a pipe could block forever, a device may never end. `parsing` wraps a parser: libraries
that read files raise nearly any exception on damaged bytes.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from anytime.errors import AnytimeError, FileError, FormatError, IntegrityError, MissingFileError

_LARGEST = 1 << 32
_REASON = 300


def open_file(path: str | Path, *, expected: str = "a file", fix: str = "pass the path of an existing file") -> BufferedReader:
    """Open a regular file, or a link to one, to read its bytes; `expected` and `fix` are for the error."""
    stat_file(path, expected=expected, fix=fix)
    handle = -1
    try:
        # If a pipe replaces the file in between, this still returns at once. Regular files ignore the flag.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        _check_regular(os.fstat(handle).st_mode, path, expected)
        return os.fdopen(handle, "rb")
    except BaseException as error:
        if handle >= 0:
            os.close(handle)
        if isinstance(error, OSError | ValueError) and not isinstance(error, AnytimeError):
            raise _unreadable(path, error, expected, fix) from None
        raise


def stat_file(path: str | Path, *, expected: str = "a file", fix: str = "pass the path of an existing file") -> os.stat_result:
    """The size and times of a regular file, or of the one that a link names; the errors are those of `open_file`."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error, expected, fix) from None
    _check_regular(found.st_mode, path, expected)
    return found


def read_file(
    path: str | Path, *, most: int = _LARGEST, expected: str = "a file", fix: str = "pass the path of an existing file"
) -> bytes:
    """The bytes of a regular file of at most `most` bytes."""
    with open_file(path, expected=expected, fix=fix) as file:
        try:
            data = file.read(most + 1)
        except OSError as error:
            raise _unreadable(path, error, expected, fix) from None
    if len(data) > most:
        raise FormatError(f"{path} has more than {most:,} bytes", expected=expected, fix=fix, path=path)
    return data


def is_file(path: str | Path) -> bool:
    """Whether the path is a regular file; false for what cannot be a path."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


@contextmanager
def parsing(
    path: str | Path,
    *,
    expected: str,
    fix: str = "copy or write it again",
    kind: type[FileError] = IntegrityError,
    what: str = "is damaged or not what its name says",
) -> Iterator[None]:
    """Turn every exception of a parser into an error of type `kind` about this file: "{path} {what}: {exception}".

    Errors of this library pass, and so does `MemoryError`, which is not the file's fault: check sizes first.
    """
    try:
        yield
    except (AnytimeError, MemoryError):
        raise
    except PermissionError as error:
        raise _unreadable(path, error, expected, fix) from None
    except Exception as error:
        why = " ".join(str(error).split())[:_REASON] or type(error).__name__
        raise kind(f"{path} {what}: {why}", expected=expected, fix=fix, path=path) from error


def read_json(path: str | Path, *, most: int = 1 << 28, expected: str, fix: str = "copy or write it again") -> Any:
    """The document of a JSON file; NaN and infinity, which JSON lacks, are refused."""
    return json_from(read_file(path, most=most, expected=expected, fix=fix), path, expected=expected, fix=fix)


def json_from(data: bytes | str, path: str | Path, *, expected: str, fix: str = "copy or write it again") -> Any:
    """The document in the bytes of a JSON file, as in `read_json`."""
    with parsing(path, expected=expected, fix=fix, kind=FormatError, what="is not JSON"):
        return json.loads(data, parse_constant=_refuse_constant)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _check_regular(mode: int, path: str | Path, expected: str) -> None:
    if not stat.S_ISREG(mode):
        raise FormatError(f"{path} is {_kind(mode)}", expected=expected, fix="pass the path of a regular file", path=path)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_ISDIR: "a folder",
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
    }
    return next((word for test, word in kinds.items() if test(mode)), "not a regular file")


def _unreadable(path: str | Path, error: OSError | ValueError, expected: str, fix: str) -> FileError:
    number = getattr(error, "errno", None)
    if number in (errno.ENOENT, errno.ENOTDIR):
        return MissingFileError(f"there is no file {path}", expected=expected, fix=fix, path=path)
    why = getattr(error, "strerror", None) or str(error)
    if number in (errno.EACCES, errno.EPERM):
        fix = "change its permissions, e.g. with chmod u+r"
    return FileError(f"{path} cannot be read: {why}", expected=expected, fix=fix, path=path)

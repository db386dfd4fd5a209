"""Reading what others wrote: each file is opened here, and whatever a parser makes of damaged bytes becomes a typed error.

`open_file` takes ordinary files only: a pipe would wait for a writer for ever, a device never ends. `parsing` is the boundary
around a parser: libraries that read files raise nearly anything on bytes that nobody wrote on purpose.
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


def open_file(path: str | Path, *, expected: str = "a file", fix: str = "check the path") -> BufferedReader:
    """Open an ordinary file to read its bytes; a link to one is followed.

    Args:
        path: The file.
        expected: What it should hold, for the error.
        fix: What to do if it cannot be read.
    """
    handle = -1
    try:
        _check_ordinary(Path(path).stat().st_mode, path, expected)
        # Where a pipe takes the file's place in between, this still returns at once. Ordinary files ignore the flag.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        _check_ordinary(os.fstat(handle).st_mode, path, expected)
        return os.fdopen(handle, "rb")
    except BaseException as error:
        if handle >= 0:
            os.close(handle)
        if isinstance(error, OSError | ValueError) and not isinstance(error, AnytimeError):
            raise _unreadable(path, error, expected, fix) from None
        raise


def read_file(path: str | Path, *, most: int = _LARGEST, expected: str = "a file", fix: str = "check the path") -> bytes:
    """The bytes of an ordinary file; one of more than `most` bytes is refused."""
    with open_file(path, expected=expected, fix=fix) as file:
        try:
            data = file.read(most + 1)
        except OSError as error:
            raise _unreadable(path, error, expected, fix) from None
    if len(data) > most:
        raise FormatError(f"{path} has more than {most:,} bytes", expected=expected, fix=fix, path=path)
    return data


def is_file(path: str | Path) -> bool:
    """Whether there is an ordinary file; no error for what cannot be the path of one."""
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
    """The boundary around a parser: each failure inside becomes a typed error about this file.

    Errors of this library pass, and so does a lack of memory: that is not the file's fault, so sizes are to be checked first.

    Args:
        path: The file that is parsed.
        expected: What it should hold.
        fix: What to do about it.
        kind: Which error.
        what: What is wrong with it, in words that come before the parser's own.
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
    """The document in a JSON file; NaN and infinity, which JSON does not have, are refused."""
    return json_from(read_file(path, most=most, expected=expected, fix=fix), path, expected=expected, fix=fix)


def json_from(data: bytes | str, path: str | Path, *, expected: str, fix: str = "copy or write it again") -> Any:
    """The document in the bytes of a JSON file, as `read_json`."""
    with parsing(path, expected=expected, fix=fix, kind=FormatError, what="is not JSON"):
        return json.loads(data, parse_constant=_refuse_constant)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _check_ordinary(mode: int, path: str | Path, expected: str) -> None:
    if not stat.S_ISREG(mode):
        raise FormatError(f"{path} is {_kind(mode)}", expected=expected, fix="name an ordinary file", path=path)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_ISDIR: "a folder",
        stat.S_ISFIFO: "a pipe",
        stat.S_ISSOCK: "a socket",
        stat.S_ISCHR: "a device",
        stat.S_ISBLK: "a device",
    }
    return next((word for test, word in kinds.items() if test(mode)), "not an ordinary file")


def _unreadable(path: str | Path, error: OSError | ValueError, expected: str, fix: str) -> FileError:
    number = getattr(error, "errno", None)
    if number in (errno.ENOENT, errno.ENOTDIR):
        return MissingFileError(f"there is no file {path}", expected=expected, fix=fix, path=path)
    why = getattr(error, "strerror", None) or str(error)
    if number in (errno.EACCES, errno.EPERM):
        fix = "check its permissions"
    return FileError(f"{path} cannot be read: {why}", expected=expected, fix=fix, path=path)

"""Atomic files: written under a temporary name in the same folder, synced and renamed.

A reader, a full disk or `kill -9` finds the old file or the new one, never a part.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from anytime.errors import AnytimeError, FileError, MissingFileError

if sys.platform != "win32":
    import fcntl

TEMPORARY = re.compile(r"\.anytime-(file|bundle)-[0-9a-f]{16}\.tmp")
_LOCK_SECONDS = 60.0
_FIXES = {
    errno.ENOSPC: "free some space, or use another disk",
    errno.EACCES: "change the permissions, or use another folder",
    errno.EPERM: "change the permissions, or use another folder",
    errno.EROFS: "use a disk that is not mounted read-only",
    errno.ENOTDIR: "use another path: a part of this one is a file",
    errno.EEXIST: "use another path: a part of this one is a file",
    errno.EIO: "use another disk: this one reports a fault",
}


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file, and its folders, completely or not at all; links are followed, permissions of an old file kept."""
    with typed_errors(path):
        target = Path(path).resolve()
        mode = file_mode(target)
        make_folder(target.parent)
        with lock_folder(target.parent) as alone:
            if alone:
                clear_temporary(target.parent, "file")
            temporary = write_temporary(target.parent, data, kind="file", mode=mode)
            try:
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            sync_folder(target.parent)


def replace_file(made: Path, path: str | Path) -> None:
    """Move a finished and synced file to a path on the same disk; links are followed, permissions of an old file kept."""
    with typed_errors(path):
        target = Path(path).resolve()
        mode = file_mode(target)
        if mode is not None:
            made.chmod(mode)
        made.replace(target)
        sync_folder(target.parent)


def write_text(path: str | Path, text: str) -> None:
    """Write a text in UTF-8 as `write_bytes` does; line ends stay as they are."""
    with typed_errors(path):
        write_bytes(path, text.encode())


def write_json(path: str | Path, document: Any) -> None:
    """Write a JSON document as `write_bytes` does; NaN and infinity, which JSON lacks, are refused."""
    with typed_errors(path):
        write_text(path, json_text(document))


def json_text(document: Any) -> str:
    """A JSON document as it is written to files."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def make_folder(folder: Path) -> None:
    """Create a folder and its parents so that they survive a loss of power."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


@contextmanager
def typed_errors(path: str | Path, *, verb: str = "written") -> Iterator[None]:
    """Turn errors of the operating system about a path into errors of this library."""
    try:
        yield
    except AnytimeError:
        raise
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        kind = MissingFileError if isinstance(error, FileNotFoundError) else FileError
        number = getattr(error, "errno", None) or 0
        raise kind(
            f"{str(path)!r} cannot be {verb}: {getattr(error, 'strerror', None) or error}",
            expected=f"a path and content that can be {verb} (JSON has no NaN or infinity, UTF-8 no lone surrogates)",
            fix=_FIXES.get(number, "use another path" if number else "replace such values in the content"),
            path=path,
        ) from error


def write_temporary(folder: Path, data: bytes, *, kind: str, mode: int | None = None) -> Path:
    """Write a new synced file; remove it if that fails."""
    temporary = folder / f".anytime-{kind}-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    # What replaces a private file is private from its first byte.
    handle = os.open(temporary, flags, 0o666 if mode is None else 0o600)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(handle, rest) :]
            if mode is not None:
                temporary.chmod(mode)
            os.fsync(handle)
        finally:
            os.close(handle)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


@contextmanager
def lock_folder(folder: Path, *, shared: bool = False) -> Iterator[bool]:
    """Lock a folder against other writers; yields whether the file system supports it."""
    if sys.platform == "win32":
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield _wait_for_lock(handle, folder, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    finally:
        # Unlocked explicitly: a process forked in between shares the lock and would keep it.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _wait_for_lock(handle: int, folder: Path, kind: int) -> bool:
    until = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < until:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.005)
        except OSError:
            return False
    raise FileError(
        f"another process has been writing in {folder} for {_LOCK_SECONDS:g} s",
        expected="one writer at a time",
        fix="wait for that process or stop it, then try again",
        path=folder,
    )


def clear_temporary(folder: Path, *kinds: str) -> None:
    """Remove temporary files of killed writers; only under the lock, as they may belong to a running writer otherwise."""
    for path in list(folder.iterdir()):
        match = TEMPORARY.fullmatch(path.name)
        if match and match[1] in kinds:
            with suppress(OSError):
                path.unlink()


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, where the file system supports it."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def file_mode(target: Path) -> int | None:
    """The permission bits of a file that will be replaced, or None where there is none."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        raise FileError(f"{target} is {what}", expected="a new path or a regular file", fix="use another path", path=target)
    return mode & 0o777

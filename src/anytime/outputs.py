"""Where results may be written: no command overwrites what it did not write, and one process at a time trains in a folder.

The kind of a result is in its manifest (`anytime.artifacts.write_bundle`) or in the first bytes of a file. The checks run
before the work, so that a wrong path costs nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anytime.artifacts import bundle_kind, bundle_names, make_folder, overwrites, typed_errors
from anytime.errors import FileError, LockedError

if sys.platform != "win32":
    import fcntl

LOCK = ".anytime-run.lock"
_HEAD = 512
_held: set[tuple[Path, int]] = set()
"""Which thread of this process holds the lock of a folder."""


def check_folder(folder: str | Path, *, kind: str, inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuse a folder for results unless it is new, empty, or holds an earlier bundle of the same kind.

    `inputs` are the paths that the command reads, or None; they must not be overwritten.
    """
    place, given = Path(folder), _existing(inputs)
    _refuse_inputs(place, given)
    if not os.path.lexists(place):
        return
    if not exists(place, Path.is_dir):
        raise FileError(f"{place} is a file", expected="a folder", fix="use another --out", path=place)
    if not _names(place):
        return
    found = bundle_kind(place)
    if found != kind:
        held = "files that this command did not write" if not found else f"the results of another command ({found})"
        raise overwrites(place, f"holds {held}")
    for name in bundle_names(place):
        _refuse_inputs(place / name, given)


def check_new_folder(folder: str | Path, *, fix: str) -> None:
    """Refuse a folder that holds anything but a lock."""
    place = Path(folder)
    if os.path.lexists(place) and (not exists(place, Path.is_dir) or _names(place)):
        error = overwrites(place, "is not empty" if exists(place, Path.is_dir) else "is a file")
        error.expected, error.fix = "a new or an empty folder", fix
        raise error


def check_file(path: str | Path, *, ours: Callable[[bytes], bool], inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuse a path for a single file unless it is new, or holds an earlier file of the same kind.

    `ours` decides from the first bytes whether a file is of this kind. `inputs` are as in `check_folder`.
    """
    place = Path(path)
    _refuse_inputs(place, _existing(inputs))
    if exists(place, Path.is_dir):
        raise FileError(f"{place} is a folder", expected="the path of a file", fix=f"use {place / 'NAME'}", path=place)
    if not exists(place, Path.is_file):
        if os.path.lexists(place):
            raise FileError(
                f"{place} is not a file, or a link that leads to none", expected="a new path", fix="use another", path=place
            )
        return
    try:
        with place.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise FileError(
            f"{place} cannot be read: {error.strerror}", expected="a new path", fix="use another", path=place
        ) from error
    if not ours(head):
        raise overwrites(place, "was not written by this command")


@contextmanager
def lock_run(folder: str | Path, *, doing: str = "training") -> Iterator[None]:
    """Lock a folder against other processes and threads that train or write there; the lock ends with the process.

    A thread may take it again. Without file locks it does nothing.
    """
    with typed_errors(folder):
        place = Path(folder).resolve()
        held = place, threading.get_ident()
        if held in _held or sys.platform == "win32":
            handle = None
        else:
            make_folder(place)
            handle = _take(place, doing)
    if handle is None:
        yield
        return
    _held.add(held)
    try:
        yield
    finally:
        _held.discard(held)
        (place / LOCK).unlink(missing_ok=True)
        os.close(handle)


def _take(place: Path, doing: str) -> int:
    while True:
        handle = os.open(place / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            error = _locked(place, handle, doing)
            os.close(handle)
            raise error from None
        except OSError:  # a file system without locks
            return handle
        # The previous holder may have removed the file in between: then this lock would be without effect.
        with suppress(FileNotFoundError):
            if (place / LOCK).stat().st_ino == os.fstat(handle).st_ino:
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
                return handle
        os.close(handle)


def _locked(place: Path, handle: int, doing: str) -> LockedError:
    written = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    pid = int(written) if written.isascii() and written.isdigit() else None
    return LockedError(
        f"process {pid or 'unknown'} is {doing} in {place}",
        expected=f"one process {doing} per folder",
        fix="wait for that process or stop it, or use another --out",
        path=place,
        pid=pid,
    )


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.name != LOCK]
    except OSError as error:
        raise FileError(
            f"{folder} cannot be read: {error.strerror}", expected="a readable folder", fix="use another folder", path=folder
        ) from error


def exists(path: str | Path, kind: Callable[[Path], bool] = Path.exists) -> bool:
    """Whether the path exists, or is of a kind; false for what cannot be a path, such as one with a NUL."""
    try:
        return kind(Path(path))
    except (OSError, ValueError):
        return False


def _existing(inputs: Iterable[str | Path | None]) -> list[Path]:
    return [Path(path) for path in inputs if path is not None and exists(path)]


def _refuse_inputs(place: Path, inputs: Iterable[Path]) -> None:
    if not exists(place):
        return
    for path in inputs:
        if place.samefile(path):
            raise overwrites(place, "is an input of this command" if place == path else f"is {path}, an input of this command")

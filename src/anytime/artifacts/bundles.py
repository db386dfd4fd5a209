"""Bundles: several files that belong together, with a manifest of their SHA-256.

A writer first writes every file under a temporary name, then commits by renaming a journal that lists which temporary file
goes where. Readers follow a pending journal without writing, and the next writer completes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from anytime.artifacts.files import (
    TEMPORARY,
    clear_temporary,
    file_mode,
    json_text,
    lock_folder,
    make_folder,
    sync_folder,
    typed_errors,
    write_bytes,
    write_temporary,
)
from anytime.errors import FileError, FormatError, IntegrityError, MissingFileError, OptionError, OverwriteError

_VERSION = 1
_MANIFEST = "manifest.json"
_JOURNAL = ".anytime-journal.json"
_PLAIN_NAME = re.compile(r"\w[\w.+=@, -]{0,199}", re.ASCII)
_DOCUMENT_BYTES = 1 << 24


class _Entry(NamedTuple):
    path: Path
    size: int
    sha256: str


def write_bundle(folder: str | Path, files: Mapping[str, bytes], *, kind: str = "") -> None:
    """Write files that belong together, and their manifest, so that a reader gets all the old or all the new ones.

    An earlier bundle of the same kind is replaced; with a `kind`, one of another kind and files outside of a bundle are not.
    Other files of the folder are not touched. A disk fault after the commit is raised too, but readers get the new bundle.

    Args:
        folder: The folder; created if it does not exist.
        files: Contents by plain file name: ASCII, not hidden, not `manifest.json`.
        kind: What the bundle is, such as `model`, for the manifest.
    """
    _check_names(files)
    with typed_errors(folder):
        place = Path(folder).resolve()
        make_folder(place)
        with lock_folder(place) as alone:
            _finish(place, _pending(place))
            before = _replaceable(place, kind, files)
            if alone:
                clear_temporary(place, "file", "bundle")
            entries = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
            _finish(place, _commit(place, {**files, _MANIFEST: _document(entries, kind)}))
            for name in before - files.keys():
                (place / name).unlink(missing_ok=True)


def seal(folder: str | Path, names: Iterable[str], *, kind: str) -> None:
    """Write the manifest of files that a folder already holds, so that a later change to one of them is noticed."""
    with typed_errors(folder):
        place = Path(folder).resolve()
        files = {}
        for name in names:
            with _open_regular(place / name) as file:
                files[name] = {
                    "bytes": os.fstat(file.fileno()).st_size,
                    "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
                }
        _check_names(files)
        write_bytes(place / _MANIFEST, _document(files, kind))


def bundle_kind(folder: str | Path) -> str | None:
    """The kind in the manifest of a folder, an empty string without one; None where there is no manifest."""
    with typed_errors(folder, verb="read"):
        place = Path(folder).resolve()
        found = _present(place)
        return None if found is None else str(found.get("kind", ""))


def bundle_names(folder: str | Path) -> set[str]:
    """The names in the manifest of a folder; empty where there is no manifest."""
    with typed_errors(folder, verb="read"):
        return {name for name in (_present(Path(folder).resolve()) or {"files": ()})["files"] if _is_plain(name)}


def read_sealed(folder: str | Path, name: str) -> bytes:
    """One file of a bundle, checked against the manifest; an error if the manifest does not name it."""
    if bundle_kind(folder) is None:
        raise IntegrityError(
            f"{folder} has no {_MANIFEST}, so {name} cannot be verified",
            expected="a folder with its manifest",
            fix=f"copy all files of the folder again; for a run, `anytime train --resume --out {folder}` writes the manifest",
            path=Path(folder) / name,
        )
    with _entries(folder) as entries:
        if name not in entries:
            raise IntegrityError(
                f"{Path(folder) / name} is not in the manifest of its folder",
                expected="a file of the bundle",
                fix="remove the file, or copy the folder again",
                path=Path(folder) / name,
            )
        return _check(entries[name], keep=True)


def check_sealed(path: str | Path) -> None:
    """Raise if the manifest in the folder of a file names the file and the file has changed."""
    folder, name = Path(path).resolve().parent, Path(path).resolve().name
    if not (folder / _MANIFEST).is_file() or not _is_plain(name):
        return
    try:
        with _entries(folder) as entries:
            entry = entries.get(name)
    except FormatError:  # the manifest.json of another program
        return
    if entry is not None:
        _check(entry)


def read_bundle(folder: str | Path) -> dict[str, bytes]:
    """The contents of a bundle by file name, each checked against the manifest."""
    with _entries(folder) as entries:
        return {name: _check(entry, keep=True) for name, entry in entries.items()}


@contextmanager
def bundle_reader(folder: str | Path) -> Iterator[Callable[[str, int], bytes]]:
    """A function `read(name, largest)` that reads and checks one file of an untrusted bundle; other files are not opened.

    A file of more than `largest` bytes is refused before it is read.
    """
    with _entries(folder) as entries:

        def read(name: str, largest: int) -> bytes:
            if name not in entries:
                raise _unusable(Path(folder) / _MANIFEST, f"does not name {name[:100]!r}", FormatError)
            if entries[name].size > largest:
                what = f"has {entries[name].size} bytes"
                raise _unusable(entries[name].path, what, FormatError, expected=f"at most {largest} bytes")
            return _check(entries[name], keep=True)

        yield read


def open_bundle(folder: str | Path) -> dict[str, Path]:
    """The paths of the files of a bundle, each checked in chunks; for files too large for memory.

    If a writer was killed half-way these are temporary names, valid until the next write.
    """
    with _entries(folder) as entries:
        for entry in entries.values():
            _check(entry)
        return {name: entry.path for name, entry in entries.items()}


def verify_bundle(folder: str | Path) -> None:
    """Raise unless every file of the bundle matches the manifest."""
    open_bundle(folder)


def overwrites(path: str | Path, why: str) -> OverwriteError:
    """The error for a path that must not be overwritten."""
    return OverwriteError(
        f"{path} {why}",
        expected="a new path, an empty folder, or results of an earlier call of the same command",
        fix="use another --out (in Python, another path), or move the old files away",
        path=path,
    )


def _commit(folder: Path, contents: Mapping[str, bytes]) -> dict[str, str]:
    """Write all files under temporary names, then the journal that commits them."""
    modes = {name: file_mode(folder / name) for name in contents}
    made: list[Path] = []
    try:
        for name, data in contents.items():
            made.append(write_temporary(folder, data, kind="bundle", mode=modes[name]))
        moves = {name: path.name for name, path in zip(contents, made, strict=True)}
        made.append(write_temporary(folder, _document(moves), kind="bundle"))
        sync_folder(folder)
        made[-1].replace(folder / _JOURNAL)
    except BaseException:
        # Ctrl-C may arrive just after the rename: then these files are the bundle, and stay.
        for path in [] if (folder / _JOURNAL).exists() else made:
            path.unlink(missing_ok=True)
        raise
    sync_folder(folder)
    return moves


def _finish(folder: Path, moves: Mapping[str, str]) -> None:
    """Apply a committed journal and remove it; idempotent."""
    if moves:
        for name, temporary in moves.items():
            with suppress(FileNotFoundError):
                (folder / temporary).replace(folder / name)
        sync_folder(folder)
        (folder / _JOURNAL).unlink(missing_ok=True)
        sync_folder(folder)


def _pending(folder: Path) -> dict[str, str]:
    """Temporary names by target, from the journal of a writer that was killed after its commit."""
    path = folder / _JOURNAL
    if not os.path.lexists(path):
        return {}
    moves: dict[str, str] = _load(path)["files"]
    for name, temporary in moves.items():
        if not (_is_plain(name) or name == _MANIFEST) or not TEMPORARY.fullmatch(str(temporary)):
            raise _unusable(path, f"would move {temporary!r} to {name!r}", FormatError)
    if _MANIFEST not in moves:
        raise _unusable(path, f"does not name {_MANIFEST}", FormatError)
    return moves


@contextmanager
def _entries(folder: str | Path) -> Iterator[dict[str, _Entry]]:
    """The manifest's entry for each file, and its current path."""
    with typed_errors(folder, verb="read"):
        place = Path(folder).resolve()
        with lock_folder(place, shared=True):
            where = _where(place)
            manifest = where(_MANIFEST)
            entries = {}
            for name, entry in _load(manifest)["files"].items():
                size, sha256 = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
                if not _is_plain(name) or type(size) is not int or not isinstance(sha256, str):
                    raise _unusable(manifest, f"has the entry {str(entry)[:100]} for {name!r}", FormatError)
                entries[name] = _Entry(where(name), size, sha256)
            yield entries


def _where(place: Path) -> Callable[[str], Path]:
    """The current path of a file of a bundle: a killed writer may have left it under its temporary name."""
    pending = ((name, place / temporary) for name, temporary in _pending(place).items())
    moved = {name: path for name, path in pending if os.path.lexists(path)}
    return lambda name: moved.get(name, place / name)


def _present(place: Path) -> dict[str, Any] | None:
    """The manifest of a folder, or None; without a lock, which a writer already holds."""
    manifest = _where(place)(_MANIFEST)
    return _load(manifest) if os.path.lexists(manifest) else None


def _replaceable(place: Path, kind: str, files: Mapping[str, bytes]) -> set[str]:
    """The names of the bundle that `files` may replace; refuses another kind, and files outside of a bundle."""
    if not kind:
        return set()
    try:
        found = bundle_kind(place)
    except FileError:
        raise overwrites(place, f"has a {_MANIFEST} that cannot be read") from None
    if found is not None and found != kind:
        raise overwrites(place, f"holds {f'files of kind {found!r}' if found else 'another bundle'}")
    foreign = [name for name in files if os.path.lexists(place / name) and not (place / name).is_dir()]
    if found is None and foreign:
        raise overwrites(place / foreign[0], "was not written by this command")
    return bundle_names(place)


def _document(files: Mapping[str, Any], kind: str = "") -> bytes:
    return json_text({"version": _VERSION, **({"kind": kind} if kind else {}), "files": files}).encode()


def _load(path: Path) -> dict[str, Any]:
    """A manifest or a journal, with a table of `files`."""
    with _open_regular(path) as file:
        data = file.read(_DOCUMENT_BYTES + 1)
    try:
        document = json.loads(data if len(data) <= _DOCUMENT_BYTES else b"")
    except (ValueError, RecursionError) as error:
        raise _unusable(path, f"is not JSON: {error}", FormatError) from error
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        version = str(document.get("version"))[:20] if isinstance(document, dict) else "None"
        raise _unusable(path, f"has version {version}", FormatError, expected=f"version {_VERSION}")
    if not isinstance(document.get("files"), dict):
        raise _unusable(path, "has no table of files", FormatError)
    return document


def _open_regular(path: Path) -> BufferedReader:
    """Open a file of a bundle; links, which could lead anywhere, and devices are refused."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError as error:
        raise _unusable(path, "does not exist", MissingFileError) from error
    if not stat.S_ISREG(mode):
        raise _unusable(path, f"is {'a symbolic link' if stat.S_ISLNK(mode) else 'not a regular file'}")
    return path.open("rb")


def _check(entry: _Entry, *, keep: bool = False) -> bytes:
    """Raise unless a file matches the manifest; return its content with `keep`."""
    with _open_regular(entry.path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry.size:
            raise _unusable(entry.path, f"has {size} bytes", expected=f"{entry.size} bytes, as the manifest says")
        data = file.read() if keep else b""
        sha256 = (hashlib.sha256(data) if keep else hashlib.file_digest(file, "sha256")).hexdigest()
    if sha256 != entry.sha256:
        raise _unusable(entry.path, f"has SHA-256 {sha256}", expected=f"{entry.sha256[:64]}, as the manifest says")
    return data


def _unusable(path: Path, why: str, kind: type[FileError] = IntegrityError, *, expected: str | None = None) -> FileError:
    return kind(
        f"{path} {why}",
        expected=expected or f"a complete folder: {_MANIFEST} and the regular files that it names",
        fix="copy the bundle again, with hidden files, or write it again with this release"
        + (f", after removing {path.name}" if path.name == _JOURNAL else ""),
        path=path,
    )


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and bool(_PLAIN_NAME.fullmatch(name)) and name.lower() != _MANIFEST


def _check_names(files: Collection[str]) -> None:
    bad = [name for name in files if not _is_plain(name)]
    if bad or len({name.lower() for name in files}) < len(files):
        raise OptionError(
            f"a bundle of files named {(bad or list(files))[:10]}",
            expected=f"plain names of ASCII letters, digits and ._-+=@, not {_MANIFEST}, that differ in more than case",
            fix="pass file names without a folder",
        )

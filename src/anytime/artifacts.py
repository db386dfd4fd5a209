"""Safe, atomic, checksummed files.

A file is written under a temporary name beside its place, synced and renamed: a reader, a full disk or `kill -9`
meets the old file or the new one, never a part. A bundle is several files that belong together, with a manifest of
their SHA-256. Its commit point is the rename of a journal that says which temporary file goes where; readers look
through a pending journal without writing, and the next writer finishes it. Tensors travel as safetensors alone.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anytime.errors import (
    AnytimeError,
    DtypeError,
    FileError,
    FormatError,
    IntegrityError,
    MissingFileError,
    OptionError,
    OverwriteError,
)

if sys.platform != "win32":
    import fcntl
if TYPE_CHECKING:
    from torch import Tensor

_VERSION = 1
_MANIFEST = "manifest.json"
_JOURNAL = ".anytime-journal.json"
_PLAIN_NAME = re.compile(r"\w[\w.+=@, -]{0,199}", re.ASCII)
_TEMPORARY = re.compile(r"\.anytime-(file|bundle)-[0-9a-f]{16}\.tmp")
_LOCK_SECONDS = 60.0
_DOCUMENT_BYTES = 1 << 24
_FIXES = {
    errno.ENOSPC: "free some space, or use another disk",
    errno.EACCES: "change the permissions, or use another folder",
    errno.EPERM: "change the permissions, or use another folder",
    errno.EROFS: "use a disk that may be written to",
    errno.ENOTDIR: "a part of the path is a file: use another path",
    errno.EEXIST: "a part of the path is a file: use another path",
    errno.EIO: "the disk reports a fault: use another one",
}


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace a file, or make it and its folders: all of `data`, or, on any failure, nothing.

    A symbolic link is followed, and permission bits of the replaced file are kept.
    """
    with typed_errors(path):
        target = Path(path).resolve()
        mode = _mode(target)
        make_folder(target.parent)
        with _lock(target.parent) as alone:
            if alone:
                _clear(target.parent, "file")
            temporary = _write_temporary(target.parent, data, kind="file", mode=mode)
            try:
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _sync(target.parent)


def write_text(path: str | Path, text: str) -> None:
    """Replace a file by `text` in UTF-8, as `write_bytes` does; line ends stay as they are."""
    with typed_errors(path):
        write_bytes(path, text.encode())


def write_json(path: str | Path, document: Any) -> None:
    """Replace a file by a JSON document, as `write_bytes` does; NaN and infinity, which JSON lacks, are refused."""
    with typed_errors(path):
        write_text(path, json_text(document))


def json_text(document: Any) -> str:
    """A JSON document as it is written to files."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_bundle(folder: str | Path, files: Mapping[str, bytes], *, kind: str = "") -> None:
    """Write files that belong together, and their manifest, so that a reader has all the old or all the new ones.

    An earlier bundle of the same kind is replaced. One of another kind is not, and neither is a file that no bundle has
    written; a caller who gives no kind answers for that. Other files of the folder are not touched. A disk fault after the
    commit point is raised too, though readers already get the new bundle then.

    Args:
        folder: Where; it is made if there is none.
        files: Contents by plain file name: ASCII, not hidden, not `manifest.json`.
        kind: What the bundle is, such as `model`, for the manifest.
    """
    _check_names(files)
    with typed_errors(folder):
        place = Path(folder).resolve()
        make_folder(place)
        with _lock(place) as alone:
            _finish(place, _pending(place))
            before = _replaceable(place, kind, files)
            if alone:
                _clear(place, "file", "bundle")
            _finish(place, _commit(place, {**files, _MANIFEST: _manifest(files, kind)}))
            for name in before - files.keys():
                (place / name).unlink(missing_ok=True)


def seal(folder: str | Path, names: Iterable[str], *, kind: str) -> None:
    """Write the manifest of files that are in a folder already, so that a later change to one of them is noticed."""
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
    """What the manifest of a folder says it is, the empty text where it does not say; None where there is no manifest."""
    with typed_errors(folder, verb="read"):
        place = Path(folder).resolve()
        found = _present(place)
        return None if found is None else str(found.get("kind", ""))


def bundle_names(folder: str | Path) -> set[str]:
    """The names in the manifest of a folder; none where there is no manifest."""
    with typed_errors(folder, verb="read"):
        return {name for name in (_present(Path(folder).resolve()) or {"files": ()})["files"] if _is_plain(name)}


def read_sealed(folder: str | Path, name: str) -> bytes:
    """One file of a bundle, checked against the manifest; an error if the manifest does not name it."""
    if bundle_kind(folder) is None:
        raise IntegrityError(
            f"{folder} has no {_MANIFEST}, so nobody can tell whether {name} was changed",
            expected="a folder that was written with its manifest",
            fix=f"copy it again, all files; for a run, `anytime train --resume --out {folder}` writes the manifest",
            path=Path(folder) / name,
        )
    with _entries(folder) as entries:
        if name not in entries:
            raise IntegrityError(
                f"{Path(folder) / name} is not in the manifest of its folder",
                expected="a file that was written together with its folder",
                fix="remove it, or copy the folder again",
                path=Path(folder) / name,
            )
        return _check(entries[name], keep=True)


def check_sealed(path: str | Path) -> None:
    """Raise if the folder of a file has a manifest that names the file and the file was changed since."""
    folder, name = Path(path).resolve().parent, Path(path).resolve().name
    if not (folder / _MANIFEST).is_file() or not _is_plain(name):
        return
    try:
        with _entries(folder) as entries:
            entry = entries.get(name)
    except FormatError:  # somebody else's manifest.json
        return
    if entry is not None:
        _check(entry)


def read_bundle(folder: str | Path) -> dict[str, bytes]:
    """The files of a bundle, each checked against the manifest."""
    with _entries(folder) as entries:
        return {name: _check(entry, keep=True) for name, entry in entries.items()}


@contextmanager
def bundle_reader(folder: str | Path) -> Iterator[Callable[[str, int], bytes]]:
    """A function that reads one file of a bundle, checked: `read(name, largest)`. No file that nobody asks for is opened.

    For bundles that may come from anybody: a file of more than `largest` bytes is refused before it is read.
    """
    with _entries(folder) as entries:

        def read(name: str, largest: int) -> bytes:
            if name not in entries:
                raise _unusable(Path(folder) / _MANIFEST, f"does not name {name[:100]!r}", FormatError)
            if entries[name].size > largest:
                came = f"has {entries[name].size} bytes"
                raise _unusable(entries[name].path, came, FormatError, expected=f"at most {largest} bytes")
            return _check(entries[name], keep=True)

        yield read


def open_bundle(folder: str | Path) -> dict[str, Path]:
    """Where the files of a bundle lie, each checked in chunks; for files too large to hold.

    Where a writer was killed half-way these are temporary names, good until the next write.
    """
    with _entries(folder) as entries:
        for entry in entries.values():
            _check(entry)
        return {name: entry.path for name, entry in entries.items()}


def verify_bundle(folder: str | Path) -> None:
    """Raise unless every file of the bundle is there and is what the manifest says."""
    open_bundle(folder)


def tensors_to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Tensors as safetensors: the same bytes for the same content. Tensors that share memory are stored apart."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save

    try:
        copies = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
        return _sort_metadata(save(copies, dict(metadata) if metadata else None))
    except (SafetensorError, ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise DtypeError(
            f"these tensors cannot be stored: {error}",
            expected="dense tensors by name, and metadata of strings",
            fix="make sparse or quantised tensors dense; turn metadata into strings, e.g. with json.dumps",
        ) from error


def tensors_from_bytes(data: bytes, *, path: str | Path = "tensors") -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. `path` names the file in an error."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, AssertionError, OverflowError) as error:
        raise IntegrityError(
            f"{path} is not a whole safetensors file: {error}",
            expected="a file that `tensors_to_bytes` or another safetensors writer made",
            fix="copy or write it again",
            path=path,
        ) from error


def metadata_from_bytes(data: bytes, *, path: str | Path = "tensors") -> dict[str, str]:
    """The metadata of a safetensors file."""
    tensors_from_bytes(data, path=path)
    return dict(_split(data)[0].get("__metadata__", {}))


class _Entry(NamedTuple):
    path: Path
    size: int
    sha256: str


def _commit(folder: Path, contents: Mapping[str, bytes]) -> dict[str, str]:
    """Write all files under temporary names, then the journal that makes them the bundle."""
    modes = {name: _mode(folder / name) for name in contents}
    made: list[Path] = []
    try:
        for name, data in contents.items():
            made.append(_write_temporary(folder, data, kind="bundle", mode=modes[name]))
        moves = {name: path.name for name, path in zip(contents, made, strict=True)}
        made.append(_write_temporary(folder, _document(moves), kind="bundle"))
        _sync(folder)
        made[-1].replace(folder / _JOURNAL)
    except BaseException:
        # Ctrl-C may come just after the rename: then these files are the bundle, and stay.
        for path in [] if (folder / _JOURNAL).exists() else made:
            path.unlink(missing_ok=True)
        raise
    _sync(folder)
    return moves


def _finish(folder: Path, moves: Mapping[str, str]) -> None:
    """Do what a committed journal says and remove it; doing so again changes nothing."""
    if moves:
        for name, temporary in moves.items():
            with suppress(FileNotFoundError):
                (folder / temporary).replace(folder / name)
        _sync(folder)
        (folder / _JOURNAL).unlink(missing_ok=True)
        _sync(folder)


def _pending(folder: Path) -> dict[str, str]:
    """Temporary names by target, from the journal of a writer that was stopped after its commit."""
    path = folder / _JOURNAL
    if not os.path.lexists(path):
        return {}
    moves: dict[str, str] = _load(path)["files"]
    for name, temporary in moves.items():
        if not (_is_plain(name) or name == _MANIFEST) or not _TEMPORARY.fullmatch(str(temporary)):
            raise _unusable(path, f"would move {temporary!r} to {name!r}", FormatError)
    if _MANIFEST not in moves:
        raise _unusable(path, f"does not name {_MANIFEST}", FormatError)
    return moves


@contextmanager
def _entries(folder: str | Path) -> Iterator[dict[str, _Entry]]:
    """What the manifest says of each file, and where that file lies now."""
    with typed_errors(folder, verb="read"):
        place = Path(folder).resolve()
        with _lock(place, shared=True):
            where = _where(place)
            manifest = where(_MANIFEST)
            entries = {}
            for name, entry in _load(manifest)["files"].items():
                size, sha256 = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
                if not _is_plain(name) or type(size) is not int or not isinstance(sha256, str):
                    raise _unusable(manifest, f"says {str(entry)[:100]} of {name!r}", FormatError)
                entries[name] = _Entry(where(name), size, sha256)
            yield entries


def _where(place: Path) -> Callable[[str], Path]:
    """Where a file of a bundle lies now: a writer that was stopped may have left it under its temporary name."""
    pending = ((name, place / temporary) for name, temporary in _pending(place).items())
    moved = {name: path for name, path in pending if os.path.lexists(path)}
    return lambda name: moved.get(name, place / name)


def _present(place: Path) -> dict[str, Any] | None:
    """The manifest of a folder, or None; without a lock, which a writer has taken already."""
    manifest = _where(place)(_MANIFEST)
    return _load(manifest) if os.path.lexists(manifest) else None


def _replaceable(place: Path, kind: str, files: Mapping[str, bytes]) -> set[str]:
    """The names of the bundle that `files` may replace; refuses one of another kind, and files that are not of a bundle."""
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


def overwrites(path: str | Path, why: str) -> OverwriteError:
    """The error for a path that must not be written over."""
    return OverwriteError(
        f"{path} {why}",
        expected="a new path, an empty folder, or what an earlier call of the same command wrote",
        fix="choose another place with --out (in Python, another path), or move the old files away",
        path=path,
    )


def _manifest(files: Mapping[str, bytes], kind: str) -> bytes:
    entries = {name: {"bytes": len(x), "sha256": hashlib.sha256(x).hexdigest()} for name, x in files.items()}
    return _document(entries, kind)


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
    """Open a file of a bundle: no symbolic link, which could lead anywhere, and no device."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError as error:
        raise _unusable(path, "does not exist", MissingFileError) from error
    if not stat.S_ISREG(mode):
        raise _unusable(path, f"is {'a symbolic link' if stat.S_ISLNK(mode) else 'not an ordinary file'}")
    return path.open("rb")


def _check(entry: _Entry, *, keep: bool = False) -> bytes:
    """Raise unless a file is what the manifest says; give its content if that is to be kept."""
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
        expected=expected or f"a folder made by `write_bundle`: {_MANIFEST} and the ordinary files it names",
        fix="check the path; copy the bundle again, hidden files too, or write it again with this release"
        + (f", after removing {path.name}" if path.name == _JOURNAL else ""),
        path=path,
    )


def _write_temporary(folder: Path, data: bytes, *, kind: str, mode: int | None = None) -> Path:
    """A new synced file with `data`; nothing if that fails."""
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


def _clear(folder: Path, *kinds: str) -> None:
    """Remove what killed writers left; only under the lock, as a living writer may own it otherwise."""
    for path in list(folder.iterdir()):
        match = _TEMPORARY.fullmatch(path.name)
        if match and match[1] in kinds:
            with suppress(OSError):
                path.unlink()


@contextmanager
def _lock(folder: Path, *, shared: bool = False) -> Iterator[bool]:
    """Keep (other) writers out of a folder; gives whether this file system can."""
    if sys.platform == "win32":
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield _wait_for_lock(handle, folder, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    finally:
        # Given up aloud: a process forked meanwhile shares the lock and would keep it.
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
    came = f"another process has been writing in {folder} for {_LOCK_SECONDS:g} s"
    raise FileError(came, expected="one writer at a time", fix="wait for it or end it, then try again", path=folder)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that they are there after a loss of power."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the file system knows how."""
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


def _mode(target: Path) -> int | None:
    """The permission bits of a file about to be replaced, or None where there is none."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        came = f"{target} is {'a folder' if stat.S_ISDIR(mode) else 'not an ordinary file'}"
        raise FileError(came, expected="the path of a file, new or to be replaced", fix="use another path", path=target)
    return mode & 0o777


@contextmanager
def typed_errors(path: str | Path, *, verb: str = "written") -> Iterator[None]:
    """Turn what the system says about a path into an error of this library."""
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
            fix=_FIXES.get(number, "check the path" if number else "check the content"),
            path=path,
        ) from error


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and bool(_PLAIN_NAME.fullmatch(name)) and name.lower() != _MANIFEST


def _check_names(files: Collection[str]) -> None:
    bad = [name for name in files if not _is_plain(name)]
    if bad or len({name.lower() for name in files}) < len(files):
        raise OptionError(
            f"a bundle of files named {(bad or list(files))[:10]}",
            expected=f"plain names of ASCII letters, digits and ._-+=@, not {_MANIFEST}, that differ in more than case",
            fix="give the names alone, without a folder",
        )


def _split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and tensors of a safetensors file that is known to be whole."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def _sort_metadata(data: bytes) -> bytes:
    """The same file with its metadata in order: safetensors gives them a new one each time."""
    header, tensors = _split(data)
    if "__metadata__" not in header:
        return data
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + tensors

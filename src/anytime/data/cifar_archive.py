"""CIFAR from its official archives, packed or unpacked. Nothing in them is executed."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anytime.data import plain_pickle
from anytime.errors import FormatError, IntegrityError, MissingFileError
from anytime.reading import is_file, open_file, parsing, read_file


class Archive(NamedTuple):
    """What an official archive is called and holds."""

    file: str
    md5: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: str
    meta: str
    names: str


ARCHIVES = {
    "cifar10": Archive(
        file="cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test=("test_batch",),
        labels="labels",
        meta="batches.meta",
        names="label_names",
    ),
    "cifar100": Archive(
        file="cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        folder="cifar-100-python",
        train=("train",),
        test=("test",),
        labels="fine_labels",
        meta="meta",
        names="fine_label_names",
    ),
}
_LARGEST_MEMBER = 256 * 2**20


def archive_in(folder: Path, name: str) -> Path | None:
    """The unpacked archive or the archive itself, where `folder` is or holds one."""
    archive = ARCHIVES[name]
    places: tuple[Path, ...] = (folder / archive.folder, folder / archive.file)
    if folder.name in (archive.folder, archive.file):
        places = (folder, *places)
    return next((place for place in places if place.exists()), None)


def read_archive(place: Path, name: str, *, verify: bool) -> dict[str, NDArray[Any]]:
    """Images `(N, 32, 32, 3)` and labels of both splits, and the class names, from what `archive_in` found."""
    archive = ARCHIVES[name]
    files = _read_folder(place, archive) if place.is_dir() else _read_tar(place, archive, verify=verify)
    parts: dict[str, NDArray[Any]] = {}
    for split, members in (("train", archive.train), ("test", archive.test)):
        batches = [_batch(files[member], archive, place / member) for member in members]
        parts[split] = np.concatenate([images for images, _ in batches])
        parts[f"{split}_labels"] = np.concatenate([labels for _, labels in batches])
    parts["class_names"] = np.array(_names(files[archive.meta], archive, place / archive.meta))
    return parts


def _batch(data: bytes, archive: Archive, path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images, labels = _entries(data, "data", path), _entries(data, archive.labels, path)
    # Looked at before NumPy sees it: a small file can hold lists of lists that would fill the memory.
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 256 for label in labels):
        raise _wrong(path, "labels that are no list of small whole numbers")
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape != (len(labels), 3 * 32 * 32):
        raise _wrong(path, f"no array of {len(labels)} images, one a label, of 3,072 bytes each")
    return images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.array(labels, dtype=np.int64)


def _names(data: bytes, archive: Archive, path: Path) -> list[str]:
    words = _entries(data, archive.names, path)
    if not isinstance(words, list) or not all(isinstance(word, bytes | str) for word in words):
        raise _wrong(path, "no list of class names")
    return [word.decode("utf-8", "replace") if isinstance(word, bytes) else word for word in words]


def _entries(data: bytes, key: str, path: Path) -> Any:
    stored = plain_pickle.load(data, path=path)
    if not isinstance(stored, dict):
        raise _wrong(path, f"a {type(stored).__name__}")
    for spelling in (key, key.encode()):
        if spelling in stored:
            return stored[spelling]
    raise _wrong(path, f"no entry {key!r}")


def _read_folder(place: Path, archive: Archive) -> dict[str, bytes]:
    files = {}
    for member in _members(archive):
        if not is_file(place / member):
            raise _missing(place / member, archive)
        files[member] = read_file(place / member, most=_LARGEST_MEMBER)
    return files


def _read_tar(place: Path, archive: Archive, *, verify: bool) -> dict[str, bytes]:
    if verify:
        _verify(place, archive)
    expected, fix = f"the official {archive.file}", _fix(place, archive)
    with (
        parsing(place, expected=expected, fix=fix, what="is damaged"),
        open_file(place, expected=expected, fix=fix) as file,
        tarfile.open(fileobj=file, mode="r:gz") as tar,
    ):
        return {member: _read_member(tar, f"{archive.folder}/{member}", place) for member in _members(archive)}


def _read_member(tar: tarfile.TarFile, name: str, place: Path) -> bytes:
    try:
        entry = tar.getmember(name)
    except KeyError:
        raise _wrong(place, f"no member {name}") from None
    file = tar.extractfile(entry) if entry.isfile() and entry.size <= _LARGEST_MEMBER else None
    if file is None:
        raise _wrong(place, f"a member {name} that is no file of a sensible size")
    return file.read()


def _verify(place: Path, archive: Archive) -> None:
    with open_file(place, expected=f"the official {archive.file}", fix=_fix(place, archive)) as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != archive.md5:
        raise _damaged(place, archive, f"its MD5 sum is {found}, published is {archive.md5}")


def _members(archive: Archive) -> tuple[str, ...]:
    return (*archive.train, *archive.test, archive.meta)


def _fix(place: Path, archive: Archive) -> str:
    return f"fetch https://www.cs.toronto.edu/~kriz/{archive.file} again and put it at {place}"


def _missing(path: Path, archive: Archive) -> MissingFileError:
    return MissingFileError(
        f"there is no {path}",
        expected=f"all of {', '.join(_members(archive))} in {path.parent}",
        fix=_fix(path.parent.parent / archive.file, archive),
        path=path,
    )


def _damaged(place: Path, archive: Archive, why: str) -> IntegrityError:
    return IntegrityError(
        f"{place} is damaged: {why}", expected=f"the official {archive.file}", fix=_fix(place, archive), path=place
    )


def _wrong(path: Path, found: str) -> FormatError:
    return FormatError(
        f"{path} holds {found}",
        expected="a batch of the official CIFAR archive",
        fix="fetch the archive again from https://www.cs.toronto.edu/~kriz/cifar.html",
        path=path,
    )

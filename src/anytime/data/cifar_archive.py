"""CIFAR from its official binary archives, packed or unpacked: records of one or two label bytes and 3,072 pixel bytes."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anytime.errors import FormatError, IntegrityError, MissingFileError
from anytime.reading import is_file, open_file, parsing, read_file

_PIXELS = 3 * 32 * 32
_LARGEST_MEMBER = 256 * 2**20


class Archive(NamedTuple):
    """The name and the contents of an official archive.

    Attributes:
        file: Its name.
        md5: Its published MD5 sum.
        folder: The folder that it unpacks to.
        train: Files with training images.
        test: Files with test images.
        names: The file with one class name per line.
        classes: The number of classes.
        label_bytes: Label bytes per record; the last is the class (CIFAR-100 has the superclass before it).
        pickled: Names of the archive for Python and of the folder that it unpacks to.
    """

    file: str
    md5: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    classes: int
    label_bytes: int
    pickled: tuple[str, str]

    @property
    def url(self) -> str:
        """The address to download it from."""
        return f"https://www.cs.toronto.edu/~kriz/{self.file}"


ARCHIVES = {
    "cifar10": Archive(
        file="cifar-10-binary.tar.gz",
        md5="c32a1d4ab5d03f1284b67883e8d87530",
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        test=("test_batch.bin",),
        names="batches.meta.txt",
        classes=10,
        label_bytes=1,
        pickled=("cifar-10-python.tar.gz", "cifar-10-batches-py"),
    ),
    "cifar100": Archive(
        file="cifar-100-binary.tar.gz",
        md5="03b5dce01913d631647c71ecec9e9cb8",
        folder="cifar-100-binary",
        train=("train.bin",),
        test=("test.bin",),
        names="fine_label_names.txt",
        classes=100,
        label_bytes=2,
        pickled=("cifar-100-python.tar.gz", "cifar-100-python"),
    ),
}


def find_archive(folder: Path, name: str) -> Path | None:
    """Find the unpacked or the packed archive, which `folder` is or contains."""
    archive = ARCHIVES[name]
    places: tuple[Path, ...] = (folder / archive.folder, folder / archive.file)
    if folder.name in (archive.folder, archive.file):
        places = (folder, *places)
    return next((place for place in places if place.exists()), None)


def read_archive(place: Path, name: str, *, verify: bool) -> dict[str, NDArray[Any]]:
    """Read images `(N, 3, 32, 32)` and labels of both splits, and the class names, from what `find_archive` found."""
    archive = ARCHIVES[name]
    files = _read_folder(place, archive) if place.is_dir() else _read_tar(place, archive, verify=verify)
    parts: dict[str, NDArray[Any]] = {}
    for split, members in (("train", archive.train), ("test", archive.test)):
        records = np.concatenate([_records(files[member], archive, place / member) for member in members])
        parts[split] = np.ascontiguousarray(records[:, archive.label_bytes :]).reshape(-1, 3, 32, 32)
        parts[f"{split}_labels"] = records[:, archive.label_bytes - 1]
    parts["class_names"] = np.array(_class_names(files[archive.names], archive, place / archive.names))
    return parts


def _records(data: bytes, archive: Archive, path: Path) -> NDArray[np.uint8]:
    size = archive.label_bytes + _PIXELS
    if not data or len(data) % size:
        raise _wrong(path, archive, f"{len(data):,} bytes, which is not a multiple of {size:,}")
    records = np.frombuffer(data, np.uint8).reshape(-1, size)
    label = int(records[:, archive.label_bytes - 1].max())
    if label >= archive.classes:
        raise _wrong(path, archive, f"the label {label}")
    return records


def _class_names(data: bytes, archive: Archive, path: Path) -> list[str]:
    words = data.decode("utf-8", "replace").split()
    if len(words) != archive.classes:
        raise _wrong(path, archive, f"{len(words)} class names")
    return words


def _read_folder(place: Path, archive: Archive) -> dict[str, bytes]:
    members = _members(archive)
    for member in members:
        if not is_file(place / member):
            raise MissingFileError(
                f"there is no {place / member}",
                expected=f"{', '.join(members)} in {place}",
                fix=f"download {archive.url} and unpack it in {place.parent}",
                path=place / member,
            )
    return {member: read_file(place / member, most=_LARGEST_MEMBER) for member in members}


def _read_tar(place: Path, archive: Archive, *, verify: bool) -> dict[str, bytes]:
    expected, fix = f"the official {archive.file}", f"download {archive.url} again to {place}"
    with open_file(place, expected=expected, fix=fix) as file:
        if verify:
            found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
            if found != archive.md5:
                got = f"{place} is damaged: its MD5 sum is {found}, the published one {archive.md5}"
                raise IntegrityError(got, expected=expected, fix=fix, path=place)
            file.seek(0)
        with parsing(place, expected=expected, fix=fix, what="is damaged"), tarfile.open(fileobj=file, mode="r:gz") as tar:
            return {member: _read_member(tar, member, archive, place) for member in _members(archive)}


def _read_member(tar: tarfile.TarFile, member: str, archive: Archive, place: Path) -> bytes:
    try:
        entry = tar.getmember(f"{archive.folder}/{member}")
    except KeyError:
        raise _wrong(place, archive, f"no {archive.folder}/{member}") from None
    file = tar.extractfile(entry) if entry.isfile() and entry.size <= _LARGEST_MEMBER else None
    if file is None:
        raise _wrong(place, archive, f"an entry {member} that is too large or not a file")
    return file.read()


def _members(archive: Archive) -> tuple[str, ...]:
    return (*archive.train, *archive.test, archive.names)


def _wrong(path: Path, archive: Archive, found: str) -> FormatError:
    return FormatError(
        f"{path} contains {found}", expected=f"the contents of {archive.file}", fix=f"download {archive.url} again", path=path
    )

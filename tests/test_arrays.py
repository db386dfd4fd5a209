"""NumPy's files: complete files are read as NumPy reads them, others are refused before memory is allocated."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytime import arrays
from anytime.arrays import open_npy, open_npz, read_npz
from anytime.errors import FileError, FormatError, IntegrityError

RANDOM = np.random.default_rng(0)


def npy(header: bytes, data: bytes = b"", version: int = 1) -> bytes:
    text = header + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + data


def described(shape: str, descr: str = "'<f4'", fortran: str = "False") -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()


@pytest.mark.parametrize("dtype", ["<f2", ">f4", "<f8", "|i1", "<u8", "|b1"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (3, 40, 5)])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_as_numpy_reads_them(tmp_path: Path, dtype: str, shape: tuple[int, ...], save: Any) -> None:
    array = np.asarray(RANDOM.normal(size=shape) * 10).astype(dtype)
    save(tmp_path / "a.npz", c=array, f=np.asfortranarray(array))
    np.save(tmp_path / "a.npy", array)
    opened = open_npz(tmp_path / "a.npz", ("c", "f"))
    for found in (opened["c"], opened["f"], open_npy(tmp_path / "a.npy")):
        assert found is not None
        np.testing.assert_array_equal(found[...], array)
        assert found.dtype == array.dtype


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.memmap]:
    """An array of some megabytes, and the same from a compressed file that counts as large."""
    monkeypatch.setattr(arrays, "_HELD", 1 << 16)
    array = RANDOM.integers(0, 9, size=(5, 50_000, 4)).astype("<f4")
    np.savez_compressed(tmp_path / "a.npz", logits=array)
    found = open_npz(tmp_path / "a.npz", ("logits",))["logits"]
    assert isinstance(found, np.memmap)
    return array, found


def test_a_large_compressed_array_is_mapped(large: tuple[np.ndarray, np.memmap]) -> None:
    array, found = large
    rows = np.sort(RANDOM.permutation(50_000)[:100])
    for key in (
        (slice(None), slice(0, 10)),
        (slice(None), slice(49_990, 60_000)),
        (slice(2, 3), slice(17_000, 30_000)),
        (slice(None), rows),
        (slice(None), rows[::-1]),
        (slice(None), slice(5, 5)),
        (slice(None), slice(0, 100, 7), slice(1, 3)),
        slice(None),
        ...,
    ):
        np.testing.assert_array_equal(found[key], array[key])


def test_a_large_compressed_list_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_HELD", 1 << 10)
    labels = RANDOM.integers(0, 9, size=300_000)
    np.savez_compressed(tmp_path / "a.npz", labels=labels)
    found = open_npz(tmp_path / "a.npz", ("labels",))["labels"]
    assert isinstance(found, np.memmap)
    np.testing.assert_array_equal(found[...], labels)
    np.testing.assert_array_equal(found[100:200_000], labels[100:200_000])


def test_several_threads_may_read_a_compressed_array(large: tuple[np.ndarray, np.memmap]) -> None:
    array, found = large
    pieces = [slice(first, first + 997) for first in range(0, 50_000, 997)]
    RANDOM.shuffle(pieces)  # type: ignore[arg-type]
    with ThreadPoolExecutor(4) as pool:
        for piece, part in zip(pieces, pool.map(lambda piece: found[:, piece], pieces), strict=True):
            np.testing.assert_array_equal(part, array[:, piece])


def test_a_large_compressed_array_is_checked_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_HELD", 1 << 10)
    array = RANDOM.integers(0, 9, size=(2, 3_000, 4)).astype("<f4")
    np.savez_compressed(tmp_path / "a.npz", logits=array)
    whole = (tmp_path / "a.npz").read_bytes()
    for place in RANDOM.integers(80, len(whole) - 200, size=30).tolist():
        (tmp_path / "b.npz").write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        with pytest.raises(FileError):
            open_npz(tmp_path / "b.npz", ("logits",))


def test_an_array_that_does_not_fit_the_temporary_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "_HELD", 1 << 10)
    monkeypatch.setattr(arrays.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10_000, 9_000, 1_000))  # type: ignore[attr-defined]
    np.savez_compressed(tmp_path / "a.npz", logits=np.zeros((2, 300, 4)))
    with pytest.raises(FormatError, match="TMPDIR"):
        open_npz(tmp_path / "a.npz", ("logits",))


def test_a_small_file_that_unpacks_to_a_large_one_takes_little_memory(tmp_path: Path) -> None:
    """A few hundred kilobytes that unpack to 131 megabytes."""
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("logits.npy", "w") as member:
        member.write(npy(described("(4, 8192, 1000)")))
        for _ in range(125):
            member.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    code = (
        "import sys, resource, numpy as np; from pathlib import Path; from anytime.arrays import open_npz\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "found = open_npz(Path(sys.argv[1]), ('logits',))['logits']\n"
        "assert found.shape == (4, 8192, 1000)\n"
        "for first in range(0, 8192, 1024): assert not found[:, first:first + 128].any()\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 60, "megabytes"


HOSTILE = {
    "an endless empty shape": described("(0, 1000000000000, 1000000000000)"),
    "a boolean side": described("(True, 5, 5)"),
    "a negative side": described("(-1, 5, 5)"),
    "a side that is no whole number": described("(1.0, 5, 5)"),
    "a side that is no number": described("('a', 5, 5)"),
    "a shape that is a list": described("[1, 5, 5]"),
    "a shape beyond 64 bits": described("(4294967296, 4294967296, 2)"),
    "a shape larger than the file": described("(1000, 1000, 1000)"),
    "an order that is none": described("(1, 2, 2)", fortran="2"),
    "a type that is none": described("(1, 2, 2)", descr="'<q4'"),
    "a type that is empty": described("(1, 2, 2)", descr="''"),
    "a type of no bytes": described("(1, 2, 2)", descr="'|V0'"),
    "objects": described("(1, 2, 2)", descr="'|O'"),
    "objects inside": described("(1, 2, 2)", descr="[('a', '|O')]"),
    "a name that is cut": described("(1, 2, 2)")[:-9],
    "more than there should be": described("(1, 2, 2)")[:-3] + b", 'more': 1}",
    "an expression": b"{'descr': __import__('os').system('true')}",
    "deep brackets": b"(" * 5000,
    "many signs": b"-" * 5000 + b"1",
    "a broken text": b"{'descr': '<f4",
    "bytes that are no text": b"\xff\xfe\x00'''",
    "nothing": b"",
}


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_header_is_refused(tmp_path: Path, header: bytes, version: int) -> None:
    data = npy(header, bytes(16), version)
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(FileError):
        open_npy(tmp_path / "a.npy")
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
            archive.writestr("logits.npy", data)
        with pytest.raises(FileError):
            open_npz(tmp_path / "a.npz", ("logits",))


def test_a_header_of_another_version_or_length_is_refused(tmp_path: Path) -> None:
    good = npy(described("(1, 2, 2)"), bytes(16))
    for data in (good[:6] + b"\x04" + good[7:], good[:8] + b"\xff\xff" + good[10:], good[:9], good[:5]):
        (tmp_path / "a.npy").write_bytes(data)
        with pytest.raises(IntegrityError):
            open_npy(tmp_path / "a.npy")


def test_members_that_numpy_does_not_write_are_refused(tmp_path: Path) -> None:
    data = npy(described("(1, 2, 2)"), bytes(16))
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
            archive.writestr("logits.npy", data)
        with pytest.raises(IntegrityError, match="method"):
            open_npz(tmp_path / "a.npz", ("logits",))


def test_reading_an_archive_whole_has_a_limit(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(1000), b=np.array(["x", "y"]))
    assert set(read_npz(tmp_path / "a.npz", most=10_000, texts=True)) == {"a", "b"}
    assert set(read_npz(tmp_path / "a.npz", ("a", "c"), most=10_000)) == {"a"}
    with pytest.raises(FormatError, match="at most"):
        read_npz(tmp_path / "a.npz", most=1_000, texts=True)
    with pytest.raises(FormatError, match="numbers"):
        read_npz(tmp_path / "a.npz", most=10_000)

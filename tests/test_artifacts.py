"""Files and bundles, where nothing goes wrong but what a caller gets wrong."""

import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytime.artifacts import (
    files,
    open_bundle,
    read_bundle,
    tensors_from_bytes,
    tensors_to_bytes,
    verify_bundle,
    write_bundle,
    write_bytes,
    write_json,
    write_text,
)
from anytime.errors import DtypeError, FileError, FormatError, IntegrityError, MissingFileError, OptionError

few = settings(max_examples=30, deadline=None)
names = st.from_regex(r"[a-z0-9_][a-z0-9_.+=@, -]{0,20}", fullmatch=True).filter(lambda name: name != "manifest.json")
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
documents = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@few
@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_bytes_come_back_as_written(first, second):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "deep" / "file.bin"
        for data in (first, second):
            write_bytes(path, data)
            assert path.read_bytes() == data
        assert listing(path.parent) == ["file.bin"]


@few
@given(st.text())
def test_text_comes_back_as_written_line_ends_too(text):
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder) / "text", text)
        assert (Path(folder) / "text").read_bytes().decode() == text


@few
@given(documents)
def test_json_comes_back_as_written(document):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document.json"
        write_json(path, document)
        assert json.loads(path.read_bytes()) == document
        assert path.read_bytes().endswith(b"\n")


def test_json_keeps_order_and_letters(tmp_path):
    write_json(tmp_path / "a.json", {"z": "é", "a": [1]})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n "z": "é",\n "a": [\n  1\n ]\n}\n'


def circle() -> list[object]:
    document: list[object] = []
    document.append(document)
    return document


@pytest.mark.parametrize(
    "document",
    [float("nan"), {"a": [1, float("inf")]}, {1: -float("inf")}, {"a": {1}}, np.float32(1), circle(), "\ud800", {(1, 2): 3}],
    ids=["nan", "inf", "-inf", "set", "numpy", "circle", "surrogate", "tuple key"],
)
def test_what_json_cannot_hold_is_refused_and_the_old_file_stays(tmp_path, document):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(FileError) as caught:
        write_json(path, document)
    assert caught.value.path == path
    assert "a.json" in str(caught.value)
    assert json.loads(path.read_text()) == {"old": 1}
    assert listing(tmp_path) == ["a.json"]


@pytest.mark.parametrize("data", ["text", None, [1, 2], 3])
def test_content_that_is_not_bytes_is_refused_and_nothing_stays(tmp_path, data):
    with pytest.raises(FileError):
        write_bytes(tmp_path / "file", data)
    with pytest.raises(FileError):
        write_bundle(tmp_path, {"file": data})
    assert listing(tmp_path) == []


def test_a_folder_in_place_of_the_file_is_refused(tmp_path):
    (tmp_path / "here").mkdir()
    with pytest.raises(FileError, match="is a folder"):
        write_bytes(tmp_path / "here", b"")
    with pytest.raises(FileError, match="is a folder"):
        write_bundle(tmp_path, {"here": b"", "there": b""})
    assert listing(tmp_path) == ["here"]


def test_a_file_in_place_of_a_folder_is_refused(tmp_path):
    write_bytes(tmp_path / "file", b"old")
    for path in (tmp_path / "file" / "a", tmp_path / "file" / "a" / "b"):
        with pytest.raises(FileError, match="a part of this one is a file"):
            write_bytes(path, b"")
        with pytest.raises(FileError):
            write_bundle(path, {"a": b""})
        with pytest.raises(FileError):
            read_bundle(path)
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_device_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="not a regular file"):
        write_bytes(tmp_path / "pipe", b"x")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("path", ["a\0b", "x" * 300], ids=["nul", "long"])
def test_a_path_that_cannot_be_is_a_typed_error(tmp_path, path):
    with pytest.raises(FileError):
        write_bytes(tmp_path / path, b"")
    with pytest.raises(FileError):
        write_bundle(tmp_path / path, {"a": b""})
    with pytest.raises(FileError):
        read_bundle(tmp_path / path)


def test_a_loop_of_links_is_a_typed_error(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(FileError):
        write_bytes(tmp_path / "a", b"")
    assert (tmp_path / "a").is_symlink()


def test_a_folder_without_permission_is_a_typed_error(tmp_path, monkeypatch):
    def refuse(path: object, *_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FileError, match="change the permissions"):
        write_bytes(tmp_path / "a", b"")
    with pytest.raises(FileError, match="change the permissions"):
        read_bundle(tmp_path)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755, 0o444])
def test_permission_bits_of_a_replaced_file_are_kept(tmp_path, mode):
    for name in ("alone", "member"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    write_bytes(tmp_path / "alone", b"new")
    write_bundle(tmp_path, {"member": b"new"})
    for name in ("alone", "member"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
        assert (tmp_path / name).read_bytes() == b"new"


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        write_bytes(tmp_path / "file", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_link_stays_and_its_target_is_replaced(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to(Path("far") / "file")
    for data in (b"made through a dangling link", b"replaced"):
        write_bytes(tmp_path / "link", data)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "far" / "file").read_bytes() == data
    assert listing(tmp_path / "far") == ["file"]


@few
@given(st.dictionaries(names, st.binary(max_size=500), max_size=4), st.dictionaries(names, st.binary(max_size=500), max_size=4))
def test_bundles_come_back_as_written(first, second):
    with tempfile.TemporaryDirectory() as folder:
        for files in (first, second):
            write_bundle(folder, files)
            assert read_bundle(folder) == files
            assert {name: path.read_bytes() for name, path in open_bundle(folder).items()} == files
            verify_bundle(folder)


def test_a_bundle_leaves_other_files_alone(tmp_path):
    for name in ("notes.txt", ".hidden", ".anytime-mine.tmp"):
        (tmp_path / name).write_text("mine")
    write_bundle(tmp_path, {"a": b"1", "b": b"2"})
    write_bundle(tmp_path, {"a": b"3"})
    assert read_bundle(tmp_path) == {"a": b"3"}
    assert listing(tmp_path) == sorted(["notes.txt", ".hidden", ".anytime-mine.tmp", "a", "b", "manifest.json"])
    assert (tmp_path / "b").read_bytes() == b"2"


def test_the_manifest_gives_version_size_and_hash(tmp_path):
    write_bundle(tmp_path, {"a": b"abc"})
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest == {"version": 1, "files": {"a": {"bytes": 3, "sha256": sha256}}}


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "a/b", "/a", "a\\b", ".a", "manifest.json", "MANIFEST.json", "a\0", "a\n", "é", "a" * 201, "C:a"],
)
def test_names_that_are_not_plain_are_refused(tmp_path, name):
    with pytest.raises(OptionError, match="bundle"):
        write_bundle(tmp_path / "new", {"good": b"", name: b""})
    assert not (tmp_path / "new").exists()


def test_names_that_differ_in_case_alone_are_refused(tmp_path):
    with pytest.raises(OptionError, match="case"):
        write_bundle(tmp_path, {"a": b"", "A": b""})


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(MissingFileError, match="nowhere"):
        read_bundle(tmp_path / "nowhere")
    with pytest.raises(MissingFileError, match=r"manifest\.json"):
        read_bundle(tmp_path)
    write_bundle(tmp_path, {"a": b"1"})
    (tmp_path / "a").unlink()
    for read in (read_bundle, open_bundle, verify_bundle):
        with pytest.raises(MissingFileError) as caught:
            read(tmp_path)
        assert caught.value.path == tmp_path / "a"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"version": 1}', '{"version": 1, "files": []}', "[" * 100_000])
def test_a_malformed_manifest_is_refused(tmp_path, text):
    write_bundle(tmp_path, {"a": b"1"})
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(FormatError) as caught:
        read_bundle(tmp_path)
    assert caught.value.path == tmp_path / "manifest.json"


def test_a_manifest_of_another_version_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"version": 2, "files": {}}')
    with pytest.raises(FormatError, match="has version 2"):
        verify_bundle(tmp_path)


@pytest.mark.parametrize(("content", "said"), [(b"12", "has 2 bytes"), (b"2", "SHA-256")])
def test_a_changed_file_is_noticed(tmp_path, content, said):
    write_bundle(tmp_path, {"a": b"1"})
    (tmp_path / "a").write_bytes(content)
    for read in (read_bundle, open_bundle, verify_bundle):
        with pytest.raises(IntegrityError, match=said):
            read(tmp_path)


def test_readers_beside_writers_get_whole_bundles(tmp_path):
    bundles = [{"a": bytes([i]) * 50_000, "b": bytes([i]) * 10} for i in range(4)]
    write_bundle(tmp_path, bundles[0])
    writers = [
        threading.Thread(target=lambda files=files: [write_bundle(tmp_path, files) for _ in range(5)]) for files in bundles
    ]
    for writer in writers:
        writer.start()
    seen = [read_bundle(tmp_path) for _ in range(40)]
    for writer in writers:
        writer.join()
    assert all(files in bundles for files in seen)
    assert listing(tmp_path) == ["a", "b", "manifest.json"]


def test_files_written_side_by_side_do_not_disturb_each_other(tmp_path):
    threads = [threading.Thread(target=write_bytes, args=(tmp_path / f"{i}", b"x" * i)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == {str(i): i for i in range(20)}


def test_a_writer_that_never_ends_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LOCK_SECONDS", 0.05)
    with files.lock_folder(tmp_path), pytest.raises(FileError, match="another process has been writing"):
        write_bytes(tmp_path / "a", b"")
    write_bytes(tmp_path / "a", b"")


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64],
)
def test_tensors_come_back_as_they_were(dtype):
    tensors = {
        "weights": torch.arange(6).reshape(2, 3).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "none": torch.zeros(0, 4),
    }
    back = tensors_from_bytes(tensors_to_bytes(tensors))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_tensors_that_share_or_stride_memory_come_back_as_they_were():
    base = torch.randn(3, 4, requires_grad=True)
    tensors = {"base": base, "tied": base, "turned": base.T, "row": base[1], "wide": torch.ones(1).expand(5)}
    back = tensors_from_bytes(tensors_to_bytes(tensors))
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_the_order_of_tensors_does_not_change_the_bytes():
    tensors = {"a": torch.ones(3), "b": torch.zeros(2)}
    assert tensors_to_bytes(tensors) == tensors_to_bytes(dict(reversed(tensors.items())))


@pytest.mark.parametrize(
    "tensors",
    [{"a": torch.eye(2).to_sparse()}, {"a": [1, 2]}, {1: torch.ones(1)}, {"a": torch.ones(1, device="meta")}],
    ids=["sparse", "list", "name", "meta"],
)
def test_tensors_that_cannot_be_stored_are_refused(tensors):
    with pytest.raises(DtypeError, match="cannot be stored"):
        tensors_to_bytes(tensors)


def test_importing_artifacts_does_not_import_torch():
    code = "import sys, anytime.artifacts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

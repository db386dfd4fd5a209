"""Bundles and tensor files made by an enemy or by a failing disk: each is refused with a typed error."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch

from anytime.artifacts import (
    open_bundle,
    read_bundle,
    tensors_from_bytes,
    tensors_to_bytes,
    verify_bundle,
    write_bundle,
)
from anytime.errors import FileError, FormatError, IntegrityError

READERS = [read_bundle, open_bundle, verify_bundle]
JOURNAL = ".anytime-journal.json"
TEMPORARY = ".anytime-bundle-0123456789abcdef.tmp"
OUTSIDE = [
    "../secret",
    "../../etc/passwd",
    "/etc/passwd",
    "a/../../secret",
    "..",
    ".",
    "",
    "a\\b",
    "a\0b",
    ".hidden",
    "manifest.json",
]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with a secret beside its folder."""
    (tmp_path / "secret").write_bytes(b"secret")
    write_bundle(tmp_path / "bundle", {"config.json": b"{}", "model": bytes(range(256))})
    return tmp_path / "bundle"


def edit_manifest(bundle: Path, name: str, entry: object) -> None:
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = entry
    path.write_text(json.dumps(manifest))


def refused(bundle: Path, kind: type[FileError] = FileError) -> None:
    for read in READERS:
        with pytest.raises(kind):
            read(bundle)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_that_names_files_outside_is_refused(bundle, name):
    sha256 = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of the secret: all else is right
    edit_manifest(bundle, name, {"bytes": 6, "sha256": sha256})
    refused(bundle, FormatError)


@pytest.mark.parametrize("size", [-1, 0, 255, 257, 2**31, 2**63, 10**30])
def test_a_size_that_is_not_the_file_s_is_refused_before_reading(bundle, size):
    edit_manifest(bundle, "model", {"bytes": size, "sha256": "0" * 64})
    refused(bundle, IntegrityError)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        3,
        "text",
        [],
        {},
        {"bytes": 256},
        {"sha256": "0"},
        *({"bytes": x, "sha256": ""} for x in (True, 1.5, "256", None, [])),
    ],
)
def test_an_entry_of_another_form_is_refused(bundle, entry):
    edit_manifest(bundle, "model", entry)
    refused(bundle, FormatError)


@pytest.mark.parametrize("sha256", ["", "0" * 64, "x" * 100_000])
def test_a_hash_that_is_not_the_file_s_is_refused(bundle, sha256):
    edit_manifest(bundle, "model", {"bytes": 256, "sha256": sha256})
    with pytest.raises(IntegrityError) as caught:
        read_bundle(bundle)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("text", ["[" * 1_000_000, '{"version": 1, "files": ' + "9" * 100_000 + "}", " " * ((1 << 24) + 1)])
def test_a_manifest_bomb_is_refused(bundle, text):
    (bundle / "manifest.json").write_text(text)
    refused(bundle, FormatError)


@pytest.mark.parametrize("name", ["model", "manifest.json", JOURNAL])
@pytest.mark.parametrize("target", ["../secret", "config.json", "nowhere", "/dev/zero"])
def test_a_link_in_a_bundle_is_refused(bundle, name, target):
    (bundle / name).unlink(missing_ok=True)
    (bundle / name).symlink_to(target)
    refused(bundle, IntegrityError)


def test_a_link_to_the_very_content_is_refused_too(bundle):
    (bundle / "model").rename(bundle.parent / "elsewhere")
    (bundle / "model").symlink_to("../elsewhere")
    refused(bundle, IntegrityError)


@pytest.mark.parametrize("name", ["model", "manifest.json", JOURNAL])
def test_a_pipe_or_a_folder_in_a_bundle_is_refused_without_waiting(bundle, name):
    for make in (os.mkfifo, os.mkdir):
        (bundle / name).unlink(missing_ok=True)
        make(bundle / name)
        refused(bundle, IntegrityError)


def test_writing_over_a_link_does_not_touch_what_it_points_to(bundle):
    for name in ("model", "manifest.json"):
        (bundle / name).unlink()
        (bundle / name).symlink_to("../secret")
    write_bundle(bundle, {"model": b"new"})
    assert (bundle.parent / "secret").read_bytes() == b"secret"
    assert read_bundle(bundle) == {"model": b"new"}


def journals() -> list[object]:
    good = {"manifest.json": TEMPORARY}
    moves: list[object] = [
        {**good, "model": name} for name in [*OUTSIDE, "config.json", "x" + TEMPORARY, TEMPORARY + "/..", 3, None]
    ]
    moves += [{**good, name: TEMPORARY} for name in OUTSIDE if name != "manifest.json"]
    moves += [{}, {"model": TEMPORARY}, [], None, "text"]
    return [*({"version": 1, "files": move} for move in moves), {"version": 2, "files": good}, {"files": good}, [], 3]


@pytest.mark.parametrize("journal", journals(), ids=str)
def test_a_journal_that_names_other_files_is_refused_and_moves_nothing(bundle, journal):
    (bundle / TEMPORARY).write_bytes(b"evil")
    (bundle / JOURNAL).write_text(json.dumps(journal))
    before = {path: path.read_bytes() for path in bundle.parent.rglob("*") if path.is_file()}
    refused(bundle, FormatError)
    with pytest.raises(FormatError, match="after removing"):
        write_bundle(bundle, {"model": b"new"})
    assert {path: path.read_bytes() for path in bundle.parent.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("text", ["", "{", "\xff", "[" * 100_000])
def test_a_journal_that_is_not_json_is_refused(bundle, text):
    (bundle / JOURNAL).write_text(text, encoding="latin-1")
    refused(bundle, FormatError)


def test_a_journal_cannot_bring_in_a_link(bundle):
    (bundle / TEMPORARY).symlink_to("../secret")
    (bundle / JOURNAL).write_text(json.dumps({"version": 1, "files": {"manifest.json": TEMPORARY}}))
    refused(bundle, IntegrityError)
    write_bundle(bundle, {"model": b"new"})
    assert (bundle.parent / "secret").read_bytes() == b"secret"
    assert read_bundle(bundle) == {"model": b"new"}


@pytest.mark.parametrize("name", ["config.json", "model", "manifest.json"])
def test_every_truncation_and_every_flipped_bit_of_a_bundle_is_noticed(bundle, name):
    whole = (bundle / name).read_bytes()
    damaged = [whole[:end] for end in range(len(whole) - (name == "manifest.json"))]  # the last newline says nothing
    damaged += [whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :] for i in range(len(whole))]
    for data in damaged:
        (bundle / name).write_bytes(data)
        with pytest.raises(FileError):
            read_bundle(bundle)
    (bundle / name).write_bytes(whole)
    verify_bundle(bundle)


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HOSTILE = {
    "empty": b"",
    "no header": b"\x08\0\0\0",
    "overlap": safetensors({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, bytes(12)),
    "same place": safetensors({"a": tensor(0, 8, [2]), "b": tensor(0, 8, [2])}, bytes(8)),
    "hole": safetensors({"a": tensor(0, 4, [1]), "b": tensor(8, 12, [1])}, bytes(12)),
    "out of bounds": safetensors({"a": tensor(0, 400, [100])}, bytes(8)),
    "far out of bounds": safetensors({"a": tensor(2**63, 2**63 + 4, [1])}, bytes(8)),
    "backwards": safetensors({"a": tensor(8, 0, [2])}, bytes(8)),
    "negative": safetensors({"a": tensor(-8, 0, [2])}, bytes(8)),
    "left over": safetensors({"a": tensor(0, 4, [1])}, bytes(8)),
    "shape overflow": safetensors({"a": tensor(0, 4, [2**62, 4])}, bytes(4)),
    "shape of the wrong size": safetensors({"a": tensor(0, 4, [2])}, bytes(4)),
    "negative shape": safetensors({"a": tensor(0, 4, [-1])}, bytes(4)),
    "empty with an endless side": safetensors({"a": tensor(0, 0, [0, 2**63])}),
    "unknown type": safetensors({"a": tensor(0, 4, [1], "PICKLE")}, bytes(4)),
    "type without torch": safetensors({"a": tensor(0, 1, [2], "F4")}, bytes(1)),
    "length bomb": safetensors({}, length=2**63),
    "all ones": b"\xff" * 64,
    "length beyond the file": safetensors({}, length=50_000_000),
    "length zero": safetensors(b"", length=0),
    "not json": safetensors(b"(cos\nsystem\n"),
    "not a table": safetensors([1, 2]),
    "nested": safetensors(b'{"a":' * 20_000),
    "metadata of numbers": safetensors({"__metadata__": {"a": 1}}),
    "pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "zip": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_tensors_are_refused(data):
    with pytest.raises(IntegrityError, match=r"weights\.safetensors") as caught:
        tensors_from_bytes(data, path="weights.safetensors")
    assert len(str(caught.value)) < 2000


def test_every_truncation_of_tensors_is_refused():
    whole = tensors_to_bytes({"a": torch.ones(7), "b": torch.zeros(3, dtype=torch.int8)})
    for end in range(len(whole)):
        with pytest.raises(IntegrityError):
            tensors_from_bytes(whole[:end])
    with pytest.raises(IntegrityError):
        tensors_from_bytes(whole + b"\0")


def test_a_flipped_bit_in_tensors_gives_tensors_or_a_typed_error():
    whole = tensors_to_bytes({"a": torch.ones(7), "b": torch.zeros(3, dtype=torch.int8)})
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    refusals = 0
    for position in range(header):
        for bit in range(8):
            data = whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :]
            try:
                assert sum(t.numel() for t in tensors_from_bytes(data).values()) == 10
            except IntegrityError:
                refusals += 1
    assert refusals > header

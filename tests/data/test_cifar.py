from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anytime.data import load_cifar
from anytime.data.cifar_archive import ARCHIVES
from anytime.errors import FileError, FormatError, IntegrityError, MissingExtraError, MissingFileError, OptionError

SHARED = Path(os.environ.get("ANYTIME_SHARED", Path(__file__).parents[3] / "shared"))
PER_BATCH = 20


def tool() -> Any:
    path = Path(__file__).parents[2] / "tools" / "cifar_sheets.py"
    spec = importlib.util.spec_from_file_location("cifar_sheets", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = tool()


def unpacked(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Write the folder of an archive with a few images; returns the images and labels."""
    archive, random = ARCHIVES[name], np.random.default_rng(0)
    place = folder / archive.folder
    place.mkdir(parents=True)
    written: dict[str, np.ndarray] = {}
    for split, files in (("train", archive.train), ("test", archive.test)):
        images = random.integers(0, 256, (len(files), PER_BATCH, 3, 32, 32), dtype=np.uint8)
        labels = random.integers(0, archive.classes, (len(files), PER_BATCH))
        for file, batch, answers in zip(files, images, labels, strict=True):
            coarse = [b"\xff"] * (archive.label_bytes - 1)
            records = [
                b"".join((*coarse, bytes([label]), image.tobytes())) for label, image in zip(answers, batch, strict=True)
            ]
            (place / file).write_bytes(b"".join(records))
        written[split], written[f"{split}_labels"] = images.reshape(-1, 3, 32, 32), labels.reshape(-1)
    (place / archive.names).write_text("".join(f"class_{i}\n" for i in range(archive.classes)) + "\n")
    return written


def pack(folder: Path, name: str) -> Path:
    archive = ARCHIVES[name]
    with tarfile.open(folder / archive.file, "w:gz") as tar:
        tar.add(folder / archive.folder, archive.folder)
    for file in (folder / archive.folder).iterdir():
        file.unlink()
    (folder / archive.folder).rmdir()
    return folder / archive.file


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("packed", [False, True])
def test_official_archives_are_read_packed_and_unpacked(tmp_path: Path, name: str, packed: bool) -> None:
    written = unpacked(tmp_path, name)
    if packed:
        pack(tmp_path, name)
    sets = load_cifar(name, tmp_path, verify=False)  # type: ignore[arg-type]
    for split, data in sets.items():
        np.testing.assert_array_equal(data.images.numpy(), written[split])
        np.testing.assert_array_equal(data.labels.numpy(), written[f"{split}_labels"])
    assert sets["train"].class_names[3] == "class_3"
    assert len(sets["train"].class_names) == (10 if name == "cifar10" else 100)


def test_an_archive_with_another_checksum_is_refused(tmp_path: Path) -> None:
    unpacked(tmp_path, "cifar100")
    archive = pack(tmp_path, "cifar100")
    with pytest.raises(IntegrityError, match="03b5dce01913d631647c71ecec9e9cb8") as caught:
        load_cifar("cifar100", tmp_path)
    assert caught.value.path == archive
    assert "download https://" in str(caught.value)


def test_damage_is_named(tmp_path: Path) -> None:
    unpacked(tmp_path, "cifar100")
    archive = pack(tmp_path, "cifar100")
    whole = archive.read_bytes()
    for data in (whole[: len(whole) // 2], b"not gzip", b""):
        archive.write_bytes(data)
        with pytest.raises(FileError):
            load_cifar("cifar100", tmp_path, verify=False)


def test_a_missing_file_says_what_to_fetch_and_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"download .*cifar-100-binary\.tar\.gz") as caught:
        load_cifar("cifar100", tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in str(caught.value)
    unpacked(tmp_path, "cifar10")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(MissingFileError, match=r"data_batch_3\.bin"):
        load_cifar("cifar10", tmp_path)


@pytest.mark.parametrize("data", [b"", bytes(3073), bytes(3074)[:-1], bytes([0, 100]) + bytes(3072)], ids=len)
def test_records_of_another_size_or_label_are_refused(tmp_path: Path, data: bytes) -> None:
    unpacked(tmp_path, "cifar100")
    (tmp_path / "cifar-100-binary" / "test.bin").write_bytes(data)
    with pytest.raises(FormatError, match=r"test\.bin contains"):
        load_cifar("cifar100", tmp_path)


def test_another_number_of_class_names_is_refused(tmp_path: Path) -> None:
    unpacked(tmp_path, "cifar100")
    (tmp_path / "cifar-100-binary" / "fine_label_names.txt").write_text("cat dog")
    with pytest.raises(FormatError, match="2 class names"):
        load_cifar("cifar100", tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("form", [0, 1], ids=["packed", "unpacked"])
def test_archives_for_python_are_refused_and_the_binary_archive_is_named(tmp_path: Path, name: str, form: int) -> None:
    (tmp_path / ARCHIVES[name].pickled[form]).write_bytes(b"pickle")
    with pytest.raises(FormatError, match="is the archive for Python") as caught:
        load_cifar(name, tmp_path)  # type: ignore[arg-type]
    assert ARCHIVES[name].file in caught.value.expected
    assert ARCHIVES[name].url in caught.value.fix


def test_other_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        load_cifar("cifar1000", tmp_path)  # type: ignore[arg-type]


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, np.ndarray]:
    pytest.importorskip("PIL.Image")
    images = np.random.default_rng(0).integers(0, 256, (3000, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(3000) % 100
    TOOL.write_shards(tmp_path, images, labels[:2000], labels[2000:], [f"class {i}" for i in range(100)])
    return tmp_path, images


def test_a_sheet_is_ten_rows_of_a_hundred_images(shards: tuple[Path, np.ndarray]) -> None:
    folder, images = shards
    with np.load(folder / "shard0.npz") as shard:
        assert len(shard["offsets"]) == 3
        first = shard["sheets"][: shard["offsets"][1]].tobytes()
    pixels = np.asarray(importlib.import_module("PIL.Image").open(io.BytesIO(first)).convert("RGB"))
    assert pixels.shape == (320, 3200, 3)
    np.testing.assert_array_equal(pixels[32:64, 64:96], images[102])


def test_shards_are_read_image_by_image(shards: tuple[Path, np.ndarray]) -> None:
    folder, images = shards
    before = importlib.import_module("PIL.Image").MAX_IMAGE_PIXELS
    sets = load_cifar("cifar100", folder)
    found = torch.cat((sets["train"].images, sets["test"].images)).permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(found, images)
    assert sets["test"].labels[:3].tolist() == [0, 1, 2]
    assert before == importlib.import_module("PIL.Image").MAX_IMAGE_PIXELS


def test_missing_and_damaged_shards_are_named(shards: tuple[Path, np.ndarray]) -> None:
    folder, _ = shards
    whole = (folder / "shard1.npz").read_bytes()
    (folder / "shard1.npz").write_bytes(whole[:-2000])
    with pytest.raises(IntegrityError, match=r"shard1\.npz"):
        load_cifar("cifar100", folder)
    (folder / "shard1.npz").unlink()
    with pytest.raises(MissingFileError, match=r"shard1\.npz"):
        load_cifar("cifar100", folder)


@pytest.mark.parametrize(
    "entries",
    [
        {"sheets": np.array(3), "offsets": np.array(3)},
        {"sheets": np.array(["a"]), "offsets": np.array(["a", "b"])},
        {"sheets": np.zeros(4, np.uint8), "offsets": np.array([0.0, 2.5, 4.0])},
    ],
    ids=["numbers", "words", "fractions"],
)
def test_shards_of_other_kinds_of_entries_are_refused(tmp_path: Path, entries: dict[str, np.ndarray]) -> None:
    for name in ("shard0.npz", "shard1.npz"):
        np.savez(tmp_path / name, **entries)
    with pytest.raises(FormatError, match="not bytes"):
        load_cifar("cifar100", tmp_path)


def test_a_shard_that_claims_more_than_there_is_memory_is_damaged(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (10**15,)})
    for name in ("shard0.npz", "shard1.npz"):
        with zipfile.ZipFile(tmp_path / name, "w") as shard:
            shard.writestr("sheets.npy", header.getvalue())
    with pytest.raises(IntegrityError, match=r"shard0\.npz"):
        load_cifar("cifar100", tmp_path)


def test_a_sheet_of_another_size_is_refused(shards: tuple[Path, np.ndarray]) -> None:
    folder, _ = shards
    image = importlib.import_module("PIL.Image")
    stored = io.BytesIO()
    image.new("RGB", (64, 64)).save(stored, "WEBP", lossless=True)
    sheet = np.frombuffer(stored.getvalue(), np.uint8)
    np.savez(folder / "shard0.npz", sheets=sheet, offsets=np.array([0, len(sheet)]))
    with pytest.raises(FileError):
        load_cifar("cifar100", folder)


def test_without_pillow_sheets_say_what_to_install(shards: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match="pip install pillow"):
        load_cifar("cifar100", shards[0])


def test_the_tool_packs_the_png_sheets_of_the_npm_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    rows = np.random.default_rng(0).integers(0, 256, (6, 1000, 1024, 3), dtype=np.uint8)
    for name, batch in zip(TOOL.PNG_FILES, rows, strict=True):
        image.fromarray(batch).save(tmp_path / name, compress_level=1)
    for name, count in zip(TOOL.LABEL_FILES, (5000, 1000), strict=True):
        (tmp_path / name).write_text(json.dumps([i % 10 for i in range(count)]))
    monkeypatch.setattr(sys, "argv", ["cifar_sheets.py", "cifar10", str(tmp_path), str(tmp_path / "out")])
    TOOL.main()
    sets = load_cifar("cifar10", tmp_path / "out")
    np.testing.assert_array_equal(sets["train"].images[2001].permute(1, 2, 0), rows[2, 1].reshape(32, 32, 3))
    np.testing.assert_array_equal(sets["test"].images[1].permute(1, 2, 0), rows[5, 1].reshape(32, 32, 3))
    assert sets["test"].labels[:12].tolist() == [*range(10), 0, 1]
    assert sets["train"].class_names[0] == "airplane"


@pytest.mark.skipif(not (SHARED / "data" / "cifar100").is_dir(), reason=f"no CIFAR-100 shards under {SHARED}")
def test_the_published_shards_hold_cifar100() -> None:
    pytest.importorskip("PIL.Image")
    sets = load_cifar("cifar100", SHARED / "data" / "cifar100")
    train, test = sets["train"], sets["test"]
    assert train.images.shape == (50_000, 3, 32, 32)
    assert test.images.shape == (10_000, 3, 32, 32)
    assert train.labels.bincount().tolist() == [500] * 100
    assert test.labels.bincount().tolist() == [100] * 100
    shades = train.images.float() / 255
    assert torch.allclose(shades.mean((0, 2, 3)), torch.tensor(train.mean), atol=2e-4)
    assert torch.allclose(shades.std((0, 2, 3)), torch.tensor(train.std), atol=2e-4)

from __future__ import annotations

import importlib
import io
import json
import os
import pickle
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from anytime.data import load_cifar
from anytime.data.cifar_archive import ARCHIVES
from anytime.data.cifar_sheets import write_shards
from anytime.errors import FileError, FormatError, IntegrityError, MissingExtraError, MissingFileError, OptionError

SHARED = Path(os.environ.get("ANYTIME_SHARED", Path(__file__).parents[3] / "shared"))
PER_BATCH = 20


def unpacked(folder: Path, name: str) -> dict[str, np.ndarray]:
    """An archive of a few images as it unpacks; gives the images and labels that went in."""
    archive, random = ARCHIVES[name], np.random.default_rng(0)
    place = folder / archive.folder
    place.mkdir(parents=True)
    classes = 10 if name == "cifar10" else 100
    written: dict[str, np.ndarray] = {}
    for split, files in (("train", archive.train), ("test", archive.test)):
        images = random.integers(0, 256, (len(files), PER_BATCH, 3, 32, 32), dtype=np.uint8)
        labels = random.integers(0, classes, (len(files), PER_BATCH))
        for file, pictures, answers in zip(files, images, labels, strict=True):
            batch = {b"data": pictures.reshape(PER_BATCH, -1), archive.labels.encode(): answers.tolist()}
            (place / file).write_bytes(pickle.dumps(batch, protocol=2))
        written[split], written[f"{split}_labels"] = images.reshape(-1, 3, 32, 32), labels.reshape(-1)
    names = {archive.names.encode(): [f"class {i}".encode() for i in range(classes)]}
    (place / archive.meta).write_bytes(pickle.dumps(names, protocol=2))
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
    assert sets["train"].class_names[3] == "class 3"
    assert len(sets["train"].class_names) == (10 if name == "cifar10" else 100)


def test_an_archive_with_another_checksum_is_refused(tmp_path: Path) -> None:
    unpacked(tmp_path, "cifar100")
    archive = pack(tmp_path, "cifar100")
    with pytest.raises(IntegrityError, match="eb9058c3a382ffc7106e4002c42a8d85") as caught:
        load_cifar("cifar100", tmp_path)
    assert caught.value.path == archive
    assert "fetch https://" in str(caught.value)


def test_damage_is_named(tmp_path: Path) -> None:
    unpacked(tmp_path, "cifar100")
    archive = pack(tmp_path, "cifar100")
    whole = archive.read_bytes()
    for data in (whole[: len(whole) // 2], b"not gzip", b""):
        archive.write_bytes(data)
        with pytest.raises(FileError):
            load_cifar("cifar100", tmp_path, verify=False)


def test_a_missing_file_says_what_to_fetch_and_where_to_put_it(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"fetch .*cifar-100-python\.tar\.gz") as caught:
        load_cifar("cifar100", tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in str(caught.value)
    unpacked(tmp_path, "cifar10")
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(MissingFileError, match="data_batch_3"):
        load_cifar("cifar10", tmp_path)


def test_a_batch_of_another_shape_is_refused(tmp_path: Path) -> None:
    unpacked(tmp_path, "cifar100")
    file = tmp_path / "cifar-100-python" / "test"
    for batch in ({b"data": np.zeros((3, 12), np.uint8), b"fine_labels": [0, 1, 2]}, {b"fine_labels": [0]}, [1]):
        file.write_bytes(pickle.dumps(batch, protocol=2))
        with pytest.raises(FormatError):
            load_cifar("cifar100", tmp_path)


def _nested(depth: int) -> list[object]:
    """A billion numbers in a file of a few hundred bytes."""
    inner: list[object] = [1] * 10
    for _ in range(depth):
        inner = [inner] * 10
    return inner


@pytest.mark.parametrize(
    "labels", ["abc", None, 5, {1: 2}, [1.5], ["a"], [2**80], [True], _nested(9)], ids=lambda x: str(type(x))
)
def test_labels_that_are_no_whole_numbers_are_refused(tmp_path: Path, labels: object) -> None:
    unpacked(tmp_path, "cifar100")
    batch = {b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": labels}
    (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(FormatError, match="whole numbers"):
        load_cifar("cifar100", tmp_path)


@pytest.mark.parametrize("names", [5, None, [1] * 100, [_nested(9)] * 100], ids=["number", "none", "numbers", "nested"])
def test_class_names_that_are_no_words_are_refused(tmp_path: Path, names: object) -> None:
    unpacked(tmp_path, "cifar100")
    meta = {b"fine_label_names": names}
    (tmp_path / "cifar-100-python" / "meta").write_bytes(pickle.dumps(meta, protocol=2))
    with pytest.raises(FormatError, match="class names"):
        load_cifar("cifar100", tmp_path)


def test_other_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        load_cifar("cifar1000", tmp_path)  # type: ignore[arg-type]


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, np.ndarray]:
    pytest.importorskip("PIL.Image")
    images = np.random.default_rng(0).integers(0, 256, (3000, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(3000) % 100
    write_shards(tmp_path, images, labels[:2000], labels[2000:], [f"class {i}" for i in range(100)])
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
    with pytest.raises(FormatError, match="in place of bytes"):
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


def test_png_sheets_of_the_npm_package_are_read(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    first = {}
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        rows = np.zeros((10_000, 1024, 3), np.uint8)
        rows[:4] = random.integers(0, 256, (4, 1024, 3))
        first[name] = rows[1].reshape(32, 32, 3)
        image.fromarray(rows).save(tmp_path / f"{name}.png", compress_level=1)
    (tmp_path / "train_lables.json").write_text(json.dumps([i % 10 for i in range(50_000)]))
    (tmp_path / "test_lables.json").write_text(json.dumps([i % 10 for i in range(10_000)]))
    sets = load_cifar("cifar10", tmp_path)
    np.testing.assert_array_equal(sets["train"].images[20_001].permute(1, 2, 0), first["data_batch_3"])
    np.testing.assert_array_equal(sets["test"].images[1].permute(1, 2, 0), first["test_batch"])
    (tmp_path / "test_lables.json").write_text("[1, 2]")
    with pytest.raises(FormatError, match=r"test_lables\.json"):
        load_cifar("cifar10", tmp_path)


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

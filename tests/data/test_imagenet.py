from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from anytime.data.base import StreamedImages
from anytime.data.imagenet import center_crop, load_imagenet, random_box, random_crop
from anytime.data.split import hold_out
from anytime.errors import FormatError, IntegrityError, MissingFileError
from anytime.models.base import MultiExit
from anytime.train import TrainConfig, joint_cross_entropy, on_logits
from anytime.train.config import Hardware
from anytime.train.data.stream import StreamedEvaluation, StreamedStep

CLASSES = ("n01440764", "n01443537", "n01484850")
SIZE = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of several sizes and modes, one colour per class, and noise."""
    place: Path = tmp_path_factory.mktemp("imagenet")
    random = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 3)):
        for label, name in enumerate(CLASSES):
            (place / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 60, (30 + 5 * i, 50 - 3 * i, 3), dtype=np.uint8)
                pixels[..., label] += 150
                Image.fromarray(pixels).save(place / split / name / f"{name}_{i}.JPEG")
    grey = Image.fromarray(random.integers(0, 256, (40, 40), dtype=np.uint8))
    grey.save(place / "val" / CLASSES[0] / "grey.JPEG")
    (place / "train" / CLASSES[0] / "notes.txt").write_text("not an image")
    return place


def test_folders_become_labelled_rows(folder: Path) -> None:
    sets = load_imagenet(folder, size=SIZE)
    assert {name: len(data) for name, data in sets.items()} == {"train": 24, "test": 10}
    train = sets["train"]
    assert isinstance(train, StreamedImages)
    assert train.class_names == CLASSES
    assert train.labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    images = next(train.batches(torch.tensor([20, 0]), 2))
    assert images.dtype == torch.uint8
    assert images.shape == (2, 3, SIZE, SIZE)
    assert images.float().mean((2, 3)).argmax(1).tolist() == [2, 0]


def test_batches_depend_on_seed_and_epoch_only_not_on_workers(folder: Path) -> None:
    train = load_imagenet(folder, size=SIZE)["train"]
    order = torch.randperm(24)

    def batches(workers: int, draws: tuple[int, int], start: int = 0) -> list[torch.Tensor]:
        return list(replace(train, workers=workers).batches(order[start:], 5, draws=draws))

    one, many = batches(1, (0, 3)), batches(7, (0, 3))
    assert [len(batch) for batch in one] == [5, 5, 5, 5, 4]
    assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))
    assert torch.equal(one[2], batches(2, (0, 3), start=10)[0])  # a run resumed within an epoch
    assert not torch.equal(one[0], batches(1, (0, 4))[0])
    assert not torch.equal(one[0], batches(1, (1, 3))[0])


def test_a_subset_keeps_the_crops_of_its_rows(folder: Path) -> None:
    train = load_imagenet(folder, size=SIZE)["train"]
    kept, held = hold_out(24, 6, seed=0).apply(train)
    whole = next(train.batches(kept.rows[:4], 4, draws=(0, 0)))
    assert torch.equal(next(kept.batches(torch.arange(4), 4, draws=(0, 0))), whole)
    assert held.split == "val"


@pytest.mark.parametrize(("width", "height"), [(500, 375), (300, 300), (1000, 20), (7, 900), (1, 1)])
def test_crops_are_inside_the_image_and_have_an_allowed_aspect_ratio(width: int, height: int) -> None:
    random = np.random.RandomState(0)
    fractions = []
    for _ in range(200):
        left, top, right, bottom = random_box(width, height, random)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        fractions.append((right - left) * (bottom - top) / (width * height))
        if min(width, height) >= 300:
            assert 0.74 < (right - left) / (bottom - top) < 1.35
    if min(width, height) >= 300:
        assert 0.07 < min(fractions) < 0.15
        assert max(fractions) > 0.85


def test_half_of_the_crops_are_flipped() -> None:
    ramp = Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (200, 1))).convert("RGB")
    random = np.random.RandomState(0)
    crops = [np.asarray(random_crop(ramp, random, size=8)).astype(int) for _ in range(400)]
    flipped = sum(crop[0, 0, 0] > crop[0, -1, 0] for crop in crops)
    assert 150 < flipped < 250


def test_evaluation_uses_the_center_crop() -> None:
    pixels = np.zeros((256, 512, 3), dtype=np.uint8)
    pixels[16:240, 144:368] = 255
    assert np.asarray(center_crop(Image.fromarray(pixels))).min() == 255
    assert center_crop(Image.new("RGB", (37, 1000)), size=224).size == (224, 224)


def test_mistakes_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="train"):
        load_imagenet(tmp_path)
    for split in ("train", "val"):
        (tmp_path / split / CLASSES[0]).mkdir(parents=True)
    with pytest.raises(MissingFileError, match="without images"):
        load_imagenet(tmp_path)
    for split in ("train", "val"):
        (tmp_path / split / CLASSES[0] / "a.JPEG").write_bytes(b"\xff\xd8 not an image")
    with pytest.raises(IntegrityError, match=r"a\.JPEG"):
        next(load_imagenet(tmp_path)["train"].batches(torch.tensor([0]), 1))
    (tmp_path / "val" / CLASSES[1]).mkdir()
    with pytest.raises(FormatError, match=CLASSES[1]):
        load_imagenet(tmp_path)


def test_a_class_without_images_is_named(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for name in CLASSES:
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (20, 20)).save(tmp_path / split / name / "a.JPEG")
    load_imagenet(tmp_path)
    (tmp_path / "val" / CLASSES[1] / "a.JPEG").unlink()
    with pytest.raises(MissingFileError, match=CLASSES[1]):
        load_imagenet(tmp_path)


def test_only_jpeg_and_png_are_decoded_whatever_the_name(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / CLASSES[0]).mkdir(parents=True)
        for name, kind in (("a.JPEG", "PNG"), ("b.JPEG", "GIF")):
            Image.new("RGB", (20, 20)).save(tmp_path / split / CLASSES[0] / name, kind)
    train = load_imagenet(tmp_path, size=SIZE)["train"]
    assert next(train.batches(torch.tensor([0]), 1)).shape == (1, 3, SIZE, SIZE)
    with pytest.raises(IntegrityError, match=r"b\.JPEG"):
        next(train.batches(torch.tensor([1]), 1))


def test_an_image_of_billions_of_pixels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("train", "val"):
        (tmp_path / split / CLASSES[0]).mkdir(parents=True)
        Image.new("1", (100, 100)).save(tmp_path / split / CLASSES[0] / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000)
    with pytest.raises(IntegrityError, match=r"a\.png"):
        next(load_imagenet(tmp_path, size=SIZE)["train"].batches(torch.tensor([0]), 1))


class Colours(MultiExit):
    """Two exits that see the mean colour."""

    num_exits = 2

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def exits(self, x: torch.Tensor):  # type: ignore[no-untyped-def]
        for head in self.heads:
            yield head(x.mean((2, 3)))


def test_the_trainer_learns_from_a_stream(folder: Path) -> None:
    sets = load_imagenet(folder, size=SIZE)
    torch.manual_seed(0)
    model = Colours()
    config = TrainConfig(epochs=5, batch=8, lr=0.5)
    training = StreamedStep(model, sets["train"], on_logits(joint_cross_entropy), config, Hardware())
    for epoch in range(5):
        training.begin(epoch)
        for index in range(training.steps_per_epoch):
            training(index, 0.5)
    training.publish(15)
    found = StreamedEvaluation(model, sets["test"], batch=4)
    assert found.logits().shape == (2, 10, 3)
    assert min(found.accuracy()) >= 0.9


def test_a_stream_resumed_within_an_epoch_gives_the_same_losses(folder: Path) -> None:
    train = load_imagenet(folder, size=SIZE)["train"]

    def last_loss(first: int) -> list[float]:
        torch.manual_seed(0)
        training = StreamedStep(Colours(), train, on_logits(joint_cross_entropy), TrainConfig(batch=8), Hardware())
        training.begin(2)
        for index in range(first, 3):
            training.take_losses()
            training(index, 0.0)
        losses: list[float] = training.take_losses().tolist()
        return losses

    assert last_loss(0) == pytest.approx(last_loss(2))

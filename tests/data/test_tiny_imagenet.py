from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from anytime.data.base import ImageData
from anytime.data.tiny_imagenet import load_tiny_imagenet
from anytime.errors import AnytimeError, FormatError, MissingFileError
from anytime.train.data.named import open_sets
from anytime.train.settings import Source, read_recipe, resolve

CLASSES = ("n01443537", "n01629819", "n01641577")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The layout of the archive with a few images, one colour per class; one of them is grey."""
    random = np.random.default_rng(0)

    def save(path: Path, label: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 60, (64, 64, 3), dtype=np.uint8)
        pixels[..., label] += 150
        Image.fromarray(pixels).save(path, quality=95)

    lines = []
    for label, name in enumerate(CLASSES):
        for i in range(4):
            save(tmp_path / "train" / name / "images" / f"{name}_{i}.JPEG", label)
        (tmp_path / "train" / name / f"{name}_boxes.txt").write_text("boxes")
    for i, label in enumerate((2, 0, 1)):
        save(tmp_path / "val" / "images" / f"val_{i}.JPEG", label)
        lines.append(f"val_{i}.JPEG\t{CLASSES[label]}\t0\t0\t62\t62\n")
    (tmp_path / "val" / "val_annotations.txt").write_text("".join(lines))
    grey = Image.fromarray(random.integers(0, 256, (64, 64), dtype=np.uint8))
    grey.save(tmp_path / "train" / CLASSES[0] / "images" / f"{CLASSES[0]}_0.JPEG")
    return tmp_path


def test_the_archive_becomes_labelled_images(folder: Path) -> None:
    sets = load_tiny_imagenet(folder)
    train, test = sets["train"], sets["test"]
    assert isinstance(train, ImageData)
    assert train.images.shape == (12, 3, 64, 64)
    assert train.class_names == CLASSES
    assert train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert test.labels.tolist() == [2, 0, 1]
    colours = train.images.float().mean((2, 3))
    assert colours[1:].argmax(1).tolist() == train.labels[1:].tolist()
    assert torch.equal(train.images[0, 0], train.images[0, 2])  # grey
    assert test.images.float().mean((2, 3)).argmax(1).tolist() == [2, 0, 1]


def test_images_are_resized_and_threads_do_not_matter(folder: Path) -> None:
    one, many = (load_tiny_imagenet(folder, size=72, workers=workers) for workers in (1, 5))
    assert one["test"].images.shape == (3, 3, 72, 72)
    assert torch.equal(one["train"].images, many["train"].images)


def test_the_recipe_loads_images_of_its_networks_size(folder: Path) -> None:
    changes = Source("test", {"device": "cpu", "root": str(folder), "held_out": 2})
    sets = open_sets(resolve(read_recipe("tiny-imagenet-msdnet-4"), changes))
    assert sets.val is not None
    assert (len(sets.train), len(sets.val), len(sets.test)) == (10, 2, 3)
    assert sets.train.images.shape[-2:] == (72, 72)  # type: ignore[union-attr]


@pytest.mark.parametrize("broken", ["val/val_annotations.txt", "train", "train/n01443537/images", "val/images/val_1.JPEG"])
def test_a_missing_part_is_named(folder: Path, broken: str) -> None:
    (folder / broken).rename(folder / "elsewhere")
    with pytest.raises(MissingFileError) as caught:
        load_tiny_imagenet(folder)
    assert Path(broken).name in str(caught.value)


@pytest.mark.parametrize("line", ["val_0.JPEG", "val_0.JPEG\tn00000000", "../val_0.JPEG\tn01443537", ""])
def test_a_wrong_list_of_labels_is_refused(folder: Path, line: str) -> None:
    (folder / "val" / "val_annotations.txt").write_text(line)
    with pytest.raises(FormatError):
        load_tiny_imagenet(folder)


def test_a_file_that_is_not_an_image_is_refused(folder: Path) -> None:
    (folder / "val" / "images" / "val_1.JPEG").write_bytes(b"not an image")
    with pytest.raises(AnytimeError, match="val_1"):
        load_tiny_imagenet(folder)

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from anytime.data.rand_augment import COLOURS, GEOMETRY, Operations, _affine, draw_operations, recolour, transform

WITHOUT_LEVEL = {"auto_contrast", "equalize", "invert"}
# Pillow cuts off fractions where we round, and rounds grey values and filtered pixels before it blends.
TOLERANCE = {"equalize": 6, "contrast": 2, "sharpness": 2}


def some_images(count: int = 4, *, side: int = 16, channels: int = 3) -> Tensor:
    """Smooth images with a little noise, whole numbers from 20 to 230."""
    rng = np.random.default_rng(0)
    wave = np.sin(np.linspace(0, 5, side)[:, None] * rng.uniform(0.5, 2, (count, channels, 1, 1)) + np.linspace(0, 3, side))
    return torch.from_numpy((125 + 90 * wave + rng.uniform(-15, 15, wave.shape)).round()).to(torch.uint8)


def apply(name: str, images: Tensor, level: float) -> Tensor:
    count = len(images)
    chosen = torch.full((count, 1), list(COLOURS).index(name))
    return recolour(images, Operations(chosen, torch.full((count, 1), level), torch.zeros(count, 2, 3)))


def by_pillow(name: str, image: Tensor, level: float) -> Tensor:
    """One image, `(channels, height, width)`, through Pillow."""
    pillow = pytest.importorskip("PIL.Image", reason="needs Pillow")
    from PIL import ImageEnhance, ImageOps

    picture = pillow.fromarray(image.permute(1, 2, 0).numpy())
    factor = 1 + 0.9 * level
    done = {
        "auto_contrast": lambda: ImageOps.autocontrast(picture),
        "equalize": lambda: ImageOps.equalize(picture),
        "invert": lambda: ImageOps.invert(picture),
        "posterize": lambda: ImageOps.posterize(picture, 8 - round(4 * abs(level))),
        "solarize": lambda: ImageOps.solarize(picture, round(256 * (1 - abs(level)))),
        "solarize_add": lambda: picture.point(lambda value: value + round(110 * abs(level)) if value < 128 else value),
        "saturation": lambda: ImageEnhance.Color(picture).enhance(factor),
        "contrast": lambda: ImageEnhance.Contrast(picture).enhance(factor),
        "brightness": lambda: ImageEnhance.Brightness(picture).enhance(factor),
        "sharpness": lambda: ImageEnhance.Sharpness(picture).enhance(factor),
    }[name]()
    return torch.from_numpy(np.array(done)).permute(2, 0, 1)


@pytest.mark.parametrize("level", [-1.0, -0.5, 0.5, 1.0])
@pytest.mark.parametrize("name", COLOURS)
def test_a_colour_operation_is_that_of_pillow(name: str, level: float) -> None:
    images = some_images(side=64 if name == "equalize" else 16)  # Pillow counts in steps of 1/255 of the pixels
    expected = torch.stack([by_pillow(name, image, level) for image in images])
    torch.testing.assert_close(apply(name, images, level), expected.float(), rtol=0, atol=TOLERANCE.get(name, 1))


@pytest.mark.parametrize("name", sorted(set(COLOURS) - WITHOUT_LEVEL))
def test_level_0_changes_no_colour(name: str) -> None:
    images = some_images()
    assert torch.equal(apply(name, images, 0.0), images.float())


@pytest.mark.parametrize("name", ["auto_contrast", "equalize"])
def test_an_image_of_one_colour_stays(name: str) -> None:
    images = torch.full((2, 3, 8, 8), 77, dtype=torch.uint8)
    assert torch.equal(apply(name, images, 0.9), images.float())


@pytest.mark.parametrize("name", COLOURS)
def test_grey_images_keep_their_channel_and_their_range(name: str) -> None:
    found = apply(name, some_images(channels=1), 1.0)
    assert found.shape == (4, 1, 16, 16)
    assert found.min() >= 0
    assert found.max() <= 255
    assert torch.equal(found, found.round())


def test_each_image_gets_its_own_operations_in_their_order() -> None:
    images, names = some_images(3), list(COLOURS)
    chosen = torch.tensor([[names.index("invert"), names.index("brightness")], [-1, names.index("solarize")], [-1, -1]])
    level = torch.tensor([[0.0, -0.5], [0.9, 0.5], [0.9, 0.9]])
    found = recolour(images, Operations(chosen, level, torch.zeros(3, 2, 3)))
    darker = apply("brightness", apply("invert", images[:1], 0.0), -0.5)
    assert torch.equal(found, torch.cat([darker, apply("solarize", images[1:2], 0.5), images[2:].float()]))


def affine(name: str, level: float, *, aspect: float = 1.0) -> Tensor:
    return torch.from_numpy(_affine(np.array([GEOMETRY.index(name)]), np.array([level]), aspect)[:, :2]).float()


@pytest.mark.parametrize("name", GEOMETRY)
def test_level_0_moves_nothing(name: str) -> None:
    images = some_images(1).float()
    torch.testing.assert_close(transform(images, affine(name, 0.0)), images, rtol=0, atol=1e-3)


def test_a_translation_moves_whole_pixels_and_fills_with_0() -> None:
    images = some_images(1).float()
    level = 4 / 16 / 0.45  # 4 of 16 pixels
    right = transform(images, affine("translate_x", level))
    torch.testing.assert_close(right[..., :12], images[..., 4:], rtol=0, atol=1e-2)
    assert right[..., 12:].abs().max() < 1e-2
    down = transform(images, affine("translate_y", -level))
    torch.testing.assert_close(down[..., 4:, :], images[..., :12, :], rtol=0, atol=1e-2)


def test_a_rotation_keeps_distances_in_pixels() -> None:
    height, width = 20, 50
    half = torch.diag(torch.tensor([width / 2, height / 2]))  # from coordinates between -1 and 1 to pixels
    turn = half @ affine("rotate", 0.5, aspect=height / width)[0, :, :2] @ half.inverse()
    torch.testing.assert_close(turn @ turn.T, torch.eye(2))
    assert math.degrees(math.acos(float(turn[0, 0]))) == pytest.approx(15, abs=1e-3)


def test_a_shear_moves_each_row_in_proportion_to_its_height() -> None:
    height, width = 20, 50
    half = torch.diag(torch.tensor([width / 2, height / 2]))
    slope = half @ affine("shear_x", 1.0, aspect=height / width)[0, :, :2] @ half.inverse()
    torch.testing.assert_close(slope, torch.tensor([[1.0, 0.3], [0.0, 1.0]]))


def test_draws_depend_on_the_generator_alone_and_half_of_the_operations_are_none() -> None:
    first, same, other = (
        draw_operations(6_000, operations=2, magnitude=9, rng=np.random.default_rng(seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(first.colour, same.colour)
    assert torch.equal(first.affine, same.affine)
    assert not torch.equal(first.level, other.level)
    moved = (first.affine != torch.eye(3)[:2]).flatten(1).any(1)
    # Of 15 operations 5 are geometric; an image moves unless neither of its two is one of them and applied.
    assert float(moved.float().mean()) == pytest.approx(1 - (1 - 0.5 / 3) ** 2, abs=0.03)
    counts = (first.colour.flatten() + 1).bincount(minlength=len(COLOURS) + 1) / 12_000
    torch.testing.assert_close(counts[1:], torch.full((len(COLOURS),), 0.5 / 15), rtol=0, atol=0.01)
    assert float(first.level.abs().mean()) == pytest.approx(0.9, abs=0.02)
    assert float((first.level > 0).float().mean()) == pytest.approx(0.5, abs=0.03)


def test_no_operations_change_nothing() -> None:
    images = some_images()
    drawn = draw_operations(4, operations=0, magnitude=9, rng=np.random.default_rng(0))
    assert torch.equal(recolour(images, drawn), images.float())
    torch.testing.assert_close(transform(images.float(), drawn.affine), images.float(), rtol=0, atol=1e-3)

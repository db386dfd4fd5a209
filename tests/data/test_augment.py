from __future__ import annotations

import torch
from torch.nn import functional as F

from anytime.data import Draws, augment, crop_flip, draw, no_draws, normalise


def noise_images(count: int = 6, channels: int = 3, height: int = 8, width: int = 10) -> torch.Tensor:
    return torch.randint(1, 256, (count, channels, height, width), dtype=torch.uint8)


def by_hand(image: torch.Tensor, down: int, right: int, flip: bool, pad: int) -> torch.Tensor:
    height, width = image.shape[1:]
    cut = F.pad(image, (pad, pad, pad, pad))[:, down : down + height, right : right + width]
    return cut.flip(2) if flip else cut


def test_every_crop_and_flip_equals_padding_and_slicing_by_hand() -> None:
    pad = 2
    images = noise_images(count=2)
    for down in range(2 * pad + 1):
        for right in range(2 * pad + 1):
            for flip in (False, True):
                draws = Draws(torch.tensor([down]), torch.tensor([right]), torch.tensor([flip]))
                found = crop_flip(images, torch.tensor([1]), draws, pad=pad)
                assert torch.equal(found[0], by_hand(images[1], down, right, flip, pad))


def test_a_batch_gets_what_each_image_would_get_alone() -> None:
    images = noise_images()
    rows = torch.tensor([3, 0, 0, 5])
    draws = draw(4, generator=torch.Generator().manual_seed(1))
    together = crop_flip(images, rows, draws)
    for i, row in enumerate(rows):
        assert torch.equal(together[i], by_hand(images[row], int(draws.down[i]), int(draws.right[i]), bool(draws.flip[i]), 4))


def test_no_draws_changes_nothing() -> None:
    images = noise_images()
    assert torch.equal(crop_flip(images, torch.arange(6), no_draws(6)), images)


def test_draws_cover_all_shifts_and_both_flips_evenly() -> None:
    draws = draw(90_000, generator=torch.Generator().manual_seed(0))
    for shift in (draws.down, draws.right):
        counts = shift.bincount(minlength=9)
        assert len(counts) == 9
        assert counts.min() > 9_500
        assert counts.max() < 10_500
    assert abs(float(draws.flip.float().mean()) - 0.5) < 0.01


def test_the_same_generator_state_gives_the_same_images() -> None:
    images = noise_images()
    first = augment(images, generator=torch.Generator().manual_seed(3))
    assert torch.equal(first, augment(images, generator=torch.Generator().manual_seed(3)))
    assert not torch.equal(first, augment(images, generator=torch.Generator().manual_seed(4)))


def test_normalise_takes_mean_and_deviation_per_channel() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    found = normalise(images, (0.5, 0.1, 0.2), (0.5, 0.1, 0.4))
    torch.testing.assert_close(found.flatten(), torch.tensor([-1.0, 1.0, 2.0]))
    assert normalise(images, (0.5,) * 3, (0.5,) * 3, dtype=torch.bfloat16).dtype == torch.bfloat16

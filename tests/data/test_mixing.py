from __future__ import annotations

import numpy as np
import pytest
import torch

from anytime.data.mixing import Erased, Mixing, draw_erased, draw_mixing, erase, inside, mix, own_weights

SIZE = {"height": 32, "width": 24}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_erasing_replaces_the_box_and_nothing_else() -> None:
    images, noises = torch.zeros(3, 2, 6, 8), torch.arange(1.0, 3).view(2, 1, 1, 1).expand(2, 2, 6, 8)
    boxes = torch.tensor([[1, 3, 2, 7], [4, 4, 0, 0], [0, 6, 0, 8]])
    found = erase(images, Erased(boxes, torch.tensor([1, 0, 0])), noises)
    expected = images.clone()
    expected[0, :, 1:3, 2:7] = 2
    expected[2] = 1
    assert torch.equal(found, expected)


def test_boxes_to_erase_have_the_published_sizes() -> None:
    drawn = draw_erased(20_000, probability=0.25, noises=5, rng=rng(), **SIZE)
    top, bottom, left, right = drawn.box.unbind(1)
    assert drawn.box.min() >= 0
    assert bottom.max() <= 32
    assert right.max() <= 24
    area = (bottom - top) * (right - left) / (32 * 24)
    assert float((area > 0).float().mean()) == pytest.approx(0.25, abs=0.02)
    erased = area[area > 0]
    assert float(erased.mean()) == pytest.approx((0.02 + 1 / 3) / 2, abs=0.02)
    assert erased.max() < 0.4
    assert set(drawn.noise.tolist()) == set(range(5))
    assert draw_erased(50, probability=1.0, noises=1, rng=rng(), **SIZE).box.diff(dim=1)[:, ::2].min() > 0


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_weights_of_images_and_labels_sum_to_one(mixup: float, cutmix: float) -> None:
    drawn = draw_mixing(40, mixup=mixup, cutmix=cutmix, rng=rng(), **SIZE)
    labels = torch.eye(4)
    for step in range(40):
        own = own_weights(drawn[torch.tensor([step])], **SIZE)
        assert own.shape == (1, 32, 24)
        torch.testing.assert_close(mix(torch.ones(4, 3, 32, 24), own), torch.ones(4, 3, 32, 24))
        mixed = mix(labels, own.mean())
        torch.testing.assert_close(mixed.sum(1), torch.ones(4))
        torch.testing.assert_close(mixed[0, 0], own.mean())
        torch.testing.assert_close(mixed[2, 3], 1 - own.mean())
        assert float(mixed[:2, 2:].abs().max()) == 0  # of a pair alone


def test_mixup_blends_whole_images_and_cutmix_exchanges_a_box() -> None:
    drawn = draw_mixing(4_000, mixup=0.8, cutmix=1.0, rng=rng(), **SIZE)
    empty = ~inside(drawn.box, **SIZE).flatten(1).any(1)
    cut = drawn.own == 1
    assert bool((empty | cut).all())
    assert float(cut.float().mean()) == pytest.approx(0.5, abs=0.03)
    assert float(drawn.own[~cut].mean()) == pytest.approx(0.5, abs=0.03)
    # The variance of a beta distribution with two parameters a is 1 / (8 a + 4).
    assert float(drawn.own[~cut].var()) == pytest.approx(1 / (8 * 0.8 + 4), abs=0.01)


def test_cutmix_by_hand() -> None:
    values = torch.stack([torch.zeros(1, 4, 4), torch.ones(1, 4, 4)])
    own = own_weights(Mixing(torch.tensor(1.0), torch.tensor([1, 3, 0, 4])), 4, 4)
    mixed = mix(values, own)
    assert mixed[0, 0].tolist() == [[0] * 4, [1] * 4, [1] * 4, [0] * 4]
    assert torch.equal(mixed[1], 1 - mixed[0])
    assert float(own.mean()) == 0.5


def test_nothing_is_mixed_without_mixup_and_cutmix() -> None:
    drawn = draw_mixing(5, mixup=0.0, cutmix=0.0, rng=rng(), **SIZE)
    assert float(drawn.own.min()) == 1
    assert not inside(drawn.box, **SIZE).any()

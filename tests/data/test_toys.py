from __future__ import annotations

from typing import Any

import pytest
import torch

from anytime.data.toys import make_simple_1d, make_spiral
from anytime.errors import OptionError


def test_a_seed_gives_the_same_points_and_another_gives_others() -> None:
    first, again, other = make_spiral(50, seed=3), make_spiral(50, seed=3), make_spiral(50, seed=4)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs, other.inputs)
    assert len(first) == 50
    assert first.inputs.dtype == torch.float32


def test_the_spiral_has_arms_of_the_same_size_that_turn_into_each_other() -> None:
    data = make_spiral(400, noise=0.0)
    assert data.inputs.shape == (400, 2)
    assert data.targets.bincount().tolist() == [100] * 4
    radius = data.inputs.norm(dim=1)
    assert radius.min() >= 0.1
    assert radius.max() <= 1
    angle = torch.atan2(data.inputs[:, 1], data.inputs[:, 0])
    along = (angle / (2 * torch.pi) - 0.75 * radius) % 1  # what is left is the arm's own angle
    assert torch.allclose((along * 4).round() % 4, data.targets.float())


def test_simple_1d_has_the_published_points() -> None:
    # The first rows of my_1d_data.npy in github.com/cambridge-mlg/DUN: training x and y, test x and y.
    published = [
        [-1.0747095, -0.16771168, -0.12928766, -0.18957202],
        [0.12670742, 0.05116083, 0.9276154, 1.6304451],
        [0.90425605, 1.0532261, 0.88205355, 1.5947601],
    ]
    train, test = make_simple_1d()
    columns = train.inputs[:, 0], train.targets, test.inputs[:, 0], test.targets
    torch.testing.assert_close(torch.stack(columns, 1)[:3], torch.tensor(published), rtol=0, atol=2e-7)
    low, high = torch.cat((train.inputs, test.inputs)).aminmax()
    torch.testing.assert_close(torch.stack((low, high)), torch.tensor([-1.5116239, 1.325057]), rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    "make",
    [lambda: make_spiral(0), lambda: make_spiral(arms=0), lambda: make_spiral(noise=-1.0), lambda: make_spiral(rows=True)],
)
def test_settings_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(OptionError):
        make()

from __future__ import annotations

from typing import Any

import pytest
import torch

from anytime.data.toys import make_curve, make_spiral
from anytime.errors import OptionError


@pytest.mark.parametrize("make", [make_spiral, make_curve])
def test_a_seed_gives_the_same_points_and_another_gives_others(make: Any) -> None:
    first, again, other = make(50, seed=3), make(50, seed=3), make(50, seed=4)
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


def test_the_curve_has_a_gap() -> None:
    data = make_curve(500)
    x = data.inputs[:, 0]
    assert data.inputs.shape == (500, 1)
    assert data.targets.shape == (500,)
    assert not bool(((x >= -0.2) & (x < 0.3)).any())
    assert -1 <= x.min() < -0.9
    assert 0.9 < x.max() <= 1
    still = make_curve(500, noise=0.0)
    x = still.inputs[:, 0]
    assert torch.allclose(still.targets, x + torch.sin(4 * x) + torch.sin(13 * x) / 2, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [lambda: make_spiral(0), lambda: make_spiral(arms=0), lambda: make_spiral(noise=-1.0), lambda: make_curve(rows=True)],
)
def test_settings_that_make_no_sense_are_refused(make: Any) -> None:
    with pytest.raises(OptionError):
        make()

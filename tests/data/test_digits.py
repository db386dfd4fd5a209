from __future__ import annotations

import pytest
import torch

from anytime.data import load_digits
from anytime.errors import OptionError


def test_the_three_splits_share_no_row_and_hold_all() -> None:
    sets = load_digits()
    rows = torch.cat([data.rows for data in sets.values()])
    assert torch.equal(rows.sort().values, torch.arange(1797))
    assert sets["train"].images.shape == (1197, 1, 8, 8)
    assert sets["train"].images.max() == 255


def test_three_channels_repeat_the_grey_values() -> None:
    grey, colour = load_digits()["test"], load_digits(channels=3)["test"]
    assert torch.equal(colour.images, grey.images.expand(-1, 3, -1, -1))
    assert len(colour.mean) == 3


def test_the_split_follows_the_seed() -> None:
    assert torch.equal(load_digits(seed=1)["val"].rows, load_digits(seed=1)["val"].rows)
    assert not torch.equal(load_digits(seed=1)["val"].rows, load_digits(seed=2)["val"].rows)


def test_other_numbers_of_channels_are_refused() -> None:
    with pytest.raises(OptionError):
        load_digits(channels=2)

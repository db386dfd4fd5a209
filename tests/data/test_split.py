from __future__ import annotations

import pytest
import torch

from anytime.data import Split, hold_out, load_digits
from anytime.errors import OptionError


def test_held_out_and_kept_rows_cover_all_rows_once() -> None:
    split = hold_out(50_000, 5_000, seed=0)
    assert len(split.held_out) == 5_000
    assert len(split.kept) == 45_000
    assert torch.equal(torch.cat((split.kept, split.held_out)).sort().values, torch.arange(50_000))


def test_a_seed_is_one_split_for_good() -> None:
    assert hold_out(50_000, 5_000, seed=0).held_out[:6].tolist() == [14, 22, 24, 28, 64, 76]
    assert not torch.equal(hold_out(100, 10, seed=0).held_out, hold_out(100, 10, seed=1).held_out)


def test_a_split_can_be_stored_and_read_back() -> None:
    split = hold_out(100, 10, seed=3)
    again = Split.from_json(split.to_json())
    assert (again.rows, again.seed) == (100, 3)
    assert torch.equal(again.held_out, split.held_out)


def test_applying_a_split_names_its_parts_and_keeps_their_rows() -> None:
    digits = load_digits()["train"]
    train, val = hold_out(len(digits), 100).apply(digits)
    assert (train.split, val.split) == ("train", "val")
    assert not set(train.rows.tolist()) & set(val.rows.tolist())
    with pytest.raises(OptionError, match="1000 rows"):
        hold_out(1000, 10).apply(digits)


@pytest.mark.parametrize("count", [-1, 10, 11])
def test_there_must_be_rows_left_to_train_on(count: int) -> None:
    with pytest.raises(OptionError):
        hold_out(10, count)


def test_a_damaged_index_is_refused() -> None:
    for rows in ([1, 1], [3, 2], [-1, 2], [5, 10]):
        with pytest.raises(OptionError):
            Split(rows=10, seed=0, held_out=torch.tensor(rows))

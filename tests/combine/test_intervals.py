from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytime import Intersection
from anytime.errors import AnytimeError, InputError, OptionError, ShapeError, StateError

ends = st.lists(st.tuples(st.floats(-5, 5, width=32), st.floats(0, 5, width=32)), min_size=1, max_size=8)


@given(ends)
def test_intervals_only_shrink_until_they_are_empty(pairs) -> None:
    low = torch.tensor([[start] for start, _ in pairs])
    high = low + torch.tensor([[width] for _, width in pairs])
    given = Intersection()(low, high)
    kept = ~given.fell_back
    assert torch.equal(given.lower[kept], low.cummax(0).values[kept])
    assert torch.equal(given.upper[kept], high.cummin(0).values[kept])
    assert torch.equal(given.lower[given.fell_back], low[given.fell_back])
    assert (given.fell_back[:-1] <= given.fell_back[1:]).all()
    assert (given.width >= 0).all()
    backwards = Intersection()(low.flip(0), high.flip(0))  # the order does not matter in the end
    assert torch.equal(backwards.fell_back[-1], given.fell_back[-1])
    assert torch.equal(backwards.width[-1][kept[-1]], given.width[-1][kept[-1]])


def test_density_rises_inside_and_is_zero_outside() -> None:
    given = Intersection()(torch.tensor([[0.0], [1.0]]), torch.tensor([[4.0], [3.0]]))
    assert torch.allclose(given.log_density(torch.tensor([2.0])).exp(), torch.tensor([[0.25], [0.5]]))
    assert given.log_density(torch.tensor([9.0])).tolist() == [[-math.inf], [-math.inf]]
    assert given.middle.tolist() == [[2.0], [2.0]]


def test_touching_intervals_meet_in_a_point() -> None:
    given = Intersection()(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [2.0]]))
    assert not given.fell_back.any()
    assert given.width[1].item() == 0


@pytest.mark.parametrize(
    ("attempt", "kind"),
    [
        (lambda: Intersection()(torch.zeros(2, 1), torch.zeros(2, 2)), ShapeError),
        (lambda: Intersection()(torch.tensor(0.0), torch.tensor(1.0)), ShapeError),
        (lambda: Intersection()(torch.zeros(0, 1), torch.zeros(0, 1)), ShapeError),
        (lambda: Intersection()(torch.ones(2, 1), torch.zeros(2, 1)), InputError),
        (lambda: Intersection()(torch.zeros(2, 1), torch.full((2, 1), math.nan)), InputError),
        (lambda: Intersection()(torch.zeros(2, 1).long(), torch.ones(2, 1).long()), InputError),
        (lambda: Intersection().start(0), OptionError),
        (
            lambda: Intersection().step(Intersection().step(Intersection().start(1), torch.zeros(1), torch.ones(1))[0], 0, 0),
            StateError,
        ),
        (lambda: Intersection().step(Intersection().start(1), torch.zeros(1), torch.ones(2)), ShapeError),
        (
            lambda: Intersection().step(
                Intersection().step(Intersection().start(2), torch.zeros(1), torch.ones(1))[0], torch.zeros(2), torch.ones(2)
            ),
            ShapeError,
        ),
    ],
)
def test_misuse_is_refused(attempt, kind) -> None:
    with pytest.raises(kind) as caught:
        attempt()
    assert isinstance(caught.value, AnytimeError)

"""Perceptrons with exits on the toy tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import anytime
from anytime.data.toys import make_simple_1d, make_spiral
from anytime.errors import OptionError, ShapeError
from anytime.models import MLP, IntervalMLP, MLPConfig, create, load, save
from anytime.models.mlp import interval_score
from anytime.testing import check_model


def test_both_pass_check_model() -> None:
    torch.manual_seed(0)
    check_model(MLP(MLPConfig(classes=4)), torch.randn(3, 2), classes=4)
    check_model(IntervalMLP(exits=3), torch.randn(3, 1), classes=2)


def test_it_survives_a_folder(tmp_path: Path) -> None:
    network, points = create("mlp-toy", classes=4, width=8), torch.randn(3, 2)
    save(network, tmp_path)
    torch.testing.assert_close(load(tmp_path)(points), network(points))


def test_every_exit_learns_the_spiral() -> None:
    train, test = make_spiral(800, seed=0), make_spiral(400, seed=1)
    torch.manual_seed(0)
    network = MLP(MLPConfig(classes=4, width=32, exits=3))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(300):
        loss = sum(F.cross_entropy(logits, train.targets) for logits in network.exits(train.inputs))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    accuracy = (anytime.Latest()(network(test.inputs).detach()).labels == test.targets).double().mean(-1)
    assert accuracy.min() > 0.8  # chance is 0.25
    support = (anytime.parse_rule("product(heaviside)")(network(test.inputs).detach()).probs > 0).sum(-1)
    assert bool((support.diff(dim=0) <= 0).all())


def test_intervals_cover_the_curve_and_their_intersection_shrinks() -> None:
    train, test = make_simple_1d()
    torch.manual_seed(0)
    network = IntervalMLP(width=32, exits=3)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(300):
        loss = interval_score(*network.intervals(train.inputs), train.targets, miss=0.1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        lower, upper = network.intervals(test.inputs)
    covered = ((lower <= test.targets) & (test.targets <= upper)).double().mean(-1)
    assert covered.min() > 0.7
    assert (upper - lower)[-1].mean() < test.targets.max() - test.targets.min()
    answer = anytime.Intersection()(lower, upper)
    whole = ~answer.fell_back.any(0)
    assert whole.double().mean() > 0.9
    assert bool((answer.width[:, whole].diff(dim=0) <= 0).all())


def test_the_interval_score_prefers_the_quantiles() -> None:
    targets = torch.linspace(0, 1, 10_001)
    best = interval_score(torch.tensor(0.1), torch.tensor(0.9), targets, miss=0.2).mean()
    for lower, upper in ((0.05, 0.95), (0.2, 0.8), (0.1, 0.95), (0.0, 1.0)):
        assert best < interval_score(torch.tensor(lower), torch.tensor(upper), targets, miss=0.2).mean()


@pytest.mark.parametrize("options", [{"classes": 0}, {"inputs": 1.5}, {"width": True}, {"exits": 1 << 20}], ids=str)
def test_a_wrong_setting_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        MLPConfig(**{"classes": 4, **options})


def test_other_wrong_calls_are_refused() -> None:
    with pytest.raises(ShapeError, match="inputs have shape"):
        next(MLP(MLPConfig(classes=4)).exits(torch.zeros(3, 5)))
    with pytest.raises(OptionError, match="miss"):
        interval_score(torch.zeros(1), torch.ones(1), torch.zeros(1), miss=1.0)

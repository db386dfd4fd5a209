"""Figures of sets of any origin, against loops over Python sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import anytime
from anytime.conformal import measure_sets, nestedness, running_intersection, support_sets
from anytime.errors import DtypeError, LabelError, ShapeError


def plain_nestedness(members: np.ndarray) -> np.ndarray:
    exits, batch, _ = members.shape
    found = np.ones((exits, batch))
    for n in range(batch):
        common = set(range(members.shape[2]))
        for t in range(exits):
            now = set(np.flatnonzero(members[t, n]).tolist())
            common &= now
            found[t, n] = len(common) / len(now) if now else 1.0
    return found


def test_metrics_are_those_of_plain_sets() -> None:
    rng = np.random.default_rng(0)
    members, labels = rng.random((4, 60, 5)) < 0.5, rng.integers(0, 5, 60)
    metrics = measure_sets(members, labels)
    assert nestedness(members).numpy() == pytest.approx(plain_nestedness(members))
    assert metrics.nestedness == pytest.approx(plain_nestedness(members).mean(1).tolist(), abs=1e-6)
    covered = np.array([[members[t, n, labels[n]] for n in range(60)] for t in range(4)])
    assert metrics.coverage == pytest.approx(covered.mean(1).tolist())
    assert metrics.simultaneous_coverage == pytest.approx([covered[: t + 1].all(0).mean() for t in range(4)])
    assert metrics.size == pytest.approx(members.sum(2).mean(1).tolist())
    assert metrics.empty == pytest.approx((members.sum(2) == 0).mean(1).tolist())
    sizes = members.sum(2)
    grown = [max(sizes[j, n] - sizes[i, n] for i in range(4) for j in range(i, 4)) for n in range(60)]
    assert metrics.size_rise_percent["2"] == pytest.approx(100 * np.mean(np.array(grown) >= 2))


def test_a_running_intersection_is_nested_and_covers_what_all_sets_cover() -> None:
    rng = np.random.default_rng(1)
    members, labels = rng.random((4, 60, 5)) < 0.7, rng.integers(0, 5, 60)
    inner = measure_sets(running_intersection(members), labels)
    assert inner.nestedness == [1.0] * 4
    assert inner.coverage == measure_sets(members, labels).simultaneous_coverage


def test_the_support_of_the_product_only_shrinks_until_it_collapses() -> None:
    logits = torch.tensor([[[1.0, 2.0, -1.0]], [[1.0, -1.0, 3.0]], [[-1.0, 1.0, 1.0]]])
    sets = support_sets(anytime.Product()(logits))
    assert sets[:, 0].tolist() == [[True, True, False], [True, False, False], [True, True, True]]


def test_invalid_sets_are_refused() -> None:
    with pytest.raises(DtypeError, match="boolean"):
        measure_sets(torch.ones(2, 3, 4), torch.zeros(3).long())
    with pytest.raises(ShapeError):
        nestedness(torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(ShapeError, match="no rows"):
        measure_sets(torch.ones(2, 0, 4, dtype=torch.bool), torch.zeros(0).long())
    with pytest.raises(LabelError):
        measure_sets(torch.ones(2, 3, 4, dtype=torch.bool), torch.zeros(2).long())

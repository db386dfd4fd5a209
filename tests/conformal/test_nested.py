"""Nested sets of classes against loops over the formulas, and their file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytime.conformal import NestedSets, fit_nested_sets, measure_sets
from anytime.conformal.nested import log_gammas, log_ratio
from anytime.errors import IntegrityError, LabelError, OptionError, ShapeError, StateError


def some(seed: int, rows: int = 300, exits: int = 3, classes: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    logits = torch.randn(exits, rows, classes, generator=generator) * 2
    return logits + 6 * torch.nn.functional.one_hot(labels, classes), labels


def plain_sets(logits: np.ndarray, thresholds: list[float], alpha: float, seed: int) -> np.ndarray:
    """C_t by the formulas, with the numbers that the library draws."""
    exits, batch, classes = logits.shape
    inside = np.zeros((exits, batch, classes), dtype=bool)
    drawn = [log_gammas(torch.from_numpy(logits[m]), [seed, 1, m]).numpy() for m in range(exits)]
    for n in range(batch):
        ratio, common = np.ones(classes), set(range(classes))
        for m in range(exits):
            support = [y for y in range(classes) if logits[m, n, y] >= thresholds[m] and logits[m, n, y] > 0]
            for y in range(classes):
                if y not in support:
                    ratio[y] = math.inf
                    continue
                fraction = logits[m, n, y] / sum(logits[m, n, z] for z in support)
                ratio[y] *= fraction * sum(np.exp(min(drawn[m][n, z] - drawn[m][n, y], 700)) for z in support)
            common &= {y for y in range(classes) if ratio[y] <= 1 / alpha}
            inside[m, n, list(common)] = True
    return inside


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), alpha=st.sampled_from([0.05, 0.3, 0.8]))
def test_sets_are_the_formulas(seed: int, alpha: float) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(3, 8, 5)) * 3 + 1
    thresholds = np.round(rng.normal(size=3) + 0.5, 1).tolist()
    fitted = NestedSets(3, 5, alpha=alpha, thresholds=tuple(thresholds), rows=1, coverage=(1.0,) * 3)
    answer = fitted(logits, seed=seed)
    assert np.array_equal(answer.members.numpy(), plain_sets(logits, thresholds, alpha, seed))
    assert torch.equal(answer.empty, ~answer.members.any(-1))


def test_what_is_ruled_out_stays_out_and_an_empty_set_is_flagged() -> None:
    logits = torch.tensor([[[3.0, 2.0, -1.0]], [[4.0, 0.5, 5.0]], [[0.5, 6.0, 6.0]], [[7.0, 7.0, 7.0]]])
    fitted = NestedSets(4, 3, alpha=1e-9, thresholds=(1.0,) * 4, rows=1, coverage=(1.0,) * 4)
    answer = fitted(logits)
    expected = [[True, True, False], [True, False, False], [False] * 3, [False] * 3]
    assert answer.members[:, 0].tolist() == expected
    assert answer.empty[:, 0].tolist() == [False, False, True, True]


def test_stepping_gives_what_the_call_gives() -> None:
    logits, labels = some(0)
    fitted = fit_nested_sets(logits, labels)
    whole, state = fitted(logits, seed=4), fitted.start(4)
    for exit in range(3):
        state, answer = fitted.step(state, logits[exit])
        assert torch.equal(answer.members, whole.members[exit])
        assert torch.equal(answer.empty, whole.empty[exit])
    assert measure_sets(whole.members, labels).nestedness == [1.0] * 3
    one, other = (fitted.step(fitted.start(seed), logits[0])[0].log_ratio for seed in (4, 5))
    assert one is not None
    assert other is not None
    assert not torch.equal(one, other)


def test_draws_are_gammas_and_dirichlets() -> None:
    shapes = torch.tensor([0.001, 0.5, 2.0, 30.0], dtype=torch.float64).expand(40_000, 4)
    drawn = log_gammas(shapes, [0])
    assert bool(torch.isfinite(drawn).all()), "the logarithm of Gamma(0.001) is near -1000"
    means, spread = drawn.exp().mean(0), shapes[0].sqrt() / 200
    assert bool(((means - shapes[0]).abs() < 6 * spread).all())  # six deviations of the mean: 1e-8 for each
    fractions = drawn.log_softmax(-1).exp().mean(0)
    assert fractions.numpy() == pytest.approx((shapes[0] / shapes[0].sum()).numpy(), abs=0.002)
    assert bool(torch.isfinite(log_gammas(torch.tensor([[5e-324, -1.0]], dtype=torch.float64), [0])).all())


def test_thresholds_are_those_of_the_greedy_search() -> None:
    logits, labels = some(1)
    fitted = fit_nested_sets(logits, labels, alpha=0.1, seed=3)
    drawn = [log_gammas(now, [3, 0, exit]) for exit, now in enumerate(logits)]

    def coverage(thresholds: list[float]) -> float:
        ratio = torch.zeros(300, dtype=torch.float64)
        inside = torch.ones(300, dtype=torch.bool)
        for exit, now in enumerate(logits):
            ratio = ratio + log_ratio(now, thresholds[exit], drawn[exit])[torch.arange(300), labels]
            inside &= ratio <= math.log(10)
        return float(inside.double().mean())

    thresholds = [1.0] * 3
    for exit in range(3):
        while coverage([*thresholds[:exit], thresholds[exit] + 0.5, *thresholds[exit + 1 :]]) * 300 / 301 >= 0.9:
            thresholds[exit] += 0.5
    assert fitted.thresholds == tuple(thresholds)
    assert max(thresholds) > 1
    assert fitted.coverage[-1] == pytest.approx(coverage(thresholds))
    assert fitted.reached


def test_too_few_rows_to_show_the_coverage_raise_no_threshold() -> None:
    logits, labels = some(1)
    for rows in (1, 5, 18):
        fitted = fit_nested_sets(logits[:, :rows], labels[:rows], alpha=0.05)
        assert fitted.thresholds == (0.0,) * 3
        assert not fitted.reached
    assert fit_nested_sets(logits[:, :40] + 2, labels[:40], alpha=0.05).rows == 40


def test_a_coverage_that_cannot_be_had_is_said_so() -> None:
    logits, labels = some(2)
    logits[0, :60] -= 100  # a fifth of the labels has no evidence at the first exit
    fitted = fit_nested_sets(logits, labels)
    assert not fitted.reached
    assert fitted.coverage[0] <= 0.8
    assert fitted.thresholds == (0.0,) * 3


def test_coverage_carries_over_to_other_rows_on_real_logits(shared: Path) -> None:
    with np.load(shared / "reference" / "msdnet-cifar100-val.npz") as file:
        logits, labels = torch.from_numpy(file["logits"]).float(), torch.from_numpy(file["labels"].astype(np.int64))
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    cal, test = order[:2000], order[2000:]
    fitted = fit_nested_sets(logits[:, cal], labels[cal])
    metrics = measure_sets(fitted(logits[:, test]).members, labels[test])
    assert 0.93 < metrics.coverage[-1] < 0.97
    assert metrics.coverage == metrics.simultaneous_coverage
    assert metrics.nestedness == [1.0] * 7
    assert 6 < metrics.size[-1] < metrics.size[0] < 25


def test_it_round_trips_and_refuses_damage_and_other_logits(tmp_path: Path) -> None:
    logits, labels = some(0)
    fitted = fit_nested_sets(logits, labels)
    path = fitted.save(tmp_path / "nested.json")
    assert NestedSets.load(path) == fitted
    path.write_text(path.read_text().replace("thresholds", "treshholds"))
    with pytest.raises(IntegrityError):
        NestedSets.load(path)
    for wrong in (logits[:2], logits[..., :5]):
        with pytest.raises(ShapeError, match="fitted"):
            fitted(wrong)
    with pytest.raises(ShapeError, match="fitted"):
        fitted.step(fitted.start(), logits[0, :, :5])
    with pytest.raises(StateError):
        fitted.step(replace(fitted.start(), seen=3), logits[0])
    for bad in ({"alpha": 0.0}, {"raise_by": 0.0}, {"first": math.inf}):
        with pytest.raises(OptionError):
            fit_nested_sets(logits, labels, **bad)
    with pytest.raises(LabelError):
        fit_nested_sets(logits[:, :0], labels[:0])
    with pytest.raises(OptionError):
        replace(fitted, thresholds=(1.0,))

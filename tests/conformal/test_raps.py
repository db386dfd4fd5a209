"""Prediction sets against the plain formulas of both variants."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytime.conformal import Raps, members_of, rank_of, sort_rows
from anytime.errors import OptionError, ShapeError


def plain_rank(probs: np.ndarray, label: int) -> int:
    return int(np.argsort(-probs, kind="stable").tolist().index(label))


def plain_score(raps: Raps, probs: np.ndarray, rank: int, u: float) -> float:
    ordered = np.sort(probs)[::-1]
    if not raps.randomised:
        return ordered[: rank + 1].sum() + raps.lam_reg * max(rank + 1 - raps.k_reg, 0)
    if raps.variant == "original":
        return ordered[:rank].sum() + u * ordered[rank] + raps.lam_reg * max(rank + 1 - raps.k_reg, 0)
    steps = ordered + raps.lam_reg * (np.arange(1, len(ordered) + 1) > raps.k_reg)
    return steps[: rank + 1].sum() - u * steps[rank]


def plain_size(raps: Raps, probs: np.ndarray, q: float, u: float) -> int:
    classes, least = len(probs), 0 if raps.empty else 1
    if raps.variant == "original" and q == 1:
        return classes
    if raps.variant == "paper" or not raps.randomised:
        return max(least, sum(plain_score(raps, probs, rank, u) <= q for rank in range(classes)))
    ordered = np.sort(probs)[::-1]
    reach = np.cumsum(ordered) + raps.lam_reg * np.maximum(np.arange(1, classes + 1) - raps.k_reg, 0)
    size = min(classes, 1 + int((reach <= q).sum()))
    chance = (q - ordered[: size - 1].sum() - raps.lam_reg * max(size - raps.k_reg, 0)) / ordered[size - 1]
    return max(least, size - int(u >= chance))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    variant=st.sampled_from(["paper", "original"]),
    lam_reg=st.sampled_from([0.0, 0.01, 0.3]),
    k_reg=st.integers(0, 6),
    ties=st.booleans(),
    randomised=st.booleans(),
    empty=st.sampled_from([None, True, False]),
)
def test_scores_and_sizes_are_the_formulas(seed, variant, lam_reg, k_reg, ties, randomised, empty) -> None:
    rng = np.random.default_rng(seed)
    raps = Raps(lam_reg=lam_reg, k_reg=k_reg, variant=variant, randomised=randomised, empty=empty)
    logits = rng.normal(size=(2, 6, 9)) * 2
    logits = torch.from_numpy(np.round(logits) if ties else logits)
    log_probs = logits.log_softmax(-1)
    labels = torch.from_numpy(rng.integers(0, 9, 6))
    uniform = torch.from_numpy(rng.random((2, 6)))
    ascending = sort_rows(log_probs)
    rank = rank_of(log_probs, ascending, labels)
    scores = raps.label_score(ascending, rank, uniform)
    threshold = torch.from_numpy(rng.random(2) * 1.2)
    sizes = raps.size(ascending, threshold, uniform)
    members = members_of(log_probs, ascending, sizes)
    for m in range(2):
        for n in range(6):
            probs, u = log_probs[m, n].exp().numpy(), float(uniform[m, n])
            assert rank[m, n].item() == plain_rank(log_probs[m, n].numpy(), int(labels[n]))
            assert scores[m, n].item() == pytest.approx(plain_score(raps, probs, int(rank[m, n]), u))
            assert sizes[m, n].item() == plain_size(raps, probs, float(threshold[m]), u)
            best = np.argsort(-log_probs[m, n].numpy(), kind="stable")[: int(sizes[m, n])]
            assert set(members[m, n].nonzero()[:, 0].tolist()) == set(best.tolist())


@pytest.mark.parametrize("rows", [1, 5, 19, 20, 100, 101])
def test_thresholds_are_the_quantiles_of_numpy(rows: int) -> None:
    scores = torch.rand(2, rows, dtype=torch.float64)
    plain = np.quantile(scores.numpy(), 0.95, axis=1, method="higher")
    assert Raps(quantile="plain").threshold(scores).numpy() == pytest.approx(plain)
    level = min(1.0, np.ceil((rows + 1) * 0.95) / rows)
    corrected = np.quantile(scores.numpy(), level, axis=1, method="higher")
    assert Raps(quantile="corrected").threshold(scores).numpy() == pytest.approx(corrected)
    least = int(np.ceil((rows + 1) * 0.95 - 1e-9))
    exact = np.sort(scores.numpy(), axis=1)[:, least - 1] if least <= rows else [np.inf, np.inf]
    for variant in ("paper", "original"):
        assert Raps(variant=variant).threshold(scores).tolist() == pytest.approx(list(exact))


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), variant=st.sampled_from(["paper", "original"]), lam_reg=st.sampled_from([0.0, 0.01, 0.3]))
def test_a_label_is_in_its_set_where_its_score_is_within_the_threshold(seed, variant, lam_reg) -> None:
    generator = torch.Generator().manual_seed(seed)
    raps = Raps(lam_reg=lam_reg, k_reg=2, variant=variant, empty=True)
    logits = torch.randn(2, 50, 9, generator=generator) * 5
    log_probs = logits.clamp(min=0).log().log_softmax(-1).nan_to_num(-1e9) if seed % 2 else logits.log_softmax(-1)
    labels = torch.randint(0, 9, (50,), generator=generator)
    uniform = torch.rand(2, 50, generator=generator)
    ascending = sort_rows(log_probs)
    rank = rank_of(log_probs, ascending, labels)
    scores = raps.label_score(ascending, rank, uniform)
    threshold = raps.threshold(scores)
    size = raps.size(ascending, threshold, uniform)
    limit, rounding = threshold[:, None], 8 * torch.finfo(scores.dtype).eps
    all_classes = ((limit - 1).abs() <= rounding) & (variant == "original")
    clear = (scores - limit - rounding).abs() > rounding / 2  # not within rounding of the threshold with its slack
    assert torch.equal((rank < size)[clear], ((scores <= limit + rounding) | all_classes)[clear])
    assert bool(((rank < size) | (scores > limit)).all())


def test_variants_fill_in_their_own_defaults() -> None:
    assert (Raps().quantile, Raps().empty) == ("exact", True)
    assert (Raps(variant="original").quantile, Raps(variant="original").empty) == ("exact", False)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 10, 30])
@pytest.mark.parametrize("variant", ["paper", "original"])
def test_the_default_keeps_the_coverage_asked_for_with_any_number_of_rows(rows: int, variant) -> None:
    """Over exchangeable scores: the rank of one more score among `rows` others is uniform, so coverage is counted exactly."""
    raps = Raps(alpha=0.1, variant=variant)
    scores = torch.arange(rows + 1, dtype=torch.float64)
    covered = 0
    for new in range(rows + 1):
        others = scores[scores != new]
        covered += int(scores[new] <= raps.threshold(others[None])[0])
    assert covered / (rows + 1) >= 0.9


def test_classes_without_probability_are_ranked_by_index() -> None:
    log_probs = torch.tensor([[[0.0, -torch.inf, -torch.inf, -torch.inf]]])
    for label in range(4):
        assert rank_of(log_probs, sort_rows(log_probs), torch.tensor([label])).item() == label


def test_settings_out_of_range_are_refused() -> None:
    for bad in (
        {"alpha": 0},
        {"alpha": 1},
        {"lam_reg": -1},
        {"k_reg": -1},
        {"variant": "aps"},
        {"lam_reg": float("inf")},
        {"quantile": "exakt"},
    ):
        with pytest.raises(OptionError):
            Raps(**bad)
    with pytest.raises(ShapeError):
        Raps().threshold(torch.zeros(2, 0))

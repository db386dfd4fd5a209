"""Fitted prediction sets: the laws of sets, metrics on real logits, the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import stats

import anytime
from anytime.combine import Scaled
from anytime.conformal import (
    ConformalSets,
    Raps,
    fit_conformal_sets,
    measure_sets,
    rank_of,
    running_intersection,
    sort_rows,
    tuning_split,
)
from anytime.errors import FewRowsWarning, FormatError, IntegrityError, LabelError, OptionError, ScaleError, ShapeError
from anytime.metrics import rise

SEEDS = st.integers(0, 10_000)
SETTINGS = st.builds(
    Raps,
    lam_reg=st.sampled_from([0.0, 0.01, 0.2]),
    k_reg=st.integers(0, 4),
    variant=st.sampled_from(["paper", "original"]),
    randomised=st.booleans(),
    quantile=st.sampled_from(["exact", "corrected", "plain"]),
)
FALSE_ALARM = 1e-6
"""With which probability a test below fails although the claim is true, for each of its assertions."""


def some(seed: int, rows: int = 120, exits: int = 3, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    logits = torch.randn(exits, rows, classes, generator=generator, dtype=torch.float64) * 2
    return logits + 2 * torch.nn.functional.one_hot(labels, classes), labels


@settings(max_examples=40)
@given(seed=SEEDS, raps=SETTINGS)
@example(seed=2679, raps=Raps(lam_reg=0.0, variant="original", randomised=False, quantile="exact"))
def test_a_smaller_alpha_never_takes_a_class_away(seed: int, raps: Raps) -> None:
    logits, labels = some(seed)
    log_probs = anytime.Latest()(some(seed + 1)[0]).log_probs
    before = None
    for alpha in (0.5, 0.2, 0.1, 0.05, 0.01):
        sets = fit_conformal_sets(logits, labels, rule="latest", raps=replace(raps, alpha=alpha)).sets(log_probs)
        if before is not None:
            assert bool((before <= sets).all())
        before = sets


@settings(max_examples=40)
@given(seed=SEEDS, raps=SETTINGS)
def test_renaming_the_classes_renames_the_sets(seed: int, raps: Raps) -> None:
    assume(raps.randomised)  # else the last class's whole score is the same in every row, up to rounding
    logits, labels = some(seed)
    other = some(seed + 1)[0].log_softmax(-1)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    plain = fit_conformal_sets(logits, labels, rule="latest", raps=raps)
    renamed = fit_conformal_sets(logits[..., order], order.argsort()[labels], rule="latest", raps=raps)
    assert renamed.thresholds == pytest.approx(plain.thresholds)
    assert torch.equal(renamed.sets(other[..., order]), plain.sets(other)[..., order])


@settings(max_examples=40)
@given(seed=SEEDS, raps=SETTINGS)
def test_a_set_is_a_prefix_of_the_ranking(seed: int, raps: Raps) -> None:
    logits, labels = some(seed)
    log_probs = anytime.Product()(some(seed + 1)[0]).log_probs
    fitted = fit_conformal_sets(logits, labels, raps=raps)
    sets, sizes = fitted.sets(log_probs), fitted.sizes(log_probs)
    assert torch.equal(sets.sum(-1), sizes)
    assert raps.empty or int(sizes.min()) >= 1
    lowest_in = log_probs.where(sets, torch.inf).amin(-1)
    highest_out = log_probs.where(~sets, -torch.inf).amax(-1)
    assert bool((lowest_in >= highest_out).all())


@pytest.mark.parametrize("raps", [Raps(), Raps(lam_reg=0.0), Raps(variant="original"), Raps(randomised=False)])
def test_one_exit_at_a_time_gives_the_same_sets(raps: Raps) -> None:
    logits, labels = some(0)
    fitted = fit_conformal_sets(logits, labels, raps=raps, shared=True)
    log_probs = anytime.Product()(some(1)[0]).log_probs
    draws = torch.from_numpy(np.random.default_rng([5, 2]).random(120))
    whole = fitted.sets(log_probs, seed=5)
    for exit in range(3):
        assert torch.equal(fitted.set_at(exit + 1, log_probs[exit], draws), whole[exit])
        assert torch.equal(fitted.set_at(exit + 1, log_probs[exit, :1], float(draws[0])), whole[exit, :1])


def test_everything_is_seeded() -> None:
    logits, labels = some(0)
    log_probs = anytime.Latest()(some(1)[0]).log_probs
    one, same, other = (fit_conformal_sets(logits, labels, tune=True, seed=seed) for seed in (1, 1, 2))
    assert (one.k_reg, one.lam_reg) == (same.k_reg, same.lam_reg)
    assert one.thresholds == pytest.approx(same.thresholds)
    assert one.thresholds != pytest.approx(other.thresholds)
    assert torch.equal(one.sets(log_probs, seed=3), one.sets(log_probs, seed=3))
    assert not torch.equal(one.sets(log_probs, seed=3), one.sets(log_probs, seed=4))
    first, second = (torch.Generator().manual_seed(0) for _ in range(2))
    assert torch.equal(one.set_at(1, log_probs[0], first), one.set_at(1, log_probs[0], second))


def test_a_shared_draw_leaves_only_the_exits_to_differ() -> None:
    logits, labels = some(0)
    same = some(1)[0][:1].log_softmax(-1).expand(3, -1, -1)
    thresholds = {"thresholds": (0.9,) * 3}
    shared = replace(fit_conformal_sets(logits, labels, shared=True), **thresholds)
    fresh = replace(fit_conformal_sets(logits, labels), **thresholds)
    assert shared.measure(same, labels).size_rise_percent["1"] == 0
    assert fresh.measure(same, labels).size_rise_percent["1"] > 0


def test_unrandomised_sets_need_no_draws_on_either_side() -> None:
    logits, labels = some(0)
    one, other = (fit_conformal_sets(logits, labels, raps=Raps(randomised=False), seed=seed) for seed in (0, 1))
    assert one.thresholds == pytest.approx(other.thresholds)
    log_probs = anytime.Product()(some(1)[0]).log_probs
    assert torch.equal(one.sets(log_probs, seed=0), one.sets(log_probs, seed=1))
    assert torch.equal(one.set_at(1, log_probs[0]), one.sets(log_probs)[0])


def test_tuning_is_the_original_choice_on_its_own_rows() -> None:
    logits, labels = some(3, rows=400)
    raps = Raps(alpha=0.1, variant="original")
    fitted = fit_conformal_sets(logits, labels, rule="latest", raps=raps, tune=True, seed=7)
    chosen, rest = tuning_split(400, 7)
    assert len(chosen) == 120
    assert sorted([*chosen.tolist(), *rest.tolist()]) == list(range(400))
    assert fitted.rows == 280
    log_probs = logits.log_softmax(-1)
    ranks = rank_of(log_probs, sort_rows(log_probs), labels)[:, chosen].numpy()
    assert fitted.k_reg == tuple(int(np.quantile(rank, 0.9, method="higher")) + 1 for rank in ranks)
    uniform = torch.from_numpy(np.random.default_rng([7, 1]).random((400, 3))).T
    for exit in range(3):
        ascending = sort_rows(log_probs)[exit, None]
        sizes = {}
        for lam_reg in (0.001, 0.01, 0.1, 0.2, 0.5):
            each = replace(raps, lam_reg=lam_reg, k_reg=fitted.k_reg[exit])
            scores = each.label_score(
                ascending, rank_of(log_probs, sort_rows(log_probs), labels)[exit, None], uniform[exit, None]
            )
            limit = each.threshold(scores[:, chosen])
            sizes[lam_reg] = float(each.size(ascending[:, chosen], limit, uniform[exit, None][:, chosen]).double().mean())
            if lam_reg == fitted.lam_reg[exit]:
                assert fitted.thresholds[exit] == pytest.approx(float(each.threshold(scores[:, rest])))
        assert sizes[fitted.lam_reg[exit]] == min(sizes.values())


def test_the_rule_is_kept_as_text_with_its_temperature() -> None:
    logits, labels = some(0)
    scaled = Scaled(anytime.Latest(), (2.0, 1.5, 1.0))
    fitted = fit_conformal_sets(logits, labels, rule=scaled)
    assert fitted.rule == scaled
    by_hand = fit_conformal_sets(scaled(logits).log_probs, labels, rule=None)
    assert by_hand.rule is None
    assert by_hand.thresholds == pytest.approx(fitted.thresholds)


@pytest.mark.parametrize("simultaneous", [False, True])
def test_too_few_rows_give_all_classes_and_a_warning(simultaneous: bool) -> None:
    logits, labels = some(0, rows=18)
    with pytest.warns(FewRowsWarning, match="all sets hold all classes. Hold out at least 19 rows"):
        fitted = fit_conformal_sets(logits, labels, simultaneous=simultaneous)
    assert fitted.thresholds == (float("inf"),) * 3
    assert fitted.sets(anytime.Product()(logits).log_probs).all()


def test_a_clipped_level_warns_of_lower_coverage() -> None:
    logits, labels = some(0, rows=18)
    for quantile in ("corrected", "plain"):
        with pytest.warns(FewRowsWarning, match="coverage is below 1 - alpha"):
            fitted = fit_conformal_sets(logits, labels, raps=Raps(quantile=quantile))
        assert np.isfinite(fitted.thresholds).all()
    assert fit_conformal_sets(*some(0, rows=19)).rows == 19  # enough for 95 %


def test_it_round_trips_and_refuses_damage(tmp_path: Path) -> None:
    logits, labels = some(0)
    for raps in (Raps(), Raps(alpha=0.01), Raps(variant="original")):
        fitted = fit_conformal_sets(logits, labels, raps=raps)
        path = fitted.save(tmp_path / "sets.json")
        assert ConformalSets.load(path) == fitted
    path.write_text(path.read_text().replace('"alpha": 0.05', '"alpha": 0.01'))
    with pytest.raises(IntegrityError, match="checksum"):
        ConformalSets.load(path)
    for wrong in ({"thresholds": (1.0,)}, {"alpha": 2.0}, {"variant": "mine"}, {"lam_reg": (1.0, 2.0, float("nan"))}):
        with pytest.raises(OptionError):
            replace(fitted, **wrong)
    document = fitted.document()
    document["fields"]["thresholds"] = [1.0]
    with pytest.raises(FormatError):
        ConformalSets.from_document(document)


def test_other_logits_are_refused() -> None:
    logits, labels = some(0)
    fitted = fit_conformal_sets(logits, labels)
    log_probs = anytime.Product()(logits).log_probs
    for wrong in (log_probs[:2], torch.cat((log_probs, torch.full((3, 120, 1), -torch.inf)), -1)):
        with pytest.raises(ShapeError, match="fitted"):
            fitted.sets(wrong)
    with pytest.raises(ScaleError, match="log_probs"):
        fitted.sets(logits)
    with pytest.raises(ShapeError, match="exits, batch, classes"):
        fitted.sets(log_probs[0])
    with pytest.raises(ShapeError, match="all exits"):
        fitted.set_at(1, log_probs, 0.5)
    for exit in (0, 4):
        with pytest.raises(OptionError, match="at most 3"):
            fitted.set_at(exit, log_probs[0], 0.5)
    with pytest.raises(OptionError, match="Generator"):
        fitted.set_at(1, log_probs[0])
    with pytest.raises(LabelError):
        fit_conformal_sets(logits, labels[:-1])
    with pytest.raises(ShapeError, match="calibration"):
        fit_conformal_sets(logits[:, :0], labels[:0])
    with pytest.raises(ShapeError, match="tune"):
        fit_conformal_sets(logits[:, :1], labels[:1], tune=True)
    with pytest.raises(ScaleError):
        fit_conformal_sets(log_probs.masked_fill(log_probs == log_probs.max(), torch.nan), labels, rule=None)


@pytest.fixture(scope="module")
def reference(shared: Path) -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(shared / "reference" / "msdnet-cifar100-val.npz") as file:
        return torch.from_numpy(file["logits"]).float(), torch.from_numpy(file["labels"].astype(np.int64))


@pytest.mark.parametrize("rule", ["latest", "caching", "product"])
@pytest.mark.parametrize("raps", [Raps(), Raps(quantile="corrected"), Raps(lam_reg=0.0)], ids=["raps", "paper", "aps"])
def test_coverage_over_200_random_splits_is_within_binomial_error_at_every_exit(reference, rule: str, raps: Raps) -> None:
    """A label is in its set where its score is within the threshold (a law of test_raps), so scores suffice.

    Over random splits the number of covered test rows is beta-binomial, whatever the scores are.
    """
    logits, labels = reference
    log_probs = anytime.parse_rule(rule)(logits).log_probs
    ascending = sort_rows(log_probs)
    rng = np.random.default_rng(0)
    uniform = torch.from_numpy(rng.random((7, 5000), dtype=np.float32))
    scores = raps.label_score(ascending, rank_of(log_probs, ascending, labels), uniform)
    rows, splits = 1000, 200
    coverage = torch.empty(splits, 7, dtype=torch.float64)
    for split in range(splits):
        order = torch.from_numpy(rng.permutation(5000))
        threshold = raps.threshold(scores[:, order[:rows]])
        coverage[split] = (scores[:, order[rows:]] <= threshold[:, None]).double().mean(1)
    place = 951 if raps.quantile == "exact" else 952  # of the threshold among 1,000 sorted scores
    truth = stats.betabinom(4000, place, rows + 1 - place)
    error = stats.norm.isf(FALSE_ALARM / 7 / 2) * truth.std() / 4000 / splits**0.5
    assert error < 0.004
    assert coverage.mean(0).numpy() == pytest.approx(np.full(7, truth.mean() / 4000), abs=error)
    assert abs(float(coverage.mean()) - 0.95) < 0.005
    single = FALSE_ALARM / coverage.numel() / 2
    assert float(coverage.min()) * 4000 >= truth.ppf(single)
    assert float(coverage.max()) * 4000 <= truth.isf(single)


def test_sets_of_the_product_shrink_from_about_11_to_about_5_as_in_the_paper(reference) -> None:
    logits, labels = reference
    raps, sizes, rises = Raps(), {}, {}
    for rule in ("latest", "product"):
        log_probs = anytime.parse_rule(rule)(logits).log_probs
        ascending = sort_rows(log_probs)
        ranks = rank_of(log_probs, ascending, labels)
        found = []
        for split in range(40):
            rng = np.random.default_rng(split)
            cal, test = torch.from_numpy(rng.permutation(5000)[:2000]).chunk(2)
            fit_draws, test_draws = torch.from_numpy(rng.random((2, 7, 1000), dtype=np.float32))
            threshold = raps.threshold(raps.label_score(ascending[:, cal], ranks[:, cal], fit_draws))
            found.append(raps.size(ascending[:, test], threshold, test_draws))
        sizes[rule] = torch.stack(found).double().mean((0, 2)).numpy()
        rises[rule] = np.mean([float((rise(each) >= 2).double().mean()) for each in found])
    assert 10 < sizes["product"][0] < 13
    assert 4.5 < sizes["product"][-1] < 5.5
    assert (np.diff(sizes["product"]) < 0).all()
    assert sizes["latest"][-1] > 1.4 * sizes["product"][-1]
    assert rises["product"] < rises["latest"] / 2


def test_the_running_intersection_loses_coverage_unless_exits_are_calibrated_together(reference) -> None:
    logits, labels = reference
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(1))
    cal, test = order[:2000], order[2000:]
    log_probs = anytime.Product()(logits[:, test]).log_probs
    found = {}
    for simultaneous in (False, True):
        fitted = fit_conformal_sets(logits[:, cal], labels[cal], simultaneous=simultaneous, shared=True)
        assert fitted.simultaneous == simultaneous
        found[simultaneous] = measure_sets(running_intersection(fitted.sets(log_probs)), labels[test])
    assert found[False].coverage[-1] < 0.935
    # 1,400 rows give the quantile: five deviations of coverage over the draw of both sets of rows.
    assert abs(found[True].coverage[-1] - 0.95) < 5 * (0.95 * 0.05 * (1 / 1400 + 1 / 3000)) ** 0.5
    assert found[True].nestedness == [1.0] * 7
    assert found[True].size[-1] < 9


def test_a_rule_fitted_for_other_classes_is_refused() -> None:
    logits, labels = torch.randn(3, 60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 4
    fitted = anytime.fit_product(torch.randn(3, 60, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 6)
    for fit in (fit_conformal_sets, anytime.fit_temperature):
        with pytest.raises(ShapeError, match="3 exits and 4 classes"):
            fit(logits, labels, rule=fitted)

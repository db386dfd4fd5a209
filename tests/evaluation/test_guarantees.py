"""Guarantees against the single functions on whole tensors, and how often rows are read."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import anytime
from anytime.calibrate import certify, fit_product, fit_temperature, tune
from anytime.conformal import Raps
from anytime.errors import LabelError, OptionError, OverlapError, ShapeError
from anytime.evaluation import Guarantees, evaluate, measure_guarantees
from anytime.evaluation import guarantees as module
from anytime.policy import budget_curve

Pair = tuple[Tensor, Tensor]


def rows(count: int, *, exits: int = 3, classes: int = 6, seed: int = 0) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    logits = 2 * torch.randn(exits, count, classes, generator=generator)
    return logits + 2 * torch.nn.functional.one_hot(labels, classes), labels


def near(value: Any) -> Any:
    """The same values, with numbers that are equal within rounding."""
    if isinstance(value, dict):
        return {key: near(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(near(each) for each in value)
    return pytest.approx(value, rel=1e-6) if isinstance(value, float) else value


@pytest.fixture(scope="module")
def halves() -> tuple[Pair, Pair]:
    """Real logits: test rows and calibration rows."""
    file = anytime.samples.cifar100_msdnet()
    assert file.labels is not None
    logits = file.logits[:]
    return (logits[:, :600], file.labels[:600]), (logits[:, 600:], file.labels[600:])


@pytest.fixture(scope="module")
def found(halves: tuple[Pair, Pair]) -> Guarantees:
    return measure_guarantees(*halves, costs=[1.0, 2.0, 3.5, 5.0, 7.0, 9.0, 12.0])


def split_rows(halves: tuple[Pair, Pair], seed: int = 0) -> tuple[Pair, Pair]:
    """The calibration rows to fit on, and the others."""
    _, (logits, labels) = halves
    fitting, calibrating = module._split(torch.arange(len(labels)), 1, seed)
    return (logits[:, fitting], labels[fitting]), (logits[:, calibrating], labels[calibrating])


def test_fitted_rules_are_added_to_those_given(found: Guarantees) -> None:
    assert list(found.rules) == ["latest", "caching", "product", "scaled caching", "fitted product"]
    assert [each.fitted for each in found.rules.values()] == [False, False, False, True, True]
    assert (found.fitting_rows, found.calibrating_rows, found.dropped_rows) == (200, 200, 0)
    caching = found.rules["caching"].temperature
    assert caching is not None
    assert found.rules["scaled caching"].rule == caching.rule


def test_fits_are_those_of_the_single_functions(found: Guarantees, halves: tuple[Pair, Pair]) -> None:
    fitting, _ = split_rows(halves)
    for name in ("latest", "caching", "product"):
        assert asdict(found.rules[name].temperature) == near(asdict(fit_temperature(*fitting, anytime.parse_rule(name))))
    assert asdict(found.product) == near(asdict(fit_product(*fitting)))
    assert found.rules["fitted product"].rule == found.product.rule


def test_metrics_before_and_after_are_those_of_an_evaluation(found: Guarantees, halves: tuple[Pair, Pair]) -> None:
    test, _ = halves
    for name, each in found.rules.items():
        before = evaluate(*test, rules={"one": each.rule}, sets=None, costs=found.evaluation.costs).rules["one"].to_json()
        without_sets = {key: value for key, value in before.items() if "set_" not in key}
        assert {key: value for key, value in each.before.to_json().items() if "set_" not in key} == near(without_sets)
        if each.temperature is None:
            assert each.after is None
            assert name in ("scaled caching", "fitted product")
        else:
            scaled = {"one": each.temperature.rule}
            assert each.after is not None
            wanted = evaluate(*test, rules=scaled, sets=None, costs=found.evaluation.costs).rules["one"]
            assert each.after.to_json() == near(wanted.to_json())


def test_the_certificate_counts_all_test_rows(found: Guarantees, halves: tuple[Pair, Pair]) -> None:
    test, _ = halves
    for each in found.rules.values():
        assert each.certificate == certify(*test, each.rule)
        assert each.certificate.rows == 600


def test_the_budget_curve_is_that_of_the_policy(found: Guarantees, halves: tuple[Pair, Pair]) -> None:
    (logits, labels), _ = halves
    _, (held, _) = split_rows(halves)
    for each in found.rules.values():
        wanted = budget_curve(each.rule(held), each.rule(logits), labels, costs=found.evaluation.costs)
        assert each.budget.q == wanted.q
        assert each.budget.log_odds == near(wanted.log_odds)
        assert each.budget.fractions == near(wanted.fractions)
        assert each.budget.cost == pytest.approx(wanted.cost)
        assert each.budget.accuracy == pytest.approx(wanted.accuracy)


def test_thresholds_of_the_sets_are_from_the_rows_that_no_rule_was_fitted_on(halves: tuple[Pair, Pair]) -> None:
    raps = Raps(randomised=False)
    (logits, labels), _ = halves
    _, calibrating = split_rows(halves)
    from anytime.conformal import fit_conformal_sets

    for each in measure_guarantees(*halves, sets=raps).rules.values():
        wanted = fit_conformal_sets(*calibrating, rule=each.rule, raps=raps).measure(each.rule(logits).log_probs, labels)
        assert each.before.set_size == pytest.approx(list(wanted.size))
        assert each.before.set_coverage == pytest.approx(list(wanted.coverage))


def test_coverage_is_near_the_target(shared: Path) -> None:
    with np.load(shared / "reference" / "msdnet-cifar100-val.npz") as file:
        logits, labels = torch.from_numpy(file["logits"]), torch.from_numpy(file["labels"])
    found = measure_guarantees((logits[:, :2500], labels[:2500]), (logits[:, 2500:], labels[2500:]))
    for each in found.rules.values():
        assert all(abs(share - 0.95) < 0.025 for share in each.before.set_coverage)
    after = found.rules["latest"].after
    assert after is not None
    assert max(after.ece) < 0.04 < min(found.rules["latest"].before.ece)


def test_the_evaluation_has_all_rules_with_their_sets(found: Guarantees, halves: tuple[Pair, Pair]) -> None:
    test, _ = halves
    rules = {name: each.rule for name, each in found.rules.items()}
    plain = evaluate(*test, rules=rules, sets=None, costs=found.evaluation.costs)
    assert found.evaluation.rules == {name: each.before for name, each in found.rules.items()}
    assert (found.evaluation.worst, found.evaluation.examples) == (plain.worst, plain.examples)
    assert found.evaluation.settings == {**plain.settings, "sets": {**asdict(Raps()), "calibration_rows": 200}}


class CountingArray(np.ndarray):
    """Counts how often each row of `(exits, rows, classes)` is read."""

    def __array_finalize__(self, parent: Any) -> None:
        self.reads = getattr(parent, "reads", None)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple) and len(key) == 2 and self.ndim == 3:
            self.reads[key[1]] += 1
        return np.asarray(self)[key]


def counting(pair: Pair) -> tuple[CountingArray, Tensor]:
    array = pair[0].numpy().view(CountingArray)
    array.reads = np.zeros(array.shape[1], int)
    return array, pair[1]


def test_every_row_is_read_once() -> None:
    test, calibration = counting(rows(6000, classes=4)), counting(rows(5000, classes=4, seed=1))
    found = measure_guarantees(test, calibration)
    assert found.dropped_rows == 0
    for array, _ in (test, calibration):
        assert (array.reads[:2048] == 2).all()  # a first look at the scale
        assert (array.reads[2048:] == 1).all()


def test_evaluate_reads_every_row_once_and_calibration_rows_of_sets_twice() -> None:
    array, labels = counting(rows(6000))
    evaluate(array, labels, rules=["latest"], sets=None)
    assert (array.reads[2048:] == 1).all()
    evaluate(array, labels, rules=["latest"])
    assert array.reads[2048:].sum() == pytest.approx(2.2 * (6000 - 2048), rel=0.05)


def test_the_document_is_plain_json_and_the_seed_decides_it(halves: tuple[Pair, Pair]) -> None:
    one, two, other = (
        json.dumps(measure_guarantees(*halves, rules=["latest"], seed=seed).to_json(), allow_nan=False) for seed in (0, 0, 1)
    )
    assert one == two != other
    document = json.loads(one)
    assert set(document["rules"]["latest"]) >= {"temperature", "before", "after", "set_size", "certificate", "budget"}
    assert list(document["rules"]) == ["latest", "fitted product"]


@settings(max_examples=12)
@given(
    exits=st.integers(2, 4),
    classes=st.integers(2, 12),
    count=st.integers(50, 90),
    held=st.integers(50, 90),
    seed=st.integers(0, 9),
)
def test_any_sizes_work(exits: int, classes: int, count: int, held: int, seed: int) -> None:
    test, calibration = rows(count, exits=exits, classes=classes, seed=seed), rows(held, exits=exits, classes=classes, seed=99)
    found = measure_guarantees(test, calibration, seed=seed)
    assert found.fitting_rows + found.calibrating_rows == held
    json.dumps(found.to_json(), allow_nan=False)
    for each in found.rules.values():
        assert each.certificate.drops / count <= each.certificate.drop_bound <= each.certificate.joint_drop_bound
        assert all(found.evaluation.costs[0] <= cost <= found.evaluation.costs[-1] for cost in each.budget.cost)


def test_a_rule_that_excludes_every_label_has_no_temperature() -> None:
    (logits, labels), calibration = rows(60), rows(60, seed=1)
    poor = calibration[0] - 20 * torch.nn.functional.one_hot(calibration[1], 6)
    found = measure_guarantees((logits, labels), (poor, calibration[1]), rules=["product"])
    assert found.rules["product"].temperature is None
    assert found.rules["product"].after is None
    assert found.rules["product"].to_json()["temperature"] is None


def test_files_give_the_same_as_tensors(halves: tuple[Pair, Pair], tmp_path: Path, found: Guarantees) -> None:
    for name, (logits, labels) in zip(("test", "calibration"), halves, strict=True):
        np.savez(tmp_path / f"{name}.npz", logits=logits.numpy(), labels=labels.numpy())
    again = measure_guarantees(
        tmp_path / "test.npz", anytime.open_logits(tmp_path / "calibration.npz"), costs=found.evaluation.costs
    )
    assert again.to_json() == near(found.to_json())


def test_the_number_of_rows_to_fit_on_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FITTING_ROWS", 20)
    found = measure_guarantees(rows(60), rows(100, seed=1), rules=["latest"])
    assert (found.fitting_rows, found.calibrating_rows) == (20, 80)
    monkeypatch.setattr(module, "FITTING_NUMBERS", 10 * 3 * 6)
    assert measure_guarantees(rows(60), rows(100, seed=1), rules=["latest"]).fitting_rows == 10


def test_a_few_shared_rows_are_left_out_and_more_are_refused() -> None:
    test, (logits, labels) = rows(300), rows(201, seed=1)
    logits[:, 7] = test[0][:, 3]
    found = measure_guarantees(test, (logits, labels), rules=["latest"])
    assert found.dropped_rows == 1
    assert found.fitting_rows + found.calibrating_rows == 200
    assert found.to_json()["dropped_rows"] == 1
    without = torch.arange(201) != 7
    left = measure_guarantees(test, (logits[:, without], labels[without]), rules=["latest"])
    assert left.rules == found.rules
    for place in (8, 9):
        logits[:, place] = test[0][:, place]
    with pytest.raises(OverlapError, match="3 of the 201 calibration rows"):
        measure_guarantees(test, (logits, labels))


def test_rows_that_are_equal_at_one_exit_only_are_different_rows() -> None:
    test, (logits, labels) = rows(100), rows(100, seed=1)
    logits[0] = test[0][0]
    assert measure_guarantees(test, (logits, labels), rules=["latest"]).dropped_rows == 0


def test_the_same_rows_in_another_precision_are_refused() -> None:
    logits, labels = rows(100)
    with pytest.raises(OverlapError, match="100 of the 100"):
        measure_guarantees((logits, labels), (logits.double(), labels))


def test_rows_of_another_model_are_refused() -> None:
    with pytest.raises(ShapeError, match="4 exits and 6 classes") as error:
        measure_guarantees(rows(60), rows(60, exits=4, seed=1))
    assert "3 exits and 6 classes" in error.value.expected
    with pytest.raises(ShapeError, match="3 exits and 5 classes"):
        measure_guarantees(rows(60), rows(60, classes=5, seed=1))


def test_labels_are_required_for_both(tmp_path: Path) -> None:
    test, calibration = rows(60), rows(60, seed=1)
    with pytest.raises(LabelError, match="the test rows have no labels"):
        measure_guarantees(test[0], calibration)
    np.save(tmp_path / "bare.npy", calibration[0].numpy())
    with pytest.raises(LabelError, match=r"the calibration rows in .*bare.npy have no labels"):
        measure_guarantees(test, tmp_path / "bare.npy")


def test_a_tuned_rule_refuses_the_rows_it_was_tuned_on(halves: tuple[Pair, Pair]) -> None:
    test, (logits, labels) = halves
    tuned = tune(logits[:, :200], labels[:200], penalties=(3.0,)).choose(least="nll")
    with pytest.raises(OverlapError, match="for the calibration"):
        measure_guarantees(test, (logits, labels), rules={"tuned": tuned})
    fresh = measure_guarantees(test, (logits[:, 200:], labels[200:]), rules={"tuned": tuned})
    assert fresh.rules["tuned"].rule == tuned.rule


def test_evaluate_accepts_fitted_objects_and_refuses_rows_they_were_tuned_on(halves: tuple[Pair, Pair]) -> None:
    test, (logits, labels) = halves
    tuned = tune(logits[:, :200], labels[:200], penalties=(3.0,)).choose(least="nll")
    temperature = fit_temperature(logits, labels)
    found = evaluate(*test, rules={"tuned": tuned, "scaled": temperature}, sets=None)
    plain = evaluate(*test, rules={"tuned": tuned.rule, "scaled": temperature.rule}, sets=None)
    assert found.rules == plain.rules
    assert list(evaluate(*test, rules=[tuned, "latest"], sets=None).rules)[1] == "latest"
    with pytest.raises(OverlapError, match="for the test"):
        evaluate(logits, labels, rules={"tuned": tuned}, sets=None)


@pytest.mark.parametrize(
    "options", [{"rules": []}, {"rules": {"fitted product": anytime.Product()}}, {"rules": {"mine": len}}, {"drop": 0.0}]
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        measure_guarantees(rows(60), rows(60, seed=1), **options)  # type: ignore[arg-type]


def test_too_few_calibration_rows_are_refused() -> None:
    with pytest.raises(ShapeError, match="1 calibration rows"):
        measure_guarantees(rows(60), rows(1, seed=1))


def test_probabilities_are_accepted_with_the_option() -> None:
    (logits, labels), (held, held_labels) = rows(80), rows(80, seed=1)
    test, calibration = (logits.softmax(-1), labels), (held.softmax(-1), held_labels)
    found = measure_guarantees(test, calibration, rules=["latest", "caching"], probabilities=True)
    assert found.rules["latest"].before.accuracy[0] > 0.4

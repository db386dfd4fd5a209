"""Metrics that accumulate: equal to `evaluate`, merged exactly, and never waiting for a device."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import anytime
from anytime.errors import LabelError, NonFiniteError, OptionError, ScaleError, ShapeError
from anytime.metrics import Metrics, RuleMetrics


def some(rows: int = 90, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(4, rows, 7, generator=generator), torch.randint(0, 7, (rows,), generator=generator)


def assert_same(found: dict[str, RuleMetrics], expected: dict[str, RuleMetrics]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        numbers, wanted = found[name].scalars(), expected[name].scalars()
        assert numbers.keys() == wanted.keys()
        torch.testing.assert_close(numbers, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_accumulated_metrics_equal_those_of_evaluate(labelled: bool, strict: bool) -> None:
    logits, labels = some()
    costs, rules = [1.0, 2.5, 3.0, 8.0], ["latest", "product(softplus)", anytime.Caching()]
    metrics = Metrics(rules, costs=costs, strict=strict)
    for rows in torch.arange(90).split([1, 40, 49]):
        metrics.update(logits[:, rows], labels[rows] if labelled else None)
    expected = anytime.evaluate(logits, labels if labelled else None, rules=rules, costs=costs, strict=strict, sets=None)
    assert metrics.rows == 90
    assert_same(metrics.compute(), expected.rules)


def test_fitted_rules_and_lists_of_exits_are_taken() -> None:
    logits, labels = some()
    fitted = anytime.fit_product(*some(seed=1))
    metrics = Metrics({"fitted": fitted})
    metrics.update(list(logits), labels)
    assert_same(metrics.compute(), anytime.evaluate(logits, labels, rules={"fitted": fitted}, sets=None).rules)


def test_prepared_metrics_take_rules_that_were_fitted_for_some_classes() -> None:
    logits, labels = some()
    fitted = anytime.fit_product(*some(seed=1))
    metrics = Metrics({"fitted": fitted}, class_dim=None).prepared(len(logits))
    empty = metrics.pack()
    metrics.update(logits, labels)
    assert (empty == 0).all()
    assert len(empty) == len(metrics.pack())
    assert_same(metrics.compute(), anytime.evaluate(logits, labels, rules={"fitted": fitted}, sets=None).rules)
    with pytest.raises(ShapeError, match="classes"):
        metrics.update(logits[..., 1:], labels.clamp(max=2))
    assert Metrics(class_dim=2, ignore_index=9).prepared(3).ignore_index == 9


def test_a_rule_fitted_for_other_logits_leaves_the_metrics_as_they_were() -> None:
    logits, labels = some()
    metrics = Metrics({"fitted": anytime.fit_product(*some(seed=1))})
    with pytest.raises(ShapeError, match="for which this"):
        metrics.update(logits[1:], labels)
    metrics.update(logits, labels)
    assert metrics.rows == len(labels)


def test_merging_equals_seeing_all_rows() -> None:
    logits, labels = some()
    whole, first, second, empty = (Metrics() for _ in range(4))
    whole.update(logits, labels)
    first.update(logits[:, :30], labels[:30])
    second.update(logits[:, 30:], labels[30:])
    empty.merge(first)
    empty.merge(second)
    empty.merge(Metrics())
    assert_same(empty.compute(), whole.compute())


def test_only_metrics_with_the_same_rules_and_settings_are_merged() -> None:
    logits, labels = some()
    mine, other = Metrics({"mine": "product"}), Metrics({"mine": "product(softplus)"})
    with pytest.raises(OptionError, match="Softplus"):
        mine.merge(other)
    mine, other = Metrics("latest", costs=[1, 2, 3, 4]), Metrics("latest", costs=[1, 2, 3, 9])
    for metrics in (mine, other):
        metrics.update(logits, labels)
    with pytest.raises(OptionError, match=r"costs=\[1.0, 2.0, 3.0, 9.0\]"):
        mine.merge(other)


def test_copies_are_small_and_go_on_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anytime.metrics.accumulate.is_read_at_once", lambda values: False)
    logits, labels = some()
    metrics = Metrics()
    metrics.update(logits[:, :30], labels[:30])
    text = pickle.dumps(metrics)
    assert len(text) < 4 << 20  # the sums; the room for rows that wait has 64 MB
    copies = [pickle.loads(text), copy.deepcopy(metrics), metrics]
    for each in copies:
        each.update(logits[:, 30:], labels[30:])
    for each in copies:
        assert_same(each.compute(), anytime.evaluate(logits, labels, sets=None).rules)


def test_the_repr_has_the_rules_and_the_rows() -> None:
    metrics = Metrics("latest")
    metrics.update(*some())
    assert (
        repr(metrics)
        == f"Metrics({{'latest': Latest()}}, strict=False, class_dim=None, ignore_index=None, rows={metrics.rows})"
    )


def test_reset_forgets_all_rows_and_the_shape() -> None:
    metrics = Metrics("product")
    metrics.update(*some(seed=3))
    metrics.reset()
    logits, labels = some(seed=4)
    metrics.update(logits[:2], labels)
    assert_same(metrics.compute(), anytime.evaluate(logits[:2], labels, rules="product", sets=None).rules)


def test_packed_sums_add_up_to_those_of_all_rows() -> None:
    logits, labels = some()
    parts = [Metrics().prepared(4), Metrics().prepared(4)]
    for metrics, rows in zip(parts, torch.arange(90).split(45), strict=True):
        metrics.update(logits[:, rows], labels[rows])
    both, whole = Metrics().prepared(4), Metrics()
    both.unpack(parts[0].pack() + parts[1].pack(), parts[0].faults)
    whole.update(logits, labels)
    assert_same(both.compute(), whole.compute())


RULES = ["latest", "caching", "product", "product(softplus)", "mixture", "cached(product)", "tempered(latest, (1, 2, 3, 4))"]


class CopySpy(TorchDispatchMode):
    """Notes the operations that copy between the CPU and the device, unless they are queued."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [each for each in pytree.tree_leaves((args, kwargs, found)) if isinstance(each, Tensor)]
        if {"cpu"} <= {tensor.device.type for tensor in tensors} and not (kwargs or {}).get("non_blocking"):
            self.seen.append(str(func))
        return found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("labelled", [True, False])
def test_update_never_waits_for_the_device(rule: str, labelled: bool) -> None:
    """Tensors on `meta` have no values: what would wait for a GPU to read one (item, a boolean index) raises."""
    logits, labels = (tensor.to("meta") for tensor in some())
    metrics = Metrics(rule, costs=[1.0, 2.0, 3.0, 7.0])
    metrics.update(logits.half(), labels if labelled else None)
    with CopySpy() as spy:
        metrics.update(logits, labels if labelled else None)
        assert metrics.pack().device.type == "meta"  # the rows that waited are added
    assert spy.seen == []
    with pytest.raises((RuntimeError, NotImplementedError)):  # and reading one does raise
        metrics.compute()


def test_faults_on_a_device_are_found_by_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = some()
    logits[2, 40, 3] = math.nan
    logits[1, 41, 3] = math.inf
    metrics = on_a_device(monkeypatch)
    metrics.update(logits[:, :30], labels[:30])
    metrics.update(logits[:, 30:], labels[30:])
    with pytest.raises(NonFiniteError, match="exit 3, row 40") as caught:
        metrics.compute()
    assert (caught.value.exit, caught.value.row) == (3, 40)


def test_bad_labels_on_a_device_are_found_by_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = some()
    labels[50] = 7
    metrics, merged = on_a_device(monkeypatch), on_a_device(monkeypatch)
    metrics.update(logits[:, 30:], labels[30:])
    with pytest.raises(LabelError, match="row 20"):
        metrics.compute()
    merged.update(logits[:, :30], labels[:30])
    merged.merge(metrics)
    with pytest.raises(LabelError, match="row 50"):
        merged.compute()


def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    """Metrics that treat the CPU as a device that must not be waited for."""
    monkeypatch.setattr("anytime.metrics.accumulate.is_read_at_once", lambda values: False)
    return Metrics()


@pytest.mark.parametrize(
    ("update", "kind", "words"),
    [
        (lambda metrics: metrics.update(some()[0][:3], some()[1]), ShapeError, "reset"),
        (lambda metrics: metrics.update(some()[0][..., :5], some()[1] % 5), ShapeError, "classes"),
        (lambda metrics: metrics.update(some()[0]), LabelError, "without labels"),
        (lambda metrics: metrics.merge(Metrics("product")), OptionError, "same arguments"),
        (lambda metrics: metrics.merge(filled(Metrics(costs=[1, 2, 3, 9]))), OptionError, "same"),
    ],
)
def test_batches_that_do_not_belong_together_are_refused_and_not_counted(update: Any, kind: Any, words: str) -> None:
    metrics = filled(Metrics())
    before = metrics.pack()
    with pytest.raises(kind, match=words):
        update(metrics)
    torch.testing.assert_close(metrics.pack(), before)


def filled(metrics: Metrics) -> Metrics:
    metrics.update(*some())
    return metrics


def test_probabilities_in_place_of_logits_are_refused() -> None:
    metrics = Metrics()
    metrics.update(some()[0].softmax(-1), some()[1])
    with pytest.raises(ScaleError, match="probabilities"):
        metrics.compute()


def test_scalars_are_flat_and_named_by_exit() -> None:
    scalars = filled(Metrics("product")).compute()["product"].scalars()
    assert {"accuracy/exit_4", "label_drop_percent/0.1", "mean_label_drop", "consistency/concordance"} <= set(scalars)
    assert not any("reliability" in name for name in scalars)
    assert all(isinstance(value, int | float) for value in scalars.values())


def test_dense_batches_have_the_metrics_of_evaluate() -> None:
    logits, labels = torch.randn(3, 6, 9, 5, 7), torch.randint(9, (6, 5, 7))
    labels[:, 0] = labels[2:4] = 255
    metrics = Metrics("product", class_dim=2, ignore_index=255)
    for first in (0, 2, 4):  # the second batch has no label at all
        metrics.update(list(logits[:, first : first + 2]), labels[first : first + 2])
    wanted = anytime.evaluate(logits, labels, rules="product", class_dim=2, ignore_index=255).rules["product"]
    found = metrics.compute()["product"]
    assert metrics.rows == int((labels != 255).sum())
    assert found.mean_iou == pytest.approx(wanted.mean_iou)
    assert found.accuracy == pytest.approx(wanted.accuracy)

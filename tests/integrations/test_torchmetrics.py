"""The torchmetrics metric: the numbers of `evaluate`, over several batches and processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anytime
from anytime.errors import LabelError, NonFiniteError, OptionError

torchmetrics = pytest.importorskip("torchmetrics", reason="needs torchmetrics")
from anytime.integrations.torchmetrics import AnytimeMetric  # noqa: E402 - after the check that torchmetrics is there

LOGITS = 2 * torch.randn(3, 60, 7, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(60) % 7


def filled(rows: slice, **options: Any) -> AnytimeMetric:
    metric = AnytimeMetric(exits=3, **options)
    for part in torch.arange(60)[rows].split(16):
        metric.update(LOGITS[:, part], LABELS[part])
    return metric


def assert_is_evaluate(metric: AnytimeMetric) -> None:
    expected = anytime.evaluate(LOGITS, LABELS, sets=None).rules
    scalars = {f"{rule}/{name}": value for rule, each in expected.items() for name, value in each.scalars().items()}
    found = {name: value.item() for name, value in metric.compute().items()}
    torch.testing.assert_close(found, scalars, rtol=1e-6, atol=1e-6)
    assert metric.by_rule()["product"].learned == expected["product"].learned


def test_the_metric_equals_evaluate() -> None:
    assert_is_evaluate(filled(slice(None)))


def test_merged_states_equal_all_rows() -> None:
    first = filled(slice(0, 25))
    first.merge_state(filled(slice(25, 60)))
    assert_is_evaluate(first)


def test_states_of_two_processes_are_reduced_by_a_sum() -> None:
    other = filled(slice(25, 60))
    states = iter([])

    def gather(state: torch.Tensor, group: Any) -> list[torch.Tensor]:
        nonlocal states
        here = next(states, None)
        if here is None:
            states = iter([other.sums, other.faults, other.identity])
            here = next(states)
        return [state, here]

    metric = filled(slice(0, 25), dist_sync_fn=gather, distributed_available_fn=lambda: True)
    assert_is_evaluate(metric)


def test_forward_returns_the_batch_and_accumulates_and_reset_forgets() -> None:
    metric = AnytimeMetric(exits=3)
    first = metric(LOGITS[:, :30], LABELS[:30])
    alone = anytime.evaluate(LOGITS[:, :30], LABELS[:30], sets=None).rules["latest"]
    assert first["latest/accuracy/exit_1"].item() == pytest.approx(alone.accuracy[0])
    metric(LOGITS[:, 30:], LABELS[30:])
    assert_is_evaluate(metric)
    metric.reset()
    with pytest.warns(UserWarning, match="before the ``update``"), pytest.raises(OptionError, match="no rows"):
        metric.compute()


def test_the_metric_works_in_a_collection_and_in_a_state_dict() -> None:
    collection = torchmetrics.MetricCollection({"exits": AnytimeMetric(exits=3, rules="product")})
    collection.update(LOGITS, LABELS)
    assert "product/accuracy/exit_3" in collection.compute()
    metric = filled(slice(None))
    metric.persistent(True)
    restored = AnytimeMetric(exits=3)
    restored.load_state_dict(metric.state_dict())
    torch.testing.assert_close(restored.sums, metric.sums)


def test_metrics_in_a_collection_stay_apart_whatever_the_first_batch_was() -> None:
    """A collection updates only one of the metrics whose states are equal after the first batch."""
    alike = torch.zeros(3, 1, 7)
    alike[..., 0] = 9.0  # all rules give the same answers
    rules = ["latest", "caching"]
    collection = torchmetrics.MetricCollection({rule: AnytimeMetric(exits=3, rules={"": rule}) for rule in rules})
    collection.update(alike, torch.tensor([0]))
    collection.update(LOGITS, LABELS)
    collection.compute()
    wanted = anytime.evaluate(
        torch.cat((alike, LOGITS), 1), torch.cat((torch.tensor([0]), LABELS)), rules=rules, sets=None
    ).rules
    assert wanted["latest"].accuracy != wanted["caching"].accuracy
    for rule in rules:
        assert collection[rule].by_rule()[""].accuracy == pytest.approx(wanted[rule].accuracy)


def test_sums_keep_their_type() -> None:
    metric = filled(slice(None)).half().set_dtype(torch.float16)
    assert_is_evaluate(metric)


@pytest.mark.parametrize("exits", [1, 0, 2.5, "3", True])
def test_a_number_of_exits_is_needed(exits: Any) -> None:
    with pytest.raises(OptionError, match="exits is"):
        AnytimeMetric(exits=exits)


def test_update_adds_on_the_device_without_reading_from_it() -> None:
    """Tensors on `meta` have no values, so that reading one, or copying one to the CPU, raises."""
    metric = AnytimeMetric(exits=3).to("meta")
    for _ in range(2):
        metric.update(LOGITS.to("meta"), LABELS.to("meta"))
    assert metric.sums.device.type == metric.faults.device.type == "meta"
    with pytest.raises((RuntimeError, NotImplementedError)):
        metric.compute()


def test_bad_batches_are_refused_and_not_counted() -> None:
    metric = filled(slice(None))
    before = metric.sums.clone()
    with pytest.raises(LabelError):
        metric.update(LOGITS)
    with pytest.raises(NonFiniteError):
        metric.update(LOGITS / 0, LABELS)
    with pytest.raises(anytime.errors.ShapeError):
        metric.update(LOGITS[:2], LABELS)
    torch.testing.assert_close(metric.sums, before)


def test_fitted_rules_are_taken() -> None:
    fitted = anytime.fit_product(LOGITS, LABELS)
    found = filled(slice(None), rules={"fitted": fitted}).by_rule()["fitted"]
    expected = anytime.evaluate(LOGITS, LABELS, rules={"fitted": fitted}, sets=None).rules["fitted"]
    assert found.learned == expected.learned
    assert found.accuracy == pytest.approx(expected.accuracy)

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import anytime
from anytime.calibrate import sweep_static_thresholds
from anytime.errors import LabelError, OptionError


def sample(rows: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    file = anytime.samples.cifar100_msdnet()
    assert file.labels is not None
    return file.logits[:, :rows].float(), file.labels[:rows]


def test_each_trial_is_the_product_over_the_gate() -> None:
    logits, labels = sample()
    values, wanted = logits.numpy().astype(np.float64), labels.numpy()
    for trial in sweep_static_thresholds(logits, labels, thresholds=[0.0, 1.0, 5.0]):
        support = np.logical_and.accumulate(values > trial.threshold, 0)
        collapsed = ~support.any(-1)
        held = support | collapsed[..., None]
        np.testing.assert_allclose(trial.set_size, held.sum(-1).mean(1))
        np.testing.assert_allclose(trial.coverage, held[:, np.arange(300), wanted].mean(1))
        np.testing.assert_allclose(trial.collapsed, collapsed.mean(1))


def test_zero_is_the_plain_product() -> None:
    logits, labels = sample()
    metrics = anytime.evaluate(logits, labels, rules=["product"]).rules["product"]
    (trial,) = sweep_static_thresholds(logits, labels, thresholds=[0.0])
    assert trial.accuracy == pytest.approx(metrics.accuracy)
    assert trial.ece == pytest.approx(metrics.ece)
    assert trial.drops == pytest.approx(metrics.label_drop_percent["0.1"] / 100)


def test_among_rows_that_have_not_collapsed_a_higher_threshold_never_adds_to_the_set() -> None:
    logits, labels = sample()
    trials = sweep_static_thresholds(logits, labels)
    assert [trial.threshold for trial in trials] == sorted(trial.threshold for trial in trials)
    for low, high in itertools.pairwise(trials):
        for exit in range(len(logits)):
            inside = [trial.set_size[exit] - 100 * trial.collapsed[exit] for trial in (low, high)]
            assert inside[1] <= inside[0] + 1e-9
            assert high.collapsed[exit] >= low.collapsed[exit]


def test_wrong_calls_are_refused() -> None:
    logits, labels = sample(10)
    with pytest.raises(OptionError, match="thresholds is empty"):
        sweep_static_thresholds(logits, labels, thresholds=[])
    with pytest.raises(OptionError, match="threshold is -1"):
        sweep_static_thresholds(logits, labels, thresholds=[1.0, -1.0])
    with pytest.raises(LabelError, match="no rows"):
        sweep_static_thresholds(logits[:, :0], labels[:0])

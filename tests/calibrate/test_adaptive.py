from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import anytime
from anytime.calibrate import fit_adaptive_threshold
from anytime.errors import LabelError, OptionError, OverlapError


def some(rows: int, seed: int, classes: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    ease = 3 * torch.rand(rows, 1, generator=generator)
    logits = torch.randn(4, rows, classes, generator=generator) + 2 * ease * torch.nn.functional.one_hot(labels, classes)
    return logits, labels


def test_a_more_confident_row_gets_a_higher_threshold() -> None:
    fit, tune = some(600, 0), some(600, 1)
    found = fit_adaptive_threshold(*fit, tuning_logits=tune[0], tuning_labels=tune[1])
    activation = found.activation
    top = torch.tensor([[1.0, 0.9, 0.8, 0.0], [9.0, 0.5, 0.1, 0.0]])
    low, high = activation.threshold(top).flatten().tolist()
    assert activation.scale > 0
    assert 0 <= low < high <= activation.scale


def test_scale_zero_is_the_plain_product() -> None:
    logits, labels = some(200, 2)
    found = fit_adaptive_threshold(logits, labels, tuning_logits=some(200, 3)[0], tuning_labels=some(200, 3)[1], scales=[0.0])
    assert torch.allclose(anytime.Product(found.activation)(logits).probs, anytime.Product()(logits).probs, atol=1e-6)


def test_the_choice_is_the_least_of_the_grid() -> None:
    fit, tune = some(400, 4), some(400, 5)
    for balance in (0.0, 1.0, 50.0):
        found = fit_adaptive_threshold(*fit, tuning_logits=tune[0], tuning_labels=tune[1], balance=balance)
        best = min(found.trials, key=lambda trial: trial.ece + balance * trial.drop)
        assert found.activation.scale == best.scale


def test_bad_rows_are_refused() -> None:
    logits, labels = some(100, 6)
    other = some(100, 7)
    with pytest.raises(OverlapError, match="100 of the 100"):
        fit_adaptive_threshold(logits, labels, tuning_logits=logits, tuning_labels=labels)
    mixed = torch.cat((other[0][:, :99], logits[:, 5:6]), 1)
    with pytest.raises(OverlapError, match="1 of the 100"):
        fit_adaptive_threshold(logits, labels, tuning_logits=mixed, tuning_labels=other[1])
    with pytest.raises(LabelError, match="right on all"):
        fit_adaptive_threshold(logits, logits[0].argmax(-1), tuning_logits=other[0], tuning_labels=other[1])
    with pytest.raises(OptionError):
        fit_adaptive_threshold(logits, labels, tuning_logits=other[0], tuning_labels=other[1], scales=[])
    with pytest.raises(OptionError):
        fit_adaptive_threshold(logits, labels, tuning_logits=other[0], tuning_labels=other[1], balance=-1)


def test_it_improves_calibration_on_unseen_rows_as_in_the_paper(shared: Path) -> None:
    with np.load(shared / "reference" / "msdnet-cifar100-val.npz") as file:
        logits, labels = torch.from_numpy(file["logits"]).float(), torch.from_numpy(file["labels"].astype(np.int64))
    fit, tune, test = slice(0, 1500), slice(1500, 3000), slice(3000, 5000)
    found = fit_adaptive_threshold(logits[:, fit], labels[fit], tuning_logits=logits[:, tune], tuning_labels=labels[tune])
    rules = {"plain": anytime.Product(), "adaptive": anytime.Product(found.activation)}
    metrics = anytime.evaluate(logits[:, test], labels[test], rules=rules).rules
    assert np.mean(metrics["adaptive"].ece) < np.mean(metrics["plain"].ece) - 0.1
    assert metrics["adaptive"].label_drop_percent["0.1"] < 20
    assert np.mean(metrics["adaptive"].accuracy) > np.mean(metrics["plain"].accuracy) - 0.03

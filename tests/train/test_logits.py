from __future__ import annotations

from types import ModuleType

import pytest
import torch

from anytime.data import ImageData, normalise
from anytime.train import Evaluation


@pytest.mark.parametrize("batch", [300, 128, 7, 1000])
def test_logits_do_not_depend_on_the_batch(digits: dict[str, ImageData], tiny: ModuleType, batch: int) -> None:
    torch.manual_seed(0)
    model, data = tiny.Tiny(dropout=0.5), digits["test"]
    model.train()
    found = Evaluation(model, data, batch=batch).logits()
    assert model.training
    with torch.no_grad():
        expected = model.eval()(normalise(data.images, data.mean, data.std))
    assert found.shape == (3, 300, 10)
    torch.testing.assert_close(found, expected)


def test_an_evaluation_follows_the_model(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    model = tiny.Tiny()
    evaluation = Evaluation(model, digits["test"])
    before = evaluation.logits()
    with torch.no_grad():
        model.heads[2][3].bias.add_(1.0)
    after = evaluation.logits()
    torch.testing.assert_close(after[2], before[2] + 1)
    torch.testing.assert_close(after[0], before[0])

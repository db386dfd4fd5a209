from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from anytime.data import ImageData, normalise
from anytime.models.base import MultiExit
from anytime.train import ExitEvaluation
from anytime.train.data.stream import StreamedEvaluation
from anytime.train.data.tokens import TokenEvaluation


@pytest.mark.parametrize("batch", [300, 128, 7, 1000])
def test_logits_do_not_depend_on_the_batch(digits: dict[str, ImageData], tiny: ModuleType, batch: int) -> None:
    torch.manual_seed(0)
    model, data = tiny.Tiny(dropout=0.5), digits["test"]
    model.train()
    found = ExitEvaluation(model, data, batch=batch).logits()
    assert model.training
    with torch.no_grad():
        expected = model.eval()(normalise(data.images, data.mean, data.std))
    assert found.shape == (3, 300, 10)
    torch.testing.assert_close(found, expected)


def test_an_evaluation_uses_the_current_weights(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    model = tiny.Tiny()
    evaluation = ExitEvaluation(model, digits["test"])
    before = evaluation.logits()
    with torch.no_grad():
        model.heads[2][3].bias.add_(1.0)
    after = evaluation.logits()
    torch.testing.assert_close(after[2], before[2] + 1)
    torch.testing.assert_close(after[0], before[0])


class Precise(MultiExit):
    """Records whether TF32 is allowed while it runs."""

    num_exits = 1

    def __init__(self) -> None:
        super().__init__()
        self.head, self.rounded = nn.Linear(1, 10), list[tuple[bool, bool]]()

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        self.rounded.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        yield self.head(x.float().flatten(1)[:, :1])


class Stream:
    """The first images of a data set, as those that are read batch by batch."""

    def __init__(self, data: ImageData) -> None:
        self.mean, self.std, self.labels, self._images = data.mean, data.std, data.labels[:7], data.images[:7]

    def __len__(self) -> int:
        return 7

    def batches(self, *_: Any) -> list[Tensor]:
        return [self._images]


@pytest.fixture
def rounding() -> Iterator[None]:
    """TF32 is allowed."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("kind", ["images", "stream", "texts"])
def test_evaluation_is_in_true_float32(digits: dict[str, ImageData], kind: str) -> None:
    model, data = Precise(), digits["test"]
    if kind == "images":
        evaluation: Any = ExitEvaluation(model, data)
    elif kind == "stream":
        evaluation = StreamedEvaluation(model, cast(Any, Stream(data)), batch=7)
    else:
        evaluation = object.__new__(TokenEvaluation)
        evaluation.model, evaluation._plan = model, [(torch.arange(2), 3)]
        evaluation.data = SimpleNamespace(ids=torch.zeros(2, 3, dtype=torch.int64))
    evaluation.logits()
    assert set(model.rounded) == {(False, False)}
    assert torch.backends.cudnn.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32

"""A runner of a model with dense logits: answers in the shape of the logits, exit by exit."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import anytime
from anytime.errors import ShapeError


class Segmenter(nn.Module):
    num_exits = 3

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.parts = nn.ModuleList(nn.Conv2d(3 if part == 0 else 8, 8, 3, padding=1) for part in range(3))
            self.heads = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(3))

    def exits(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for part, head in zip(self.parts, self.heads, strict=True):
            x = part(x).relu()
            yield head(x)


X = torch.randn(2, 3, 6, 7, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model() -> Segmenter:
    return Segmenter().eval()


def test_stream_and_predict_give_what_the_rule_gives(model: Segmenter) -> None:
    with torch.inference_mode():
        wanted = anytime.Product()(torch.stack(list(model.exits(X))), class_dim=2)
    with anytime.Runner(model, "product", class_dim=1) as runner:
        streamed = list(runner.stream(X))
        whole = runner.predict(X, deadline="60s")
    for exit, answer in enumerate(streamed):
        torch.testing.assert_close(answer.probs, wanted.probs[exit])
    torch.testing.assert_close(whole.probs, wanted.probs[-1])
    assert (whole.labels.shape, whole.confidence.shape, whole.reason) == ((2, 6, 7), (2, 6, 7), "finished")


def test_a_budget_of_confidence_reads_the_mean_over_the_positions(model: Segmenter) -> None:
    with anytime.Runner(model, "latest", class_dim=1) as runner:
        means = [answer.confidence.flatten(1).mean(1).min().item() for answer in runner.stream(X)]
        reached = runner.predict(X, budget=anytime.Budget(confidence=means[0] - 1e-4))
        later = runner.predict(X, budget=anytime.Budget(confidence=max(means) + 1e-3))
    assert (reached.exit, later.exit) == (1, 3)


def test_a_dense_answer_has_no_single_label(model: Segmenter) -> None:
    with anytime.Runner(model, class_dim=1, rule="product") as runner:
        answer = runner.predict(X[:1])
        with pytest.raises(ShapeError, match="42 positions"):
            _ = answer.label


def test_a_copy_knows_the_dimension_of_the_classes(model: Segmenter) -> None:
    with anytime.Runner(model, class_dim=1) as runner, copy.deepcopy(runner) as other:
        assert torch.equal(other.predict(X).labels, runner.predict(X).labels)

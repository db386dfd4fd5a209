"""What the eager engine takes from a caller and from a model, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from anytime.errors import ShapeError, StateError
from anytime.models import MLP, MLPConfig
from anytime.run import Runner
from anytime.run.engines.eager import EagerEngine


class Given:
    """A model that gives what it is told."""

    num_exits = 3

    def __init__(self, *given: Any) -> None:
        self.given = given

    def exits(self, x: Tensor) -> Iterator[Any]:
        return iter(self.given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_numbers_are_taken_in_any_width(dtype: torch.dtype) -> None:
    engine = EagerEngine(MLP(MLPConfig(classes=4)))
    x = torch.tensor([[0.5, -2.0]])
    torch.testing.assert_close(engine.begin(x.to(dtype)).advance(), engine.begin(x).advance())


def test_a_list_of_logits_will_do() -> None:
    model = Given(*torch.zeros(3, 2, 5))
    model.exits = lambda x: list(model.given)  # type: ignore[method-assign, assignment, return-value]
    with Runner(model) as runner:
        assert runner.predict(torch.zeros(2, 1)).exit == 3


def test_a_model_with_fewer_exits_than_it_says_is_named() -> None:
    with Runner(Given(torch.zeros(2, 5))) as runner, pytest.raises(StateError, match="after 1 of 3"):
        runner.predict(torch.zeros(2, 1))


@pytest.mark.parametrize(
    "wrong", [3, torch.zeros(5), torch.zeros(3, 5), torch.zeros(2, 6)], ids=["3", "rank", "rows", "classes"]
)
def test_what_are_no_logits_for_these_inputs_is_refused(wrong: Any) -> None:
    model = Given(torch.zeros(2, 5), wrong, torch.zeros(2, 5))
    with Runner(model) as runner, pytest.raises(ShapeError):
        runner.predict(torch.zeros(2, 1))

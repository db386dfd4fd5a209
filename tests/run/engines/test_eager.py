"""Inputs and models that the eager engine accepts and refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anytime.errors import OptionError, ShapeError, StateError
from anytime.models import MLP, MLPConfig
from anytime.run import Runner
from anytime.run.engines.eager import EagerEngine


class Given:
    """A model with fixed outputs."""

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


def test_exits_may_return_a_list() -> None:
    model = Given(*torch.zeros(3, 2, 5))
    model.exits = lambda x: list(model.given)  # type: ignore[method-assign, assignment, return-value]
    with Runner(model) as runner:
        assert runner.predict(torch.zeros(2, 1)).exit == 3


def test_a_model_with_fewer_exits_than_num_exits_is_refused() -> None:
    with Runner(Given(torch.zeros(2, 5))) as runner, pytest.raises(StateError, match="after 1 of 3"):
        runner.predict(torch.zeros(2, 1))


@pytest.mark.parametrize(
    "wrong", [3, torch.zeros(5), torch.zeros(3, 5), torch.zeros(2, 6)], ids=["3", "rank", "rows", "classes"]
)
def test_outputs_that_are_not_logits_for_these_inputs_are_refused(wrong: Any) -> None:
    model = Given(torch.zeros(2, 5), wrong, torch.zeros(2, 5))
    with Runner(model) as runner, pytest.raises(ShapeError):
        runner.predict(torch.zeros(2, 1))


class Dropping(nn.Module):
    """A classifier with dropout, whose training mode is visible in its logits."""

    num_exits = 1

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.9), nn.Linear(3, 4))

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        yield self.body(x)


def test_a_model_in_training_mode_stays_in_it_and_is_run_in_eval_mode() -> None:
    model, x = Dropping().train(), torch.randn(8, 3)
    model.body[2].eval()
    modes = [part.training for part in model.modules()]
    with Runner(model, "latest") as runner:
        found = runner.predict(x).log_probs
        assert [part.training for part in model.modules()] == modes
        with torch.no_grad():
            model.body[2].bias.add_(torch.arange(4.0))  # the weights are shared with a model in training
            changed = runner.predict(x).log_probs
    assert [part.training for part in model.modules()] == modes
    with torch.no_grad():
        wanted = model.eval().body(x).log_softmax(-1)
    torch.testing.assert_close(changed, wanted)
    assert not torch.allclose(found, changed)


def test_a_model_in_training_mode_that_cannot_be_copied_is_refused() -> None:
    class Stubborn(Dropping):
        def __deepcopy__(self, memo: object) -> None:
            raise TypeError("there is only one")

    with pytest.raises(OptionError, match=r"there is only one[\s\S]*call model\.eval\(\) first"):
        EagerEngine(Stubborn().train())
    assert EagerEngine(Stubborn().eval()).num_exits == 1

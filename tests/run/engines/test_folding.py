"""Folding removes exactly the batch norms that it can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import anytime
from anytime.errors import OptionError
from anytime.models import Carry, MultiExit
from anytime.run.engines.folding import ConvReLU, allow_tf32, difference, folded_copy, logits_of_stages


def norms(model: nn.Module) -> int:
    return sum(isinstance(part, _BatchNorm) for part in model.modules())


@pytest.mark.parametrize("name", ["msdnet", "imta", "resnet", "cascade"])
def test_no_batch_norm_is_left_where_each_follows_a_layer(name: str, make_network: Any) -> None:
    model, x = make_network(name)
    assert norms(model) > 0
    assert norms(folded_copy(model, x)) == 0


def test_a_batch_norm_stays_where_an_exit_reads_what_it_reads(make_network: Any) -> None:
    model, x = make_network("attached")  # one of its exits stands on a convolution
    assert norms(folded_copy(model, x)) == 1


def test_relus_become_part_of_convolutions(make_network: Any) -> None:
    model, x = make_network("msdnet")
    copy: Any = folded_copy(model, x, with_relu=True)
    kinds = [type(part) for part in copy.modules()]
    assert kinds.count(ConvReLU) == kinds.count(nn.Conv2d) > 0
    assert nn.ReLU not in kinds
    assert difference(logits_of_stages(copy, x), list(model.exits(x))) < 1e-5


class OneStage(MultiExit):
    num_exits = 1

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        return (), self.body(carry[0])


class Twice(nn.Module):
    """A layer that is used twice, once without its batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.layer(self.layer(x)))
        return result


class WrittenOver(nn.Module):
    """The layer's output is overwritten in place before the batch norm reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.layer(x).relu_())
        return result


@pytest.mark.parametrize("body", [Twice(), WrittenOver(), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))])
def test_a_batch_norm_stays_where_folding_would_change_something(body: nn.Module) -> None:
    model = OneStage(body).eval()
    assert norms(folded_copy(model, torch.randn(3, 4))) == 1


def test_a_model_that_cannot_be_copied_is_named() -> None:
    class Stubborn(OneStage):
        def __deepcopy__(self, memo: object) -> None:
            raise TypeError("there is only one")

    with pytest.raises(OptionError, match=r"Stubborn cannot be copied: there is only one"):
        folded_copy(Stubborn(nn.Linear(4, 4)), torch.zeros(1, 4))


def test_nan_is_far_from_everything() -> None:
    assert difference([torch.tensor([[float("nan")]])], [torch.zeros(1, 1)]) == float("inf")
    assert difference([torch.ones(1, 1)], [torch.full((1, 1), 4.0)]) == 0.75


def test_tf32_is_set_inside_and_restored_outside() -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark)
    for tf32 in (False, True):
        with allow_tf32(tf32):
            assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == (tf32, tf32, True)
        assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == before
    with pytest.raises(ValueError, match="inside"), allow_tf32(True):
        raise ValueError("inside")
    assert (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == before


@pytest.mark.parametrize("engine", ["folded", "eager"])
def test_an_engine_can_be_built_within_inference_mode(engine: str) -> None:
    model = anytime.create_model("msdnet-cifar", classes=10).eval()
    with torch.inference_mode():
        x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        with anytime.Runner(model, engine=engine, example=x) as runner:
            inside = runner.predict(x).probs
    with anytime.Runner(model, engine=engine, example=x.clone()) as runner:
        torch.testing.assert_close(runner.predict(x.clone()).probs, inside)

from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch
from torch import nn

from anytime.train import TrainConfig
from anytime.train.gpu.optimizers import optimizer_for
from anytime.train.gpu.weights import FlatWeights


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(27, 4)).double()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_steps_are_those_of_torch(name: str, nesterov: bool) -> None:
    config = TrainConfig(optimizer=name, weight_decay=0.01, nesterov=nesterov)
    plain = network().float()
    ours = copy.deepcopy(plain)
    if name == "adam":
        rival = torch.optim.Adam(plain.parameters(), 0.02, weight_decay=0.01)
    else:
        rival = torch.optim.SGD(plain.parameters(), 0.02, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
    weights = FlatWeights(ours)
    optimizer = optimizer_for(weights, config)
    for step in range(6):
        images = torch.randn(5, 1, 5, 5, generator=torch.Generator().manual_seed(step))
        rival.zero_grad()
        plain(images).square().sum().backward()
        rival.step()
        optimizer.lr.fill_(0.02)
        weights.collect(torch.autograd.grad(ours(images).square().sum(), weights.parameters))
        optimizer.step()
        if step == 2:  # what is remembered can be carried over
            again = optimizer_for(weights, config)
            again.load({key: value.clone() for key, value in optimizer.state().items()})
            optimizer = again
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_heads_on_a_frozen_backbone_learn_with_adam(tiny: ModuleType, digits) -> None:
    from anytime.train import fit
    from anytime.train.data.logits import ExitEvaluation

    torch.manual_seed(0)
    model = tiny.Tiny()
    kept = copy.deepcopy(model.stages.state_dict())
    recipe = TrainConfig(epochs=6, batch=64, lr=0.01, optimizer="adam", frozen=("stages",), hold_statistics=True, augment=False)
    fit(model, digits["train"], recipe)
    for name, value in model.stages.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(value, kept[name]), name
    assert min(ExitEvaluation(model, digits["test"]).accuracy()) > 0.7

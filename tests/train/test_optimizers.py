from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch
from torch import nn

from anytime.train import TrainConfig
from anytime.train.gpu.weights import TrainedWeights, optimizer_state


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(27, 4))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_steps_are_those_of_torch_and_continue_from_a_stored_state(name: str, nesterov: bool) -> None:
    config = TrainConfig(optimizer=name, weight_decay=0.01, nesterov=nesterov)
    plain = network()
    ours = copy.deepcopy(plain)
    if name == "adam":
        rival: torch.optim.Optimizer = torch.optim.Adam(plain.parameters(), 0.02, weight_decay=0.01)
    else:
        rival = torch.optim.SGD(plain.parameters(), 0.02, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
    weights = TrainedWeights(ours, config)
    for step in range(6):
        images = torch.randn(5, 1, 5, 5, generator=torch.Generator().manual_seed(step))
        rival.zero_grad()
        plain(images).square().sum().backward()
        rival.step()
        weights.set_lr(0.02)
        weights.step(torch.autograd.grad(ours(images).square().sum(), weights.parameters))
        if step == 2:
            state = {key: value.clone() for key, value in optimizer_state(weights.optimizer, weights.named).items()}
            stored = {key: value.clone() for key, value in weights.named.items()}
            weights = TrainedWeights(ours, config)
            weights.load(stored, state)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_loaded_state_has_the_memory_format_of_the_weights(name: str) -> None:
    config = TrainConfig(optimizer=name)
    weights = TrainedWeights(nn.Conv2d(4, 8, 3), config, channels_last=True)
    weights.set_lr(0.1)
    weights.step([torch.randn_like(weight) for weight in weights.parameters])
    state = optimizer_state(weights.optimizer, weights.named)
    stored = {key: value.contiguous() for key, value in state.items()}  # as in a file
    resumed = TrainedWeights(nn.Conv2d(4, 8, 3), config, channels_last=True)
    resumed.load(weights.named, stored)
    for key, value in optimizer_state(resumed.optimizer, resumed.named).items():
        torch.testing.assert_close(value, state[key])
        assert value.stride() == state[key].stride()  # fused optimizers on a GPU refuse other strides


@pytest.mark.parametrize("change", ["missing", "shape", "adam"])
def test_the_state_of_another_optimizer_is_refused(change: str) -> None:
    weights = TrainedWeights(network(), TrainConfig())
    state = optimizer_state(weights.optimizer, weights.named)
    if change == "missing":
        state.pop("momentum_buffer.0.bias")
    elif change == "shape":
        state["momentum_buffer.0.bias"] = torch.zeros(2)
    else:
        state = {name.replace("momentum_buffer", "exp_avg"): value for name, value in state.items()}
    with pytest.raises(ValueError, match="state of"):
        weights.load(weights.named, state)


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

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import nn

from anytime.data import ImageData, normalise
from anytime.errors import OptionError
from anytime.train import Hardware, TrainConfig, joint_cross_entropy, on_logits
from anytime.train.data.rows import RowsStep
from anytime.train.gpu.graph import Replayed, use_streams

OBJECTIVE = on_logits(joint_cross_entropy)


def plain_loop(model: nn.Module, step: RowsStep, config: TrainConfig, steps: int, lr: float) -> list[torch.Tensor]:
    """The same batches in a plain PyTorch loop."""
    optimizer = torch.optim.SGD(
        model.parameters(), lr, momentum=config.momentum, weight_decay=config.weight_decay, nesterov=config.nesterov
    )
    model.train()
    losses = []
    for index in range(steps):
        rows = step.order[index * config.batch : (index + 1) * config.batch]
        images = normalise(step.data.images[rows], step.data.mean, step.data.std)
        exits = [nn.functional.cross_entropy(logits, step.data.labels[rows]) for logits in model.exits(images)]  # type: ignore[operator]
        optimizer.zero_grad()
        sum(exits).backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append(torch.stack(exits).detach())
    return losses


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_the_step_is_that_of_a_plain_loop(
    digits: dict[str, ImageData], tiny: ModuleType, nesterov: bool, channels_last: bool
) -> None:
    torch.manual_seed(0)
    model = tiny.Tiny()
    rival = copy.deepcopy(model)
    config = TrainConfig(batch=64, nesterov=nesterov, augment=False)
    step = RowsStep(model, digits["train"], OBJECTIVE, config, Hardware(channels_last=channels_last))
    step.begin(0)
    ours = []
    steps = 4  # few, as training amplifies rounding
    for index in range(steps):
        step(index, 0.05)
        ours.append(step.take_losses())
    theirs = plain_loop(rival, step, config, steps, 0.05)
    torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-3, atol=1e-4)
    step.publish(steps)
    for (name, mine), (_, other) in zip(model.state_dict().items(), rival.state_dict().items(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4, msg=name)


def test_only_publish_changes_the_callers_model(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    model = tiny.Tiny()
    before = copy.deepcopy(model.state_dict())
    step = RowsStep(model, digits["train"], OBJECTIVE, TrainConfig(), Hardware())
    step.begin(0)
    step(0, 0.1)
    assert all(torch.equal(before[name], values) for name, values in model.state_dict().items())
    step.publish(1)
    assert not torch.equal(before["heads.0.3.weight"], model.state_dict()["heads.0.3.weight"])
    assert int(model.state_dict()["stages.0.1.num_batches_tracked"]) == 1


def test_frozen_parameters_stay(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    model = tiny.Tiny()
    model.stages.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    step = RowsStep(model, digits["train"], OBJECTIVE, TrainConfig(), Hardware())
    step.begin(0)
    for index in range(3):
        step(index, 0.1)
    step.publish(3)
    after = model.state_dict()
    assert torch.equal(before["stages.1.0.weight"], after["stages.1.0.weight"])
    assert not torch.equal(before["heads.1.3.weight"], after["heads.1.3.weight"])


@contextmanager
def without_onednn() -> Iterator[None]:
    # oneDNN's bfloat16 kernels die of an illegal instruction on some virtual machines.
    before = torch.backends.mkldnn.enabled
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


def test_bfloat16_follows_float32_and_keeps_float32_weights(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    torch.manual_seed(0)
    model = tiny.Tiny()
    losses = []
    with without_onednn():
        for hardware in (Hardware(), Hardware(precision="bfloat16", channels_last=True)):
            step = RowsStep(copy.deepcopy(model), digits["train"], OBJECTIVE, TrainConfig(), hardware)
            step.begin(0)
            for index in range(6):
                step(index, 0.05)
            losses.append(step.take_losses())
            step.publish(6)
    torch.testing.assert_close(losses[1], losses[0], rtol=0.03, atol=0)
    assert step.network.heads[0][3].weight.dtype == torch.bfloat16
    assert step.network.stages[0][1].weight.dtype == torch.float32
    assert {p.dtype for p in step.model.parameters()} == {torch.float32}
    assert torch.equal(step.model.heads[0][3].weight, step.weights.named["heads.0.3.weight"])


def test_an_epoch_shows_each_row_once_and_epochs_differ(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    step = RowsStep(tiny.Tiny(), digits["train"], OBJECTIVE, TrainConfig(), Hardware())
    step.begin(0)
    first = step.order.clone(), step.draws.down.clone()
    assert torch.equal(first[0].sort().values, torch.arange(1197))
    step.begin(1)
    assert not torch.equal(step.order, first[0])
    step.begin(0)
    assert torch.equal(step.order, first[0])
    assert torch.equal(step.draws.down, first[1])


def test_a_batch_larger_than_the_data_is_refused(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    with pytest.raises(OptionError, match="batch"):
        RowsStep(tiny.Tiny(), digits["val"], OBJECTIVE, TrainConfig(batch=301), Hardware())


def test_a_frozen_network_is_refused(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    with pytest.raises(OptionError, match="gradient"):
        RowsStep(tiny.Tiny().requires_grad_(False), digits["train"], OBJECTIVE, TrainConfig(), Hardware())


def test_streams_need_an_msdnet(tiny: ModuleType) -> None:
    with pytest.raises(OptionError, match="Tiny"):
        use_streams(tiny.Tiny())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_every_call_of_a_captured_function_runs_it_once() -> None:
    value = torch.zeros((), device="cuda")

    def add_one() -> None:
        value.add_(1)

    step = Replayed(add_one)
    for calls in range(1, 9):
        step()
        assert float(value) == calls

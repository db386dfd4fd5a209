from __future__ import annotations

import copy
from types import ModuleType

import pytest
import torch

from anytime.data import ImageData
from anytime.train import Hardware, TrainConfig, joint_cross_entropy, on_logits
from anytime.train.average import WeightAverage
from anytime.train.data.rows import RowsStep

OBJECTIVE = on_logits(joint_cross_entropy)


def test_the_average_is_that_of_a_plain_loop() -> None:
    weights = {"a": torch.randn(3, 2), "b": torch.randn(4)}
    average = WeightAverage(weights, decay=0.6)
    expected = {name: weight.tolist() for name, weight in weights.items()}
    for update in range(1, 20):
        for weight in weights.values():
            weight.add_(torch.randn_like(weight))
        average.update()
        decay = min(0.6, (1 + update) / (10 + update))
        for name, weight in weights.items():
            expected[name] = (decay * torch.tensor(expected[name]) + (1 - decay) * weight).tolist()
    for name, value in average.values.items():
        torch.testing.assert_close(value, torch.tensor(expected[name]))
    assert average.updates == 19


def test_a_loaded_average_continues() -> None:
    weights = {"a": torch.zeros(2)}
    first, second = (WeightAverage(weights, decay=0.9) for _ in range(2))
    weights["a"].fill_(3)
    first.update()
    second.load({name: value.clone() for name, value in first.values.items()}, updates=first.updates)
    for average in (first, second):
        average.update()
    assert torch.equal(first.values["a"], second.values["a"])


@pytest.mark.parametrize("steps", [1, 4])
def test_what_is_published_is_the_average_of_weights_and_statistics(
    digits: dict[str, ImageData], tiny: ModuleType, steps: int
) -> None:
    step = RowsStep(tiny.Tiny(), digits["train"], OBJECTIVE, TrainConfig(average_decay=0.5), Hardware())
    names = "heads.0.3.weight", "stages.1.1.running_var"
    expected = {name: value.double() for name, value in step.network.state_dict().items() if name in names}
    step.begin(0)
    for index in range(steps):
        step(index, 0.1)
        decay = min(0.5, (2 + index) / (11 + index))
        for name in names:
            expected[name] = decay * expected[name] + (1 - decay) * step.network.state_dict()[name]
    step.publish(steps)
    for name in names:
        torch.testing.assert_close(step.model.state_dict()[name], expected[name].float())
        assert not torch.equal(step.model.state_dict()[name], step.network.state_dict()[name])


def test_the_average_does_not_change_what_is_trained(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    model = tiny.Tiny()
    trained = []
    for decay in (0.0, 0.9):
        step = RowsStep(copy.deepcopy(model), digits["train"], OBJECTIVE, TrainConfig(average_decay=decay), Hardware())
        step.begin(0)
        for index in range(3):
            step(index, 0.1)
            step.publish(index + 1)
        trained.append(step.weights.named)
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])

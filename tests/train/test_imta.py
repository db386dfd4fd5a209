from __future__ import annotations

import copy
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from anytime.data import ImageData, load_digits
from anytime.errors import OptionError
from anytime.models.imta import IMTA
from anytime.models.msdnet import MSDNet, MSDNetConfig
from anytime.train import ExitEvaluation, TrainConfig, distillation, fit, joint_cross_entropy
from anytime.train.data.named import doubled
from anytime.train.objectives.losses import equilibrium, one_for_all

NETWORK = MSDNetConfig(
    classes=10, exits=3, base=1, step=1, channels=8, growth=4, growth_factors=(1, 2), bottleneck_factors=(1, 2), image_size=16
)
RECIPE = TrainConfig(epochs=6, batch=32, lr=0.1, schedule="cosine", augment=False)


@pytest.fixture(scope="module")
def large_digits() -> dict[str, ImageData]:
    """The digits in colour and 16 × 16, as MSDNet takes them; few to learn from."""
    sets = {name: doubled(data) for name, data in load_digits(channels=3).items()}
    return {"train": sets["train"].take(torch.arange(384)), "test": sets["test"]}


@pytest.fixture(scope="module")
def stage_one(large_digits: dict[str, ImageData]) -> MSDNet:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MSDNet(NETWORK)
    assert fit(model, large_digits["train"], replace(RECIPE, objective="equilibrium")).finished
    return model


def test_every_exit_learns_the_digits_with_balanced_gradients(stage_one: MSDNet, large_digits: dict[str, ImageData]) -> None:
    assert min(ExitEvaluation(stage_one, large_digits["test"]).accuracy()) > 0.8  # chance is 0.1


@pytest.mark.parametrize("hold", [False, True])
def test_the_second_stage_trains_new_classifiers_on_a_frozen_network(
    stage_one: MSDNet, large_digits: dict[str, ImageData], hold: bool
) -> None:
    torch.manual_seed(1)
    model = IMTA.on(stage_one, hold_statistics=hold)
    before = copy.deepcopy(model.backbone.state_dict())
    assert fit(model, large_digits["train"], replace(RECIPE, epochs=4, objective="one-for-all")).finished
    changed = {name for name, values in model.backbone.state_dict().items() if not torch.equal(values, before[name])}
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert all(name.endswith(statistics) for name in changed)
    assert bool(changed) is not hold
    assert min(ExitEvaluation(model, large_digits["test"]).accuracy()) > 0.8  # chance is 0.1


def test_stage_one_is_plain_cross_entropy_with_other_gradients(large_digits: dict[str, ImageData]) -> None:
    torch.manual_seed(0)
    network = MSDNet(NETWORK).train()
    images, labels = large_digits["train"].images[:8].float() / 255, large_digits["train"].labels[:8]
    balanced = equilibrium(network, images, labels)
    plain = joint_cross_entropy(network(images), labels)
    torch.testing.assert_close(balanced, plain)
    stem = network.blocks[0][0].layers[0].net[0].weight
    sizes = [torch.autograd.grad(losses.sum(), stem)[0].norm() for losses in (balanced, plain)]
    assert sizes[0] < sizes[1]


def test_stage_two_distils_from_the_teacher_of_the_same_pass(stage_one: MSDNet, large_digits: dict[str, ImageData]) -> None:
    torch.manual_seed(0)
    network = IMTA.on(stage_one, hold_statistics=True).train()
    images, labels = large_digits["train"].images[:8].float() / 255, large_digits["train"].labels[:8]
    losses = one_for_all(weight=0.4, temperature=3.0)(network, images, labels)
    teacher = stage_one.eval()(images)[-1]
    torch.testing.assert_close(losses, distillation(network(images), labels, teacher, weight=0.4, temperature=3.0))
    losses.sum().backward()
    assert all(parameter.grad is None for parameter in network.backbone.parameters())


def test_other_networks_are_refused(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    for objective, needed in (("equilibrium", "MSDNet"), ("one-for-all", "IMTA")):
        with pytest.raises(OptionError, match=needed):
            fit(tiny.Tiny(), digits["train"], TrainConfig(objective=objective))  # type: ignore[arg-type]

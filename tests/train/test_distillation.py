from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch

from anytime.data import ImageData
from anytime.errors import OptionError
from anytime.train import (
    Distillation,
    ExitEvaluation,
    TrainConfig,
    distil_from_exit,
    distillation,
    fit,
    joint_cross_entropy,
    phases,
)

LOGITS = torch.tensor([[[0.0, 0.0]], [[2.0, 0.0]], [[0.0, 1.0]]], dtype=torch.float64)
LABELS = torch.tensor([0])
TEACHER = torch.tensor([[math.log(3.0), 0.0]], dtype=torch.float64)  # probabilities ¾ and ¼


def test_the_divergence_by_hand() -> None:
    losses = distillation(LOGITS, LABELS, TEACHER, weight=0.1)
    divergence = (0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)) / 2  # a mean over two classes
    assert losses[0].item() == pytest.approx(0.9 * math.log(2) + 0.1 * divergence)
    assert losses[2].item() == pytest.approx(math.log(1 + math.e))  # the last exit learns from the label alone


def test_temperature_divides_both_and_its_square_multiplies_the_divergence() -> None:
    losses = distillation(LOGITS, LABELS, 2 * TEACHER, weight=1.0, temperature=2.0)
    student = 1 / (1 + math.exp(-1.0))
    divergence = (0.75 * math.log(0.75 / student) + 0.25 * math.log(0.25 / (1 - student))) / 2
    assert losses[1].item() == pytest.approx(4 * divergence)


def test_a_student_equal_to_its_teacher_has_no_divergence() -> None:
    logits = LOGITS[1:2].repeat(2, 1, 1)
    losses = distillation(logits, LABELS, logits[1], weight=0.25)
    torch.testing.assert_close(losses[0], 0.75 * joint_cross_entropy(logits, LABELS)[0])


def test_no_gradient_goes_to_the_teacher() -> None:
    logits, teacher = LOGITS.clone().requires_grad_(), TEACHER.clone().requires_grad_()
    distillation(logits, LABELS, teacher, weight=1.0).sum().backward()
    assert teacher.grad is None
    assert logits.grad is not None


@pytest.mark.parametrize("teacher", [0, 1, -1])
def test_any_exit_can_teach_and_learns_from_the_labels_alone(
    digits: dict[str, ImageData], tiny: ModuleType, teacher: int
) -> None:
    torch.manual_seed(0)
    network = tiny.Tiny()
    images, labels = digits["train"].images[:16].float() / 255, digits["train"].labels[:16]
    losses = distil_from_exit(teacher, weight=1.0)(network, images, labels)
    plain = joint_cross_entropy(network(images), labels)
    torch.testing.assert_close(losses[teacher], plain[teacher])
    for exit in {0, 1, 2} - {teacher % 3}:
        (back,) = torch.autograd.grad(losses[exit], network.heads[teacher][3].weight, retain_graph=True)
        assert not back.any()


def test_every_exit_learns_the_digits_from_the_last(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    torch.manual_seed(0)
    model = tiny.Tiny()
    settings = Distillation(weight=0.5, temperature=2.0)
    config = TrainConfig(epochs=6, schedule="cosine", augment=False, objective="distillation", distillation=settings)
    assert fit(model, digits["train"], config).finished
    assert min(ExitEvaluation(model, digits["test"]).accuracy()) > 0.9  # chance is 0.1


def test_settings_survive_json_and_wrong_ones_are_refused() -> None:
    config = TrainConfig(objective="distillation", distillation=Distillation(teacher=1, weight=0.3), frozen=("stages",))
    assert TrainConfig.from_json(config.to_json()) == config
    with pytest.raises(OptionError, match="teacher is 4"):
        phases(TrainConfig(distillation=Distillation(teacher=4)), exits=3, steps_per_epoch=1)
    with pytest.raises(OptionError, match="weight"):
        Distillation(weight=1.5)
    with pytest.raises(OptionError, match="heat"):
        TrainConfig.from_json({"distillation": {"heat": 1.0}})
    with pytest.raises(OptionError, match="distillation"):
        TrainConfig(distillation={"weight": 0.1})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="exit_weights"):
        phases(TrainConfig(objective="distillation", exit_weights=(1.0, 1.0)), exits=2, steps_per_epoch=1)

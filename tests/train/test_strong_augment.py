"""Strong augmentation and probabilities as labels in a training step."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from anytime.artifacts import read_bundle, write_bundle
from anytime.data import ImageData
from anytime.train import (
    FitOptions,
    Hardware,
    StrongAugment,
    TrainConfig,
    fit,
    joint_cross_entropy,
    on_logits,
    product_likelihood,
)
from anytime.train.data.rows import RowsStep
from anytime.train.objectives.losses import smooth_labels

OBJECTIVE = on_logits(joint_cross_entropy)
ALL = StrongAugment(operations=2, erasing=0.5, mixup=0.8, cutmix=1.0)


def step_on(digits: dict[str, ImageData], tiny: ModuleType, **settings: object) -> RowsStep:
    return RowsStep(tiny.Tiny(), digits["train"], OBJECTIVE, TrainConfig(augment=False, **settings), Hardware())  # type: ignore[arg-type]


def batch_of(step: RowsStep, epoch: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    step.begin(epoch)
    step(index, 0.0)
    return step.batch()


def test_the_loss_of_probabilities_is_the_cross_entropy_of_torch() -> None:
    logits, labels = torch.randn(3, 8, 5, dtype=torch.float64), torch.randn(8, 5).softmax(-1).double()
    expected = torch.stack([F.cross_entropy(exit, labels) for exit in logits])
    torch.testing.assert_close(joint_cross_entropy(logits, labels), expected)
    smooth = smooth_labels(labels.argmax(-1), 5, smoothing=0.1)
    expected = torch.stack([F.cross_entropy(exit, labels.argmax(-1), label_smoothing=0.1) for exit in logits])
    torch.testing.assert_close(joint_cross_entropy(logits, smooth), expected)


@pytest.mark.parametrize("loss", [joint_cross_entropy, product_likelihood])
def test_certain_probabilities_are_labels(loss: object) -> None:
    logits, labels = torch.randn(3, 8, 5), torch.randint(0, 5, (8,))
    torch.testing.assert_close(loss(logits, smooth_labels(labels, 5)), loss(logits, labels))  # type: ignore[operator]


def test_a_batch_depends_on_seed_epoch_and_index_alone(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    step = step_on(digits, tiny, strong_augment=ALL, label_smoothing=0.1)
    images, labels = batch_of(step, 2, 3)
    batch_of(step, 0, 1)
    for again in (batch_of(step, 2, 3), batch_of(step_on(digits, tiny, strong_augment=ALL, label_smoothing=0.1), 2, 3)):
        assert torch.equal(again[0], images)
        assert torch.equal(again[1], labels)
    other = batch_of(step_on(digits, tiny, strong_augment=ALL, label_smoothing=0.1, seed=1), 2, 3)
    assert not torch.equal(other[0], images)
    assert images.shape == (64, 1, 8, 8)
    torch.testing.assert_close(labels.sum(1), torch.ones(64))


@pytest.mark.parametrize(
    "settings", [StrongAugment(operations=2), StrongAugment(erasing=1.0), StrongAugment(mixup=1.0), StrongAugment(cutmix=1.0)]
)
def test_each_setting_changes_images_and_only_mixing_changes_labels(
    digits: dict[str, ImageData], tiny: ModuleType, settings: StrongAugment
) -> None:
    plain, labels = batch_of(step_on(digits, tiny), 0, 2)
    images, targets = batch_of(step_on(digits, tiny, strong_augment=settings), 0, 2)
    assert not torch.equal(images, plain)
    if settings.mixes:
        other = labels.view(-1, 2).flip(1).flatten()
        own = targets.gather(1, labels[:, None])[:, 0][labels != other]
        assert float(own.max() - own.min()) < 1e-6  # one weight for the batch
        assert bool((targets.gather(1, other[:, None])[:, 0] > 0).any())
    else:
        assert torch.equal(targets, labels)


@pytest.mark.parametrize("settings", [{}, {"strong_augment": StrongAugment(operations=0)}])
def test_without_settings_batches_are_as_before(
    digits: dict[str, ImageData], tiny: ModuleType, settings: dict[str, object]
) -> None:
    step = step_on(digits, tiny, **settings)
    assert step.strong is None
    images, labels = batch_of(step, 0, 0)
    mean, std = digits["train"].mean[0], digits["train"].std[0]
    torch.testing.assert_close(images, (digits["train"].images[step.rows] / 255 - mean) / std)
    assert torch.equal(labels, digits["train"].labels[step.rows])


def test_a_network_learns_from_augmented_digits(digits: dict[str, ImageData], tiny: ModuleType) -> None:
    torch.manual_seed(0)
    strong = StrongAugment(operations=1, magnitude=5, erasing=0.25, mixup=0.8, cutmix=1.0)
    config = TrainConfig(
        epochs=8, optimizer="adamw", lr=3e-3, schedule="cosine", augment=False, strong_augment=strong, label_smoothing=0.1,
        average_decay=0.98,
    )  # fmt: skip
    outcome = fit(tiny.Tiny(), digits["train"], config, val=digits["val"])
    last = outcome.history[-1].val_accuracy
    assert last is not None
    assert min(last) > 0.8


def test_a_checkpoint_from_before_a_setting_existed_is_continued(
    digits: dict[str, ImageData], tiny: ModuleType, tmp_path: Path
) -> None:
    def run(config: TrainConfig, **options: object) -> int:
        settings = FitOptions(folder=tmp_path, **options)  # type: ignore[arg-type]
        return fit(tiny.Tiny(), digits["train"], config, options=settings).step

    run(TrainConfig(epochs=1))
    folder = tmp_path / "checkpoint"
    files = read_bundle(folder)
    document = json.loads(files["state.json"])
    for name in ("strong_augment", "label_smoothing", "average_decay"):
        del document["config"][name]
    write_bundle(folder, {**files, "state.json": json.dumps(document).encode()}, kind="checkpoint")
    assert run(TrainConfig(epochs=1), resume=True) == 18
    with pytest.raises(Exception, match=r"label_smoothing was 0\.0 and is 0\.1"):
        run(TrainConfig(epochs=1, label_smoothing=0.1), resume=True)

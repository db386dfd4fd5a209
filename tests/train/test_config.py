from __future__ import annotations

import json
from typing import Any

import pytest

from anytime.errors import OptionError
from anytime.train import Hardware, StrongAugment, TrainConfig


def test_a_recipe_survives_json() -> None:
    config = TrainConfig(epochs=7, exit_weights=(1, 0.5), schedule="cosine", objective="product")
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    hardware = Hardware(channels_last=True)
    assert Hardware.from_json(json.loads(json.dumps(hardware.to_json()))) == hardware


@pytest.mark.parametrize(
    "values",
    [
        {"epochs": 0},
        {"epochs": 1.5},
        {"batch": True},
        {"lr": 0},
        {"lr": float("nan")},
        {"momentum": 1.5},
        {"weight_decay": -1e-4},
        {"warmup": 301},
        {"schedule": "slow"},
        {"objective": "sum"},
        {"exit_weights": (1.0, -1.0)},
        {"exit_weights": 1.0},
        {"milestones": 0.5},
        {"milestones": None},
        {"frozen": 5},
        {"frozen": None},
        {"seed": -1},
        {"seed": 2**64},
        {"nesterov": "yes"},
        {"label_smoothing": 1},
        {"label_smoothing": -0.1},
        {"average_decay": 1.0},
        {"average_decay": True},
        {"strong_augment": 2},
    ],
)
def test_values_outside_their_range_are_refused(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(OptionError, match=name):
        TrainConfig(**values)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(OptionError, match="learning_rate"):
        TrainConfig.from_json({"learning_rate": 0.1})


def test_a_graph_needs_a_gpu() -> None:
    with pytest.raises(OptionError, match="graph"):
        Hardware(device="cpu", graph=True)
    assert Hardware.best("cuda:0").graph
    assert not Hardware.best("cpu").graph


@pytest.mark.parametrize(
    "values",
    [
        {"distillation": {"weight": 2}},
        {"distillation": {1: 2}},
        {"l2w": {"meta": 1}},
        {"strong_augment": {"operations": 0.5}},
        {"strong_augment": {"magnitude": 11}},
        {"strong_augment": {"erasing": 1.5}},
        {"strong_augment": {"mixup": -1}},
        {"strong_augment": {"cutmix": "1"}},
    ],
)
def test_an_error_within_a_setting_names_the_setting(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(OptionError, match=f"{name} has a wrong setting"):
        TrainConfig.from_json(values)


def test_settings_of_augmentation_survive_json() -> None:
    config = TrainConfig(strong_augment=StrongAugment(operations=2, mixup=0.8), label_smoothing=0.1, average_decay=0.999)
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_the_former_name_of_the_teachers_weight_is_read() -> None:
    assert TrainConfig.from_json({"distillation": {"share": 0.3}}).distillation.weight == 0.3

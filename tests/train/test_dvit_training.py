"""A DViT under the trainer: the command for CIFAR runs it, and it learns at every exit with AdamW."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from anytime.data import load_digits
from anytime.data.cifar_archive import ARCHIVES
from anytime.models.dvit import DViT, DViTConfig
from anytime.train import Evaluation, TrainConfig, fit
from anytime.train.cifar import main

SMALL = DViTConfig(
    classes=10,
    image_size=16,
    unfolds=(((7, 4, 2), (3, 2, 1)), ((5, 3, 1), (3, 2, 1)), ((3, 2, 1), (3, 2, 1))),
    width=32,
    depth=2,
    performer_width=16,
    random_features=8,
    reuse_hidden=16,
    drop_path=0.0,
    performer_dropout=0.0,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """CIFAR-100 in its unpacked official form, of a few random images."""
    archive, random = ARCHIVES["cifar100"], np.random.default_rng(0)
    (tmp_path / archive.folder).mkdir()
    labels = np.repeat(np.arange(16)[:, None], 2, axis=1)
    for file in (*archive.train, *archive.test):
        records = np.hstack((labels, random.integers(0, 256, (len(labels), 3072))))
        (tmp_path / archive.folder / file).write_bytes(records.astype(np.uint8).tobytes())
    (tmp_path / archive.folder / archive.names).write_text("\n".join(map(str, range(100))))
    return tmp_path


def test_the_command_for_cifar_trains_one(root: Path) -> None:
    out = root / "run"
    data = ["--root", str(root), "--out", str(out), "--device", "cpu", "--held-out", "4"]
    recipe = ["--model", "dvit-cifar", "--optimizer", "adamw", "--lr", "1e-3", "--weight-decay", ".06"]
    assert main([*data, *recipe, "--epochs", "1", "--batch", "6"]) == 0
    assert json.loads((out / "config.json").read_text())["network"] == "DViT"
    assert len(json.loads((out / "summary.json").read_text())["test_accuracy"]) == 3


def test_every_exit_learns_the_digits() -> None:
    sets = {
        name: replace(data, images=data.images.repeat_interleave(2, -1).repeat_interleave(2, -2))
        for name, data in load_digits(channels=3).items()
    }
    torch.manual_seed(0)
    model = DViT(SMALL)
    recipe = TrainConfig(
        epochs=6, batch=16, lr=5e-3, optimizer="adamw", weight_decay=0.03, schedule="cosine", warmup=1, augment=False
    )
    assert fit(model, sets["train"].take(torch.arange(400)), recipe).finished
    assert min(Evaluation(model, sets["test"]).accuracy()) > 0.4  # chance is 0.1

"""A DViT learns at every exit with AdamW."""

from __future__ import annotations

import torch

from anytime.data import load_digits
from anytime.models.dvit import DViT, DViTConfig
from anytime.train import ExitEvaluation, TrainConfig, fit
from anytime.train.data.named import doubled

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


def test_every_exit_learns_the_digits() -> None:
    sets = {name: doubled(data) for name, data in load_digits(channels=3).items()}
    torch.manual_seed(0)
    model = DViT(SMALL)
    recipe = TrainConfig(
        epochs=6, batch=16, lr=5e-3, optimizer="adamw", weight_decay=0.03, schedule="cosine", warmup=1, augment=False
    )
    assert fit(model, sets["train"].take(torch.arange(400)), recipe).finished
    assert min(ExitEvaluation(model, sets["test"]).accuracy()) > 0.4  # chance is 0.1

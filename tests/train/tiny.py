"""A small network with exits on the digits, and a run that kills itself: `python tiny.py FOLDER EPOCH|--resume`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from anytime.data import load_digits
from anytime.models.base import MultiExit
from anytime.train import EpochLog, FitOptions, StrongAugment, TrainConfig, fit

RECIPE = TrainConfig(
    epochs=6,
    batch=64,
    lr=0.1,
    schedule="cosine",
    warmup=1,
    objective="joint-then-product",
    strong_augment=StrongAugment(operations=2, erasing=0.25, mixup=0.8, cutmix=1.0),
    label_smoothing=0.1,
    average_decay=0.9,
    seed=1,
)


class Tiny(MultiExit):
    """Three stages of one convolution each; with dropout, a network that draws random numbers."""

    num_exits = 3

    def __init__(self, *, width: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.stages = nn.ModuleList(self._stage(before, width) for before in (1, width, width))
        self.heads = nn.ModuleList(
            nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(16 * width, 10)) for _ in range(3)
        )

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            yield head(x)

    @staticmethod
    def _stage(before: int, width: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


def train(folder: Path | None, *, resume: bool = False, killed_in: int = 0) -> MultiExit:
    """The run that is killed and resumed."""
    torch.manual_seed(0)
    model = Tiny(dropout=0.1)
    sets = load_digits()

    def say(line: EpochLog) -> None:
        print(line.epoch, flush=True)
        if line.epoch == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)  # nothing can be saved any more

    options = FitOptions(folder=folder, resume=resume, checkpoint_every=1, on_epoch=say)
    fit(model, sets["train"], RECIPE, val=sets["val"], options=options)
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, how = Path(sys.argv[1]), sys.argv[2]
    train(place, resume=how == "--resume", killed_in=0 if how == "--resume" else int(how))

"""Programs for test_distributed.py: steps on two ranks, errors on one of them, and a run that can be interrupted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from anytime.data import ImageData, load_digits
from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.process import run_program
from anytime.train.config import Hardware, StrongAugment, TrainConfig
from anytime.train.data.rows import RowsStep
from anytime.train.data.stream import StreamedStep
from anytime.train.distributed import Ranks, launch
from anytime.train.objectives.plan import phases
from anytime.train.stopping import Stopping

RECIPE = TrainConfig(
    epochs=2,
    batch=64,
    lr=0.1,
    nesterov=True,
    objective="joint-then-product",
    product_from=0.5,
    strong_augment=StrongAugment(operations=2, erasing=0.25, mixup=0.8, cutmix=1.0),
    label_smoothing=0.1,
    average_decay=0.5,
)
STEPS = 4


class Small(MultiExit):
    """Two exits with batch norms, of maps and of vectors, and a layer that no exit reads."""

    num_exits = 2

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Softplus())
        self.second = nn.Sequential(nn.Flatten(), nn.Linear(288, 16), nn.BatchNorm1d(16), nn.Softplus())
        self.heads = nn.ModuleList((nn.Linear(8, 10), nn.Linear(16, 10)))
        self.unused = nn.Linear(2, 2)

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        x = self.first(x)
        yield self.heads[0](x.mean((2, 3)))
        yield self.heads[1](self.second(x))


class Stream:
    """The digits as if they did not fit in memory; each epoch changes the first pixel."""

    shape = (1, 8, 8)

    def __init__(self, data: ImageData) -> None:
        self.data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.data, name)

    def __len__(self) -> int:
        return len(self.data)

    def to(self, device: str) -> Stream:
        return self

    def batches(self, index: Tensor, batch: int, *, draws: tuple[int, int] | None = None) -> Iterator[Tensor]:
        assert draws is not None
        for rows in index.split(batch):
            images = self.data.images[rows].clone()
            images[:, 0, 0, 0] += 50 * draws[1]
            yield images


def train(streamed: bool, ranks: Ranks | None = None) -> dict[str, Any]:
    """A few steps of each of the two objectives, with a restart from the stored state in between."""
    torch.manual_seed(0)
    data: Any = Stream(load_digits()["train"]) if streamed else load_digits()["train"]
    plan = phases(RECIPE, exits=2, steps_per_epoch=len(data) // RECIPE.batch)
    kind: Any = StreamedStep if streamed else RowsStep
    training: RowsStep = kind(Small(), data, plan[0].objective, RECIPE, Hardware(), ranks)
    losses = []
    for epoch, phase in enumerate(plan):
        if epoch:
            training.publish(STEPS)
            state = {name: values.clone() for name, values in training.optimizer_state().items()}
            training.adopt(state, training.mean_losses())
            training.minimise(phase.objective)
        training.begin(epoch)
        for index in range(STEPS):
            training(index, 0.1)
            losses.append(training.take_losses().tolist())
    training.publish(2 * STEPS)
    return {"losses": losses, "state": {name: values.tolist() for name, values in training.model.state_dict().items()}}


def train_both(ranks: Ranks) -> list[dict[str, Any]]:
    return [train(False, ranks), train(True, ranks)]


def fail(rank: int, ranks: Ranks) -> None:
    if ranks.rank == rank:
        raise OptionError(f"rank {rank} cannot train", expected="a rank that can", fix="repair it")
    ranks.mean(torch.zeros(1))


def wait_for_signal(ranks: Ranks) -> str:
    """Take steps until a stop is requested, as the training loop does."""
    with Stopping(agree=ranks.maximum) as stopping:
        if ranks.rank == 0:
            print("training", flush=True)
        while not stopping.requested():
            ranks.mean(torch.zeros(1))
    return stopping.reason


def main() -> int:
    torch.set_num_threads(1)
    what, *rest = sys.argv[1:]
    if what == "train":
        print("RESULT" + json.dumps(launch(2, train_both)), flush=True)
    elif what == "fail":
        launch(2, fail, int(rest[0]))
    else:
        print(launch(2, wait_for_signal), flush=True)
        return 130
    return 0


if __name__ == "__main__":
    run_program(main)

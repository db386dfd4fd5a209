"""Losses, gradients' effect and statistics of a few steps, by one process or by two; run as a program by test_parallel.py."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from typing import Any

import torch
from lightning_fabric.plugins.environments import lightning as environment
from torch import Tensor, nn

from anytime.data import ImageData, load_digits
from anytime.errors import AnytimeError, OptionError
from anytime.models.base import MultiExit
from anytime.train.config import Hardware, TrainConfig
from anytime.train.data.stream import StreamedStep
from anytime.train.objectives.plan import phases
from anytime.train.parallel import StreamedTeamStep, Team, TeamStep, launch
from anytime.train.step import TrainStep

RECIPE = TrainConfig(epochs=2, batch=64, lr=0.1, nesterov=True, objective="joint-then-product", product_from=0.5)
STEPS = 4


class Small(MultiExit):
    """Two exits with batch norms, of maps and of vectors."""

    num_exits = 2

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Softplus())
        self.second = nn.Sequential(nn.Flatten(), nn.Linear(288, 16), nn.BatchNorm1d(16), nn.Softplus())
        self.heads = nn.ModuleList((nn.Linear(8, 10), nn.Linear(16, 10)))

    def exits(self, x: Tensor) -> Iterator[Tensor]:
        x = self.first(x)
        yield self.heads[0](x.mean((2, 3)))
        yield self.heads[1](self.second(x))


class Stream:
    """The digits as if they were too large to hold; what is drawn for an image is added to its first pixel."""

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
        for piece in index.split(batch):
            images = self.data.images[piece].clone()
            images[:, 0, 0, 0] += 50 * draws[1]
            yield images


def both(team: Team) -> None:
    """With images at hand, and from a stream; printed, as a result must be small."""
    found = [work(team), work(team, streamed=True)]
    if team.rank == 0:
        print("RESULT" + json.dumps(found), flush=True)


def work(team: Team | None = None, *, streamed: bool = False) -> dict[str, Any] | None:
    """A few steps in each of the two phases, with a stop and a going on in between."""
    torch.manual_seed(0 if team is None or team.rank == 0 else 99)  # the leader's weights count
    data: Any = Stream(load_digits()["train"]) if streamed else load_digits()["train"]
    plan = phases(RECIPE, exits=2, steps_per_epoch=len(data) // RECIPE.batch)
    first = (Small(), data, plan[0].objective, RECIPE, Hardware())
    alone, shared = (StreamedStep, StreamedTeamStep) if streamed else (TrainStep, TeamStep)
    training: TrainStep = alone(*first) if team is None else shared(*first, team)
    if isinstance(training, TeamStep) and team is not None and team.rank:
        training.follow(plan)
        return None
    losses = []
    for epoch, phase in enumerate(plan):
        if epoch:
            training.publish(STEPS)
            training.adopt({name: values.clone() for name, values in training.optimizer.state().items()}, training.losses)
            training.minimise(phase.objective)
        training.begin(epoch)
        for index in range(STEPS):
            training(index, 0.1)
            losses.append(training.take_losses().tolist())
    training.publish(2 * STEPS)
    if isinstance(training, TeamStep):
        training.end()
    return {"losses": losses, "state": {name: values.tolist() for name, values in training.model.state_dict().items()}}


def fail(team: Team) -> None:
    raise OptionError("the leader has a bad day", expected="a good one", fix="sleep")


def fail_in_the_second(team: Team) -> None:
    if team.rank:
        raise OptionError("the second has a bad day", expected="a good one", fix="sleep")
    team.mean_(torch.zeros(1))


def nothing(team: Team) -> None:
    pass


def launch_at_a_busy_port() -> None:
    """Have the first port that is chosen taken by this process."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        choices = [taken.getsockname()[1]]
        find = environment.find_free_network_port
        tried = []

        def choose() -> int:
            tried.append(choices.pop() if choices else find())
            return tried[-1]

        environment.find_free_network_port = choose
        launch(2, nothing)
    print(f"ports tried: {len(tried)}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--busy" in sys.argv:
        launch_at_a_busy_port()
    elif "--fail" in sys.argv:
        try:
            launch(2, fail_in_the_second if "--second" in sys.argv else fail)
        except AnytimeError as error:
            print(error)
    else:
        launch(2, both)

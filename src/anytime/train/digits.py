"""A small MSDNet on handwritten digits: the training behind `anytime demo`, in seconds on a CPU.

It is trained on few of scikit-learn's 1,797 images, so that it makes enough errors on the others to show something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anytime.checks import check_count, check_seed
from anytime.data.digits import doubled, load_digits
from anytime.models import MSDNet, MSDNetConfig, measure_cost
from anytime.train.config import TrainConfig
from anytime.train.data.logits import ExitEvaluation
from anytime.train.log import EpochLog
from anytime.train.loop import fit
from anytime.train.options import FitOptions

NETWORK = MSDNetConfig(
    classes=10,
    exits=6,
    base=2,
    step=1,
    channels=8,
    growth=4,
    growth_factors=(1, 2),
    bottleneck_factors=(1, 2),
    image_size=16,
)


@dataclass(frozen=True, eq=False)
class DigitsRun:
    """A trained network and its logits on the images it was not trained on.

    Attributes:
        model: The network.
        logits: `(exits, samples, 10)`.
        labels: `(samples,)`.
        costs: MACs up to each exit.
        trained_on: Number of training images.
    """

    model: MSDNet
    logits: Tensor
    labels: Tensor
    costs: tuple[int, ...]
    trained_on: int


def train_digits(
    *, rows: int = 200, epochs: int = 25, seed: int = 0, on_epoch: Callable[[EpochLog], None] = lambda line: None
) -> DigitsRun:
    """Train the network on `rows` images and run it on all others.

    Args:
        rows: Training images; at least one batch of 32, and at least 100 others are left to test on.
        epochs: Passes over them.
        seed: Seed of the split, the initial weights and the order of the images.
        on_epoch: Called after each epoch.
    """
    parts = [doubled(part) for part in load_digits(channels=3, seed=seed).values()]
    joined: Any = {name: torch.cat([getattr(part, name) for part in parts]) for name in ("images", "labels", "rows")}
    everything = replace(parts[0], split="all", **joined)
    check_count(rows, "rows", low=32, most=len(everything) - 100)
    train, test = everything.take(torch.arange(rows)), everything.take(torch.arange(rows, len(everything)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(check_seed(seed))
        model = MSDNet(NETWORK)
    recipe = TrainConfig(epochs=epochs, batch=32, lr=0.1, schedule="cosine", augment=False, seed=seed)
    fit(model, train, recipe, options=FitOptions(on_epoch=on_epoch))
    costs = measure_cost(model, torch.zeros(1, 3, 16, 16)).macs
    return DigitsRun(model, ExitEvaluation(model, test).logits(), test.labels, tuple(costs), rows)

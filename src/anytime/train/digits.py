"""A small MSDNet on real handwritten digits: the training behind `anytime demo`, in seconds on a CPU.

It learns from few of scikit-learn's 1,797 images, so that it errs often enough on the others to show something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anytime.checks import check_seed
from anytime.data import ImageData, load_digits
from anytime.errors import OptionError
from anytime.models import MSDNet, MSDNetConfig, measure_cost
from anytime.train.config import TrainConfig
from anytime.train.data.logits import Evaluation
from anytime.train.log import EpochLog
from anytime.train.loop import FitOptions, fit

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


@dataclass(frozen=True)
class DigitsRun:
    """What was trained, and what it says about images it has not seen.

    Attributes:
        model: The network.
        logits: `(exits, samples, 10)`.
        labels: `(samples,)`.
        costs: Multiplications and additions up to each exit.
        trained_on: How many images it learnt from.
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
        rows: How many images to learn from, at least 32.
        epochs: Passes over them.
        seed: Of the split, the network's start and the order of the images.
        on_epoch: Called after each epoch.
    """
    sets = load_digits(channels=3, seed=seed)
    whole = _join([_doubled(part) for part in sets.values()])
    if not 32 <= rows <= len(whole) - 100:
        raise OptionError(
            f"rows is {rows}", expected=f"between 32 and {len(whole) - 100}, to leave 100 to test on", fix="the default is 200"
        )
    train, test = whole.take(torch.arange(rows)), whole.take(torch.arange(rows, len(whole)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(check_seed(seed))
        model = MSDNet(NETWORK)
    recipe = TrainConfig(epochs=epochs, batch=32, lr=0.1, schedule="cosine", augment=False, seed=seed)
    fit(model, train, recipe, options=FitOptions(on_epoch=on_epoch))
    costs = measure_cost(model, torch.zeros(1, 3, 16, 16)).macs
    return DigitsRun(model, Evaluation(model, test).logits(), test.labels, tuple(costs), rows)


def _doubled(data: ImageData) -> ImageData:
    """Each pixel twice in both directions: 8 × 8 is too small for a network with two scales."""
    return replace(data, images=data.images.repeat_interleave(2, -1).repeat_interleave(2, -2))


def _join(parts: list[ImageData]) -> ImageData:
    return replace(
        parts[0],
        split="all",
        images=torch.cat([part.images for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
        rows=torch.cat([part.rows for part in parts]),
    )

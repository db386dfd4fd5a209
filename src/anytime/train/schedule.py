"""Learning rates as pure functions of the step."""

from __future__ import annotations

import math

from anytime.train.config import TrainConfig


def learning_rate(step: int, *, steps_per_epoch: int, config: TrainConfig) -> float:
    """The rate of `step`, counted from 0 over all epochs.

    The `step` schedule changes with the epoch, the others and the warm-up with every step.

    >>> config = TrainConfig(epochs=4, lr=1.0)
    >>> [round(learning_rate(step, steps_per_epoch=1, config=config), 3) for step in range(4)]
    [1.0, 1.0, 0.1, 0.01]
    """
    epoch = step // steps_per_epoch
    warmup = round(config.warmup * steps_per_epoch)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    if config.schedule == "step":
        return config.lr * 0.1 ** sum(epoch >= share * config.epochs for share in config.milestones)
    rest = config.epochs * steps_per_epoch - warmup
    if config.schedule == "linear":
        return config.lr * (1 - (step - warmup) / rest)
    return 0.5 * config.lr * (1 + math.cos(math.pi * (step - warmup) / rest))

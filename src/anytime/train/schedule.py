"""Learning rates, and the exit weights of shallow-deep networks (SDN), as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from anytime.train.config import TrainConfig

_SDN_FIRST, _SDN_INNER = 0.01, 0.9


def learning_rate(step: int, *, steps_per_epoch: int, config: TrainConfig) -> float:
    """The learning rate of `step`, counted from 0 over all epochs.

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
        return config.lr * 0.1 ** sum(epoch >= milestone * config.epochs for milestone in config.milestones)
    rest = config.epochs * steps_per_epoch - warmup
    if config.schedule == "linear":
        return config.lr * (1 - (step - warmup) / rest)
    return 0.5 * config.lr * (1 + math.cos(math.pi * (step - warmup) / rest))


def default_sdn_weights(exits: int) -> tuple[float, ...]:
    """The final SDN weights of exits placed evenly up to 90 % of the network; the last exit has weight 1.

    >>> [round(weight, 2) for weight in default_sdn_weights(7)]
    [0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0]
    """
    return (*(_SDN_INNER * exit / (exits - 1) for exit in range(1, exits)), 1.0)


def sdn_weights(epoch: int, *, epochs: int, final: Sequence[float]) -> tuple[float, ...]:
    """The weight of each exit in an epoch, counted from 0 (Kaya et al. 2019): linear up to `final`; the last is constant.

    >>> sdn_weights(50, epochs=100, final=(0.3, 0.9, 1.0))
    (0.16, 0.46, 1.0)
    """
    *inner, last = final
    return (*(min(weight, _SDN_FIRST + epoch * weight / epochs) for weight in inner), last)

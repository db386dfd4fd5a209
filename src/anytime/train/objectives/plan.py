"""Which objective a recipe minimises, from which step on."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from anytime.combine import Product, Rule, Softplus
from anytime.errors import OptionError
from anytime.train.config import TrainConfig
from anytime.train.objectives.losses import (
    Objective,
    distil_from_exit,
    equilibrium,
    joint_cross_entropy,
    on_logits,
    one_for_all,
    product_likelihood,
)


class Phase(NamedTuple):
    """An objective and the step from which on it is minimised."""

    start: int
    name: str
    objective: Objective


def phases(config: TrainConfig, *, exits: int, steps_per_epoch: int) -> tuple[Phase, ...]:
    """The objectives of a recipe in their order."""
    _check_exits(config, exits)
    starts = {config.objective: 0}
    if config.objective == "joint-then-product":
        change = round(config.product_from * config.epochs) * steps_per_epoch
        starts = {"joint": 0, "product": change} if change else {"product": 0}
    return tuple(Phase(start, name, _objective(name, config)) for name, start in starts.items())


def learnt_rule(config: TrainConfig) -> Rule[Any] | None:
    """The rule to validate with: the product for objectives that train it, else None, each exit by itself."""
    return Product(Softplus(), weights="ones") if config.objective in ("product", "joint-then-product") else None


def _objective(name: str, config: TrainConfig) -> Objective:
    weights = config.exit_weights
    teacher, weight, temperature = config.distillation.teacher, config.distillation.weight, config.distillation.temperature
    plain = on_logits(joint_cross_entropy)
    objectives: dict[str, Objective] = {
        "joint": on_logits(partial(joint_cross_entropy, weights=weights)),
        "product": on_logits(partial(product_likelihood, weights=weights)),
        "sdn": plain,  # `TrainStep` multiplies by the weights, which change with the epoch
        "l2w": plain,  # `L2WStep` has its own losses
        "distillation": distil_from_exit(teacher if teacher < 0 else teacher - 1, weight=weight, temperature=temperature),
        "equilibrium": equilibrium,
        "one-for-all": one_for_all(weight=weight, temperature=temperature),
    }
    return objectives[name]


def _check_exits(config: TrainConfig, exits: int) -> None:
    weights, teacher = config.exit_weights, config.distillation.teacher
    if config.objective == "l2w" and config.head_rate != 1:
        raise OptionError(
            f"head_rate is {config.head_rate:g} with objective 'l2w'",
            expected="1: the look-ahead step of L2W has one learning rate",
            fix="set head_rate=1",
        )
    if weights is not None and config.objective not in ("joint", "product", "joint-then-product", "sdn"):
        raise OptionError(
            f"exit_weights is set with objective {config.objective!r}",
            expected="None, as this objective has weights of its own",
            fix="set exit_weights=null",
        )
    if weights is not None and len(weights) != exits:
        raise OptionError(
            f"exit_weights has {len(weights)} numbers, and the network {exits} exits",
            expected=f"{exits} numbers",
            fix="give one weight per exit",
        )
    if not -exits <= teacher <= exits or teacher == 0:
        raise OptionError(
            f"teacher is {teacher}, and the network has {exits} exits",
            expected=f"from 1 to {exits}, or from -{exits} to -1 to count from the last exit",
            fix="set teacher=-1 for the last exit",
        )

"""Which objective a recipe minimises when."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from anytime.combine import Product, Rule, Softplus
from anytime.errors import OptionError
from anytime.train.config import TrainConfig
from anytime.train.objectives.imta import equilibrium, one_for_all
from anytime.train.objectives.losses import Objective, distil_from_exit, joint_cross_entropy, on_logits, product_likelihood


class Phase(NamedTuple):
    """From which step on an objective is minimised."""

    start: int
    name: str
    objective: Objective


def phases(config: TrainConfig, *, exits: int, steps_per_epoch: int) -> tuple[Phase, ...]:
    """Which objective is minimised from which step on."""
    _check_exits(config, exits)
    starts = {config.objective: 0}
    if config.objective == "joint-then-product":
        change = round(config.product_from * config.epochs) * steps_per_epoch
        starts = {"joint": 0, "product": change} if change else {"product": 0}
    return tuple(Phase(start, name, _objective(name, config)) for name, start in starts.items())


def learnt_rule(config: TrainConfig) -> Rule[Any] | None:
    """The rule by which a network trained so is to be judged: the product where it learns one, else each exit by itself."""
    return Product(Softplus(), weights="ones") if config.objective in ("product", "joint-then-product") else None


def _objective(name: str, config: TrainConfig) -> Objective:
    weights, taught = config.exit_weights, config.distillation
    plain = on_logits(joint_cross_entropy)
    objectives: dict[str, Objective] = {
        "joint": on_logits(partial(joint_cross_entropy, weights=weights)),
        "product": on_logits(partial(product_likelihood, weights=weights)),
        # Their weights change between steps: the step sees to them.
        "sdn": plain,
        "l2w": plain,
        "distillation": distil_from_exit(taught.teacher, share=taught.share, temperature=taught.temperature),
        "equilibrium": equilibrium,
        "one-for-all": one_for_all(share=taught.share, temperature=taught.temperature),
    }
    return objectives[name]


def _check_exits(config: TrainConfig, exits: int) -> None:
    weights, teacher = config.exit_weights, config.distillation.teacher
    if config.objective == "l2w" and config.head_rate != 1:
        raise OptionError(
            f"head_rate is {config.head_rate:g} with the objective 'l2w'",
            expected="1, as its look-ahead has one rate for all",
            fix="leave head_rate out",
        )
    if weights is not None and config.objective not in ("joint", "product", "joint-then-product", "sdn"):
        raise OptionError(
            f"exit_weights came with the objective {config.objective!r}",
            expected="none, as it has weights of its own",
            fix="leave exit_weights out",
        )
    if weights is not None and len(weights) != exits:
        raise OptionError(
            f"{len(weights)} exit_weights came with {exits} exits", expected=f"{exits}", fix="give one weight an exit"
        )
    if not -exits <= teacher < exits:
        raise OptionError(
            f"teacher is {teacher} with {exits} exits", expected=f"from {-exits} to {exits - 1}", fix="-1 is the last exit"
        )

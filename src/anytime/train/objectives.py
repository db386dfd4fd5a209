"""What training minimises: small functions from the logits of all exits and the labels to losses.

A `Loss` takes `(exits, batch, classes)` logits and `(batch,)` labels and gives the loss of each exit, `(exits,)`, in
at least float32. An `Objective` takes the network itself, for recipes that need more of it than the logits; the trainer
minimises the sum of what it gives. Nothing in them reads a value back to the host, so that they can be captured in a
CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from anytime.combine import Softplus
from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.train.config import TrainConfig

Loss = Callable[[Tensor, Tensor], Tensor]
Objective = Callable[[MultiExit, Tensor, Tensor], Tensor]


class Phase(NamedTuple):
    """From which step on an objective is minimised."""

    start: int
    name: str
    objective: Objective


def on_logits(loss: Loss) -> Objective:
    """The objective that applies `loss` to the logits of all exits."""

    def objective(network: MultiExit, images: Tensor, labels: Tensor) -> Tensor:
        return loss(torch.stack(tuple(network.exits(images))), labels)

    return objective


def joint_cross_entropy(logits: Tensor, labels: Tensor, *, weights: Sequence[float] | None = None) -> Tensor:
    """The cross-entropy of every exit times its weight, `(exits,)`: the terms of Eq. 1.

    >>> joint_cross_entropy(torch.zeros(2, 3, 4), torch.tensor([0, 1, 2]), weights=(1.0, 2.0)).tolist()
    [1.3862943649291992, 2.7725887298583984]
    """
    return _mean_loss(_at_least_float32(logits).log_softmax(-1), labels, weights)


def product_likelihood(logits: Tensor, labels: Tensor, *, weights: Sequence[float] | None = None) -> Tensor:
    """The negative log-likelihood under Product Anytime at every exit, `(exits,)`, times its weight.

    The product takes the softplus and weights of one, the paper's choice for training, where every class keeps some
    probability and hence a gradient.

    Args:
        logits: `(exits, batch, classes)`.
        labels: `(batch,)`.
        weights: Of the exits' losses in the sum, all ones by default; not the exponents of the product.
    """
    # What `Product(Softplus(), weights="ones")` gives, less its look for collapsed rows: a softplus is never zero, and that
    # look waits for the device.
    evidence = Softplus().log_evidence(_at_least_float32(logits)).cumsum(0)
    return _mean_loss(evidence.log_softmax(-1), labels, weights)


def phases(config: TrainConfig, *, exits: int, steps_per_epoch: int) -> tuple[Phase, ...]:
    """Which objective is minimised from which step on."""
    weights = config.exit_weights
    if weights is not None and len(weights) != exits:
        raise OptionError(
            f"{len(weights)} exit_weights came with {exits} exits", expected=f"{exits}", fix="give one weight an exit"
        )
    joint = on_logits(partial(joint_cross_entropy, weights=weights))
    product = on_logits(partial(product_likelihood, weights=weights))
    change = round(config.product_from * config.epochs) * steps_per_epoch
    return {
        "joint": (Phase(0, "joint", joint),),
        "product": (Phase(0, "product", product),),
        "joint-then-product": (Phase(0, "joint", joint), Phase(change, "product", product)),
    }[config.objective]


def _mean_loss(log_probs: Tensor, labels: Tensor, weights: Sequence[float] | None) -> Tensor:
    exits, batch, classes = log_probs.shape
    flat = F.nll_loss(log_probs.reshape(-1, classes), labels.repeat(exits), reduction="none")
    losses = flat.view(exits, batch).mean(1)
    return losses if weights is None else torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)])


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()

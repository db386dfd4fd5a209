"""What training minimises: small functions from the logits of all exits and the labels to losses.

A `Loss` takes `(exits, batch, classes)` logits and `(batch,)` labels and gives the loss of each exit, `(exits,)`, in
at least float32. An `Objective` takes the network itself, for recipes that need more of it than the logits; the trainer
minimises the sum of what it gives. Nothing in them reads a value back to the host, so that they can be captured in a
CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from anytime.combine import Softplus
from anytime.models.base import MultiExit

Loss = Callable[[Tensor, Tensor], Tensor]
Objective = Callable[[MultiExit, Tensor, Tensor], Tensor]


def on_logits(loss: Loss) -> Objective:
    """The objective that applies `loss` to the logits of all exits."""

    def objective(network: MultiExit, images: Tensor, labels: Tensor) -> Tensor:
        return loss(torch.stack(tuple(network.exits(images))), labels)

    return objective


def joint_cross_entropy(logits: Tensor, labels: Tensor, *, weights: Sequence[float] | None = None) -> Tensor:
    """The cross-entropy of every exit times its weight, `(exits,)`: the terms of Eq. 1.

    >>> terms = joint_cross_entropy(torch.zeros(2, 3, 4), torch.tensor([0, 1, 2]), weights=(1.0, 2.0))
    >>> [round(term, 4) for term in terms.tolist()]  # log 4, and twice that
    [1.3863, 2.7726]
    """
    return _mean_loss(at_least_float32(logits).log_softmax(-1), labels, weights)


def product_likelihood(logits: Tensor, labels: Tensor, *, weights: Sequence[float] | None = None) -> Tensor:
    """The negative log-likelihood under Product Anytime at every exit, `(exits,)`, times its weight.

    The product takes the softplus and weights of one, the paper's choice for training, where every class keeps some
    probability and hence a gradient.

    Args:
        logits: `(exits, batch, classes)`.
        labels: `(batch,)`.
        weights: Of the exits' losses in the sum, all ones by default; not the exponents of the product.
    """
    # What `Product(Softplus(), weights="ones")` gives, less what it does for collapsed rows: a softplus is never zero, and a
    # second softmax in every step would be for nothing.
    evidence = Softplus().log_evidence(at_least_float32(logits)).cumsum(0)
    return _mean_loss(evidence.log_softmax(-1), labels, weights)


def distillation(
    logits: Tensor, labels: Tensor, teacher: Tensor, *, share: float = 0.1, temperature: float = 1.0, plain: int = -1
) -> Tensor:
    """The loss of every exit where all but one learn from a teacher too, `(exits,)`.

    A student's loss is `(1 - share) · cross-entropy + share · temperature² · divergence`. The Kullback-Leibler divergence of
    student from teacher is a mean over samples and classes, as IMTA has it: with K classes it weighs K times less than the
    usual mean over samples.

    Args:
        logits: `(exits, batch, classes)`.
        labels: `(batch,)`.
        teacher: Logits, `(batch, classes)`; no gradient goes to them.
        share: γ.
        temperature: T.
        plain: The exit that learns from the labels alone.
    """
    values = at_least_float32(logits)
    plain %= len(values)
    losses = joint_cross_entropy(values, labels)
    target = (at_least_float32(teacher.detach()) / temperature).log_softmax(-1)
    student = (values / temperature).log_softmax(-1)
    divergence = (target.exp() * (target - student)).mean((1, 2))
    shares = [0.0 if exit == plain else share for exit in range(len(values))]
    return torch.stack(
        [(1 - part) * loss + part * temperature**2 * gap for part, loss, gap in zip(shares, losses, divergence, strict=True)]
    )


def distil_from_exit(exit: int = -1, *, share: float = 0.1, temperature: float = 1.0) -> Objective:
    """The objective in which an exit learns from the labels, and all others from the labels and from it."""

    def objective(network: MultiExit, images: Tensor, labels: Tensor) -> Tensor:
        logits = torch.stack(tuple(network.exits(images)))
        return distillation(logits, labels, logits[exit], share=share, temperature=temperature, plain=exit)

    return objective


def _mean_loss(log_probs: Tensor, labels: Tensor, weights: Sequence[float] | None) -> Tensor:
    exits, batch, classes = log_probs.shape
    flat = F.nll_loss(log_probs.reshape(-1, classes), labels.repeat(exits), reduction="none")
    losses = flat.view(exits, batch).mean(1)
    return losses if weights is None else torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)])


def at_least_float32(logits: Tensor) -> Tensor:
    """The logits in an element type that a loss can be computed in."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()

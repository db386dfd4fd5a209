"""Training objectives: functions from the logits of all exits and the labels to the loss of each exit.

A `Loss` takes `(exits, batch, classes)` logits, or a list with those of each exit, and `(batch,)` labels or `(batch, classes)`
probabilities of the classes, and returns `(exits,)` losses in at least float32. An `Objective` takes the network itself, for
methods that need more than its logits; the trainer minimises the sum of its losses.
None of them reads a value back to the CPU, so that they can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from anytime.checks import as_tensor, check_label_shape, check_labels, check_logits_shape, check_number, stack_exits
from anytime.combine import Softplus
from anytime.errors import OptionError, ShapeError
from anytime.models.base import MultiExit
from anytime.models.imta import IMTA, balanced_exits
from anytime.models.msdnet import MSDNet

Loss = Callable[[Tensor, Tensor], Tensor]
ExitLogits = Tensor | Sequence[Tensor]
"""`(exits, batch, classes)`, or a list with `(batch, classes)` per exit."""
Objective = Callable[[MultiExit, Tensor, Tensor], Tensor]
_NO_LABEL = -(1 << 62)
"""For `nll_loss`, which by default skips the label -100 and counts its row as one without a loss."""


def on_logits(loss: Loss) -> Objective:
    """The objective that applies `loss` to the logits of all exits."""

    def objective(network: MultiExit, images: Tensor, labels: Tensor) -> Tensor:
        return loss(torch.stack(tuple(network.exits(images))), labels)

    return objective


def joint_cross_entropy(logits: ExitLogits, labels: Tensor, *, weights: Sequence[float] | None = None) -> Tensor:
    """The cross-entropy of each exit times its weight, `(exits,)`: the terms of Eq. 1.

    >>> terms = joint_cross_entropy(torch.zeros(2, 3, 4), torch.tensor([0, 1, 2]), weights=(1.0, 2.0))
    >>> [round(term, 4) for term in terms.tolist()]  # log 4, and twice that
    [1.3863, 2.7726]
    """
    return _mean_loss(at_least_float32(logits).log_softmax(-1), labels, weights)


def product_likelihood(logits: ExitLogits, labels: Tensor, *, weights: Sequence[float] | None = None) -> Tensor:
    """The negative log-likelihood under Product Anytime at each exit times its weight, `(exits,)`.

    The product uses the softplus and exponents of one, as the paper does for training: every class keeps some probability,
    hence a gradient. `weights` are those of the losses in the sum, not the exponents of the product.
    """
    # Equal to `Product(Softplus(), weights="ones")` without its handling of collapse, which a softplus rules out.
    evidence = Softplus().log_evidence(at_least_float32(logits)).cumsum(0)
    return _mean_loss(evidence.log_softmax(-1), labels, weights)


def distillation(
    logits: ExitLogits, labels: Tensor, teacher: Tensor, *, weight: float = 0.1, temperature: float = 1.0, plain: int = -1
) -> Tensor:
    """The loss of each exit where all but one also learn from a teacher, `(exits,)`.

    A student's loss is `(1 - weight) · cross-entropy + weight · temperature² · divergence`. The Kullback-Leibler divergence of
    student from teacher is a mean over samples and classes, as in IMTA: K times smaller than the usual mean over samples.

    Args:
        logits: `(exits, batch, classes)`, or a list with `(batch, classes)` per exit.
        labels: `(batch,)`, or probabilities, `(batch, classes)`.
        teacher: The teacher's logits, `(batch, classes)`; no gradient flows to them.
        weight: γ.
        temperature: T.
        plain: Index of the exit that learns from the labels alone.
    """
    check_number(weight, "weight", low=0, most=1)
    check_number(temperature, "temperature", above=0)
    values, target = at_least_float32(logits), as_tensor(teacher, "the teacher's logits").detach()
    if target.shape != values.shape[1:]:
        raise ShapeError(
            f"the teacher's logits have shape {tuple(target.shape)}",
            expected=f"{tuple(values.shape[1:])}, as those of an exit",
            fix="pass the teacher's logits of the same inputs, such as teacher=logits[-1]",
        )
    plain %= len(values)
    losses = joint_cross_entropy(values, labels)
    target = (target.to(values.dtype) / temperature).log_softmax(-1)
    student = (values / temperature).log_softmax(-1)
    divergence = (target.exp() * (target - student)).mean((1, 2))
    weights = [0.0 if exit == plain else weight for exit in range(len(values))]
    return torch.stack(
        [(1 - w) * loss + w * temperature**2 * gap for w, loss, gap in zip(weights, losses, divergence, strict=True)]
    )


def distil_from_exit(exit: int = -1, *, weight: float = 0.1, temperature: float = 1.0) -> Objective:
    """The objective in which the exit at index `exit` learns from the labels, and all others from the labels and from it."""

    def objective(network: MultiExit, images: Tensor, labels: Tensor) -> Tensor:
        logits = torch.stack(tuple(network.exits(images)))
        return distillation(logits, labels, logits[exit], weight=weight, temperature=temperature, plain=exit)

    return objective


def equilibrium(network: MultiExit, images: Tensor, labels: Tensor) -> Tensor:
    """IMTA's first stage (Li et al. 2019): the cross-entropy of each exit, `(exits,)`, with balanced gradients."""
    if not isinstance(network, MSDNet):
        raise OptionError(
            f"objective is 'equilibrium' with a {type(network).__name__}",
            expected="an MSDNet, whose structure says which maps an exit and the next stage both read",
            fix="set objective=joint",
        )
    return joint_cross_entropy(torch.stack(tuple(balanced_exits(network, images))), labels)


def one_for_all(*, weight: float = 0.1, temperature: float = 1.0) -> Objective:
    """IMTA's second stage: all exits but the last also learn from the last exit of the first stage."""

    def objective(network: MultiExit, images: Tensor, labels: Tensor) -> Tensor:
        if not isinstance(network, IMTA):
            raise OptionError(
                f"objective is 'one-for-all' with a {type(network).__name__}",
                expected="an IMTA network, which contains the teacher",
                fix="build one from a trained MSDNet with IMTA.on, or set objective=distillation",
            )
        logits, teacher = network.with_teacher(images)
        return distillation(logits, labels, teacher, weight=weight, temperature=temperature)

    return objective


def smooth_labels(labels: Tensor, classes: int, *, smoothing: float = 0.0) -> Tensor:
    """Labels as probabilities, `(batch, classes)`, of which `smoothing` is spread over all classes.

    >>> smooth_labels(torch.tensor([1]), 4, smoothing=0.2)
    tensor([[0.0500, 0.8500, 0.0500, 0.0500]])
    """
    chosen = labels[:, None] == torch.arange(classes, device=labels.device)  # `F.one_hot` may wait for the device
    return chosen * (1 - smoothing) + smoothing / classes


def at_least_float32(logits: ExitLogits) -> Tensor:
    """The logits as one tensor in float32, or in float64 if that is what they are."""
    logits = check_logits_shape(stack_exits(logits))
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _mean_loss(log_probs: Tensor, labels: Tensor, weights: Sequence[float] | None) -> Tensor:
    exits, batch, classes = log_probs.shape
    if weights is not None and len(weights) != exits:
        raise OptionError(
            f"{len(weights)} weights for the logits of {exits} exits",
            expected=f"{exits} weights",
            fix="give one weight per exit",
        )
    if getattr(labels, "shape", None) == (batch, classes) and labels.is_floating_point():
        losses = -(labels * log_probs).sum(-1).mean(1)
    else:
        labels = check_label_shape(labels, batch=batch)
        try:
            flat = F.nll_loss(log_probs.reshape(-1, classes), labels.repeat(exits), reduction="none", ignore_index=_NO_LABEL)
        except IndexError:  # on a CPU
            check_labels(labels, batch=batch, classes=classes)
            raise
        losses = flat.view(exits, batch).mean(1)
    return losses if weights is None else torch.stack([loss * weight for loss, weight in zip(losses, weights, strict=True)])

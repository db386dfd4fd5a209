"""Fitting the learned ensembles of Zero Time Waste on logits that were computed before.

Weights and biases of each exit are found by Adam on the cross-entropy of that exit's ensemble. All exits are fitted at once:
their numbers do not meet in the loss. The method fits on the training rows; rows that the network has not seen are
the safer choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from anytime.checks import check_count, check_labels, check_logits, check_number, check_seed
from anytime.combine import Rule, parse_rule
from anytime.combine.learned import Arithmetic, Geometric, Rows
from anytime.errors import LabelError
from anytime.fitted import Fitted

Combine = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Log-probabilities `(exits, rows, classes)` of each exit's ensemble from those of the exits, v `(exits, exits)` and b."""

_FLOOR = 1e-6


@dataclass(frozen=True)
class FittedRule(Fitted, kind="fitted rule"):
    """A rule with numbers in it that were fitted, as a file.

    Args:
        exits: How many exits it was fitted for.
        classes: How many classes, or None where it does not depend on them.
        text: The rule, as text.

    Example:
        >>> FittedRule.of(Geometric.plain(3), exits=3).rule == Geometric.plain(3)
        True
    """

    text: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule.start(self.exits)  # it refuses a number of exits that it was not fitted for

    @classmethod
    def of(cls, rule: Rule[Any], *, exits: int, classes: int | None = None) -> Self:
        """The file's content for a rule, such as those that `fit_geometric` and `fit_arithmetic` give."""
        return cls(exits, classes, repr(rule))

    @property
    def rule(self) -> Rule[Any]:
        """The rule."""
        return parse_rule(self.text)


def fit_geometric(
    logits: Any,
    labels: Any,
    *,
    epochs: int = 501,
    batch: int = 512,
    lr: float = 5e-4,
    biases: bool = True,
    seed: int = 0,
) -> Geometric:
    """Fit ZTW's geometric ensemble.

    Args:
        logits: `(exits, rows, classes)`.
        labels: `(rows,)`.
        epochs: Passes over the rows; 501 is the published number for small data sets, 10 for ImageNet.
        batch: Rows a step.
        lr: Adam's rate.
        biases: Whether each class has a bias at each exit.
        seed: Of the first weights and of the order of the rows.
    """
    return Geometric(*_fit(_geometric, logits, labels, epochs=epochs, batch=batch, lr=lr, biases=biases, seed=seed))


def fit_arithmetic(
    logits: Any,
    labels: Any,
    *,
    epochs: int = 501,
    batch: int = 512,
    lr: float = 5e-4,
    biases: bool = True,
    seed: int = 0,
) -> Arithmetic:
    """Fit ZTW's arithmetic ensemble; the arguments are those of `fit_geometric`."""
    return Arithmetic(*_fit(_arithmetic, logits, labels, epochs=epochs, batch=batch, lr=lr, biases=biases, seed=seed))


def _geometric(log_probs: Tensor, v: Tensor, b: Tensor) -> Tensor:
    exits = len(v)
    weights = v.exp().tril() / torch.arange(1, exits + 1, device=v.device)[:, None]
    total = (weights @ log_probs.flatten(1)).view_as(log_probs)
    return (total + b).log_softmax(-1)


def _arithmetic(log_probs: Tensor, v: Tensor, b: Tensor) -> Tensor:
    total = (v.exp().tril() @ log_probs.exp().flatten(1)).view_as(log_probs) + b.exp()
    return (total / total.sum(-1, keepdim=True) + _FLOOR).log()


def _fit(
    combine: Combine, logits: Any, labels: Any, *, epochs: int, batch: int, lr: float, biases: bool, seed: int
) -> tuple[Rows, Rows]:
    _check_options(epochs, batch, lr)
    rows = check_logits(logits)
    exits, count, classes = rows.shape
    wanted = check_labels(labels, batch=count, classes=classes, device=rows.device)
    if count == 0:
        raise LabelError("there are no rows", expected="rows to learn from", fix="give logits with labels")
    # -inf times a weight has no gradient; this is far below anything that matters.
    log_probs = rows.detach().float().log_softmax(-1).clamp(min=-1e4)
    generator = torch.Generator().manual_seed(check_seed(seed))
    v = (0.01 * torch.randn(exits, exits, generator=generator)).to(rows.device).requires_grad_()
    b = torch.zeros(exits, 1, classes, device=rows.device)
    if not biases:
        b.fill_(-torch.inf if combine is _arithmetic else 0.0)
    trained = [v, b.requires_grad_()] if biases else [v]
    optimizer = torch.optim.Adam(trained, lr=lr)
    # A caller that measures under no_grad may fit there too.
    with torch.enable_grad():
        for index in _batches(count, batch, epochs, generator):
            picked = index.to(rows.device)
            answers = combine(log_probs[:, picked], v, b)
            loss = F.nll_loss(answers.flatten(0, 1), wanted[picked].repeat(exits)) * exits
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    triangle = tuple(tuple(row[: exit + 1]) for exit, row in enumerate(v.detach().cpu().tolist()))
    return triangle, tuple(map(tuple, b.detach()[:, 0].cpu().tolist())) if biases else ()


def _batches(count: int, batch: int, epochs: int, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(epochs):
        yield from torch.split(torch.randperm(count, generator=generator), batch)


def _check_options(epochs: int, batch: int, lr: float) -> None:
    for name, value in (("epochs", epochs), ("batch", batch)):
        check_count(value, name)
    check_number(lr, "lr", above=0)

"""Fitting the learned ensembles of Zero Time Waste on precomputed logits.

Adam minimises the cross-entropy of each exit's ensemble over its weights and biases; all exits are fitted at once, since
they share no parameters. The original method fits on training rows; held-out rows are the safer choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anytime.checks import check_count, check_labelled, check_number, check_seed
from anytime.combine.learned import Arithmetic, Geometric, Rows
from anytime.threads import one_thread_for_few

Combine = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Log-probabilities `(exits, rows, classes)` of each exit's ensemble from those of the exits, v `(exits, exits)` and b."""

_FLOOR = 1e-6


@one_thread_for_few
def fit_geometric(
    logits: Any, labels: Any, *, epochs: int = 501, batch: int = 512, lr: float = 5e-4, biases: bool = True, seed: int = 0
) -> Geometric:
    """Fit the geometric ensemble of Zero Time Waste.

    Args:
        logits: `(exits, rows, classes)`.
        labels: `(rows,)`.
        epochs: Passes over the rows; the published number is 501 for small data sets and 10 for ImageNet.
        batch: Rows per step.
        lr: Learning rate of Adam.
        biases: Whether each class has a bias at each exit.
        seed: For the initial weights and the order of the rows.
    """
    return Geometric(*_fit(_geometric, logits, labels, epochs, batch, lr, biases, seed))


@one_thread_for_few
def fit_arithmetic(
    logits: Any, labels: Any, *, epochs: int = 501, batch: int = 512, lr: float = 5e-4, biases: bool = True, seed: int = 0
) -> Arithmetic:
    """Fit the arithmetic ensemble of Zero Time Waste; arguments as for `fit_geometric`."""
    return Arithmetic(*_fit(_arithmetic, logits, labels, epochs, batch, lr, biases, seed))


def _geometric(log_probs: Tensor, v: Tensor, b: Tensor) -> Tensor:
    exits = len(v)
    weights = v.exp().tril() / torch.arange(1, exits + 1, device=v.device)[:, None]
    total = (weights @ log_probs.flatten(1)).view_as(log_probs)
    return (total + b).log_softmax(-1)


def _arithmetic(log_probs: Tensor, v: Tensor, b: Tensor) -> Tensor:
    total = (v.exp().tril() @ log_probs.exp().flatten(1)).view_as(log_probs) + b.exp()
    return (total / total.sum(-1, keepdim=True) + _FLOOR).log()


def _fit(
    combine: Combine, logits: Any, labels: Any, epochs: int, batch: int, lr: float, biases: bool, seed: int
) -> tuple[Rows, Rows]:
    check_count(epochs, "epochs")
    check_count(batch, "batch")
    check_number(lr, "lr", above=0)
    rows, wanted = check_labelled(logits, labels)
    exits, count, classes = rows.shape
    # -inf times a weight has no gradient; the bound is far below any relevant log-probability.
    log_probs = rows.detach().float().log_softmax(-1).clamp(min=-1e4)
    generator = torch.Generator().manual_seed(check_seed(seed))
    v = (0.01 * torch.randn(exits, exits, generator=generator)).to(rows.device).requires_grad_()
    b = torch.zeros(exits, 1, classes, device=rows.device)
    if not biases:
        b.fill_(-torch.inf if combine is _arithmetic else 0.0)
    optimizer = torch.optim.Adam([v, b.requires_grad_()] if biases else [v], lr=lr)
    with torch.enable_grad():  # also if called under no_grad
        for _ in range(epochs):
            for index in torch.split(torch.randperm(count, generator=generator), batch):
                picked = index.to(rows.device)
                answers = combine(log_probs[:, picked], v, b)
                loss = F.nll_loss(answers.flatten(0, 1), wanted[picked].repeat(exits)) * exits
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    triangle = tuple(tuple(row[: exit + 1]) for exit, row in enumerate(v.detach().cpu().tolist()))
    return triangle, tuple(map(tuple, b.detach()[:, 0].cpu().tolist())) if biases else ()

"""Fitting the fitted product: the powers of p_m ∝ p_{m-1}^{a_m} · softmax(f_m)^{b_m}, two numbers an exit.

They minimise the mean NLL over exits and rows plus `penalty` times the mean over rows of the largest drop of the label's
probability. The first term alone asks for calibration, the second for steadiness; `docs/calibration.md` has what each costs.
With so few numbers the gradient over all rows is cheap, and L-BFGS reaches the optimum in some fifty looks at the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anytime.calibrate.temperature import fit_temperature
from anytime.checks import check_count, check_labels, check_logits, check_number
from anytime.combine.base import LARGEST, SMALLEST
from anytime.combine.powers import Powers, multiply
from anytime.fitted import Fitted
from anytime.metrics import drop

_BLOCK = 4096
_LOWEST = -1e4
_FIRST_PAST, _FIRST_NOW = 0.8, 0.2


@dataclass(frozen=True)
class PowersFit(Fitted, kind="fitted product"):
    """The powers found, and what they reach on the fitted rows.

    Args:
        exits: How many exits it was fitted for.
        classes: How many classes.
        past: a, one an exit; the first is 1 and not used.
        now: b, one an exit. An exit whose b is next to nothing is not listened to: the penalty was too high for it.
        penalty: λ.
        ignored: The part of every drop that went without a penalty.
        rows: How many rows it was fitted on.
        nll: Mean NLL over exits and rows.
        drop: Mean over the rows of the penalised drop.
        loss_before: The loss at the first powers, nll + λ · drop.
        looks: How many times the loss was computed over all rows.
    """

    past: tuple[float, ...]
    now: tuple[float, ...]
    penalty: float
    ignored: float
    rows: int
    nll: float
    drop: float
    loss_before: float
    looks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        # The rule checks the numbers, also those that come from a file.
        self.rule.start(self.exits)

    @property
    def rule(self) -> Powers:
        """The fitted product as a rule."""
        return Powers(self.past, self.now)

    @property
    def loss(self) -> float:
        """What was minimised, at these powers."""
        return self.nll + self.penalty * self.drop


def fit_powers(logits: Any, labels: Any, *, penalty: float = 3.0, ignored: float = 0.0, steps: int = 100) -> PowersFit:
    """Fit the powers of the fitted product on held-out rows. The same rows give the same powers.

    Args:
        logits: `(exits, rows, classes)`, of rows that the network was not trained on; a thousand rows are enough.
        labels: `(rows,)`.
        penalty: λ, what a mean drop of 1 costs in nats. 0 asks for likelihood alone.
        ignored: Drops up to this are free, and only what exceeds it is penalised.
        steps: At most so many of L-BFGS; it stops by itself when nothing is gained any more.

    Example:
        >>> labels = torch.arange(300) % 3
        >>> noise = torch.randn(4, 300, 3, generator=torch.Generator().manual_seed(0))
        >>> fitted = fit_powers(3 * torch.nn.functional.one_hot(labels) + 2 * noise, labels)
        >>> fitted.loss < fitted.loss_before
        True
    """
    given = check_logits(logits)
    exits, rows, classes = given.shape
    wanted = check_labels(labels, batch=rows, classes=classes, device=given.device)
    _check_options(penalty, ignored, steps)
    temperatures = fit_temperature(given, wanted).temperatures
    # A caller that measures under no_grad or in inference mode may fit there too.
    with torch.inference_mode(False), torch.enable_grad():
        # -inf times a power has no gradient; this is far below anything that matters.
        log_probs = given.detach().log_softmax(-1).float().clamp(min=_LOWEST)
        label, powers = wanted.clone(), _first_powers(temperatures).to(given.device).requires_grad_()
        losses = _descend(powers, log_probs, label, penalty, ignored, steps)
        nll, fall = (float(part.detach()) / rows for part in _sums(powers, log_probs, label, ignored))
    past, now = _powers(powers.detach()).tolist()
    return PowersFit(
        exits,
        classes,
        past=(1.0, *past[1:]),
        now=tuple(now),
        penalty=float(penalty),
        ignored=float(ignored),
        rows=rows,
        nll=nll,
        drop=fall,
        loss_before=losses[0],
        looks=len(losses),
    )


def _first_powers(temperatures: tuple[float, ...]) -> Tensor:
    """Logarithms of the powers to begin with, `(2, exits)`: the first exit calibrated, then a little of each further one."""
    scale = torch.tensor(temperatures)
    share = torch.full_like(scale, _FIRST_NOW)
    share[0] = 1.0
    return torch.stack((torch.full_like(scale, _FIRST_PAST), share / scale)).log()


def _descend(powers: Tensor, log_probs: Tensor, labels: Tensor, penalty: float, ignored: float, steps: int) -> list[float]:
    """Move the powers to the optimum; give the losses on the way."""
    losses: list[float] = []
    search = torch.optim.LBFGS([powers], max_iter=steps, history_size=20, line_search_fn="strong_wolfe", tolerance_change=1e-7)

    def loss() -> Tensor:
        search.zero_grad()
        total = torch.zeros((), device=powers.device)
        # A sum over rows: block by block it needs little memory, whatever the file.
        for now, wanted in zip(torch.split(log_probs, _BLOCK, 1), torch.split(labels, _BLOCK), strict=True):
            nll, fall = _sums(powers, now, wanted, ignored)
            part = (nll + penalty * fall) / len(labels)
            part.backward()  # type: ignore[no-untyped-call]
            total += part.detach()
        losses.append(float(total))
        return total

    search.step(loss)  # type: ignore[no-untyped-call]
    return losses


def _sums(powers: Tensor, log_probs: Tensor, labels: Tensor, ignored: float) -> tuple[Tensor, Tensor]:
    """NLL, a mean over exits, and the penalised drops, both summed over the rows."""
    past, now = _powers(powers)
    answer, answers = None, []
    for exit, seen in enumerate(log_probs):
        answer = multiply(answer, seen, past[exit], now[exit]).log_softmax(-1)
        answers.append(answer.gather(-1, labels[:, None])[:, 0])
    label = torch.stack(answers)
    return -label.mean(0).sum(), (drop(label.exp()) - ignored).clamp(min=0).sum()


def _powers(logarithms: Tensor) -> Tensor:
    return logarithms.clamp(math.log(2 * SMALLEST), math.log(LARGEST / 2)).exp()


def _check_options(penalty: float, ignored: float, steps: int) -> None:
    check_number(penalty, "penalty", low=0, most=LARGEST)
    check_number(ignored, "ignored", low=0, below=1)
    check_count(steps, "steps")

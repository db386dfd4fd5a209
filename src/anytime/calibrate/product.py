"""The fitted product: powers of p_m ∝ p_{m-1}^{a_m} · softmax(f_m)^{b_m}, two numbers per exit.

They minimise the mean NLL over exits and rows plus `penalty` times the mean over rows of the largest drop of the label's
probability. The first term asks for calibration, the second for few drops; `docs/calibration.md` shows what each costs. With so
few parameters the gradient over all rows is cheap: L-BFGS converges in about fifty evaluations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anytime.calibrate.temperature import fit_temperature
from anytime.checks import check_count, check_number
from anytime.combine.base import LARGEST, SMALLEST
from anytime.combine.dense import check_labelled_rows
from anytime.combine.powers import Powers, multiply
from anytime.fitted import Fitted
from anytime.metrics import drop

_BLOCK = 4096
_LOWEST = -1e4
_FIRST_PAST, _FIRST_NOW = 0.8, 0.2


@dataclass(frozen=True)
class FittedProduct(Fitted, kind="fitted-product", version=2, oldest=1, renamed={"looks": "n_evaluations"}):
    """Fitted powers, and the loss they reach on the fitted rows.

    Args:
        past: a, one per exit; the first is 1 and not used.
        now: b, one per exit. If an exit's b is close to 0, the penalty was too high for it: the exit is ignored.
        penalty: λ.
        ignored: The part of every drop that was not penalised.
        rows: The number of rows it was fitted on.
        nll: Mean NLL over exits and rows.
        drop: Mean over the rows of the penalised drop.
        loss_before: The loss at the initial powers, nll + λ · drop.
        n_evaluations: How many times the loss was computed over all rows.
    """

    past: tuple[float, ...]
    now: tuple[float, ...]
    penalty: float
    ignored: float
    rows: int
    nll: float
    drop: float
    loss_before: float
    n_evaluations: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule.start(self.exits)  # checks the powers

    @property
    def rule(self) -> Powers:
        """The fitted product as a rule."""
        return Powers(self.past, self.now)

    @property
    def loss(self) -> float:
        """The loss at these powers."""
        return self.nll + self.penalty * self.drop


def fit_product(
    logits: Any,
    labels: Any,
    *,
    penalty: float = 3.0,
    ignored: float = 0.0,
    steps: int = 100,
    class_dim: int | None = None,
    ignore_index: int | None = None,
) -> FittedProduct:
    """Fit the powers of the fitted product on held-out rows; deterministic.

    Args:
        logits: `(exits, rows, classes)`, rows that the network was not trained on; a thousand rows are enough.
        labels: `(rows,)`.
        penalty: λ, the cost of a mean drop of 1 in nats. 0 maximises likelihood alone.
        ignored: Only the part of a drop above this is penalised.
        steps: The maximum number of L-BFGS steps; it stops earlier once it has converged.
        class_dim: The dimension of the classes in dense logits; every position is a row. All rows are held in memory.
        ignore_index: The label of positions to leave out.

    Example:
        >>> labels = torch.arange(300) % 3
        >>> noise = torch.randn(4, 300, 3, generator=torch.Generator().manual_seed(0))
        >>> fitted = fit_product(3 * torch.nn.functional.one_hot(labels) + 2 * noise, labels)
        >>> fitted.loss < fitted.loss_before
        True
    """
    given, wanted = check_labelled_rows(logits, labels, class_dim, ignore_index)
    exits, rows, classes = given.shape
    check_number(penalty, "penalty", low=0, most=LARGEST)
    check_number(ignored, "ignored", low=0, below=1)
    check_count(steps, "steps")
    temperatures = fit_temperature(given, wanted).temperatures
    with torch.inference_mode(False), torch.enable_grad():  # also if called under no_grad or in inference mode
        # -inf times a power has no gradient; the bound is far below any relevant log-probability.
        log_probs = given.detach().log_softmax(-1).float().clamp(min=_LOWEST)
        label, powers = wanted.clone(), _first_powers(temperatures).to(given.device).requires_grad_()
        losses = _descend(powers, log_probs, label, penalty, ignored, steps)
        nll, mean_drop = (float(part.detach()) / rows for part in _sums(powers, log_probs, label, ignored))
    past, now = _powers(powers.detach()).tolist()
    return FittedProduct(
        exits,
        classes,
        past=(1.0, *past[1:]),
        now=tuple(now),
        penalty=float(penalty),
        ignored=float(ignored),
        rows=rows,
        nll=nll,
        drop=mean_drop,
        loss_before=losses[0],
        n_evaluations=len(losses),
    )


def _first_powers(temperatures: tuple[float, ...]) -> Tensor:
    """Logarithms of the initial powers, `(2, exits)`: the first exit calibrated, then a little of each further one."""
    scale = torch.tensor(temperatures)
    weight = torch.full_like(scale, _FIRST_NOW)
    weight[0] = 1.0
    return torch.stack((torch.full_like(scale, _FIRST_PAST), weight / scale)).log()


def _descend(powers: Tensor, log_probs: Tensor, labels: Tensor, penalty: float, ignored: float, steps: int) -> list[float]:
    """Move the powers to the optimum; return the losses of all evaluations."""
    losses: list[float] = []
    search = torch.optim.LBFGS([powers], max_iter=steps, history_size=20, line_search_fn="strong_wolfe", tolerance_change=1e-7)

    def loss() -> Tensor:
        search.zero_grad()
        total = torch.zeros((), device=powers.device)
        # The loss is a sum over rows, so blocks bound the memory.
        for now, wanted in zip(torch.split(log_probs, _BLOCK, 1), torch.split(labels, _BLOCK), strict=True):
            nll, drops = _sums(powers, now, wanted, ignored)
            part = (nll + penalty * drops) / len(labels)
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

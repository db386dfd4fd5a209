"""The fitted product: powers of p_m ∝ p_{m-1}^{a_m} · softmax(f_m)^{b_m}, two numbers per exit.

They minimise the mean NLL over exits and rows plus `penalty` times the mean over rows of the largest drop of the label's
probability. The first term asks for calibration, the second for few drops; `docs/calibration.md` shows what each costs. With so
few parameters the gradient over all rows is cheap: L-BFGS converges in about fifty evaluations.

A held answer is a step function of the powers, which has no useful gradient. So it is fitted with a weight between the previous
and the new answer that approaches this step in two stages, the second started from the powers of the first. From several
initial powers this ends at nearly the same loss; descent on the step function itself stops near where it begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anytime.calibrate.temperature import fit_temperature
from anytime.checks import check_count, check_number
from anytime.combine.base import LARGEST, SMALLEST
from anytime.combine.dense import check_labelled_rows
from anytime.combine.powers import Powers, held, multiply
from anytime.fitted import Fitted
from anytime.metrics import drop
from anytime.threads import one_thread_for_few

_BLOCK = 4096
_LOWEST = -1e4
_FIRST_PAST, _FIRST_NOW = 0.8, 0.2
_SMALLEST_DOUBT = 1e-7
_SHARPNESS = (3.0, 12.0)
"""How steeply the weight of a held answer rises with the log-odds, stage by stage."""


@dataclass(frozen=True)
class FittedProduct(Fitted, kind="fitted-product", version=3, oldest=1, renamed={"looks": "n_evaluations"}):
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
        margin: How much more certain, in log-odds, a new answer with the same label must be; None if answers are not held.
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
    margin: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule.start(self.exits)  # checks the powers

    @property
    def rule(self) -> Powers:
        """The fitted product as a rule."""
        return Powers(self.past, self.now, self.margin)

    @property
    def loss(self) -> float:
        """The loss at these powers."""
        return self.nll + self.penalty * self.drop


@one_thread_for_few
def fit_product(
    logits: Any,
    labels: Any,
    *,
    penalty: float = 3.0,
    ignored: float = 0.0,
    steps: int = 100,
    margin: float | None = None,
    class_dim: int | None = None,
    ignore_index: int | None = None,
) -> FittedProduct:
    """Fit the powers of the fitted product on held-out rows; deterministic.

    Args:
        logits: `(exits, rows, classes)`, rows that the network was not trained on; a thousand rows are enough.
        labels: `(rows,)`.
        penalty: λ, the cost of a mean drop of 1 in nats. 0 maximises likelihood alone.
        ignored: Only the part of a drop above this is penalised.
        steps: The maximum number of L-BFGS steps, of each stage if answers are held; it stops earlier once it has converged.
        margin: Of `Powers`: hold an answer unless its label changes or is more certain by this much in log-odds. 1 suits few
            classes. None holds no answers.
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
    check_number(penalty, "penalty", low=0, most=LARGEST)
    check_number(ignored, "ignored", low=0, below=1)
    check_count(steps, "steps")
    if margin is not None:
        margin = check_number(margin, "margin", low=0, most=LARGEST)
    temperatures = fit_temperature(given, wanted).temperatures
    with torch.inference_mode(False), torch.enable_grad():  # also if called under no_grad or in inference mode
        # In float32 rounding, and so the processor, decides where the descent ends.
        # -inf times a power has no gradient; the bound is far below any relevant log-probability.
        log_probs = given.detach().double().log_softmax(-1).clamp(min=_LOWEST)
        fitting = _Rows(log_probs, wanted.clone(), float(penalty), float(ignored))
        first = _first_powers(temperatures).to(given.device, torch.float64)
        return _fit(fitting, first, steps, margin)


@dataclass(frozen=True)
class _Rows:
    """The rows to fit on, as log-probabilities, and what the loss counts of them."""

    log_probs: Tensor
    labels: Tensor
    penalty: float
    ignored: float

    def blocks(self) -> Iterator[_Rows]:
        """Some rows at a time: the loss is a sum over rows, so this bounds the memory."""
        for log_probs, labels in zip(torch.split(self.log_probs, _BLOCK, 1), torch.split(self.labels, _BLOCK), strict=True):
            yield replace(self, log_probs=log_probs, labels=labels)

    def sums(self, powers: Tensor, margin: float | None, sharpness: float) -> tuple[Tensor, Tensor]:
        """NLL, a mean over exits, and the penalised drops, both summed over the rows."""
        label = _label_log_probs(powers, self.log_probs, self.labels, margin, sharpness)
        return -label.mean(0).sum(), (drop(label.exp()) - self.ignored).clamp(min=0).sum()


def _fit(rows: _Rows, first: Tensor, steps: int, margin: float | None) -> FittedProduct:
    """The powers with the lowest loss, from these initial ones."""
    powers = first.clone().requires_grad_()
    evaluations = sum(_descend(powers, rows, steps, margin, by) for by in ((math.inf,) if margin is None else _SHARPNESS))
    count, powers = len(rows.labels), powers.detach()
    before, after = ([float(part) / count for part in rows.sums(at, margin, math.inf)] for at in (first, powers))
    past, now = _powers(powers).tolist()
    exits, _, classes = rows.log_probs.shape
    return FittedProduct(
        exits,
        classes,
        past=(1.0, *past[1:]),
        now=tuple(now),
        penalty=rows.penalty,
        ignored=rows.ignored,
        rows=count,
        nll=after[0],
        drop=after[1],
        loss_before=before[0] + rows.penalty * before[1],
        n_evaluations=evaluations,
        margin=margin,
    )


def _descend(powers: Tensor, rows: _Rows, steps: int, margin: float | None, sharpness: float) -> int:
    """Move the powers to the optimum; return the number of evaluations."""
    evaluations = 0
    search = torch.optim.LBFGS([powers], max_iter=steps, history_size=20, line_search_fn="strong_wolfe", tolerance_change=1e-7)

    def loss() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        search.zero_grad()
        total = torch.zeros((), dtype=powers.dtype, device=powers.device)
        for block in rows.blocks():
            nll, drops = block.sums(powers, margin, sharpness)
            part = (nll + rows.penalty * drops) / len(rows.labels)
            part.backward()  # type: ignore[no-untyped-call]
            total += part.detach()
        return total

    search.step(loss)  # type: ignore[no-untyped-call]
    return evaluations


def _label_log_probs(powers: Tensor, log_probs: Tensor, labels: Tensor, margin: float | None, sharpness: float) -> Tensor:
    """The labels' log-probabilities, `(exits, rows)`; with a margin answers are held, at infinite sharpness as by `Powers`."""
    past, now = _powers(powers)
    answer: Tensor | None = None
    answers = []
    for exit, seen in enumerate(log_probs):
        before, answer = answer, multiply(answer, seen, past[exit], now[exit]).log_softmax(-1)
        if before is not None and margin is not None:
            exact = sharpness == math.inf
            answer = held(before, answer, margin) if exact else _partly_held(before, answer, margin, sharpness)
        answers.append(answer.gather(-1, labels[:, None])[:, 0])
    return torch.stack(answers)


def _partly_held(before: Tensor, now: Tensor, margin: float, sharpness: float) -> Tensor:
    """Between two answers: near the first where the second keeps its label and is not more certain by the margin."""
    label = before.argmax(-1, keepdim=True)
    sure, then = now.gather(-1, label), before.gather(-1, label)
    lead = sure - now.scatter(-1, label, torch.finfo(now.dtype).min).amax(-1, keepdim=True)
    missing = _log_odds(then) + margin - _log_odds(sure)
    weight = torch.sigmoid(sharpness * missing) * torch.sigmoid(sharpness * lead)
    return (weight * before + (1 - weight) * now).log_softmax(-1)


def _log_odds(log_prob: Tensor) -> Tensor:
    """The logarithm of p/(1 - p), with a finite gradient."""
    return log_prob - (-torch.expm1(log_prob.clamp(max=-_SMALLEST_DOUBT))).log()


def _first_powers(temperatures: tuple[float, ...]) -> Tensor:
    """Logarithms of the initial powers, `(2, exits)`: the first exit calibrated, then a little of each further one."""
    scale = torch.tensor(temperatures, dtype=torch.float32, device="cpu")
    weight = torch.full_like(scale, _FIRST_NOW)
    weight[0] = 1.0
    return torch.stack((torch.full_like(scale, _FIRST_PAST), weight / scale)).log()


def _powers(logarithms: Tensor) -> Tensor:
    return logarithms.clamp(math.log(2 * SMALLEST), math.log(LARGEST / 2)).exp()

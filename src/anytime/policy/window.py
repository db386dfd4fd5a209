"""Fitting a window around a decision's threshold: which inputs are worth another exit.

The decision accepts an input whose confidence is at least τ. τ is found on held-out rows from what the decision is to achieve,
for each exit on its own confidences, and the window reaches so many percentiles of the held-out confidences to either side. All
of these are log-odds, as confidences round to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from anytime.checks import check_choice, check_count, check_labels, check_number
from anytime.combine import Prediction
from anytime.errors import LabelError, OptionError, ShapeError
from anytime.policy.stopping import FittedPolicy, Policy, Window, as_probability, check_prediction

Aim = Literal["risk", "coverage", "fpr"]


@dataclass(frozen=True)
class WindowPolicy(FittedPolicy, kind="window policy"):
    """A fitted window.

    Attributes:
        aim: What τ was chosen by, see `fit_window`.
        level: The number that belongs to it.
        width: How far the window reaches to either side, as a share of the rows.
        decision_log_odds: τ at each exit, as log-odds.
        lower_log_odds: The window's lower bound at each exit.
        upper_log_odds: Its upper bound.
        rows: How many rows it was fitted on.
    """

    aim: str
    level: float
    width: float
    decision_log_odds: tuple[float, ...]
    lower_log_odds: tuple[float, ...]
    upper_log_odds: tuple[float, ...]
    rows: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_options(self.aim, self.level, self.width)
        for name in ("decision_log_odds", "lower_log_odds", "upper_log_odds"):
            if len(getattr(self, name)) != self.exits:
                raise OptionError(f"{name} is {getattr(self, name)}", expected=f"{self.exits} numbers", fix="fit it anew")
        self.policy.check_fits(self.exits, self.classes or 1)

    @property
    def policy(self) -> Policy:
        """Go on inside of the window, stop outside of it."""
        return Window(self.lower_log_odds, self.upper_log_odds, scale="log-odds")

    @property
    def decision(self) -> tuple[float, ...]:
        """τ at each exit, as a probability: to read, as it may round to 1."""
        return tuple(as_probability(odds) for odds in self.decision_log_odds)


def fit_window(
    log_probs: Any, labels: Any = None, *, aim: Aim, level: float, width: float = 0.1, skip: int = 500
) -> WindowPolicy:
    """Find the window around a decision's threshold on held-out rows.

    Args:
        log_probs: A rule's answers at all exits, `rule(logits)`, or their log-probabilities, `(exits, rows, classes)`.
        labels: `(rows,)`; only `risk` needs them.
        aim: `risk`: τ is where the share of wrong answers among the accepted is nearest `level`. `coverage`: a share of
            `level` is accepted. `fpr`: the same share of these in-distribution rows is accepted, for a decision whose
            errors are strange inputs accepted (the false positive rate at `level`).
        level: Between 0 and 1.
        width: How far the window reaches to either side of τ, as a share of the rows.
        skip: For `risk`: so many of the most confident rows are accepted in any case, as the share of wrong ones among a
            few says little.

    Example:
        >>> from anytime import Latest, samples
        >>> log_probs = Latest()(samples.cifar100_msdnet().logits[:]).log_probs
        >>> fit_window(log_probs, aim="coverage", level=0.8).apply(log_probs).bincount().tolist()
        [0, 800, 136, 39, 13, 3, 3, 6]
    """
    _check_options(aim, level, width)
    answers = check_prediction(log_probs)
    exits, rows, classes = answers.log_probs.shape
    if rows == 0:
        raise ShapeError("there are no rows", expected="at least one", fix="hold out more rows")
    sure = answers.log_odds.double()
    if aim == "risk":
        wrong = answers.labels != _labels(labels, answers)
        decision = _at_risk(sure, wrong, level, _check_skip(skip, rows))
    else:
        decision = sure.quantile(1 - level, dim=1)
    below = (sure <= decision[:, None]).double().mean(1)
    lower, upper = (_quantiles(sure, (below + sign * width).clamp(0, 1)) for sign in (-1, 1))
    return WindowPolicy(
        exits=exits,
        classes=classes,
        aim=aim,
        level=float(level),
        width=float(width),
        decision_log_odds=tuple(decision.tolist()),
        lower_log_odds=tuple(lower.tolist()),
        upper_log_odds=tuple(upper.tolist()),
        rows=rows,
    )


def _at_risk(sure: Tensor, wrong: Tensor, level: float, skip: int) -> Tensor:
    """The confidence at each exit where the share of wrong answers among those at least as sure is nearest `level`."""
    ordered, order = sure.sort(dim=1, descending=True, stable=True)
    counts = torch.arange(1, sure.shape[1] + 1, device=sure.device)
    risk = wrong.gather(1, order).cumsum(1) / counts
    nearest = (risk - level).abs()[:, skip:].argmin(1) + skip
    return ordered.gather(1, nearest[:, None])[:, 0]


def _quantiles(values: Tensor, shares: Tensor) -> Tensor:
    """One quantile a row of `values`, each at its own share."""
    return torch.stack([row.quantile(share) for row, share in zip(values, shares, strict=True)])


def _labels(labels: Any, answers: Prediction) -> Tensor:
    if labels is None:
        raise LabelError("got no labels", expected="labels, for aim='risk'", fix="pass labels, or aim by coverage")
    _, batch, classes = answers.log_probs.shape
    return check_labels(labels, batch=batch, classes=classes, device=answers.log_probs.device)


def _check_options(aim: str, level: float, width: float) -> None:
    check_choice(aim, "aim", get_args(Aim))
    for name, value in (("level", level), ("width", width)):
        check_number(value, name, low=0, most=1)


def _check_skip(skip: int, rows: int) -> int:
    return check_count(skip, "skip", low=0, most=rows - 1, fix="pass more rows, or a smaller skip")

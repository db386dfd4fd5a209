"""Fitting a window around the threshold of a decision: only inputs inside it gain from another exit.

The decision accepts an input whose confidence is at least τ. τ is found on held-out rows for each exit, from what the
decision is to achieve, and the window extends by a number of percentiles of the held-out confidences to either side. All of
these are log-odds, because confidences round to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from anytime.checks import check_choice, check_count, check_labels, check_number
from anytime.errors import LabelError
from anytime.policy.stopping import DecisionWindow, FittedPolicy, Policy, as_probability, check_prediction
from anytime.threads import one_thread_for_few

Aim = Literal["risk", "coverage", "fpr"]


@dataclass(frozen=True)
class WindowPolicy(FittedPolicy, kind="window-policy"):
    """A fitted window.

    Attributes:
        aim: How τ was chosen, see `fit_window_policy`.
        level: The level of the aim.
        width: How far the window extends to either side, as a fraction of the rows.
        decision_log_odds: τ at each exit, as log-odds.
        lower_log_odds: The lower bound of the window at each exit.
        upper_log_odds: The upper bound.
        rows: The number of rows it was fitted on.
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
        self._check_lengths("decision_log_odds", "lower_log_odds", "upper_log_odds")

    @property
    def policy(self) -> Policy:
        """Continue inside the window, stop outside it."""
        return DecisionWindow(self.lower_log_odds, self.upper_log_odds, scale="log-odds")

    @property
    def decision(self) -> tuple[float, ...]:
        """τ at each exit as a probability, for display: it may round to 1."""
        return tuple(as_probability(odds) for odds in self.decision_log_odds)


@one_thread_for_few
def fit_window_policy(
    log_probs: Any, labels: Any = None, *, aim: Aim, level: float, width: float = 0.1, skip: int = 500
) -> WindowPolicy:
    """Fit the window around a decision's threshold on held-out rows.

    Args:
        log_probs: A rule's predictions at all exits, `rule(logits)`, or their log-probabilities, `(exits, rows, classes)`.
        labels: `(rows,)`; only `risk` needs them.
        aim: `risk`: the error rate among accepted rows is as close as possible to `level`. `coverage`: a fraction `level` of
            the rows is accepted. `fpr`: the same, for a decision whose errors are out-of-distribution inputs that are
            accepted (the false positive rate at `level`).
        level: Between 0 and 1.
        width: How far the window extends to either side of τ, as a fraction of the rows.
        skip: For `risk`: this many of the most confident rows are always accepted, because the error rate among a few rows is
            too noisy.

    Example:
        >>> from anytime import Latest, samples
        >>> log_probs = Latest()(samples.cifar100_msdnet().logits[:]).log_probs
        >>> fit_window_policy(log_probs, aim="coverage", level=0.8).apply(log_probs).bincount().tolist()
        [0, 800, 136, 39, 13, 3, 3, 6]
    """
    _check_options(aim, level, width)
    answers = check_prediction(log_probs, rows=True)
    exits, rows, classes = answers.log_probs.shape
    confidence = answers.log_odds.double()
    if aim == "risk":
        if labels is None:
            raise LabelError("got no labels", expected="labels, for aim='risk'", fix="pass labels, or use aim='coverage'")
        wanted = check_labels(labels, batch=rows, classes=classes, device=confidence.device)
        check_count(skip, "skip", low=0, most=rows - 1, fix="pass more rows, or a smaller skip")
        decision = _at_risk(confidence, answers.labels != wanted, level, skip)
    else:
        decision = confidence.quantile(1 - level, dim=1)
    below = (confidence <= decision[:, None]).double().mean(1)
    lower, upper = (_quantiles(confidence, (below + sign * width).clamp(0, 1)) for sign in (-1, 1))
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


def _at_risk(confidence: Tensor, wrong: Tensor, level: float, skip: int) -> Tensor:
    """The confidence at each exit at which the error rate of the rows at least as confident is closest to `level`."""
    ordered, order = confidence.sort(dim=1, descending=True, stable=True)
    counts = torch.arange(1, confidence.shape[1] + 1, device=confidence.device)
    risk = wrong.gather(1, order).cumsum(1) / counts
    nearest = (risk - level).abs()[:, skip:].argmin(1) + skip
    return ordered.gather(1, nearest[:, None])[:, 0]


def _quantiles(values: Tensor, fractions: Tensor) -> Tensor:
    """One quantile per row of `values`, each at its own fraction."""
    return torch.stack([row.quantile(fraction) for row, fraction in zip(values, fractions, strict=True)])


def _check_options(aim: str, level: float, width: float) -> None:
    check_choice(aim, "aim", get_args(Aim))
    check_number(level, "level", low=0, most=1)
    check_number(width, "width", low=0, most=1, fix="pass width=0.1 for ten percentiles")

"""Fitting the adaptive threshold of the product (appendix B.3.1 of the paper).

τ(f) = C · p(top three logits): p is a logistic regression fitted on the first exit's answers, right or wrong; C is taken
from a grid by what it does to calibration and monotonicity on other held-out rows. The paper says "best trade-off"; here
that is the least of mean ECE over the exits plus `balance` times the mean drop of the label's probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anytime.checks import check_disjoint, check_labels, check_logits
from anytime.combine import AdaptiveReLU, Product, parse_rule
from anytime.combine.activations import TOP, Gate
from anytime.errors import LabelError, OptionError
from anytime.fitted import Fitted
from anytime.metrics import Summary, follow

_STEPS = 20


class Trial(NamedTuple):
    """What one C does on the tuning rows: accuracy and ECE are means over the exits, `drop` over the inputs."""

    scale: float
    accuracy: float
    ece: float
    drop: float


@dataclass(frozen=True)
class AdaptiveFit(Fitted, kind="adaptive threshold"):
    """The threshold found, and the grid it was chosen from.

    Args:
        exits: How many exits.
        classes: How many classes.
        text: The product with this threshold, as text.
        trials: What each C did on the tuning rows.
    """

    text: str
    trials: tuple[Trial, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "trials", tuple(Trial(*trial) for trial in self.trials))
        if not isinstance(parse_rule(self.text), Product):
            raise OptionError(f"the rule is {self.text!r}", expected="a product", fix="fit it anew")

    @property
    def rule(self) -> Product:
        """The product with this threshold."""
        found = parse_rule(self.text)
        assert isinstance(found, Product)
        return found

    @property
    def activation(self) -> AdaptiveReLU:
        """The threshold alone."""
        found = self.rule.activation
        assert isinstance(found, AdaptiveReLU)
        return found


def fit_adaptive_threshold(
    logits: Any,
    labels: Any,
    *,
    tuning_logits: Any,
    tuning_labels: Any,
    scales: Sequence[float] | None = None,
    balance: float = 1.0,
    mode: Gate = "gate",
) -> AdaptiveFit:
    """Fit an adaptive threshold on held-out rows.

    Args:
        logits: `(exits, rows, classes)` for the regression; only the first exit is read.
        labels: `(rows,)`.
        tuning_logits: Other rows, for the choice of C.
        tuning_labels: Their labels.
        scales: The values of C to try; by default 0 (the plain product) and 20 steps up to the largest usual logit.
        balance: How much a mean drop of 1 weighs against a mean ECE of 1.
        mode: `gate` or `clamp`, see `AdaptiveReLU`.
    """
    fit_rows, fit_labels = _checked(logits, labels)
    tune_rows, tune_labels = _checked(tuning_logits, tuning_labels)
    check_disjoint(fit_rows, tune_rows, names=("the regression", "the choice of C"))
    if balance < 0:
        raise OptionError(f"balance is {balance}", expected="at least 0", fix="1 weighs both alike")
    coefficients, intercept = _foretell_correctness(fit_rows[0], fit_labels)
    grid = _grid(tune_rows) if scales is None else [float(scale) for scale in scales]
    trials = []
    for scale in grid:
        activation = AdaptiveReLU(scale, coefficients, intercept, mode)
        trials.append(_try(activation, tune_rows, tune_labels))
    if not trials:
        raise OptionError("no values of C to try", expected="at least one", fix="leave scales out")
    best = min(trials, key=lambda trial: trial.ece + balance * trial.drop)
    chosen = Product(AdaptiveReLU(best.scale, coefficients, intercept, mode))
    return AdaptiveFit(tune_rows.shape[0], tune_rows.shape[2], repr(chosen), tuple(trials))


def _checked(logits: Any, labels: Any) -> tuple[Tensor, Tensor]:
    rows = check_logits(logits)
    return rows, check_labels(labels, batch=rows.shape[1], classes=rows.shape[2], device=rows.device)


def _foretell_correctness(logits: Tensor, labels: Tensor) -> tuple[tuple[float, ...], float]:
    """Coefficients and intercept of the logistic regression on the sorted top logits."""
    from sklearn.linear_model import LogisticRegression

    right = (logits.argmax(-1) == labels).cpu().numpy()
    if right.all() or not right.any():
        raise LabelError(
            f"the first exit is {'right' if right.any() else 'wrong'} on all {len(right)} rows",
            expected="some right and some wrong answers to learn from",
            fix="give more held-out rows, which the network was not trained on",
        )
    top = logits.topk(min(TOP, logits.shape[-1]), dim=-1).values.double().cpu().numpy()
    model = LogisticRegression(max_iter=1000).fit(top, right)
    return tuple(model.coef_[0].tolist()), float(model.intercept_[0])


def _grid(logits: Tensor) -> list[float]:
    largest = float(logits.amax(-1).flatten().double().quantile(0.95)) if logits.shape[1] else 0.0
    return torch.linspace(0, max(largest, 0.0), _STEPS + 1).tolist()


def _try(activation: AdaptiveReLU, logits: Tensor, labels: Tensor) -> Trial:
    summary = Summary(torch.arange(1.0, len(logits) + 1))
    summary.add(follow(Product(activation).combine(logits), labels))
    figures = summary.figures()
    mean = {name: sum(figures[name]) / len(logits) for name in ("accuracy", "ece")}
    return Trial(activation.scale, mean["accuracy"], mean["ece"], figures["mean_label_drop"])

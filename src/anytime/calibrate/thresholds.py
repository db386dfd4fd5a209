"""Thresholds of the product's ReLU (appendix B.3.1 of the paper).

Static: f·[f > b]. A larger b removes more classes from the support: sets become smaller and contain the label less often.
`sweep_static_thresholds` shows size, coverage and accuracy over b.

Adaptive: τ(f) = C · p(top three logits), where p is a logistic regression on whether the first exit is right. C minimises
mean ECE over the exits plus `balance` times the mean drop of the label's probability on other held-out rows: the paper only
says "best trade-off".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anytime.calibrate.measure import rule_metrics
from anytime.checks import check_disjoint, check_labelled, check_number
from anytime.combine import AdaptiveReLU, Product, ThresholdReLU, parse_rule
from anytime.combine.activations import TOP, Gate
from anytime.combine.rules import Weights
from anytime.errors import LabelError, OptionError
from anytime.fitted import Fitted
from anytime.threads import one_thread_for_few

THRESHOLDS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_STEPS = 20


@dataclass(frozen=True)
class StaticTrial:
    """Metrics at one threshold. The set of a row is the product's support; if that is empty, all classes.

    Attributes:
        threshold: b.
        accuracy: One number per exit, as all below.
        set_size: Mean number of classes in the set.
        coverage: Fraction of rows whose set contains the label.
        collapsed: Fraction of rows with an empty support.
        ece: Expected calibration error.
        drops: Fraction of rows whose label's probability drops by 0.1 or more between any two exits; one number.
    """

    threshold: float
    accuracy: tuple[float, ...]
    set_size: tuple[float, ...]
    coverage: tuple[float, ...]
    collapsed: tuple[float, ...]
    ece: tuple[float, ...]
    drops: float


def sweep_static_thresholds(
    logits: Any, labels: Any, *, thresholds: Sequence[float] = THRESHOLDS, weights: Weights = "linear"
) -> tuple[StaticTrial, ...]:
    """Measure the product with static thresholds of its ReLU.

    Args:
        logits: `(exits, rows, classes)`.
        labels: `(rows,)`.
        thresholds: The values of b to try, each at least 0; 0 is the plain product.
        weights: Of the product.

    Example:
        >>> logits = torch.tensor([[[3.0, 1.0, -1.0]], [[3.0, 1.0, 1.0]]])
        >>> for trial in sweep_static_thresholds(logits, torch.tensor([0]), thresholds=[0.0, 2.0]):
        ...     print(trial.threshold, trial.set_size)
        0.0 (2.0, 2.0)
        2.0 (1.0, 1.0)
    """
    given, wanted = check_labelled(logits, labels)
    if not thresholds:
        raise OptionError("thresholds is empty", expected="at least one threshold", fix="pass thresholds=(0.0, 1.0)")
    rules = [Product(ThresholdReLU(float(value)), weights) for value in thresholds]
    return tuple(_static_trial(float(value), rule, given, wanted) for value, rule in zip(thresholds, rules, strict=True))


class Trial(NamedTuple):
    """Metrics at one C: accuracy and ECE are means over the exits, `drop` over the inputs."""

    scale: float
    accuracy: float
    ece: float
    drop: float


@dataclass(frozen=True)
class AdaptiveThreshold(Fitted, kind="adaptive-threshold"):
    """A fitted adaptive threshold, and the grid it was chosen from.

    Args:
        text: The product with this threshold, as text.
        trials: The metrics of each C on the tuning rows.
    """

    text: str
    trials: tuple[Trial, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "trials", tuple(Trial(*trial) for trial in self.trials))
        if not isinstance(parse_rule(self.text), Product):
            raise OptionError(f"the rule is {self.text!r}", expected="a product", fix="fit it again")

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


@one_thread_for_few
def fit_adaptive_threshold(
    logits: Any,
    labels: Any,
    *,
    tuning_logits: Any,
    tuning_labels: Any,
    scales: Sequence[float] | None = None,
    balance: float = 1.0,
    mode: Gate = "gate",
) -> AdaptiveThreshold:
    """Fit an adaptive threshold on held-out rows.

    Args:
        logits: `(exits, rows, classes)` for the regression; only the first exit is used.
        labels: `(rows,)`.
        tuning_logits: Other rows, for the choice of C.
        tuning_labels: Their labels.
        scales: The values of C to try; by default 0 (the plain product) and 20 steps up to a typical largest logit.
        balance: The weight of a mean drop of 1 relative to a mean ECE of 1.
        mode: `gate` or `clamp`, see `AdaptiveReLU`.
    """
    fit_rows, fit_labels = check_labelled(logits, labels)
    tune_rows, tune_labels = check_labelled(tuning_logits, tuning_labels)
    check_disjoint(fit_rows, tune_rows, names=("the regression", "the choice of C"))
    check_number(balance, "balance", low=0)
    coefficients, intercept = _regress_correctness(fit_rows[0], fit_labels)
    grid = _grid(tune_rows) if scales is None else [float(scale) for scale in scales]
    if not grid:
        raise OptionError("scales is empty", expected="at least one value of C", fix="pass scales=(0.0, 1.0), or None")
    activations = [AdaptiveReLU(scale, coefficients, intercept, mode) for scale in grid]
    trials = [_adaptive_trial(activation, tune_rows, tune_labels) for activation in activations]
    best = min(range(len(trials)), key=lambda index: trials[index].ece + balance * trials[index].drop)
    text = repr(Product(activations[best]))
    return AdaptiveThreshold(tune_rows.shape[0], tune_rows.shape[2], text, tuple(trials))


def _regress_correctness(logits: Tensor, labels: Tensor) -> tuple[tuple[float, ...], float]:
    """Coefficients and intercept of the logistic regression on the sorted top logits."""
    from sklearn.linear_model import LogisticRegression

    right = (logits.argmax(-1) == labels).cpu().numpy()
    if right.all() or not right.any():
        raise LabelError(
            f"the first exit is {'right' if right.any() else 'wrong'} on all {len(right)} rows",
            expected="some right and some wrong predictions",
            fix="pass more held-out rows, which the network was not trained on",
        )
    top = logits.topk(min(TOP, logits.shape[-1]), dim=-1).values.double().cpu().numpy()
    model = LogisticRegression(max_iter=1000).fit(top, right)
    return tuple(model.coef_[0].tolist()), float(model.intercept_[0])


def _grid(logits: Tensor) -> list[float]:
    largest = float(logits.amax(-1).flatten().double().quantile(0.95))
    return torch.linspace(0, max(largest, 0.0), _STEPS + 1).tolist()


def _adaptive_trial(activation: AdaptiveReLU, logits: Tensor, labels: Tensor) -> Trial:
    found = rule_metrics(Product(activation), logits, labels)
    accuracy, ece = (sum(values or ()) / len(logits) for values in (found.accuracy, found.ece))
    return Trial(activation.scale, accuracy, ece, found.mean_label_drop or 0.0)


def _static_trial(threshold: float, rule: Product, logits: Tensor, labels: Tensor) -> StaticTrial:
    found = rule_metrics(rule, logits, labels)
    return StaticTrial(
        threshold,
        accuracy=found.accuracy or (),
        set_size=found.support_size,
        coverage=found.support_coverage or (),
        collapsed=tuple(percent / 100 for percent in found.collapsed_percent),
        ece=found.ece or (),
        drops=(found.label_drop_percent or {})["0.1"] / 100,
    )

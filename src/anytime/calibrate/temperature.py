"""Temperature scaling (Guo et al.): one temperature per exit, fitted on held-out rows by negative log-likelihood.

The NLL of softmax(β·f) is convex in β = 1/T, so the optimum is the zero of its slope; Newton steps that stay within a
bracket find it in float64. A product has temperatures too, those of its predictions, p_m^(1/T_m). A label outside its support
has probability zero at every temperature, so it only counts in the reported NLL, with the floor of `anytime.metrics.nll`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anytime.combine import Caching, Latest, Rule, Scaled, Tempered, parse_rule
from anytime.combine.base import LARGEST, SMALLEST
from anytime.combine.dense import check_labelled_rows
from anytime.combine.named import as_rule
from anytime.errors import LabelError, OptionError
from anytime.fitted import Fitted
from anytime.metrics import nll
from anytime.threads import one_thread_for_few

_BLOCK = 4096
_STEPS = 100
_PRECISION = 1e-10


@dataclass(frozen=True)
class Temperature(Fitted, kind="temperature"):
    """Fitted temperatures.

    Args:
        inner: The rule it was fitted for, as text.
        temperatures: T, one per exit.
        at_bound: Whether the search ended at a bound, one per exit: the optimum is beyond it, or there is none (if a network
            is right on all rows, the likelihood only grows with the confidence).
        nll_before: Mean NLL on the fitted rows at temperature 1, one per exit.
        nll_after: Mean NLL on the fitted rows at these temperatures.
        rows: The number of rows it was fitted on.
    """

    inner: str
    temperatures: tuple[float, ...]
    at_bound: tuple[bool, ...]
    nll_before: tuple[float, ...]
    nll_after: tuple[float, ...]
    rows: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule.start(self.exits)  # checks the temperatures

    @property
    def rule(self) -> Rule[Any]:
        """The rule it was fitted for, at these temperatures."""
        return self.rule_for()

    def rule_for(self, inner: Rule[Any] | None = None) -> Rule[Any]:
        """Another rule at these temperatures.

        Args:
            inner: Any rule, if these are temperatures of the softmax (fitted for `Latest` or `Caching`): they scale the logits
                before it. Temperatures of another rule's predictions belong to that rule alone. By default the fitted rule.
        """
        fitted = parse_rule(self.inner)
        if _scales_logits(fitted):
            return Scaled(fitted if inner is None else inner, self.temperatures)
        if inner is not None and inner != fitted:
            raise OptionError(
                f"the rule is {inner!r}",
                expected=f"{fitted!r}, for which these temperatures were fitted",
                fix="fit_temperature(logits, labels, rule=...) fits them for another rule",
            )
        return Tempered(fitted, self.temperatures)


@one_thread_for_few
def fit_temperature(
    logits: Any,
    labels: Any,
    rule: str | Rule[Any] | None = None,
    *,
    bounds: tuple[float, float] = (0.01, 100.0),
    class_dim: int | None = None,
    ignore_index: int | None = None,
) -> Temperature:
    """Fit one temperature per exit on held-out rows.

    Args:
        logits: `(exits, rows, classes)`, rows that the network was not trained on.
        labels: `(rows,)`.
        rule: The rule to calibrate. None, `Latest()` and `Caching()` fit the softmax of each exit (caching then uses the
            scaled exits). Any other rule is fitted by the temperatures of its predictions.
        bounds: The smallest and largest temperature. Networks are typically near 2, the first exits of a ReLU product near
            0.03.
        class_dim: The dimension of the classes in dense logits; every position is a row. All rows are held in memory.
        ignore_index: The label of positions to leave out.

    Example:
        >>> logits = torch.tensor([[[3.0, 0.0], [3.0, 0.0], [3.0, 0.0]]])
        >>> found = fit_temperature(logits, torch.tensor([0, 0, 1]))  # correct for two of three rows: log-odds of log 2
        >>> round(found.temperatures[0], 4), round(3 / math.log(2), 4)
        (4.3281, 4.3281)
    """
    given, wanted = check_labelled_rows(logits, labels, class_dim, ignore_index)
    exits, rows, classes = given.shape
    if not isinstance(bounds, tuple | list) or len(bounds) != 2 or not SMALLEST <= bounds[0] < bounds[1] <= LARGEST:
        raise OptionError(
            f"bounds are {bounds!r}",
            expected=f"two temperatures in increasing order, from {SMALLEST:g} to {LARGEST:g}",
            fix="pass bounds=(0.01, 100.0), the default",
        )
    low, high = bounds
    inner = Latest() if rule is None else as_rule(rule, exits=exits, classes=classes)
    scores = given if _scales_logits(inner) else inner.combine(given).log_probs
    found = [_fit_exit(now, wanted, 1 / high, 1 / low, exit) for exit, now in enumerate(scores)]
    return Temperature(
        exits,
        classes,
        repr(inner),
        temperatures=tuple(1 / beta for beta, _ in found),
        at_bound=tuple(bound for _, bound in found),
        nll_before=tuple(_mean_nll(now, wanted, 1.0) for now in scores),
        nll_after=tuple(_mean_nll(now, wanted, beta) for now, (beta, _) in zip(scores, found, strict=True)),
        rows=rows,
    )


def _scales_logits(rule: Rule[Any]) -> bool:
    return isinstance(rule, Latest | Caching)


def _fit_exit(scores: Tensor, labels: Tensor, low: float, high: float, exit: int) -> tuple[float, bool]:
    """The best β in [low, high] for softmax(β·scores), and whether it is a bound."""
    beta = min(max(1.0, low), high)
    slope, curvature, inside = _slope(scores, labels, beta)
    if not inside:
        raise LabelError(
            f"at exit {exit + 1} the rule gives probability 0 to every label",
            expected="rows whose label is in the rule's support",
            fix="check that labels and logits have the same row order and class indices",
        )
    for bound, sign in ((low, 1), (high, -1)):
        if slope * sign > 0 and _slope(scores, labels, bound)[0] * sign >= 0:
            return bound, True
    for _ in range(_STEPS):
        low, high = (low, beta) if slope > 0 else (beta, high)
        step = beta - slope / curvature if curvature > 0 else math.inf
        # A Newton step out of the bracket may not converge; bisection does.
        after = step if low < step < high else (low + high) / 2
        if slope == 0 or abs(after - beta) <= _PRECISION * beta:
            break
        beta = after
        slope, curvature, _ = _slope(scores, labels, beta)
    return beta, False


def _slope(scores: Tensor, labels: Tensor, beta: float) -> tuple[float, float, int]:
    """First and second derivative by β of the summed NLL over the labels inside the support, and their number."""
    slope, curvature, inside = 0.0, 0.0, 0
    for above, label in _blocks(scores, labels):
        kept = label > -math.inf
        above, label = above[kept], label[kept]
        probs = (beta * above).softmax(-1)
        # A class outside the support has probability zero, and zero times anything finite is zero.
        above = above.masked_fill(above == -math.inf, 0.0)
        mean = (probs * above).sum(-1)
        spread = (probs * (above - mean[:, None]).square()).sum(-1)
        slope, curvature = slope + float((mean - label).sum()), curvature + float(spread.sum())
        inside += int(kept.sum())
    return slope, curvature, inside


def _mean_nll(scores: Tensor, labels: Tensor, beta: float) -> float:
    total = 0.0
    for above, label in _blocks(scores, labels):
        total += float(nll(beta * label - (beta * above).logsumexp(-1)).sum())
    return total / len(labels)


def _blocks(scores: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores minus their largest, `(block, classes)` in float64, and those of the labels, `(block,)`."""
    for now, label in zip(torch.split(scores, _BLOCK), torch.split(labels, _BLOCK), strict=True):
        above = now.double()
        above = above - above.amax(-1, keepdim=True)
        yield above, above.gather(-1, label[:, None])[:, 0]

"""Temperature scaling: one number an exit, fitted on held-out rows by their negative log-likelihood (Guo et al.).

The NLL of softmax(β·f) is convex in β = 1/T, so the optimum is the one zero of its slope between the bounds; Newton steps
that never leave the bracket find it in float64. A product has temperatures too: those of its answers, p_m^(1/T_m). A label
outside its support has probability zero at every temperature and cannot say which is best: it counts in the NLL with the
floor of `anytime.metrics.nll`, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anytime.checks import check_labels, check_logits
from anytime.combine import Caching, Latest, Rule, Scaled, Tempered, parse_rule
from anytime.combine.base import LARGEST, SMALLEST
from anytime.errors import LabelError, OptionError
from anytime.fitted import Fitted
from anytime.metrics import nll

_BLOCK = 4096
_STEPS = 100
_PRECISION = 1e-10


@dataclass(frozen=True)
class Temperature(Fitted, kind="temperature"):
    """Temperatures of the exits, and how they were found.

    Args:
        exits: How many exits it was fitted for.
        classes: How many classes.
        inner: The rule it was fitted for, as text.
        temperatures: T, one an exit.
        at_bound: Whether the search ended at a bound, one an exit: the optimum lies beyond, or there is none (a network that
            is right on all rows wants to be ever surer).
        nll_before: Mean NLL on the fitted rows at temperature 1, one an exit.
        nll_after: Mean NLL on the fitted rows at these temperatures.
        rows: How many rows it was fitted on.
    """

    inner: str
    temperatures: tuple[float, ...]
    at_bound: tuple[bool, ...]
    nll_before: tuple[float, ...]
    nll_after: tuple[float, ...]
    rows: int

    def __post_init__(self) -> None:
        super().__post_init__()
        # The rule checks the numbers, also those that come from a file.
        self.rule().start(self.exits)

    def rule(self, inner: Rule[Any] | None = None) -> Rule[Any]:
        """A rule at these temperatures.

        Args:
            inner: The rule to put at them; by default the one they were fitted for. Temperatures of the softmax (fitted for
                `Latest` or `Caching`) scale the logits before any rule. Those of another rule's answers belong to that rule.
        """
        fitted = parse_rule(self.inner)
        if _scales_logits(fitted):
            return Scaled(fitted if inner is None else inner, self.temperatures)
        if inner is not None and inner != fitted:
            raise OptionError(
                f"these are temperatures of {fitted!r}, not of {inner!r}",
                expected="the rule they were fitted for",
                fix="fit_temperature(logits, labels, rule=...) fits them for another",
            )
        return Tempered(fitted, self.temperatures)


def fit_temperature(
    logits: Any, labels: Any, rule: Rule[Any] | None = None, *, bounds: tuple[float, float] = (0.01, 100.0)
) -> Temperature:
    """Fit a temperature an exit on held-out rows.

    Args:
        logits: `(exits, rows, classes)`, of rows that the network was not trained on.
        labels: `(rows,)`.
        rule: What to bring to its best temperatures. None and `Latest()` fit the softmax of each exit, and so does
            `Caching()`: the scaled exits are then cached. Any other rule is fitted as it is, by the temperature of its answers.
        bounds: The least and the largest temperature. Those of networks lie near 2, those of a ReLU product's first exits
            near 0.03.

    Example:
        >>> logits = torch.tensor([[[3.0, 0.0], [3.0, 0.0], [3.0, 0.0]]])
        >>> found = fit_temperature(logits, torch.tensor([0, 0, 1]))  # right twice of three times: log-odds of log 2
        >>> round(found.temperatures[0], 4), round(3 / math.log(2), 4)
        (4.3281, 4.3281)
    """
    given = check_logits(logits)
    exits, rows, classes = given.shape
    wanted = check_labels(labels, batch=rows, classes=classes, device=given.device)
    low, high = _check_bounds(bounds)
    if rows == 0:
        raise LabelError("there are no rows", expected="rows to learn from", fix="give held-out logits with labels")
    inner = Latest() if rule is None else rule
    if not isinstance(inner, Rule):
        raise OptionError(
            f"rule is {inner!r}", expected="a rule, such as Product()", fix="anytime.parse_rule('product') makes one"
        )
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
            expected="rows whose label the rule has not ruled out",
            fix="check that labels and logits share the rows and the class list",
        )
    for bound, sign in ((low, 1), (high, -1)):
        if slope * sign > 0 and _slope(scores, labels, bound)[0] * sign >= 0:
            return bound, True
    for _ in range(_STEPS):
        low, high = (low, beta) if slope > 0 else (beta, high)
        step = beta - slope / curvature if curvature > 0 else math.inf
        # A Newton step out of the bracket would not come nearer for sure; halving it does.
        after = step if low < step < high else (low + high) / 2
        if slope == 0 or abs(after - beta) <= _PRECISION * beta:
            break
        beta = after
        slope, curvature, _ = _slope(scores, labels, beta)
    return beta, False


def _slope(scores: Tensor, labels: Tensor, beta: float) -> tuple[float, float, int]:
    """First and second derivative by β of the summed NLL over the labels inside the support, and how many these are."""
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
    """Scores less their largest, `(block, classes)` in float64, and those of the labels, `(block,)`."""
    for now, label in zip(torch.split(scores, _BLOCK), torch.split(labels, _BLOCK), strict=True):
        above = now.double()
        above = above - above.amax(-1, keepdim=True)
        yield above, above.gather(-1, label[:, None])[:, 0]


def _check_bounds(bounds: Any) -> tuple[float, float]:
    try:
        low, high = (float(bound) for bound in bounds)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not SMALLEST <= low < high <= LARGEST:
        raise OptionError(
            f"bounds are {bounds!r}",
            expected=f"two temperatures, the lower first, from {SMALLEST:g} to {LARGEST:g}",
            fix="leave bounds out",
        )
    return low, high

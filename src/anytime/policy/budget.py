"""Budgeted batch classification: spend a mean cost per input where it helps most.

A fraction π_k ∝ q^k of the inputs is to leave at exit k. Thresholds on the confidence are found on validation rows, exit by
exit, so that these fractions leave; on other rows they decide input by input. A small q stops early, a large one late. The
protocol is that of the MSDNet papers; theirs stop in simulation only, `anytime.policy.run_batch` really does. Thresholds are
log-odds: probabilities round to 1 for many rows, and all of these would leave together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anytime.checks import check_costs, check_count, check_disjoint, check_labels
from anytime.combine import Prediction
from anytime.errors import OptionError, ShapeError
from anytime.policy.stopping import Confidence, FittedPolicy, Policy, as_probability, check_prediction

_HALVINGS = 50


@dataclass(frozen=True)
class BudgetPolicy(FittedPolicy, kind="budget policy"):
    """Thresholds that keep to a budget on the rows they were fitted on.

    Attributes:
        budget: The mean cost per input that was allowed.
        q: How the inputs are spread over the exits, π_k ∝ q^k; infinite where all may go to the last exit.
        log_odds: The least confidence to stop with at each exit, as log-odds; `inf` where nobody stops, `-inf` at the last.
        costs: What it costs to get to each exit.
        shares: The share of the rows that stopped at each exit.
        cost: Their mean cost.
        accuracy: The share of right answers among them, or None where there were no labels.
        rows: How many rows it was fitted on.
    """

    budget: float
    q: float
    log_odds: tuple[float, ...]
    costs: tuple[float, ...]
    shares: tuple[float, ...]
    cost: float
    accuracy: float | None
    rows: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_costs(self.costs, exits=self.exits)
        for name in ("log_odds", "shares"):
            if len(getattr(self, name)) != self.exits:
                raise OptionError(f"{name} are {getattr(self, name)}", expected=f"{self.exits} numbers", fix="fit it anew")
        self.policy.check_fits(self.exits, self.classes or 1)

    @property
    def policy(self) -> Policy:
        """Stop at the first exit whose threshold is reached."""
        return Confidence(self.log_odds, scale="log-odds")

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The least confidence to stop with at each exit, as a probability: to read, as it may round to 1."""
        return tuple(as_probability(odds) for odds in self.log_odds)


@dataclass(frozen=True)
class BudgetCurve:
    """What can be had for which mean cost: one entry a value of q.

    Attributes:
        q: The values, rising.
        cost: Mean cost per input on the test rows.
        accuracy: Share of right answers on the test rows.
        shares: The share of the test rows that stopped at each exit, one tuple a value of q.
        log_odds: The thresholds, one tuple per value of q, as log-odds.
    """

    q: tuple[float, ...]
    cost: tuple[float, ...]
    accuracy: tuple[float, ...]
    shares: tuple[tuple[float, ...], ...]
    log_odds: tuple[tuple[float, ...], ...]


def exit_shares(q: float, exits: int) -> Tensor:
    """The share of inputs that is to leave at each exit, π_k ∝ q^k; 0 is all at the first, `inf` all at the last.

    >>> exit_shares(0.5, 3).mul(7).tolist()
    [4.0, 2.0, 1.0]
    """
    if not q >= 0 or exits < 1:
        raise OptionError(f"q is {q!r} with {exits} exits", expected="q of at least 0, an exit or more", fix="try q=1")
    # q^k and its mirror image from the other end, so that neither end overflows.
    powers = torch.arange(exits, dtype=torch.float64)
    values = q**powers if q <= 1 else (1 / q) ** powers.flip(0)
    return values / values.sum()


def share_thresholds(log_probs: Any, shares: Any) -> tuple[float, ...]:
    """The log-odds from which on inputs stop, so that `shares` of these rows leave at each exit.

    At each exit but the last, of the rows still there, the ⌊rows · share⌋-th most confident sets the threshold, and all that
    reach it leave. Where that is more than there are left, all leave; where it is none, the threshold is `inf`. That of the
    last exit is `-inf`. `Confidence(thresholds, scale="log-odds")` stops by them.

    Args:
        log_probs: A rule's answers at all exits, `rule(logits)`, or their log-probabilities, `(exits, rows, classes)`.
        shares: One per exit, see `exit_shares`.

    Example:
        >>> log_probs = torch.tensor([[[0.9, 0.1], [0.6, 0.4]], [[0.5, 0.5], [0.7, 0.3]]]).log()
        >>> [round(limit, 4) for limit in share_thresholds(log_probs, (0.5, 0.5))]  # log(0.9 / 0.1)
        [2.1972, -inf]
    """
    odds = check_prediction(log_probs).log_odds.double()
    wanted = torch.as_tensor(shares, dtype=torch.float64)
    if wanted.shape != odds.shape[:1] or bool((wanted < 0).any()) or not abs(float(wanted.sum()) - 1) < 1e-6:
        raise OptionError(
            f"shares are {shares}", expected=f"{len(odds)} shares that sum to 1, one per exit", fix="see exit_shares"
        )
    return thresholds_of(odds, wanted)


def fit_budget(log_probs: Any, labels: Any = None, *, costs: Any, budget: float) -> BudgetPolicy:
    """Find thresholds that spend at most `budget` a row on these rows, and nearly all of it.

    On other rows of the same kind the mean cost is near the budget, not bounded by it.

    Args:
        log_probs: A rule's answers at all exits on validation rows, `rule(logits)`, or their log-probabilities,
            `(exits, rows, classes)`.
        labels: `(rows,)`, to note the accuracy; not needed.
        costs: What it costs to get to each exit, cumulative: MACs, milliseconds.
        budget: The mean cost per input, in the same unit.

    Example:
        >>> from anytime import Product, samples
        >>> held_out = samples.cifar100_msdnet().logits[:]
        >>> fit = fit_budget(Product()(held_out).log_probs, costs=range(1, 8), budget=3.0)
        >>> fit.cost <= 3.0, round(fit.q, 2)
        (True, 0.77)
    """
    answers = _checked(log_probs, "log_probs")
    exits, rows, classes = answers.log_probs.shape
    device = answers.log_probs.device
    price = check_costs(costs, exits=exits).to(device)
    if not budget >= float(price[0]):
        raise OptionError(
            f"the budget is {budget}",
            expected=f"at least {float(price[0]):g}, what the first exit costs",
            fix="allow more, or use a smaller network",
        )
    wanted = None if labels is None else check_labels(labels, batch=rows, classes=classes, device=device)
    sure = answers.log_odds.double()

    def spent(part: float) -> float:
        return float(price[first_reached(sure, thresholds_of(sure, exit_shares(_q(part), exits)))].mean())

    # The rounding of the shares to whole rows makes the cost rise in small steps back and forth: what is kept is a q whose
    # own cost was within the budget, not one between two that were.
    within, beyond = 0.0, 1.0
    if spent(beyond) <= budget:
        within = beyond
    for _ in range(_HALVINGS):
        middle = (within + beyond) / 2
        within, beyond = (middle, beyond) if spent(middle) <= budget else (within, middle)
    limits = thresholds_of(sure, exit_shares(_q(within), exits))
    found = first_reached(sure, limits)
    return BudgetPolicy(
        exits=exits,
        classes=classes,
        budget=float(budget),
        q=_q(within),
        log_odds=limits,
        costs=tuple(price.tolist()),
        shares=_shares(found, exits),
        cost=float(price[found].mean()),
        accuracy=None if wanted is None else _accuracy(answers, found, wanted),
        rows=rows,
    )


def budget_curve(validation: Any, log_probs: Any, labels: Any, *, costs: Any, points: int = 39) -> BudgetCurve:
    """Accuracy and mean cost on test rows for q = 1/20, 2/20, …, with thresholds from validation rows.

    Args:
        validation: A rule's answers at all exits on validation rows, `rule(logits)`, or their log-probabilities,
            `(exits, rows, classes)`.
        log_probs: The same rule's answers on other rows, `(exits, batch, classes)`.
        labels: Labels of those other rows, `(batch,)`.
        costs: What it costs to get to each exit, cumulative.
        points: How many values of q; the MSDNet papers take 39.
    """
    held, answers = _checked(validation, "validation"), _checked(log_probs, "log_probs")
    exits, batch, classes = answers.log_probs.shape
    device, (held_exits, _, held_classes) = answers.log_probs.device, held.log_probs.shape
    if (held_exits, held_classes) != (exits, classes):
        raise ShapeError(
            f"validation has {held_exits} exits and {held_classes} classes",
            expected=f"{exits} and {classes}, as the test rows have",
            fix="give the answers of the same model by the same rule",
        )
    wanted = check_labels(labels, batch=batch, classes=classes, device=device)
    price = check_costs(costs, exits=exits).to(device)
    check_count(points, "points")
    check_disjoint(_telling(held.log_probs), _telling(answers.log_probs), names=("the thresholds", "the test"))
    held_sure, sure = held.log_odds.double(), answers.log_odds.double()
    values = tuple(point / 20 for point in range(1, points + 1))
    limits = tuple(thresholds_of(held_sure, exit_shares(q, exits)) for q in values)
    found = [first_reached(sure, limit) for limit in limits]
    return BudgetCurve(
        q=values,
        cost=tuple(float(price[exit].mean()) for exit in found),
        accuracy=tuple(_accuracy(answers, exit, wanted) for exit in found),
        shares=tuple(_shares(exit, exits) for exit in found),
        log_odds=limits,
    )


def _checked(values: Any, name: str) -> Prediction:
    answers = check_prediction(values, name=name)
    if answers.log_probs.shape[1] == 0:
        raise ShapeError(f"{name} has no rows", expected="at least one", fix="give more rows")
    return answers


def thresholds_of(sure: Tensor, shares: Tensor) -> tuple[float, ...]:
    """The confidence at each exit from which on its share of the rows leaves, from log-odds `(exits, rows)`."""
    rows = sure.shape[1]
    limits = []
    here = torch.ones(rows, dtype=torch.bool, device=sure.device)
    for now, share in zip(sure[:-1], shares.tolist(), strict=False):
        left = now[here]
        leave = min(math.floor(rows * share + 1e-9), len(left))
        limits.append(float(left.topk(leave).values[-1]) if leave else math.inf)
        here &= now < limits[-1]
    return (*limits, -math.inf)


def first_reached(sure: Tensor, limits: tuple[float, ...]) -> Tensor:
    """The index of the first exit at which each row reaches the threshold."""
    reached = sure >= torch.tensor(limits, dtype=sure.dtype, device=sure.device)[:, None]
    return reached.int().argmax(0)


def _q(part: float) -> float:
    """The q that belongs to q / (1 + q), which has a beginning and an end."""
    return part / (1 - part) if part < 1 else math.inf


def _shares(found: Tensor, exits: int) -> tuple[float, ...]:
    return tuple((found.bincount(minlength=exits).double() / len(found)).tolist())


def _accuracy(answers: Prediction, found: Tensor, labels: Tensor) -> float:
    given = answers.labels[found, torch.arange(len(found), device=found.device)]
    return float((given == labels).double().mean())


def _telling(answers: Tensor) -> Tensor:
    """The rows that no other input would have by chance, with all their exits side by side.

    Where few classes are left, different inputs have equal answers: a single class with probability one, or a uniform
    distribution that only tells its support. Such rows hold hardly more different numbers than there are exits.
    """
    flat = answers.movedim(0, 1).flatten(1)
    ordered = flat.sort(-1).values
    different = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(-1)
    return flat[different > answers.shape[0] + 1][None]

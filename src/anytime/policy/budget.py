"""Budgeted batch classification: a mean cost per input, spent where it helps most.

A fraction π_k ∝ q^k of the inputs is to stop at exit k. Confidence thresholds that achieve these fractions are found on
validation rows, exit by exit; on other rows they decide per input. A small q stops early, a large q late. This is the
protocol of the MSDNet papers, which simulate stopping; `anytime.policy.run_batch` really stops. Thresholds are log-odds: many
confidences round to 1, and all of these rows would stop together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anytime.checks import check_costs, check_count, check_disjoint, check_labels
from anytime.errors import OptionError, ShapeError
from anytime.policy.stopping import Confidence, FittedPolicy, Policy, as_probability, check_prediction
from anytime.threads import one_thread_for_few

QS = tuple(point / 20 for point in range(1, 40))
"""The values of q along a budget curve, as in the MSDNet papers."""
_BISECTIONS = 50


@dataclass(frozen=True)
class BudgetPolicy(FittedPolicy, kind="budget-policy", version=2, oldest=1, renamed={"shares": "fractions"}):
    """Thresholds that keep a budget on the rows they were fitted on.

    Attributes:
        budget: The mean cost per input that was allowed.
        q: How the inputs are distributed over the exits, π_k ∝ q^k; infinite if all may reach the last exit.
        log_odds: The confidence from which inputs stop at each exit, as log-odds: `inf` if none stop, `-inf` at the last.
        costs: The cumulative cost of each exit.
        fractions: The fraction of the fitted rows that stopped at each exit.
        cost: Their mean cost.
        accuracy: Their accuracy, or None without labels.
        rows: The number of rows it was fitted on.
    """

    budget: float
    q: float
    log_odds: tuple[float, ...]
    costs: tuple[float, ...]
    fractions: tuple[float, ...]
    cost: float
    accuracy: float | None
    rows: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_costs(self.costs, exits=self.exits)
        self._check_lengths("log_odds", "fractions")

    @property
    def policy(self) -> Policy:
        """Stop at the first exit whose threshold is reached."""
        return Confidence(self.log_odds, scale="log-odds")

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The thresholds as probabilities, for display: they may round to 1."""
        return tuple(as_probability(odds) for odds in self.log_odds)


@dataclass(frozen=True)
class BudgetCurve:
    """Accuracy over mean cost: one entry per value of q.

    Attributes:
        q: The values, increasing.
        cost: Mean cost per test row.
        accuracy: Accuracy on the test rows.
        fractions: The fraction of the test rows that stopped at each exit, one tuple per value of q.
        log_odds: The thresholds, one tuple per value of q, as log-odds.
    """

    q: tuple[float, ...]
    cost: tuple[float, ...]
    accuracy: tuple[float, ...]
    fractions: tuple[tuple[float, ...], ...]
    log_odds: tuple[tuple[float, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """A plain document, without the thresholds: some are infinite, which JSON does not allow."""
        return {"q": self.q, "cost": self.cost, "accuracy": self.accuracy, "shares": self.fractions}


class BudgetTally:
    """Counts where test rows stop and whether they are correct there, block by block, for a `BudgetCurve`.

    Args:
        log_odds: Confidences of the validation rows, `(exits, rows)`, as log-odds: they give the thresholds.
        qs: The values of q.
    """

    def __init__(self, log_odds: Tensor, qs: Sequence[float] = QS) -> None:
        self._qs, exits = tuple(qs), len(log_odds)
        self._limits = tuple(fraction_thresholds(log_odds, exit_fractions(q, exits)) for q in self._qs)
        self._stopped = torch.zeros(len(self._qs), exits, dtype=torch.float64)
        self._correct = torch.zeros(len(self._qs), dtype=torch.float64)

    def add(self, log_odds: Tensor, correct: Tensor) -> None:
        """Count test rows by their confidences and whether they are correct at each exit, both `(exits, rows)`."""
        log_odds = log_odds.double()
        for index, limits in enumerate(self._limits):
            exit = first_reached(log_odds, limits)
            self._stopped[index] += exit.bincount(minlength=len(log_odds)).cpu()
            self._correct[index] += correct.gather(0, exit[None]).sum().cpu()

    def curve(self, costs: Tensor) -> BudgetCurve:
        """The curve of the rows counted so far, with the cumulative cost of each exit."""
        rows = self._stopped.sum(1)
        fractions = self._stopped / rows[:, None]
        return BudgetCurve(
            q=self._qs,
            cost=tuple((fractions @ costs.cpu()).tolist()),
            accuracy=tuple((self._correct / rows).tolist()),
            fractions=tuple(tuple(each) for each in fractions.tolist()),
            log_odds=self._limits,
        )


def exit_fractions(q: float, exits: int) -> Tensor:
    """The fraction of inputs that is to stop at each exit, π_k ∝ q^k; with 0 all at the first, with `inf` all at the last.

    >>> exit_fractions(0.5, 3).mul(7).tolist()
    [4.0, 2.0, 1.0]
    """
    if not q >= 0 or exits < 1:
        raise OptionError(f"q is {q!r} with {exits} exits", expected="q of at least 0, and at least one exit", fix="pass q=1")
    # Powers of 1/q from the other end, so that neither end overflows.
    powers = torch.arange(exits, dtype=torch.float64)
    values = q**powers if q <= 1 else (1 / q) ** powers.flip(0)
    return values / values.sum()


def fraction_thresholds(log_odds: Tensor, fractions: Any) -> tuple[float, ...]:
    """The log-odds from which inputs stop, so that these fractions of the rows stop at each exit.

    At each exit but the last, the ⌊rows · fraction⌋-th most confident of the remaining rows sets the threshold, and all that
    reach it stop; `inf` if none are to stop. The last exit's threshold is `-inf`. `Confidence(thresholds, scale="log-odds")`
    stops by them.

    Args:
        log_odds: Confidences, `(exits, rows)`: `rule(logits).log_odds`.
        fractions: One per exit, see `exit_fractions`.

    Example:
        >>> log_odds = torch.tensor([[2.2, 0.4], [0.0, 0.8]], dtype=torch.float64)
        >>> fraction_thresholds(log_odds, (0.5, 0.5))
        (2.2, -inf)
    """
    wanted = torch.as_tensor(fractions, dtype=torch.float64)
    if wanted.shape != log_odds.shape[:1] or bool((wanted < 0).any()) or not abs(float(wanted.sum()) - 1) < 1e-6:
        raise OptionError(
            f"fractions are {fractions}",
            expected=f"{len(log_odds)} fractions that sum to 1, one per exit",
            fix=f"pass exit_fractions(q=1.0, exits={len(log_odds)})",
        )
    rows = log_odds.shape[1]
    limits = []
    here = torch.ones(rows, dtype=torch.bool, device=log_odds.device)
    for now, fraction in zip(log_odds[:-1].double(), wanted.tolist(), strict=False):
        left = now[here]
        leave = min(math.floor(rows * fraction + 1e-9), len(left))
        limits.append(float(left.topk(leave).values[-1]) if leave else math.inf)
        here &= now < limits[-1]
    return (*limits, -math.inf)


@one_thread_for_few
def fit_budget_policy(log_probs: Any, labels: Any = None, *, costs: Any, budget: float) -> BudgetPolicy:
    """Find thresholds that spend at most `budget` per row on these rows, and nearly all of it.

    On other rows from the same source the mean cost is near the budget, not bounded by it.

    Args:
        log_probs: A rule's predictions at all exits on validation rows, `rule(logits)`, or their log-probabilities,
            `(exits, rows, classes)`.
        labels: `(rows,)`; optional, to record the accuracy.
        costs: The cumulative cost of each exit: MACs, milliseconds.
        budget: The mean cost per input, in the same unit.

    Example:
        >>> from anytime import Product, samples
        >>> held_out = samples.cifar100_msdnet().logits[:]
        >>> fit = fit_budget_policy(Product()(held_out).log_probs, costs=range(1, 8), budget=3.0)
        >>> fit.cost <= 3.0, round(fit.q, 2)
        (True, 0.77)
    """
    answers = check_prediction(log_probs, rows=True)
    exits, rows, classes = answers.log_probs.shape
    device = answers.log_probs.device
    price = check_costs(costs, exits=exits).to(device)
    if not budget >= float(price[0]):
        raise OptionError(
            f"the budget is {budget}",
            expected=f"at least {float(price[0]):g}, the cost of the first exit",
            fix="allow more, or use a smaller network",
        )
    wanted = None if labels is None else check_labels(labels, batch=rows, classes=classes, device=device)
    confidence = answers.log_odds.double()

    def stops(part: float) -> tuple[tuple[float, ...], Tensor]:
        limits = fraction_thresholds(confidence, exit_fractions(_q(part), exits))
        return limits, first_reached(confidence, limits)

    def within_budget(part: float) -> bool:
        return float(price[stops(part)[1]].mean()) <= budget

    # Fractions are rounded to whole rows, so the cost is not quite monotone in q: the q that is kept has been checked itself.
    within, beyond = (1.0 if within_budget(1.0) else 0.0), 1.0
    for _ in range(_BISECTIONS):
        middle = (within + beyond) / 2
        within, beyond = (middle, beyond) if within_budget(middle) else (within, middle)
    limits, found = stops(within)
    given = answers.labels.gather(0, found[None])[0]
    return BudgetPolicy(
        exits=exits,
        classes=classes,
        budget=float(budget),
        q=_q(within),
        log_odds=limits,
        costs=tuple(price.tolist()),
        fractions=tuple((found.bincount(minlength=exits).double() / rows).tolist()),
        cost=float(price[found].mean()),
        accuracy=None if wanted is None else float((given == wanted).double().mean()),
        rows=rows,
    )


def budget_curve(validation: Any, log_probs: Any, labels: Any, *, costs: Any, points: int = 39) -> BudgetCurve:
    """Accuracy and mean cost on test rows for q = 1/20, 2/20, …, with thresholds from validation rows.

    Args:
        validation: A rule's predictions at all exits on validation rows, `rule(logits)`, or their log-probabilities,
            `(exits, rows, classes)`.
        log_probs: The same rule's predictions on other rows, `(exits, batch, classes)`.
        labels: Labels of these other rows, `(batch,)`.
        costs: The cumulative cost of each exit.
        points: The number of values of q; the MSDNet papers use 39.
    """
    held = check_prediction(validation, name="validation", rows=True)
    answers = check_prediction(log_probs, rows=True)
    exits, batch, classes = answers.log_probs.shape
    device, (held_exits, _, held_classes) = answers.log_probs.device, held.log_probs.shape
    if (held_exits, held_classes) != (exits, classes):
        raise ShapeError(
            f"validation has {held_exits} exits and {held_classes} classes",
            expected=f"{exits} exits and {classes} classes, like the test rows",
            fix="pass predictions of the same model and rule",
        )
    wanted = check_labels(labels, batch=batch, classes=classes, device=device)
    price = check_costs(costs, exits=exits)
    check_count(points, "points")
    check_disjoint(_distinctive(held.log_probs), _distinctive(answers.log_probs), names=("the thresholds", "the test"))
    tally = BudgetTally(held.log_odds, [point / 20 for point in range(1, points + 1)])
    tally.add(answers.log_odds, answers.labels == wanted)
    return tally.curve(price)


def first_reached(log_odds: Tensor, limits: tuple[float, ...]) -> Tensor:
    """The index of the first exit at which each row reaches the threshold."""
    reached = log_odds >= torch.tensor(limits, dtype=log_odds.dtype, device=log_odds.device)[:, None]
    return reached.int().argmax(0)


def _q(part: float) -> float:
    """Q from q / (1 + q), which is between 0 and 1."""
    return part / (1 - part) if part < 1 else math.inf


def _distinctive(answers: Tensor) -> Tensor:
    """The rows that no other input would have by chance, with all their exits side by side.

    With few classes left, different inputs have equal predictions: one class with probability 1, or a uniform distribution over
    the support. Such rows hold hardly more distinct numbers than there are exits.
    """
    flat = answers.movedim(0, 1).flatten(1)
    ordered = flat.sort(-1).values
    distinct = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(-1)
    return flat[distinct > answers.shape[0] + 1][None]

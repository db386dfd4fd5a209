"""The fitted product: each exit's softmax and the previous answer, each to a power of its own.

p_m ∝ p_{m-1}^{a_m} · softmax(f_m)^{b_m}, with a and b fitted on held-out rows by `anytime.fit_product`. With a margin it holds
answers: it keeps p_{m-1} where the label would stay the same and not be more certain by that margin. Its state is one number
per class, as the product's. Every class keeps some probability, so it never collapses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anytime.checks import check_number
from anytime.combine.activations import below_best
from anytime.combine.base import LARGEST, Rule, never_fell_back, positive_numbers
from anytime.combine.prediction import Prediction, State, log_odds, top_class
from anytime.errors import OptionError

_FIX = "find them with anytime.fit_product"


@dataclass(frozen=True)
class Powers(Rule[State]):
    """p_m ∝ p_{m-1}^{a_m} · softmax(f_m)^{b_m}: the fitted product.

    Args:
        past: a, one positive number per exit: the power of the previous answer. The first is not used.
        now: b, one positive number per exit: the power of the exit's own softmax.
        margin: Keep the previous answer in rows where the new one has the same label, unless its log-odds are larger by this
            much; so the confidence in a label drops only where the label changes. None keeps no answers.

    Example:
        >>> rule = Powers(past=(1.0, 0.5), now=(1.0, 0.5))
        >>> rule(torch.tensor([[[0.0, 2.0]], [[2.0, 0.0]]])).probs[1].round(decimals=4).tolist()
        [[0.5, 0.5]]
    """

    past: tuple[float, ...]
    now: tuple[float, ...]
    margin: float | None = None

    def __post_init__(self) -> None:
        if self.margin is not None:
            object.__setattr__(self, "margin", check_number(self.margin, "margin", low=0, most=LARGEST))
        object.__setattr__(self, "past", positive_numbers("past", self.past, fix=_FIX))
        object.__setattr__(self, "now", positive_numbers("now", self.now, fix=_FIX))
        if len(self.past) != len(self.now):
            raise OptionError(
                f"got {len(self.past)} powers in past and {len(self.now)} in now",
                expected="one of each per exit",
                fix="add a number for the first exit to past; it is not used",
            )

    @property
    def exits(self) -> int:
        """The number of exits that the rule was fitted for."""
        return len(self.now)

    def _update(self, state: State, logits: Tensor) -> tuple[State, Prediction]:
        exit = state.seen
        # A constant per row cancels, so nothing is normalised, and nothing rounded, before the label is taken.
        total = multiply(state.memory, below_best(logits), self.past[exit], self.now[exit])
        if self.margin is not None and state.memory is not None:
            total = held(state.memory, total, self.margin)
        prediction = Prediction(total.log_softmax(-1), never_fell_back(logits), top_class(total))
        return State(state.exits, exit + 1, below_best(total)), prediction


def multiply(before: Tensor | None, exit: Tensor, past: float | Tensor, now: float | Tensor) -> Tensor:
    """Logarithm of before^past · exit^now, up to a constant per row; the powers may be trained."""
    # Far below any probability that matters, and far enough above -inf for a sum of two to keep every class in.
    lowest = torch.finfo(exit.dtype).min / 4
    total = (now * exit).clamp(min=lowest)
    if before is not None:
        total = total + (past * before).clamp(min=lowest)
    return total


def held(before: Tensor, now: Tensor, margin: float) -> Tensor:
    """The second of two answers, or the first where both have one label and the second is not more certain by the margin.

    Answers are logarithms up to a constant per row.
    """
    label = top_class(before)
    kept = (top_class(now) == label) & (log_odds(now, label) < log_odds(before, label) + margin)
    return torch.where(kept[:, None], before, now)

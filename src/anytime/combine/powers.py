"""The fitted product: each exit's softmax and the answer before it, each to a power of its own.

p_m ∝ p_{m-1}^{a_m} · softmax(f_m)^{b_m}, with a and b fitted on held-out rows by `anytime.calibrate.fit_product`. It keeps what
the product keeps, one number a class, and can be as calibrated as a temperature makes it or as steady as the powers allow.
Every class keeps some probability, so it never collapses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anytime.combine.activations import below_best
from anytime.combine.rules import Prediction, Rule, State, top_class
from anytime.combine.scaled import check_exits, positive_numbers
from anytime.errors import OptionError

_FIX = "let anytime.calibrate.fit_product find them"


@dataclass(frozen=True)
class Powers(Rule[State]):
    """p_m ∝ p_{m-1}^{a_m} · softmax(f_m)^{b_m}: the fitted product.

    Args:
        past: a, one positive number an exit: how much of the answer before counts. The first is not used.
        now: b, one positive number an exit: how much the exit itself counts.

    Example:
        >>> rule = Powers(past=(1.0, 0.5), now=(1.0, 0.5))
        >>> rule(torch.tensor([[[0.0, 2.0]], [[2.0, 0.0]]])).probs[1].round(decimals=4).tolist()
        [[0.5, 0.5]]
    """

    past: tuple[float, ...]
    now: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "past", positive_numbers("past", self.past, fix=_FIX))
        object.__setattr__(self, "now", positive_numbers("now", self.now, fix=_FIX))
        if len(self.past) != len(self.now):
            raise OptionError(
                f"{len(self.past)} powers of the past came with {len(self.now)} of the exits",
                expected="as many of each as there are exits",
                fix="give the first exit a power of the past too; it is not used",
            )

    @property
    def exits(self) -> int:
        """How many exits it was fitted for."""
        return len(self.now)

    def start(self, exits: int) -> State:
        """The state before the first of `exits` exits."""
        state = super().start(exits)
        check_exits(self, self.exits, exits)
        return state

    def _update(self, state: State, logits: Tensor) -> tuple[State, Prediction]:
        exit = state.seen
        # A number for each row cancels, so nothing is normalised, and nothing rounded, before the label is named.
        total = multiply(state.memory, below_best(logits), self.past[exit], self.now[exit])
        never = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
        prediction = Prediction(total.log_softmax(-1), never, top_class(total))
        return State(state.exits, exit + 1, below_best(total)), prediction


def multiply(before: Tensor | None, exit: Tensor, past: float | Tensor, now: float | Tensor) -> Tensor:
    """Logarithm of before^past · exit^now, up to a number for each row; the powers may be trained."""
    # Far below any probability that matters, and far enough above -inf for a sum of two to keep every class in.
    lowest = torch.finfo(exit.dtype).min / 4
    total = (now * exit).clamp(min=lowest)
    if before is not None:
        total = total + (past * before).clamp(min=lowest)
    return total

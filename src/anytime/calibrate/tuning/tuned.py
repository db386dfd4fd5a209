"""A rule that was chosen on held-out rows, saved with what it was chosen for and which rows it has seen.

The rows are kept as fingerprints, eight bytes each: a certificate or a test on the very rows that made the choice is refused.
Files of version 1 hold fingerprints of the first exit alone, which differ between precisions; they are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from anytime.checks import check_logits, shared_rows
from anytime.combine import Prediction, Rule, parse_rule
from anytime.fitted import Fitted


@dataclass(frozen=True, eq=False)
class TunedRule(Fitted, kind="rule", version=2):
    """A rule and where it comes from; it can be called on logits, like the rule itself.

    Args:
        exits: How many exits it was tuned for.
        classes: How many classes.
        text: The rule, as `anytime.parse_rule` reads it.
        name: What it is called in the table it was chosen from.
        wish: What was asked for, in words.
        figures: What it did on the rows it was chosen on; it was chosen for them, so expect a little less elsewhere.
        rows: How many rows it has seen: for fitting, for choosing, and for a promise that the choice waited for.
        seed: Of the split between the first two.
        seen: The fingerprints of these rows.
    """

    text: str
    name: str
    wish: str
    figures: dict[str, float]
    rows: int
    seed: int
    seen: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_rule(self.text)

    @property
    def rule(self) -> Rule[Any]:
        """The rule."""
        return parse_rule(self.text)

    def __call__(self, logits: Any) -> Prediction:
        """The prediction at every exit from logits `(exits, batch, classes)` of the model it was tuned for."""
        values = check_logits(logits)
        self.check_fits(values.shape[0], values.shape[2])
        return self.rule.combine(values)

    def unseen(self, prints: Tensor, *, purpose: str) -> Tensor:
        """Which rows, by their `fingerprints`, it was not tuned on, `(rows,)`; refused where one in a hundred or more are."""
        return unseen(self.seen, prints, purpose=purpose)


def unseen(seen: Tensor, prints: Tensor, *, purpose: str) -> Tensor:
    """Which rows are not among those that a rule was tuned on; see `TunedRule.unseen`."""
    return ~shared_rows(prints, seen, names=(f"rows for {purpose}", "those the rule was tuned on"))

"""A rule chosen on held-out rows, saved with its objective and the rows it has seen.

The rows are kept as fingerprints, eight bytes each, so that a certificate or a test on the same rows is refused. Files of
version 1 hold fingerprints of the first exit only, which differ between precisions; they are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from anytime.checks import check_logits, check_shared, shared_rows
from anytime.combine import Prediction, Rule, parse_rule
from anytime.fitted import Fitted


@dataclass(frozen=True, eq=False)
class TunedRule(Fitted, kind="tuned-rule", version=3, oldest=2, renamed={"wish": "objective", "figures": "metrics"}):
    """A tuned rule and its origin; it can be called on logits, like the rule itself.

    Args:
        text: The rule, as `anytime.parse_rule` reads it.
        name: Its name in the table it was chosen from.
        objective: What was optimised, in words.
        metrics: Its metrics on the rows it was chosen on; expect slightly worse ones elsewhere.
        rows: The number of rows it has seen: for fitting, for choosing, and for the guarantee if the choice depended on one.
        seed: Of the split between the first two.
        seen: The fingerprints of these rows.
    """

    text: str
    name: str
    objective: str
    metrics: dict[str, float]
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
        """The predictions at every exit, from logits `(exits, batch, classes)` of the model it was tuned for."""
        values = check_logits(logits)
        self.check_fits(values.shape[0], values.shape[2])
        return self.rule.combine(values)

    def unseen(self, prints: Tensor, *, purpose: str) -> Tensor:
        """Which rows, by their `fingerprints`, it was not tuned on, `(rows,)`; an error if 1 % or more were."""
        return unseen(self.seen, prints, purpose=purpose)

    def check_unseen(self, count: int, rows: int, *, purpose: str) -> None:
        """Raise if it was tuned on so many of these rows: 1 % or more."""
        check_shared(count, rows, names=_names(purpose))


def unseen(seen: Tensor, prints: Tensor, *, purpose: str) -> Tensor:
    """Which rows a rule was not tuned on; see `TunedRule.unseen`."""
    return ~shared_rows(prints, seen, names=_names(purpose))


def _names(purpose: str) -> tuple[str, str]:
    return f"rows for {purpose}", "those the rule was tuned on"

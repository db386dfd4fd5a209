"""A rule that was chosen on held-out rows, saved with what it was chosen for and which rows it has seen.

The rows are kept as fingerprints, eight bytes each: a certificate or a test on the very rows that made the choice is refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anytime.checks import check_logits
from anytime.combine import Prediction, Rule, rule
from anytime.errors import OverlapError
from anytime.fitted import Fitted


@dataclass(frozen=True, eq=False)
class TunedRule(Fitted, kind="rule"):
    """A rule and where it comes from; it can be called on logits, like the rule itself.

    Args:
        exits: How many exits it was tuned for.
        classes: How many classes.
        text: The rule, as `anytime.rule` reads it.
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
        rule(self.text)

    @property
    def rule(self) -> Rule[Any]:
        """The rule."""
        return rule(self.text)

    def __call__(self, logits: Any) -> Prediction:
        """The prediction at every exit from logits `(exits, batch, classes)` of the model it was tuned for."""
        values = check_logits(logits)
        self.check_fits(values.shape[0], values.shape[2])
        return self.rule.combine(values)

    def check_unseen(self, logits: Tensor, *, purpose: str) -> None:
        """Refuse rows that the rule was fitted or chosen on."""
        check_unseen(self.seen, logits, purpose=purpose)


def fingerprints(logits: Tensor) -> Tensor:
    """One number a row of `(exits, batch, classes)`, equal where the rows agree to the last bit at the first exit."""
    rows = logits[0].detach().cpu().contiguous().numpy()
    digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
    return torch.frombuffer(bytearray(digests), dtype=torch.int64) if digests else torch.zeros(0, dtype=torch.int64)


def check_unseen(seen: Tensor, logits: Tensor, *, purpose: str) -> None:
    """Refuse rows whose fingerprints are among `seen`."""
    again = int(torch.isin(fingerprints(logits), seen).sum())
    if again:
        raise OverlapError(
            f"{again} of the {logits.shape[1]} rows for {purpose} are among those the rule was tuned on",
            expected="rows that the tuning has not seen",
            fix="keep some rows back before tuning: split them by lot, e.g. torch.randperm(rows).chunk(2)",
        )

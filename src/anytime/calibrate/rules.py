"""Rules with fitted parameters, as files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from anytime.combine import Rule, parse_rule
from anytime.fitted import Fitted


@dataclass(frozen=True)
class FittedRule(Fitted, kind="fitted-rule"):
    """A rule with fitted parameters, as a file.

    Args:
        exits: The number of exits it was fitted for.
        classes: The number of classes, or None if it does not depend on it.
        text: The rule, as text.

    Example:
        >>> from anytime.combine import Geometric
        >>> FittedRule.of(Geometric.plain(3), exits=3).rule == Geometric.plain(3)
        True
    """

    text: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rule.start(self.exits)  # checks the number of exits

    @classmethod
    def of(cls, rule: Rule[Any], *, exits: int, classes: int | None = None) -> Self:
        """Wrap a rule, such as those that `fit_geometric` and `fit_arithmetic` return."""
        return cls(exits, classes, repr(rule))

    @property
    def rule(self) -> Rule[Any]:
        """The rule."""
        return parse_rule(self.text)

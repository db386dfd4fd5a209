"""Fitted rules as files, and the rule of any object that has one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from anytime.combine import Rule, parse_rule
from anytime.errors import OptionError
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


def as_rule(given: Any, *, exits: int | None = None, classes: int | None = None) -> Rule[Any]:
    """The rule of whatever a caller passes as one: a rule, its text, or a fitted object with a `rule`.

    Args:
        given: The rule.
        exits: Of the logits it is for, if known: a fitted object is checked against them.
        classes: Likewise.

    Example:
        >>> as_rule("product") == as_rule(FittedRule(2, None, "product"))
        True
    """
    if isinstance(given, str):
        return parse_rule(given)
    found = getattr(given, "rule", None) if isinstance(given, Fitted) else given
    if not isinstance(found, Rule):
        raise OptionError(
            f"the rule is {given!r}",
            expected="a rule such as anytime.Product(), its text, or a fitted object with a rule",
            fix="pass an instance: Product(), not Product",
        )
    if isinstance(given, Fitted) and exits is not None and classes is not None:
        given.check_fits(exits, classes)
    return found

"""The rules of an evaluation as the report shows them: their names, their looks, and which of them plays which part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from anytime.report.svg.chart import Look, look

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation

# The three rules of the paper look the same in every report; the others take what is left.
_OWN_LOOK = {"latest": 0, "caching": 1, "product": 2}


def shown(rule: str) -> str:
    """The name for sentences: `Product` for a plain name, and what the user wrote for anything longer."""
    return rule.capitalize() if rule.isalpha() and rule.isascii() else rule


def looks(rules: Iterable[str]) -> dict[str, Look]:
    """A look for each rule, no two alike."""
    names = list(rules)
    free = (index for index in range(3 + len(names)) if index not in {_OWN_LOOK[name] for name in names if name in _OWN_LOOK})
    return {name: look(_OWN_LOOK[name] if name in _OWN_LOOK else next(free)) for name in names}


def base(evaluation: Evaluation) -> str:
    """The rule to compare with: `latest`, which is the model as it is, or else the first."""
    return "latest" if "latest" in evaluation.rules else next(iter(evaluation.rules))


def like(evaluation: Evaluation, kind: str) -> str | None:
    """The rule of a kind (`product`, `caching`): the plain one, or else the first with options; never the base."""
    others = [rule for rule in evaluation.rules if rule != base(evaluation)]
    plain = [rule for rule in others if rule == kind]
    return next(iter(plain + [rule for rule in others if rule.lower().startswith(kind)]), None)


def drops(evaluation: Evaluation, rule: str) -> Mapping[str, float]:
    """Percent of inputs by how far the probability falls: the true class's, or without labels the final answer's."""
    found = evaluation.rules[rule]
    return found.final_drop_percent if found.label_drop_percent is None else found.label_drop_percent


def followed(evaluation: Evaluation) -> str:
    """Whose probability is followed over the exits."""
    return "true class" if evaluation.labelled else "final answer"


def reaching(evaluation: Evaluation, limit: str) -> str:
    """What counts as a fall of that size, in words: `0.5 or more`, or under the strict setting `more than 0.5`."""
    return f"{limit} or more" if sign(evaluation) == "≥" else f"more than {limit}"


def sign(evaluation: Evaluation) -> str:
    """`≥`, or `>` under the strict setting."""
    return ">" if str(evaluation.settings.get("drops_counted", "")).startswith("above") else "≥"

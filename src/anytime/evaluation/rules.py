"""The rules of an evaluation as pages show them: names, looks, and the rule to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from anytime.display.chart import Look, look

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation

# The three rules of the paper look the same in every report; the others get the remaining looks.
_OWN_LOOK = {"latest": 0, "caching": 1, "product": 2}


def shown(rule: str) -> str:
    """The name for text: `Product` for a plain name, anything longer unchanged."""
    return rule.capitalize() if rule.isalpha() and rule.isascii() else rule


def looks(rules: Iterable[str], only: Iterable[str] | None = None) -> dict[str, Look]:
    """A different look for each rule, or for some of them."""
    names = list(rules)
    free = (index for index in range(3 + len(names)) if index not in {_OWN_LOOK[name] for name in names if name in _OWN_LOOK})
    found = {name: look(_OWN_LOOK[name] if name in _OWN_LOOK else next(free)) for name in names}
    return found if only is None else {name: found[name] for name in only}


def base(evaluation: Evaluation) -> str:
    """The rule to compare with: `latest`, which is the model as it is, otherwise the first."""
    return "latest" if "latest" in evaluation.rules else next(iter(evaluation.rules))


def like(evaluation: Evaluation, kind: str) -> str | None:
    """The rule of a kind (`product`, `caching`): the plain one, otherwise the first with options; never the base."""
    others = [rule for rule in evaluation.rules if rule != base(evaluation)]
    return next(
        iter([rule for rule in others if rule == kind] + [rule for rule in others if rule.lower().startswith(kind)]), None
    )


def drops(evaluation: Evaluation, rule: str) -> Mapping[str, float]:
    """Percent of inputs by size of drop of the true class's probability, or of the final answer's without labels."""
    found = evaluation.rules[rule]
    return found.final_drop_percent if found.label_drop_percent is None else found.label_drop_percent


def followed(evaluation: Evaluation) -> str:
    """The class whose probability `drops` is about."""
    return "true class" if evaluation.labelled else "final answer"


def reaching(evaluation: Evaluation, limit: str) -> str:
    """A drop of at least `limit` in words: `0.5 or more`, or with strict counting `more than 0.5`."""
    return f"{limit} or more" if sign(evaluation) == "≥" else f"more than {limit}"


def sign(evaluation: Evaluation) -> str:
    """`≥`, or `>` with strict counting."""
    return ">" if str(evaluation.settings.get("drops_counted", "")).startswith("above") else "≥"

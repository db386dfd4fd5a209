"""Rules on the command line: by name, or from a file that tuning or fitting saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytime.errors import FormatError, OptionError
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from anytime.calibrate import TunedRule
    from anytime.combine import Rule
    from anytime.evaluation import LogitsFile


def rules_from(text: str, source: LogitsFile | None) -> dict[str, Rule[Any] | TunedRule]:
    """The rules in a comma-separated list, by their texts; what ends in `.json` is a file.

    Args:
        text: Such as `latest,product(clipped(2), weights=ones),tuned/rule.json`.
        source: The logits they are for: a tuned rule refuses another model's, and the rows it was tuned on. None leaves that
            to the evaluation.
    """
    from anytime.combine.named import split_rules

    found: dict[str, Rule[Any] | TunedRule] = {}
    for part in split_rules(text):
        if part in found:
            raise OptionError(f"rule {part!r} appears twice", expected="each rule once", fix=f"remove one {part!r}")
        found[part] = rule_from(part, source)
    return found


def rule_files(text: str) -> list[Path]:
    """The files among the rules of a comma-separated list."""
    from anytime.combine.named import split_rules

    return [Path(part) for part in split_rules(text) if part.endswith(".json")]


def rule_from(text: str, source: LogitsFile | None, *, purpose: str = "this test") -> Rule[Any] | TunedRule:
    """One rule, by name or from a file; see `rules_from`. A tuned rule must not know the rows that serve this purpose."""
    from anytime.calibrate import TunedRule
    from anytime.evaluation.blocks import LogitRows

    loaded = read_rule(text)
    if isinstance(loaded, TunedRule) and source is not None and source.logits.ndim == 3:
        loaded.check_fits(source.logits.shape[0], source.logits.shape[2])
        new = loaded.unseen(LogitRows(source.logits, None).fingerprints(), purpose=f"{purpose} (in {source.path.name})")
        if count := int((~new).sum()):
            print(f"anytime: {text} was tuned on {count} of the rows of {source.path.name}", file=sys.stderr)
    return loaded


def read_rule(text: str) -> Rule[Any] | TunedRule:
    """A rule by name, or the rule in the file of a fitted object; a tuned rule is returned as such."""
    import anytime
    from anytime.calibrate import TunedRule
    from anytime.combine import Rule, parse_rule

    if not text.endswith(".json"):
        return parse_rule(text)
    loaded = anytime.load(text)
    found = getattr(loaded, "rule", None)
    if not isinstance(found, Rule):
        raise FormatError(
            f"{text} contains a {loaded.kind}, which has no rule",
            expected="a rule that `anytime tune` chose, or another fitted rule",
            fix="pass the rule.json of its folder",
            path=text,
        )
    return loaded if isinstance(loaded, TunedRule) else found

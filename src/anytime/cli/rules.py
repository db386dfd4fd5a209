"""Rules on the command line: named, or read from a file that tuning or fitting saved."""

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


def rules_from(text: str, source: LogitsFile) -> dict[str, Rule[Any] | TunedRule]:
    """The rules in a list with commas; what ends in `.json` is a file. Each is under the text that names it.

    Args:
        text: Such as `latest,product(clipped(2), weights=ones),tuned/rule.json`.
        source: The logits they are for: a tuned rule refuses another model's, and rows it was tuned on.
    """
    found: dict[str, Rule[Any] | TunedRule] = {}
    for part in split(text):
        if part in found:
            raise OptionError(f"rule {part!r} is named twice", expected="each rule once", fix="leave one out")
        found[part] = rule_from(part, source)
    return found


def rule_files(text: str) -> list[Path]:
    """The files among the rules of a list with commas."""
    return [Path(part) for part in split(text) if part.endswith(".json")]


def rule_from(text: str, source: LogitsFile) -> Rule[Any] | TunedRule:
    """One rule, named or from a file; see `rules_from`."""
    from anytime.calibrate import TunedRule
    from anytime.combine import parse_rule
    from anytime.evaluation.blocks import LogitRows

    if not text.endswith(".json"):
        return parse_rule(text)
    loaded = load_rule(Path(text))
    if isinstance(loaded, TunedRule) and source.logits.ndim == 3:
        loaded.check_fits(source.logits.shape[0], source.logits.shape[2])
        new = loaded.unseen(LogitRows(source.logits, None).fingerprints(), purpose=f"this test (in {source.path.name})")
        if count := int((~new).sum()):
            print(f"anytime: {count} of the rows of {source.path.name} are among those {text} was tuned on", file=sys.stderr)
    return loaded


def load_rule(path: Path) -> Rule[Any] | TunedRule:
    """The rule in the file of a fitted object; a tuned rule is returned as such."""
    import anytime
    from anytime.calibrate import TunedRule
    from anytime.combine import Rule

    loaded = anytime.load(path)
    found = getattr(loaded, "rule", None)
    if not isinstance(found, Rule):
        raise FormatError(
            f"{path} contains a {loaded.kind}, which has no rule",
            expected="a rule that `anytime tune` chose, or another fitted rule",
            fix="pass the rule.json of its folder",
            path=path,
        )
    return loaded if isinstance(loaded, TunedRule) else found


def split(text: str) -> list[str]:
    """The parts of a list with commas, where a comma inside brackets or quotes belongs to its part.

    >>> split("latest, product(clipped(2), weights=ones),tuned/rule.json")
    ['latest', 'product(clipped(2), weights=ones)', 'tuned/rule.json']
    """
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        depth += 0 if quote else (sign in "([") - (sign in ")]")
        if sign == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]

"""The language of DESIGN.md: plain technical English, without the terms that this project once used in place of the field's.

Every text a person reads is checked: source files (identifiers included), templates, the documentation and the README.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    [
        *(path for path in (ROOT / "src").rglob("*") if path.suffix in {".py", ".html", ".j2", ".css", ".js", ".yaml"}),
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("*.md"),
        *ROOT.glob("results/*.md"),
    ]
)
# Each term, and what to write in its place.
TERMS = {
    r"\bby lot\b": "randomly, a random split",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\b(falls?|fell|fallen|falling) by\b": "drops by",
    r"\b(one|each|two|single) (?!with|of|in|at|to|for)\w+ an? (exit|input|class|row|epoch|stage|batch|rule)\b": "per exit",
    r"\bnumbers? an? (exit|input|class|row|epoch|stage|batch)\b": "number per exit",
    r"(?<!there )\b(is|are|was) no (?!longer|worse|better|more|less|fewer|slower|larger|smaller|later)[a-z]+": "is not a",
    r"\banew\b": "again",
    r"\bcame with\b": "got",
    r"\b(lies|lie|lay) on\b": "is on",
    r"\bwho(ever)? asks\b": "the caller",
    r"\bwhoever\b": "name the subject",
    r"\bfigures? of (the|a|each) (rule|evaluation|report)\b": "metrics",
    r"\bhand(s|ed|ing)? over\b": "dispatch",
    r"\bsurest\b|\bsurer\b": "most confident",
    r"\bnever worse for having\b": "get better, not worse, with more time",
}
# A fix is an action: these are not.
NOT_ACTIONS = re.compile(r"^correct\b|\bis the default$|\b(is|are) (a )?usual\b|^leave it out$|^check either\b|^'[\w-]+' is\b")
# Where a term is right: a quotation, or a name that must stay. (file, text on the line)
ALLOWED = {
    ("CHANGELOG.md", ""),  # history
    ("docs/reproduction.md", "“"),  # quotations from the paper
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_texts_use_the_field_s_own_terms(path: Path) -> None:
    here = [text for file, text in ALLOWED if file == name(path)]
    found = [
        f"{name(path)}:{number}: {match[0]!r}: write {better!r}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if not any(text in line for text in here)
        for term, better in TERMS.items()
        for match in re.finditer(term, line, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".py"], ids=name)
def test_the_fix_of_an_error_is_an_action(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "fix":
            parts = [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
            text = "".join(part for part in parts if isinstance(part, str))
            assert not NOT_ACTIONS.search(text), f"{name(path)}:{node.value.lineno}: {text!r}"

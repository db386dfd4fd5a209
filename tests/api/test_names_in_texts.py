"""Every dotted name that a message, a docstring or a page tells people to use is there, and callable where it is called."""

from __future__ import annotations

import ast
import importlib
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "anytime").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/*.md")])
NAME = re.compile(r"(?<![\w./@-])anytime(?:\.[A-Za-z_]\w*)+(\()?")
FILES = {"json", "md", "py", "html", "yaml", "npz", "svg", "toml", "pt", "onnx", "dev"}
ADVICE = {"fix", "expected"}


def texts(path: Path) -> Iterator[tuple[str, bool]]:
    """Each text of a module, and whether it is the advice of an error. A format string counts without what is put in."""
    tree = ast.parse(path.read_text())
    advised: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ADVICE:
            advised.update(ast.walk(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node in advised


def found(name: str) -> Any:
    """What a dotted name stands for; a name that is not there raises."""
    thing: Any = importlib.import_module("anytime")
    path = "anytime"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        if not hasattr(thing, part) and isinstance(thing, types.ModuleType):
            try:
                importlib.import_module(path)
            except ModuleNotFoundError:
                raise AttributeError(name) from None
        thing = getattr(thing, part)
    return thing


def check(text: str, *, advice: bool = False) -> None:
    for match in NAME.finditer(text):
        name, called = match.group().rstrip("("), bool(match.group(1))
        if name.rsplit(".", 1)[1] in FILES or (match.end() < len(text) and text[match.end()] == "{"):
            continue
        try:
            thing = found(name)
        except AttributeError:
            pytest.fail(f"{name} is not there: {text[max(0, match.start() - 60) : match.end() + 30]!r}")
        assert not called or callable(thing), f"{name} cannot be called"
        says_where = re.search(r"\b(see|of|in)\s+`?$", text[: match.start()])
        assert not (advice and isinstance(thing, types.ModuleType) and not says_where), f"{name} is a module: {text!r}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_names_in_messages_and_docstrings_are_there(path: Path) -> None:
    for text, advice in texts(path):
        check(text, advice=advice)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_names_on_pages_are_there(path: Path) -> None:
    check(path.read_text())


def test_methods_that_docstrings_of_base_classes_ask_for_are_there() -> None:
    """`subclass it, give it _update`: what a base class names in backquotes with an underscore is its own."""
    import anytime
    from anytime.policy import Policy

    for base in (anytime.Rule, Policy):
        for name in re.findall(r"`(_?[a-z]+)`", (base.__doc__ or "").split("Args:")[0]):
            assert hasattr(base, name), f"{base.__name__} has no {name}"

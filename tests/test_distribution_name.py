"""No text of ours leads to the project that has the name `anytime` on PyPI: our distribution is `anytime-nn`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "docs", "tests", "benchmarks", "results")
KINDS = {".py", ".md", ".txt", ".toml", ".yaml", ".html", ".css", ".js", ".cfg", ""}
TEXTS = sorted(
    path
    for path in (*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")))
    if path.is_file() and path.suffix in KINDS and not path.name.startswith(".") and ".egg-info" not in str(path)
    if path != Path(__file__)
)
NAME = r"['\"]?anytime(?!-nn)(?![\w./-])"
WRONG = re.compile(
    rf"(?<![\w-])anytime\\?\[[a-z]"  # an extra
    rf"|\b(?:pip3?|pipx|uvx?|poetry|conda|mamba)\s+(?:(?:pip|tool)\s+)?(?:install|add|download|upgrade)\b[^\n`]*?[ \t]{NAME}"
    rf"|\bpip3?\s+install\s+{NAME}"
    rf"|(?<![\w-])anytime\s*(?:==|>=|~=|<=)\s*\d"
    rf"|pypi\.org/project/anytime(?!-nn)"
    rf"|(?:distribution|version|metadata)\(['\"]anytime['\"]\)"
)
EXTRA = re.compile(r"(?:anytime-nn|(?<=['\"\s])\.)\\?\[([a-z,]+)\\?\]")


@pytest.mark.parametrize(
    "text",
    [
        "pip install anytime",
        "pip install 'anytime[engines]'",
        'pip install "anytime"',
        "pip install -U anytime",
        "pip install --quiet torch anytime",
        "`pip install\n'anytime[text]'`",
        "uv pip install anytime",
        "uv add anytime",
        "anytime>=0.1",
        "metadata.version('anytime')",
        "https://pypi.org/project/anytime/",
        r"pip install 'anytime\[engines\]'",
    ],
)
def test_the_search_finds_the_wrong_name(text: str) -> None:
    assert WRONG.search(text)


@pytest.mark.parametrize(
    "text", ["pip install anytime-nn", "pip install 'anytime-nn[engines]'", "anytime train", "import anytime", "pip install ."]
)
def test_the_search_lets_the_right_name_pass(text: str) -> None:
    assert not WRONG.search(text)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_text_names_somebody_elses_distribution(path: Path) -> None:
    found = WRONG.search(path.read_text(errors="replace"))
    assert found is None, f"{path}: {found}"


def test_every_extra_that_a_text_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "anytime-nn"
    known = set(project["optional-dependencies"])
    named = {
        (str(path.relative_to(ROOT)), extra)
        for path in TEXTS
        if path.name != "test_doctor.py"
        for listed in EXTRA.findall(path.read_text(errors="replace"))
        for extra in listed.split(",")
    }
    assert {extra for _, extra in named} >= {"engines", "images", "text", "train"}
    assert not {(where, extra) for where, extra in named if extra not in known}

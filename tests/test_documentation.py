"""The README and the documentation are true: their code runs, their commands and links exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anytime.cli import VERBS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


PYTHON = [(page, number, code) for page in PAGES for number, code in enumerate(blocks(page, "python"))]


@pytest.mark.parametrize(("page", "number", "code"), PYTHON, ids=[f"{page.name}-{number}" for page, number, _ in PYTHON])
def test_python_runs_as_it_stands(page: Path, number: int, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(code, f"{page.name}, block {number}", "exec"), {"__name__": "documentation"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block in [*blocks(page, "sh"), page.read_text()]:
        for verb in re.findall(r"^anytime ([a-z]+)", block, re.MULTILINE) + re.findall(r"`anytime ([a-z]+)[ `]", block):
            assert verb in VERBS
        for target in re.findall(r"(?:^|`)make ([a-z]+)", block, re.MULTILINE):
            assert target in targets
        for script in re.findall(r"python ((?:benchmarks|docs)/\S+\.py)", block):
            assert (ROOT / script).exists()


def test_every_metric_is_documented() -> None:
    import anytime

    text = (ROOT / "docs" / "metrics.md").read_text()
    for name, value in anytime.evaluate(anytime.samples.cifar100_msdnet()).rules["product"].to_json().items():
        assert f"`{name}" in text, name
        if isinstance(value, dict) and name in ("consistency", "diminishing_returns"):
            for part in value:
                assert f".{part}`" in text, part


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()

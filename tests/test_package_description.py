"""The description of the package on PyPI is the README without a link or picture that does not work there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TARGET = re.compile(r"\]\(([^)]+)\)")


@pytest.fixture(scope="module")
def setup() -> Any:
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("package_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_links_and_pictures_are_absolute_once_there_is_an_address(setup: Any) -> None:
    text = setup.describe(README, "https://example.org/me/anytime")
    relative = [target for target in TARGET.findall(README) if not target.startswith("http")]
    absolute = [target for target in TARGET.findall(text) if target.startswith("https://example.org")]
    assert len(relative) == len(absolute) > 10
    assert all(target.startswith("http") for target in TARGET.findall(text))
    assert "](https://example.org/me/anytime/raw/HEAD/docs/pictures/load.svg)" in text
    assert "](https://example.org/me/anytime/blob/HEAD/docs/rules.md)" in text


def test_without_an_address_nothing_is_broken_and_no_text_is_lost(setup: Any) -> None:
    text = setup.describe(README, None)
    assert all(target.startswith("http") for target in TARGET.findall(text))
    assert "docs/pictures" not in text
    assert "docs/rules.md: the rules, their activations and when to use which" in text
    assert text.count("```") == README.count("```")

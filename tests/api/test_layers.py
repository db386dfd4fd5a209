"""Imports point down only, in the layers of docs/layers.json."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import anytime

PACKAGE = Path(anytime.__file__).parent
ROOT = Path(__file__).parents[2]
# From the top down; docs/make_pictures.py draws this very list.
LAYERS = [row["packages"] for row in json.loads((ROOT / "docs" / "layers.json").read_text())]
RANK = {name: -depth for depth, names in enumerate(LAYERS) for name in names}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_parts(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "anytime" else [f"anytime.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("anytime.")}
    return found


def test_every_part_of_the_package_has_one_layer() -> None:
    listed = sorted(name for names in LAYERS for name in names)
    assert listed == sorted({part_of(path) for path in modules()})


def test_the_picture_shows_every_layer() -> None:
    drawn = (ROOT / "docs" / "pictures" / "layers.svg").read_text()
    for name in RANK:
        assert f">{name}</text>" in drawn, f"{name} is missing: run python docs/make_pictures.py"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = part_of(path)
    for other in imported_parts(path) - {here} - {"__version__"}:
        assert other in RANK, f"{path} imports anytime.{other} through the top: import it from its home"
        assert RANK[other] < RANK[here], f"{here} must not import {other}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_edge_packages_stay_at_the_edge(path: Path) -> None:
    text = path.read_text()
    for name in ("cyclopts", "pydantic", "fastapi"):
        if f"import {name}" in text or f"from {name}" in text:
            assert part_of(path) in {"cli", "serve"}


def loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport sys; print('LOADED', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("LOADED")[2].split())


def test_help_does_not_import_torch() -> None:
    loaded = loaded_after("from anytime.cli import run\nassert run(['--help']) == 0\nassert run(['serve', '--help']) == 0")
    assert not loaded & {"torch", "numpy", "sklearn", "jinja2", "fastapi", "uvicorn"}


def test_importing_the_package_is_light() -> None:
    assert not loaded_after("import anytime") & {"torch", "numpy", "cyclopts"}


def test_evaluation_and_training_need_no_edge_packages() -> None:
    loaded = loaded_after("import anytime.evaluation, anytime.train, anytime.models, anytime.data")
    assert not loaded & {"cyclopts", "pydantic", "rich", "jinja2", "sklearn", "yaml"}

"""Imports point down only, in the layers of docs/layers.json."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

import anytime

PACKAGE = Path(anytime.__file__).parent
ROOT = Path(__file__).parents[2]
# From the top down; docs/make_pictures.py draws this very list.
LAYERS = [row["packages"] for row in json.loads((ROOT / "docs" / "layers.json").read_text())]
RANK = {name: -depth for depth, names in enumerate(LAYERS) for name in names}


def modules() -> list[Path]:
    own = PACKAGE / "__init__.py", PACKAGE / "__main__.py"
    return sorted(path for path in PACKAGE.rglob("*.py") if path not in own)


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


HEAVY = {
    *("scipy", "sklearn", "matplotlib", "pandas", "pyarrow", "transformers", "tokenizers", "ray", "lightning_fabric", "numba"),
    *("sympy", "networkx", "torch._dynamo", "torch._inductor", "onnx", "onnxruntime", "onnxscript", "jinja2", "PIL"),
}
DIGITS = PACKAGE / "samples" / "digits"
_CALL = "from anytime.cli import run; assert run({}) == 0"
STARTS = {
    "Runner": "import anytime; anytime.Runner",
    "evaluate": "import anytime; anytime.evaluate",
    "doctor": "from anytime.cli import run; run(['doctor'])",
    "anytime evaluate": _CALL.format(["evaluate", "logits.npz"]),
    "anytime predict": _CALL.format(["predict", str(DIGITS), "digit.npy", "--engine=folded"]),
    "anytime profile": _CALL.format(["profile", str(DIGITS), "--repeats=2", "--engine=folded"]),
}


@pytest.mark.parametrize("name", STARTS)
def test_nothing_heavy_is_imported_without_being_used(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "logits.npz", logits=np.random.default_rng(0).normal(size=(3, 50, 4)), labels=np.arange(50) % 4)
    np.save(tmp_path / "digit.npy", np.zeros((1, 1, 16, 16), np.float32))
    monkeypatch.chdir(tmp_path)
    assert not loaded_after(STARTS[name]) & HEAVY


def test_a_server_that_listens_has_imported_what_it_uses() -> None:
    pytest.importorskip("fastapi", reason="needs the extra serve")
    code = """
    from unittest.mock import patch
    from anytime.cli import run
    with patch("anytime.serve.run"):
        assert run(["serve", "--port=0", "--engine=folded"]) == 0
    """
    assert loaded_after(dedent(code)) & HEAVY <= {"PIL"}  # it checks that it can decode images


def test_exporting_pooled_heads_does_not_import_the_compiler_of_torch() -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra engines")
    code = f"""
    import torch, anytime
    from anytime.run.engines import make_engine
    make_engine(anytime.run.open_folder({str(DIGITS)!r}).model, "onnxruntime", example=torch.zeros(1, 1, 16, 16))
    """
    assert not loaded_after(dedent(code)) & {"torch._dynamo", "onnxscript"}


def test_opening_and_measuring_an_encoder_does_not_import_the_compiler_of_torch(tmp_path: Path) -> None:
    code = f"""
    import torch, anytime
    model = anytime.create_model("encoder-tiny", classes=3)
    anytime.save(model, {str(tmp_path / "saved")!r})
    tokens = torch.ones(1, 5, dtype=torch.int64)
    assert anytime.models.measure_cost(anytime.load({str(tmp_path / "saved")!r}), tokens).macs
    """
    assert not loaded_after(dedent(code)) & {"torch._dynamo", "sympy"}

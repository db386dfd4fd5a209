"""Texts from files and callers reach no terminal and no spreadsheet as commands."""

from __future__ import annotations

import ast
import csv
import io
import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch

import anytime
from anytime.artifacts import seal
from anytime.cli import run
from anytime.errors import AnytimeError
from anytime.evaluation import evaluate
from anytime.models import create, save
from anytime.report.folder import per_exit
from anytime.safe_text import csv_cell, printable

PACKAGE = Path(anytime.__file__).parent
ATTACKS = (
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\x9d0;title\x9c",
    "a\rb",
    "a\x08b",
    "\u202eevil",
    "\u2066x\u2069",
    "\x7f",
    "\x00",
)


def is_safe(text: str) -> bool:
    return all(sign in "\n\t" or unicodedata.category(sign) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for sign in text)


@pytest.mark.parametrize("attack", ATTACKS)
def test_control_characters_become_visible(attack: str) -> None:
    assert is_safe(printable(attack))
    assert printable(attack) == printable(printable(attack))
    assert printable(f"a\n\t{attack}", lines=True).startswith("a\n\t")
    assert "\n" not in printable("a\nb")
    assert is_safe(str(AnytimeError(attack, expected=attack, fix=attack)))


def test_all_of_unicode_is_safe_or_escaped_and_ordinary_text_stays() -> None:
    safe = printable("".join(map(chr, range(0x110000))))
    # Of the format characters, those that shape letters and do nothing to a terminal stay: joiners, soft hyphens, number signs.
    assert not any(unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp") for sign in safe)
    assert not set("\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u061c\ufeff") & set(safe)
    for text in ("crème brûlée", "日本語", "🙂", "שלום", "क्‍ष", "a\\x1b"):
        assert printable(text) == text


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A run whose class names are attacks."""
    torch.manual_seed(0)
    save(create("mlp-toy", classes=len(ATTACKS)), tmp_path / "model")
    (tmp_path / "data.json").write_text(json.dumps({"name": "\x1b[1m", "class_names": ATTACKS, "mean": [], "std": []}))
    seal(tmp_path, ["data.json"], kind="run")
    np.save(tmp_path / "points.npy", np.zeros((1, 2)))
    return tmp_path


def test_class_names_reach_the_terminal_as_text(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = ["predict", str(model), str(model / "points.npy"), "--engine", "eager", "--rule", "latest"]
    for exits in ("1", "2"):
        assert run([*shown, "--exits", exits, "--top", "20"]) == 0
        said = capsys.readouterr()
        assert is_safe(said.out)
        assert is_safe(said.err)
    assert "\\x1b" in said.out
    assert run([*shown, "--json"]) == 0
    out = capsys.readouterr().out
    assert is_safe(out)
    json.loads(out)


@pytest.mark.parametrize("name", ["\x1b[31mred", "[bold", "[red]x", ":smile:", "=cmd()", "\u202etxt"])
def test_names_of_files_and_rules_reach_the_terminal_as_text(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = np.random.default_rng(0)
    for file in ("v", "t"):
        rows = {"logits": source.normal(0, 3, (2, 120, 4)).astype(np.float32), "labels": source.integers(0, 4, 120)}
        np.savez(f"{name}{file}.npz", **rows)
    assert run(["tune", f"{name}v.npz", "--at-most", "1", "--accuracy", "0", "--out", f"{name}-tuned"]) == 0
    Path(f"{name}.json").write_bytes(Path(f"{name}-tuned/rule.json").read_bytes())
    rules = ["--rules", f"latest,{name}.json"] if "(" not in name and "[" not in name else []
    commands = [
        ["evaluate", f"{name}t.npz", *rules, "--out", f"{name}-report"],
        ["evaluate", f"{name}t.npz", "--calibration", f"{name}v.npz"],
        ["certify", f"{name}t.npz", "--rule", f"{name}.json", "--out", f"{name}-c.json"],
        ["conformal", f"{name}v.npz", f"{name}t.npz"],
        ["evaluate", f"{name}absent.npz"],
        ["predict", name, name],
        ["train", "--resume", "--out", name],
        ["train", name, "--out", "new"],
        ["profile", name],
        [name],
        ["evaluate", f"{name}t.npz", f"--{name}"],
    ]
    for command in commands:
        code = run(command)
        said = capsys.readouterr()
        assert code == (2 if command in commands[4:] else 0), said.err
        assert is_safe(said.out), command
        assert is_safe(said.err), command


def test_no_text_in_a_csv_is_a_formula_and_numbers_stay_numbers() -> None:
    names = (
        "=1+1",
        "+1",
        "-1",
        "@SUM(A1)",
        "\t=1",
        "\r=1",
        "  =1",
        "\n=1",
        "=cmd|' /C calc'!A0",
        "\uff1d1",
        "latest",
        "\x1b[2J",
    )
    logits = torch.randn(2, 120, 3, generator=torch.Generator().manual_seed(0))
    found = evaluate(logits, torch.arange(120) % 3, rules={name: anytime.Latest() for name in names})
    head, *lines = csv.reader(io.StringIO(per_exit(found)))
    assert len(lines) == 2 * len(names)
    for line in lines:
        assert not line[0].lstrip("\t\r\n ").startswith(("=", "+", "-", "@", "\uff1d"))
        assert is_safe(line[0])
        assert [float(cell) for cell in line[1:] if cell]
    assert "latest" in {line[0] for line in lines}
    assert "'=1+1" in {line[0] for line in lines}
    assert head[:3] == ["rule", "exit", "cost"]
    assert csv_cell(-1.5) == -1.5
    assert csv_cell(None) is None


TALKING = sorted({*(PACKAGE / "cli").glob("*.py"), *(PACKAGE / "train").glob("*.py")})


@pytest.mark.parametrize("path", TALKING, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_whoever_prints_prints_safely(path: Path) -> None:
    tree = ast.parse(path.read_text())
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    safe = {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "anytime.safe_text"
        for alias in node.names
        if alias.name == "print_safely"
    }
    assert "print" not in calls or "print" in safe
    if path.name not in ("terminal.py", "progress.py", "doctor.py"):  # those of the two show texts of our own alone
        assert "Console" not in calls

"""The command `anytime evaluate` as its users meet it."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from anytime.artifacts import verify_bundle
from anytime.cli import run

PER_EXIT = (
    "accuracy",
    "label_probability",
    "hindsight_improvability_percent",
    "learned",
    "forgot",
    "entropy",
    "ece",
    "nll",
    "brier",
    "set_size",
    "set_coverage",
    "collapsed_percent",
    "support_size",
    "support_coverage",
)
DROPS = ["0.01", "0.05", "0.1", "0.2", "0.25", "0.33", "0.5"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 8, 200)
    logits = rng.normal(size=(4, 200, 8)) * 2 + 3 * np.eye(8)[labels]
    np.savez(tmp_path / "logits.npz", logits=logits.astype(np.float32), labels=labels)
    return tmp_path / "logits.npz"


def test_the_document_has_the_fixed_names(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", str(file), "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert (document["exits"], document["samples"], document["classes"]) == (4, 200, 8)
    assert list(document["rules"]) == ["latest", "caching", "product"]
    for figures in document["rules"].values():
        assert all(len(figures[name]) == 4 for name in PER_EXIT)
        assert list(figures["label_drop_percent"]) == list(figures["final_drop_percent"]) == DROPS
        assert list(figures["entropy_rise_percent"]) == ["0.01", "0.1", "0.5", "1.0"]
        for name in ("correct_monotone_percent", "never_correct_percent", "overthinking_percent"):
            assert 0 <= figures[name] <= 100


def test_a_folder_holds_a_run(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "run"
    assert run(["evaluate", str(file), "--out", str(out), "--json", "--costs", "1,2,4,8", "--seed", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    names = {path.name for path in out.iterdir()}
    assert names == {"config.yaml", "metrics.json", "per_exit.csv", "report.html", "environment.json", "manifest.json"}
    verify_bundle(out)
    assert json.loads((out / "metrics.json").read_text())["rules"] == document["rules"]
    assert yaml.safe_load((out / "config.yaml").read_text())["costs"] == [1.0, 2.0, 4.0, 8.0]
    rows = list(csv.DictReader((out / "per_exit.csv").read_text().splitlines()))
    assert len(rows) == 3 * 4
    assert float(rows[0]["accuracy"]) == document["rules"]["latest"]["accuracy"][0]
    page = (out / "report.html").read_text()
    assert len(page) < 3_000_000
    assert "torch" in json.loads((out / "environment.json").read_text())["packages"]


def test_a_run_can_be_written_over_and_leaves_other_files(file: Path, tmp_path: Path) -> None:
    for seed in ("0", "1"):
        assert run(["evaluate", str(file), "--out", str(tmp_path / "run"), "--seed", seed]) == 0
        (tmp_path / "run" / "mine.txt").write_text("keep")
    assert (tmp_path / "run" / "mine.txt").read_text() == "keep"
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["settings"]["seed"] == 1


def test_rules_keep_the_text_they_were_named_by(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = "latest,product(softplus,weights=ones), Product(ClippedReLU(limit=2.0))"
    assert run(["evaluate", str(file), "--json", "--rules", rules]) == 0
    names = list(json.loads(capsys.readouterr().out)["rules"])
    assert names == ["latest", "product(softplus,weights=ones)", "Product(ClippedReLU(limit=2.0))"]


def test_sets_can_be_left_out_or_made_the_original_way(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("paper", "original", "none"):
        assert run(["evaluate", str(file), "--json", "--sets", kind]) == 0
        document = json.loads(capsys.readouterr().out)
        sizes = document["rules"]["latest"]["set_size"]
        assert sizes is None if kind == "none" else min(sizes) > 0
        assert kind == "none" or document["settings"]["sets"]["variant"] == kind


def test_without_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "logits.npy", np.random.default_rng(0).normal(size=(3, 50, 4)).astype(np.float16))
    assert run(["evaluate", str(tmp_path / "logits.npy"), "--json", "--out", str(tmp_path / "run")]) == 0
    figures = json.loads(capsys.readouterr().out)["rules"]["product"]
    assert figures["accuracy"] is None
    assert figures["final_drop_percent"]["0.01"] >= 0
    assert run(["evaluate", str(tmp_path / "logits.npy")]) == 0
    assert "no labels" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_any_terminal_can_show_the_table(file: Path, encoding: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C"}
    command = [sys.executable, "-m", "anytime.cli", "evaluate", str(file)]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"product" in done.stdout


def test_a_closed_pipe_is_not_an_error(file: Path) -> None:
    command = f"{sys.executable} -m anytime.cli evaluate {file} --json | head -c 10; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr

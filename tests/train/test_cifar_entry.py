from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from anytime.artifacts import tensors_from_bytes
from anytime.data.cifar_archive import ARCHIVES
from anytime.models import create
from anytime.train.cifar import main
from anytime.train.data.logits import exit_accuracy

ROWS = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 in its unpacked official form, of a few random images."""
    folder: Path = tmp_path_factory.mktemp("cifar")
    archive, random = ARCHIVES["cifar10"], np.random.default_rng(0)
    (folder / archive.folder).mkdir()
    labels = np.arange(ROWS)[:, None] % 10
    for file in (*archive.train, *archive.test):
        records = np.hstack((labels, random.integers(0, 256, (len(labels), 3072))))
        (folder / archive.folder / file).write_bytes(records.astype(np.uint8).tobytes())
    (folder / archive.folder / archive.names).write_text("\n".join(map(str, range(10))))
    return folder


def run(root: Path, out: Path, *more: str) -> int:
    fixed = ["--data", "cifar10", "--root", str(root), "--out", str(out), "--device", "cpu", "--model", "msdnet-cifar-linear"]
    return main([*fixed, "--epochs", "1", "--batch", "16", "--held-out", "10", *more])


def test_a_run_leaves_few_small_files_that_agree_with_each_other(root: Path, tmp_path: Path) -> None:
    assert run(root, tmp_path) == 0
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    kept = {"config.json", "log.csv", "model.safetensors", "split.json", "summary.json", "test.npz", "val.npz"}
    assert files == kept | {"manifest.json"}
    summary = json.loads((tmp_path / "summary.json").read_text())
    held_out = json.loads((tmp_path / "split.json").read_text())["held_out"]
    with np.load(tmp_path / "val.npz") as val, np.load(tmp_path / "test.npz") as test:
        assert val["indices"].tolist() == held_out
        assert test["logits"].shape == (5, ROWS, 10)
        assert test["logits"].dtype == np.float16
        again = exit_accuracy(torch.from_numpy(test["logits"]).float(), torch.from_numpy(test["labels"]))
        assert summary["test_accuracy"] == pytest.approx(again, abs=1e-5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["recipe"]["lr"] == 0.1 * 16 / 64
    model = create("msdnet-cifar-linear", classes=10)
    model.load_state_dict(tensors_from_bytes((tmp_path / "model.safetensors").read_bytes()))


def test_a_finished_run_says_so_and_is_not_trained_again(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(root, tmp_path / "run") == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    capsys.readouterr()
    assert run(root, tmp_path / "run", "--resume") == 0
    assert "is finished" in capsys.readouterr().out
    assert run(root, tmp_path / "run") == 2
    assert "--resume" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()} == before


def test_several_seeds_get_a_folder_each(root: Path, tmp_path: Path) -> None:
    assert run(root, tmp_path, "--seeds", "0", "1") == 0
    weights = [(tmp_path / f"seed-{seed}" / "model.safetensors").read_bytes() for seed in (0, 1)]
    assert weights[0] != weights[1]


def test_a_run_without_time_stops_and_says_how_to_go_on(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, tmp_path, "--minutes", "0.01") == 1
    assert "no time left" in capsys.readouterr().out


def test_missing_data_is_an_error_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "nowhere", tmp_path) == 2
    assert "fetch https://" in capsys.readouterr().err


def test_training_imports_torch_and_little_else() -> None:
    program = """
import sys
for name in ("cyclopts", "pydantic", "fastapi", "torchvision", "rich", "yaml", "jinja2", "sklearn", "PIL"):
    sys.modules[name] = None
import anytime.data, anytime.models, anytime.train, anytime.train.cifar
"""
    subprocess.run([sys.executable, "-c", program], check=True)

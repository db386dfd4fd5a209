"""The recipes of `anytime.train.cifar` beside the joint one, end to end on a few random images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anytime.artifacts import tensors_from_bytes
from anytime.data.cifar_archive import ARCHIVES
from anytime.models.imta import IMTA, PRESETS
from anytime.train.cifar import main

ROWS = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-100 in its unpacked official form."""
    folder: Path = tmp_path_factory.mktemp("cifar")
    archive, random = ARCHIVES["cifar100"], np.random.default_rng(0)
    (folder / archive.folder).mkdir()
    labels = np.repeat(np.arange(2 * ROWS)[:, None], 2, axis=1)
    for file in (*archive.train, *archive.test):
        records = np.hstack((labels, random.integers(0, 256, (len(labels), 3072))))
        (folder / archive.folder / file).write_bytes(records.astype(np.uint8).tobytes())
    (folder / archive.folder / archive.names).write_text("\n".join(map(str, range(100))))
    return folder


def run(root: Path, out: Path, *more: str) -> int:
    fixed = [
        "--root",
        str(root),
        "--out",
        str(out),
        "--device",
        "cpu",
        "--epochs",
        "1",
        "--batch",
        str(ROWS),
        "--held-out",
        "4",
    ]
    return main([*fixed, *more])


def stored(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    config, summary = (json.loads((folder / name).read_text()) for name in ("config.json", "summary.json"))
    with np.load(folder / "test.npz") as test:
        assert test["logits"].shape == (len(summary["test_accuracy"]), 2 * ROWS, 100)
    return config, summary


def test_imta_goes_from_its_first_stage_to_its_second(root: Path, tmp_path: Path) -> None:
    linear = ("--model", "msdnet-cifar-linear")
    assert run(root, tmp_path / "one", "--objective", "equilibrium", *linear) == 0
    weights = tmp_path / "one" / "model.safetensors"
    assert run(root, tmp_path / "two", "--objective", "one-for-all", *linear, "--init", str(weights)) == 0
    config, _ = stored(tmp_path / "two")
    assert config["network"] == "IMTA"
    network = IMTA(PRESETS["imta-cifar-linear"])
    network.load_state_dict(tensors_from_bytes((tmp_path / "two" / "model.safetensors").read_bytes()))
    before = tensors_from_bytes(weights.read_bytes())
    assert all(torch.equal(values, before[name]) for name, values in network.backbone.named_parameters())


def test_the_second_stage_needs_the_first(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root, tmp_path, "--objective", "one-for-all") == 2
    assert "--init FOLDER" in capsys.readouterr().err
    assert run(root, tmp_path, "--objective", "one-for-all", "--init", str(tmp_path / "nowhere")) == 2
    assert "there is no file" in capsys.readouterr().err


def test_l2w_takes_its_published_settings_unless_told_otherwise(root: Path, tmp_path: Path) -> None:
    assert run(root, tmp_path, "--objective", "l2w", "--centring", "mat", "--lr", "0.01") == 0
    config, summary = stored(tmp_path)
    recipe = config["recipe"]
    assert (config["model"], recipe["nesterov"], recipe["warmup"]) == ("msdnet-cifar-linear", False, 0.0)
    assert recipe["l2w"]["strength"] == 0.8
    assert recipe["l2w"]["centring"] == "mat"
    assert recipe["batch"] == ROWS
    assert len(summary["val_accuracy"]) == 5
    assert not config["machine"]["graph"]


def test_finetuning_begins_from_weights_and_may_freeze_a_part(root: Path, tmp_path: Path) -> None:
    linear = ("--model", "msdnet-cifar-linear")
    assert run(root, tmp_path / "joint", *linear) == 0
    weights = tmp_path / "joint" / "model.safetensors"
    product = ("--objective", "joint-then-product", "--epochs", "2", "--frozen", "blocks", "--hold-statistics")
    assert run(root, tmp_path / "product", *linear, "--init", str(weights), *product) == 0
    before, after = (tensors_from_bytes((tmp_path / name / "model.safetensors").read_bytes()) for name in ("joint", "product"))
    same = {name.split(".")[0] for name in before if torch.equal(before[name], after[name])}
    assert "blocks" in same
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith("linear.weight"))

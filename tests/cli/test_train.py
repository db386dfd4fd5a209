from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from anytime.artifacts import read_bundle, write_bundle
from anytime.cli import run
from anytime.cli.curve import curve
from anytime.models import load
from anytime.progress import Progress
from anytime.train.command import show
from anytime.train.run import RunResult, stored_config

NETWORK = (
    "{exits: 2, base: 1, step: 1, channels: 4, growth: 2, growth_factors: [1, 2], bottleneck_factors: [1, 2], image_size: 16}"
)
SMALL = ("digits-msdnet", "--epochs", "2", "--set", f"options={NETWORK}", "--checkpoint-every", "1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that came to its end without a stop."""
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("run") / "whole"
    assert run(["train", *SMALL, "--out", str(folder)]) == 0
    return folder


def test_a_run_leaves_all_its_files(finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} == {
        "checkpoint", "config.yaml", "curve.svg", "data.json", "environment.json", "log.csv", "manifest.json", "model",
        "summary.json", "test.npz", "val.npz",
    }  # fmt: skip
    ET.fromstring((finished / "curve.svg").read_text())
    with (finished / "log.csv").open(newline="") as file:
        assert [line["epoch"] for line in csv.DictReader(file)] == ["1", "2"]


def test_what_it_leaves_agrees_with_itself(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert min(summary["test_accuracy"]) > 0.6  # chance is 0.1
    assert run(["evaluate", str(finished / "test.npz"), "--json", "--rules", "latest", "--sets", "none"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["rules"]["latest"]["accuracy"] == pytest.approx(summary["test_accuracy"], abs=1e-5)
    with np.load(finished / "test.npz") as stored, np.load(finished / "val.npz") as val:
        assert stored["logits"].shape == (2, 300, 10)
        assert not set(stored["indices"]) & set(val["indices"])
    assert load(finished / "model", classes=10).num_exits == 2


def test_the_stored_settings_are_whole_and_give_the_same_run(finished: Path) -> None:
    config = stored_config(finished)
    assert yaml.safe_load((finished / "config.yaml").read_text()) == config.values()
    assert config.recipe.epochs == 2
    assert config.recipe.warmup == 1
    assert config.expected is None  # another network than the recipe's


def test_ctrl_c_saves_and_the_folder_alone_is_enough_to_go_on(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(self: Progress, step: int) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "show", interrupt)
        assert run(["train", *SMALL, "--out", str(tmp_path)]) == 130
    said = capsys.readouterr().err
    assert "step 5 of 36" in said
    assert f"anytime train --resume --out {tmp_path}" in said
    assert run(["train", "--resume", "--out", str(tmp_path)]) == 0
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "model" / file).read_bytes() == (finished / "model" / file).read_bytes()


def test_resuming_a_finished_run_says_again_what_came_out(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished / "summary.json").stat().st_mtime_ns
    assert run(["train", "--resume", "--out", str(finished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((finished / "summary.json").read_text())
    assert (finished / "summary.json").stat().st_mtime_ns == before


def test_all_settings_are_printed_back_before_training(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["train", "--resume", "--out", str(finished)])
    assert yaml.safe_load(capsys.readouterr().err.split("\n\n")[0]) == stored_config(finished).values()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digits-msdnt", "--out", "x"], ("digits-msdnt", "did you mean digits-msdnet")),
        (["digits-msdnet"], ("--out",)),
        (["digits-msdnet", "--out", "x", "--set", "epoch=3"], ("command line", "'epoch'", "did you mean epochs")),
        (["digits-msdnet", "--out", "x", "--set", "nesterov"], ("NAME=VALUE",)),
        (["digits-msdnet", "--out", "x", "--set", "about=2020-13-45"], ("NAME=VALUE",)),
        (["digits-msdnet", "--out", "x", "--set", "epochs=ten"], ("command line", "epochs is 'ten'")),
        (["digits-msdnet", "--out", "x", "--device", "cpu0"], ("device is 'cpu0'", "cuda:1")),
        (["digits-msdnet", "--out", "x", "--device", "meta"], ("device is 'meta'", "--device cpu")),
        (["digits-msdnet", "--out", "x", "--device", "cuda:99"], ("device is 'cuda:99'", "--device cpu")),
        (["digits-msdnet", "--out", "x", "--device", "cuda:99", "--processes", "2"], ("device is 'cuda:99'",)),
        (["digits-msdnet", "--out", "x", "--set", "expected={accuracy: [.9], tolerance: .1}"], ("expected has 1", "4 exits")),
        (["digits-msdnet", "--out", "x", "--lr", "-1"], ("command line", "lr is -1.0")),
        (["cifar10-msdnet", "--out", "x"], ("root", "--root FOLDER")),
        (["cifar10-msdnet", "--out", "x", "--root", "nowhere"], ("nowhere", "download https://")),
        (["--out", "x", "--model", "msdnet-cifar"], ("no data", "recipe")),
        (["--out", "x", "--config", "nothing.yaml"], ("nothing.yaml", "digits-msdnet")),
        (["--resume", "--out", "x"], ("no run in x",)),
        (["digits-msdnet", "--resume", "--out", "x"], ("--resume was given with digits-msdnet",)),
    ],
)
def test_a_wrong_call_names_what_is_wrong_and_what_to_do(
    arguments: list[str],
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", *arguments]) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: digits\nmodel: msdnet-cifar\nepoch: 3\n", ("settings.yaml", "'epoch'", "epochs")),
        ("data: digits\nmodel: msdnet-cifar\nlr: fast\n", ("settings.yaml", "lr is 'fast'")),
        ("data: digit\nmodel: msdnet-cifar\n", ("settings.yaml", "data is 'digit'", "digits")),
        ("data: digits\nmodel: msdnet-cifar\nworkers: 0\n", ("settings.yaml", "workers is 0")),
        ("data: digits\nmodel: msdnet-cifar\noptions: {classes: 5}\n", ("settings.yaml", "the data set says")),
        ("data: digits\nmodel: msdnet-cifar\noptions: {1: 2}\n", ("settings.yaml", "by name")),
        ("data: digits\nmodel: msdnet-cifar\ninit: no\n", ("settings.yaml", "init is False", "a path")),
        ("data: digits\nmodel: msdnet-cifar\nroot: 5\n", ("settings.yaml", "root is 5")),
        ("data: digits\nmodel: msdnet-cifar\nsplit_seed: 5000000000\n", ("settings.yaml", "split_seed")),
        ("about: 2020-13-45\n", ("settings.yaml", "not YAML")),
        ("about: &a [*a]\n", ("settings.yaml", "not YAML")),
        ("- 1\n", ("settings.yaml", "name: value")),
        ("a: [\n", ("settings.yaml", "not YAML")),
    ],
)
def test_a_wrong_file_is_named_with_the_key(
    text: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.yaml").write_text(text)
    assert run(["train", "--config", str(tmp_path / "settings.yaml"), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said
    assert not (tmp_path / "run").exists()


def test_a_run_that_failed_before_it_began_is_in_nobody_s_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run(["train", "digits-msdnet", "--set", "options={exits: 0}", "--out", str(tmp_path)]) == 2
        assert "exits" in capsys.readouterr().err.splitlines()[-3]


def test_a_folder_with_a_run_is_not_overwritten(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", *SMALL, "--out", str(finished)]) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.parametrize(("missed", "code", "word"), [([], 0, "reached: expected"), ([2], 1, "not reached by exit 2")])
def test_the_run_says_whether_the_expected_accuracy_was_reached(
    missed: list[int], code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {"test_accuracy": [0.6, 0.7], "expected_accuracy": [0.6, 0.7], "tolerance": 0.01, "missed_exits": missed}
    assert show(RunResult(Path("run"), 1, 1, None, summary), json=False) == code
    assert word in capsys.readouterr().err


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--list"]) == 0
    listed = capsys.readouterr().out
    assert len(listed.splitlines()) >= 5
    assert "cifar100-msdnet  " in listed


def test_help_does_not_import_torch() -> None:
    code = "from anytime.cli import run; run(['train', '--help']); import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_long_run_is_drawn_with_few_points() -> None:
    lines = [{"epoch": str(i), "loss_1": "1.0", "val_accuracy_1": "0.5" if i % 2 else ""} for i in range(1, 301)]
    picture = curve(lines)
    ET.fromstring(picture)
    assert picture.count('class="dot"') < 100
    assert "Validation accuracy" in picture


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"steps": "x"}', '{"steps": 3, "test_accuracy": "abc"}', "NaN", "\x00"]
)
def test_a_damaged_summary_is_refused(finished: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text(text)
    assert run(["train", "--resume", "--out", str(tmp_path / "run")]) == 2
    assert "summary.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("log.csv", lambda text: text.replace("step", "stop", 1)),
        ("log.csv", lambda text: text.replace("1,18,", "1,x,", 1)),
        ("log.csv", lambda text: '"' + text),
        ("log.csv", lambda text: text.replace("\n", "\udcff\n", 2)),
        ("log.csv", lambda text: text.replace(",", ",1e999", 30)),
        ("state.json", lambda text: text.replace('"step": 18', '"step": "x"')),
        ("state.json", lambda text: text.replace('"step": 18', '"step": -1')),
        ("state.json", lambda text: text.replace('"seconds"', '"second"')),
        ("state.json", lambda text: "[]"),
        ("state.json", lambda text: text[:-20]),
        ("state.json", lambda text: '{"step": 18, "seconds": 1, "config": 3, "data": null}'),
    ],
)
def test_a_run_whose_files_are_damaged_does_not_go_on(
    stopped: Path, tmp_path: Path, file: str, change: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    path = tmp_path / "run" / ("checkpoint" if file == "state.json" else "") / file
    text = path.read_text()
    assert change(text) != text
    if file == "state.json":
        write_bundle(path.parent, {**read_bundle(path.parent), file: change(text).encode()})
    else:
        path.write_bytes(change(text).encode(errors="surrogateescape"))
    assert run(["train", "--resume", "--out", str(tmp_path / "run")]) == 2
    assert file in capsys.readouterr().err


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its first epoch."""
    folder = tmp_path_factory.mktemp("stopped")

    def interrupt(self: Progress, step: int) -> None:
        if step == 18:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "show", interrupt)
        assert run(["train", *SMALL, "--out", str(folder)]) == 130
    return folder

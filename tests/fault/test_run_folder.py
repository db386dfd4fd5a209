"""The folder of a run: one process at a time, finished only once, and every file that a verb trusts is checked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from anytime.artifacts import verify_bundle
from anytime.cli import run
from anytime.errors import IntegrityError, LockedError
from anytime.outputs import LOCK, lock_run
from anytime.train.run import begin, stored_config, train
from anytime.train.settings import Source, read_recipe, resolve

NETWORK = (
    "{exits: 2, base: 1, step: 1, channels: 4, growth: 2, growth_factors: [1, 2], bottleneck_factors: [1, 2], image_size: 16}"
)
SMALL = ("digits-msdnet", "--epochs", "1", "--set", f"options={NETWORK}")
HOLD = (
    "import sys\nfrom anytime.outputs import lock_run\n"
    "with lock_run(sys.argv[1]):\n    print('in', flush=True)\n    sys.stdin.read()"
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("run") / "whole"
    assert run(["train", *SMALL, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def points(tmp_path: Path) -> Path:
    np.save(tmp_path / "digits.npy", np.zeros((2, 3, 16, 16), dtype=np.uint8))
    return tmp_path / "digits.npy"


def hold(folder: Path, script: str = HOLD) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    return process


def test_a_second_training_in_a_folder_is_refused_with_the_number_of_the_first(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, arguments in ((tmp_path / "new", SMALL), (finished, ("--resume",))):
        with hold(folder) as other:
            assert run(["train", *arguments, "--out", str(folder)]) == 2
            assert f"process {other.pid} is training in" in capsys.readouterr().err
            with pytest.raises(LockedError) as caught, lock_run(folder):
                pass
            assert caught.value.pid == other.pid
            other.kill()
            other.wait()
            with lock_run(folder), lock_run(folder / ".." / folder.name):
                assert (folder / LOCK).read_text() == f"{os.getpid()}\n"
        assert not (folder / LOCK).exists()


def test_a_run_that_was_begun_by_a_killed_process_goes_on(tmp_path: Path) -> None:
    config = resolve(read_recipe("digits-msdnet"), Source("test", {"epochs": 1, "options": {"exits": 2, "image_size": 16}}))
    begin(config, tmp_path / "run")
    with hold(tmp_path / "run") as other:
        with pytest.raises(LockedError):
            train(stored_config(tmp_path / "run"), tmp_path / "run")
        other.kill()
        other.wait()
    assert (tmp_path / "run" / LOCK).exists()
    with lock_run(tmp_path / "run"):
        pass


def test_a_place_where_no_run_can_be_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / ("x" * 5000)):
        assert run(["train", *SMALL, "--out", str(place)]) == 2
        said = capsys.readouterr().err
        assert "expected: " in said
        assert "Traceback" not in said
    assert (tmp_path / "file").read_text() == "mine"


def test_of_two_trainings_at_once_one_wins_and_its_run_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "anytime.cli", "train", *SMALL, "--out", str(tmp_path / "run")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], said
    loser = said[codes.index(2)]
    assert "is training in" in loser or "is not empty" in loser
    verify_bundle(tmp_path / "run")


def test_a_finished_run_says_so_and_stays_as_it_is(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    assert run(["train", "--resume", "--out", str(finished), "--json"]) == 0
    said = capsys.readouterr()
    assert "is finished; nothing was trained" in said.err
    assert json.loads(said.out)["epochs"] == 1
    assert run(["train", *SMALL, "--out", str(finished)]) == 2
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()} == before


def test_a_run_killed_before_its_manifest_gets_it_on_resume(finished: Path, points: Path) -> None:
    (finished / "manifest.json").unlink()
    assert run(["predict", str(finished), str(points), "--engine", "eager"]) == 2
    assert run(["train", "--resume", "--out", str(finished)]) == 0
    verify_bundle(finished)
    assert run(["predict", str(finished), str(points), "--engine", "eager"]) == 0


@pytest.mark.parametrize(
    "name", ["config.yaml", "data.json", "log.csv", "summary.json", "test.npz", "val.npz", "environment.json"]
)
def test_every_file_of_a_run_is_in_its_manifest(finished: Path, name: str) -> None:
    verify_bundle(finished)
    data = bytearray((finished / name).read_bytes())
    data[len(data) // 2] ^= 1
    (finished / name).write_bytes(data)
    with pytest.raises(IntegrityError, match=name.replace(".", r"\.")):
        verify_bundle(finished)
    assert run(["train", "--resume", "--out", str(finished)]) == 2


def test_predict_refuses_a_changed_digit_in_data_json(finished: Path, points: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = finished / "data.json"
    document = json.loads(path.read_text())
    document["mean"] = [value + 0.1 for value in document["mean"]]
    path.write_text(json.dumps(document))
    for extra in ([], ["--data", str(path)]):
        assert run(["predict", str(finished), str(points), "--engine", "eager", *extra]) == 2
        assert "data.json has" in capsys.readouterr().err
    (finished / "elsewhere").mkdir()
    mine = shutil.copy(path, finished / "elsewhere" / "mine.json")
    assert run(["predict", str(finished), str(points), "--engine", "eager", "--data", str(mine)]) == 0


def test_a_data_json_that_was_put_beside_a_network_is_not_trusted(
    finished: Path, points: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(finished / "data.json", finished / "model" / "data.json")
    assert run(["predict", str(finished / "model"), str(points), "--engine", "eager"]) == 2
    assert "is not in the manifest" in capsys.readouterr().err


def test_evaluate_refuses_the_logits_of_a_run_that_were_changed(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with np.load(finished / "test.npz") as stored:
        arrays = dict(stored)
    arrays["logits"][0, 0, 0] += 1
    np.savez(finished / "test.npz", **arrays)
    assert run(["evaluate", str(finished / "test.npz")]) == 2
    assert "test.npz has SHA-256" in capsys.readouterr().err
    shutil.copy(finished / "test.npz", finished / "mine.npz")
    assert run(["evaluate", str(finished / "mine.npz"), "--json"]) == 0


def test_somebody_elses_manifest_is_none_of_ours(finished: Path) -> None:
    shutil.copy(finished / "test.npz", finished / "elsewhere.npz")
    for text in ("{}", "not JSON", '{"version": 3, "name": "an app"}'):
        (finished / "manifest.json").write_text(text)
        assert run(["evaluate", str(finished / "elsewhere.npz"), "--json"]) == 0

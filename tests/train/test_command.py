"""`python -m anytime.train` and the settings of a run on the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from anytime.errors import OptionError
from anytime.train.__main__ import main
from anytime.train.log import read_log

NETWORK = (
    "options={exits: 2, base: 1, step: 1, channels: 4, growth: 2, growth_factors: [1, 2], bottleneck_factors: [1, 2], "
    "image_size: 16}"
)
SMALL = ("digits-msdnet", "epochs=1", NETWORK)


def test_several_seeds_get_one_folder_each_and_finished_ones_are_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--out", str(tmp_path), "--seeds", "0", "1"]) == 0
    weights = [(tmp_path / f"seed-{seed}" / "model" / "model.safetensors").read_bytes() for seed in (0, 1)]
    assert weights[0] != weights[1]
    (tmp_path / "seed-1" / "summary.json").unlink()
    assert main([*SMALL, "--out", str(tmp_path), "--seeds", "0", "1", "--resume", "--json"]) == 0
    captured = capsys.readouterr()
    assert f"the run in {tmp_path / 'seed-0'} is finished" in captured.err
    assert [json.loads(line)["seed"] for line in captured.out.splitlines()[-2:]] == [0, 1]


def test_minutes_limit_all_seeds_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "epochs=1000", "minutes=0.01", "--out", str(tmp_path), "--seeds", "0", "1"]
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert "seconds was reached" in said
    assert "seed 1 was not trained" in said


def test_a_setting_with_a_space_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="NAME=VALUE"):
        main(["digits-msdnet", "epochs", "1", "--out", str(tmp_path)])


@pytest.mark.skipif(not hasattr(signal, "SIGINT") or os.name == "nt", reason="needs POSIX signals")
def test_two_processes_are_interrupted_and_resumed_to_the_losses_of_one(tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric", reason="needs lightning-fabric")
    command = [sys.executable, "-m", "anytime.train", "--out", str(tmp_path / "two")]
    settings = [*SMALL, "epochs=2", "batch=200", "processes=2"]
    with subprocess.Popen([*command, *settings], stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("epoch 1/2"):
                os.killpg(process.pid, signal.SIGINT)
                break
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert "Ctrl-C was pressed" in rest
    assert "Traceback" not in rest
    subprocess.run([*command, "--resume"], check=True, capture_output=True)
    assert main([*SMALL, "epochs=2", "batch=200", "--out", str(tmp_path / "one")]) == 0
    two, one = ([float(line["loss_2"]) for line in read_log(tmp_path / name / "log.csv")] for name in ("two", "one"))
    assert two == pytest.approx(one, rel=0.05)  # training amplifies rounding; test_distributed.py compares closely

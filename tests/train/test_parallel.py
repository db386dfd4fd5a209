from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from anytime.data import ImageData
from anytime.errors import MissingExtraError, OptionError
from anytime.train.config import Hardware, TrainConfig
from anytime.train.parallel import Team, TeamStep, launch

needs_fabric = pytest.mark.skipif(importlib.util.find_spec("lightning_fabric") is None, reason="needs lightning-fabric")
PROGRAM = Path(__file__).with_name("team.py")


@pytest.fixture(scope="module")
def team() -> ModuleType:
    spec = importlib.util.spec_from_file_location("team_of_two", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["team_of_two"] = module
    spec.loader.exec_module(module)
    return module


def output(*arguments: str, talk: bool = False) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=250)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr if talk else ran.stdout


@pytest.fixture(scope="module")
def by_two() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(output().rpartition("RESULT")[2])
    return found


@needs_fabric
@pytest.mark.parametrize("streamed", [False, True])
def test_two_processes_learn_what_one_learns_from_the_joined_batch(
    team: ModuleType, by_two: list[dict[str, Any]], streamed: bool
) -> None:
    two, one = by_two[streamed], team.work(streamed=streamed)
    # Float32 sums in another order; a wrong share, gradient or statistic is off by far more than this.
    torch.testing.assert_close(torch.tensor(two["losses"]), torch.tensor(one["losses"]), rtol=1e-4, atol=1e-5)
    for name, values in one["state"].items():
        torch.testing.assert_close(torch.tensor(two["state"][name]), torch.tensor(values), rtol=1e-3, atol=1e-4, msg=name)


@needs_fabric
def test_an_error_of_the_leader_arrives_with_its_advice() -> None:
    said = output("--fail")
    assert "the leader has a bad day" in said
    assert "fix: sleep" in said


@needs_fabric
def test_an_error_of_another_process_is_said_there_and_ends_the_leader_in_words() -> None:
    said = output("--fail", "--second", talk=True)
    assert "process 1: the second has a bad day" in said
    assert "another process has ended" in said
    assert "Traceback" not in said


@needs_fabric
def test_a_port_taken_by_somebody_else_is_left_to_them() -> None:
    assert "ports tried: 2" in output("--busy")


@pytest.mark.parametrize(
    ("recipe", "machine", "word"),
    [
        (TrainConfig(batch=63), Hardware(), "multiple"),
        (TrainConfig(objective="l2w"), Hardware(), "l2w"),
        (TrainConfig(), replace(Hardware(), compile=True), "compile"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    recipe: TrainConfig, machine: Hardware, word: str, digits: dict[str, ImageData], tiny: ModuleType
) -> None:
    with pytest.raises(OptionError, match=word):
        TeamStep(tiny.Tiny(), digits["train"], None, recipe, machine, Team(0, 2, torch.device("cpu")))


def test_without_fabric_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    with pytest.raises(MissingExtraError, match="lightning-fabric"):
        launch(2, print)


@needs_fabric
@pytest.mark.parametrize("everybody", [False, True], ids=["the program", "all processes, as a terminal does"])
@pytest.mark.parametrize("where", ["start", "loop"])
def test_ctrl_c_ends_the_start_of_training_and_stops_the_loop(where: str, everybody: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("waiting.py"), where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    (os.killpg if everybody else os.kill)(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    if where == "start":
        assert process.returncode == 130
        assert "interrupted" in err
    else:
        assert process.returncode == 1
        assert "Ctrl-C: it was asked to terminate" in out

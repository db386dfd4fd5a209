from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from anytime.errors import MissingExtraError, OptionError
from anytime.train.config import Hardware, TrainConfig
from anytime.train.distributed import check_distributed, launch

needs_fabric = pytest.mark.skipif(importlib.util.find_spec("lightning_fabric") is None, reason="needs lightning-fabric")
PROGRAM = Path(__file__).with_name("ranks.py")


@pytest.fixture(scope="module")
def ranks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("two_ranks", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["two_ranks"] = module
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=280)


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Any]]:
    done = run("train")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.rpartition("RESULT")[2])
    return found


@needs_fabric
@pytest.mark.parametrize("streamed", [False, True], ids=["in memory", "streamed"])
def test_two_ranks_train_as_one_process_on_the_joined_batch(
    ranks: ModuleType, on_two_ranks: list[dict[str, Any]], streamed: bool
) -> None:
    two, one = on_two_ranks[streamed], ranks.train(streamed)
    # Float32 sums in another order. A wrong part of the batch, gradient or statistic differs by far more than this.
    torch.testing.assert_close(torch.tensor(two["losses"]), torch.tensor(one["losses"]), rtol=1e-4, atol=1e-5)
    for name, values in one["state"].items():
        torch.testing.assert_close(torch.tensor(two["state"][name]), torch.tensor(values), rtol=1e-3, atol=1e-4, msg=name)


@needs_fabric
def test_an_error_on_another_rank_ends_the_run_with_its_message() -> None:
    done = run("fail", "1")
    assert done.returncode == 2
    assert "rank 1 cannot train" in done.stderr
    assert "fix: repair it" in done.stderr
    assert "Traceback" not in done.stderr


@needs_fabric
def test_ctrl_c_on_rank_0_stops_all_ranks() -> None:
    """A terminal sends it to all ranks: see test_command.py."""
    command = [sys.executable, str(PROGRAM), "wait"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "training\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=280)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out) == (130, "Ctrl-C was pressed\n"), err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("recipe", "hardware", "word"),
    [
        (TrainConfig(batch=63), Hardware(), "multiple"),
        (TrainConfig(objective="l2w"), Hardware(), "l2w"),
        (TrainConfig(), Hardware(compile=True), "compile"),
    ],
)
def test_settings_that_several_processes_do_not_support_are_refused(recipe: TrainConfig, hardware: Hardware, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        check_distributed(recipe, hardware, 2)


def test_without_fabric_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning_fabric", "lightning.fabric"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match="lightning-fabric"):
        launch(2, print)

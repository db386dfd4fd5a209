from __future__ import annotations

import csv
import io
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from anytime.artifacts import read_bundle
from anytime.data import ImageData
from anytime.errors import InputError, IntegrityError, OptionError
from anytime.models import create
from anytime.progress import Progress
from anytime.train import DivergedError, ExitEvaluation, FitOptions, TrainConfig, fit


@pytest.mark.parametrize("objective", ["joint", "product", "joint-then-product"])
def test_every_exit_learns_the_digits(digits: dict[str, ImageData], tiny: ModuleType, objective: str) -> None:
    torch.manual_seed(0)
    model = tiny.Tiny()
    config = TrainConfig(epochs=8, schedule="cosine", warmup=1, augment=False, objective=objective)  # type: ignore[arg-type]
    outcome = fit(model, digits["train"], config)
    assert outcome.finished
    assert min(ExitEvaluation(model, digits["test"]).accuracy()) > 0.9  # chance is 0.1


def test_the_log_has_one_line_per_epoch_and_validates_when_asked(
    digits: dict[str, ImageData], tiny: ModuleType, tmp_path: Path
) -> None:
    lines = []
    options = FitOptions(folder=tmp_path, evaluate_every=2, on_epoch=lines.append)
    fit(tiny.Tiny(), digits["train"], TrainConfig(epochs=3), val=digits["val"], options=options)
    with (tmp_path / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert [bool(row["val_accuracy_3"]) for row in rows] == [False, True, True]
    assert float(rows[0]["loss_1"]) > float(rows[2]["loss_1"])
    assert [line.step for line in lines] == [18, 36, 54]


def test_a_diverged_loss_stops_the_run_and_says_what_to_do(
    digits: dict[str, ImageData], tiny: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(DivergedError, match=r"lower lr .* warmup") as caught:
        fit(
            tiny.Tiny(),
            digits["train"],
            TrainConfig(epochs=9, lr=1e12),
            options=FitOptions(folder=tmp_path, checkpoint_every=1),
        )
    assert "exit" in str(caught.value)
    assert ("last good weights" in str(caught.value)) == (tmp_path / "checkpoint").exists()


def final_files(folder: Path) -> dict[str, bytes]:
    """The checkpoint's tensors; its JSON holds seconds, which differ."""
    return {name: data for name, data in read_bundle(folder / "checkpoint").items() if name.endswith(".safetensors")}


def timeless_log(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if "second" not in k} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def uninterrupted(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("whole")
    torch.set_num_threads(1)
    tiny.train(folder)
    return folder


@pytest.mark.parametrize("after", [1, 7, 18, 31, 80])
def test_a_stopped_run_resumes_to_the_same_bits(
    tiny: ModuleType, tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Stopped by Ctrl-C after any step, within an epoch too; 80 lies in the product's phase."""
    shows = 0

    def interrupt(self: Progress, step: int) -> None:
        nonlocal shows
        shows += 1
        if shows == after:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Progress, "show", interrupt)
    tiny.train(tmp_path)
    assert shows < 6 * 18
    torch.manual_seed(99)  # the random state must come from the checkpoint
    tiny.train(tmp_path, resume=True)
    assert shows == 6 * 18
    assert final_files(tmp_path) == final_files(uninterrupted)
    assert timeless_log(tmp_path) == timeless_log(uninterrupted)


def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, uninterrupted: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("tiny.py")), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([*command, "4"], capture_output=True, text=True, env=environment, check=False)
    assert (killed.returncode, killed.stdout.split()) == (-signal.SIGKILL, ["1", "2", "3", "4"])
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, env=environment, check=True)
    assert again.stdout.split() == ["4", "5", "6"]
    assert final_files(tmp_path) == final_files(uninterrupted)
    assert timeless_log(tmp_path) == timeless_log(uninterrupted)


def test_time_runs_out_with_a_checkpoint(digits: dict[str, ImageData], tiny: ModuleType, tmp_path: Path) -> None:
    config = TrainConfig(epochs=1000)
    outcome = fit(tiny.Tiny(), digits["train"], config, options=FitOptions(folder=tmp_path, seconds=0.5))
    assert not outcome.finished
    assert outcome.stopped is not None
    assert "seconds" in outcome.stopped
    again = fit(tiny.Tiny(), digits["train"], config, options=FitOptions(folder=tmp_path, seconds=0.5, resume=True))
    assert again.step > outcome.step
    assert again.seconds > 1.0


def test_a_checkpoint_of_another_recipe_or_of_other_data_is_refused(
    digits: dict[str, ImageData], tiny: ModuleType, uninterrupted: Path
) -> None:
    options = FitOptions(folder=uninterrupted, resume=True)
    with pytest.raises(OptionError, match=r"lr was 0\.1 and is 0\.2"):
        fit(tiny.Tiny(), digits["train"], replace(tiny.RECIPE, lr=0.2), options=options)
    with pytest.raises(OptionError, match="data"):
        fit(tiny.Tiny(), digits["test"], tiny.RECIPE, options=options)


def test_a_checkpoint_of_another_network_is_refused(
    digits: dict[str, ImageData], tiny: ModuleType, uninterrupted: Path
) -> None:
    other = create("resnet-cifar-20", classes=10, depth=8, image_size=8, at=(0.5,))
    with pytest.raises(InputError, match="do not fit a ResNet"):
        fit(other, digits["train"], tiny.RECIPE, options=FitOptions(folder=uninterrupted, resume=True))


def test_a_damaged_checkpoint_is_refused(digits: dict[str, ImageData], tiny: ModuleType, tmp_path: Path) -> None:
    options = FitOptions(folder=tmp_path)
    config = TrainConfig(epochs=1)
    fit(tiny.Tiny(), digits["train"], config, options=options)
    file = tmp_path / "checkpoint" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(IntegrityError):
        fit(tiny.Tiny(), digits["train"], config, options=replace(options, resume=True))


def test_resuming_without_a_checkpoint_starts_a_run(digits: dict[str, ImageData], tiny: ModuleType, tmp_path: Path) -> None:
    assert fit(tiny.Tiny(), digits["train"], TrainConfig(epochs=1), options=FitOptions(folder=tmp_path, resume=True)).finished


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_has_a_rate_and_an_end_on_a_terminal_and_is_quiet_elsewhere() -> None:
    quiet, terminal = io.StringIO(), Terminal()
    for stream in (quiet, terminal):
        progress = Progress(100, 64, stream=stream)
        progress.show(1)
        progress._shown = 0.0
        progress.show(2)
        progress.clear()
    assert quiet.getvalue() == ""
    assert "step 2/100" in terminal.getvalue()
    assert "inputs/s" in terminal.getvalue()
    assert "min left" in terminal.getvalue()

"""The command `anytime bench` as its users meet it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from anytime.artifacts import verify_bundle
from anytime.cli import run
from anytime.run import Profile
from anytime.run.scheduler import POLICIES
from anytime.run.simulation import fit_times

QUICK = ("--requests", "300")
Captured = pytest.CaptureFixture[str]


def make_profile(path: Path, sizes: tuple[int, ...] = (1, 4), exits: int = 3) -> Profile:
    """Stages that take 1 ms and 0.5 ms per row."""
    seconds = torch.tensor([[[1e-3 + 5e-4 * size] * 4] * exits for size in sizes], dtype=torch.float64)
    found = Profile(
        exits=exits,
        classes=5,
        engine="eager",
        threads=1,
        machine={},
        batch_sizes=sizes,
        stage_seconds=seconds,
        exit_seconds=seconds.cumsum(1),
        repeats=1,
    )
    found.save(path)
    return found


@pytest.fixture
def logits(tmp_path: Path) -> str:
    chance = np.random.default_rng(0)
    labels = chance.integers(5, size=60)
    found = chance.normal(size=(3, 60, 5)) + 2 * np.eye(5)[labels]
    np.savez(tmp_path / "logits.npz", logits=found.astype("f4"), labels=labels)
    return str(tmp_path / "logits.npz")


def test_the_table_has_a_row_per_policy_a_column_per_load_and_the_bound_last(capsys: Captured) -> None:
    assert run(["bench", *QUICK, "--load", "100%", "300", "--deadline", "20ms,40ms"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    rows = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert rows == 2 * ["plain", *POLICIES, "fluid bound"]
    assert "100 %, 238/s" in out
    assert "300 %, 713/s" in out
    assert "deadline 40 ms" in out
    assert err == ""


def test_the_document_has_every_cell_and_the_folder_a_chart(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "found"
    line = ["bench", *QUICK, "--policy", "gain", "plain", "--load", "50,600", "--json", "--out", str(out), "--workers", "2"]
    assert run(line) == 0
    document = json.loads(capsys.readouterr().out)
    verify_bundle(out)
    assert json.loads((out / "bench.json").read_text()) == document
    assert "<svg" in (out / "bench.svg").read_text()
    assert [(cell["load"], list(cell["policies"])) for cell in document["cells"]] == [
        (50.0, ["gain", "plain"]),
        (600.0, ["gain", "plain"]),
    ]
    low, high = (cell["policies"] for cell in document["cells"])
    assert low["gain"]["in_time"] == 1.0
    assert high["gain"]["correct"] > high["plain"]["correct"]
    assert high["plain"]["refused"] == 0.0
    assert document["capacity"] == pytest.approx(2 / 4.21e-3)
    assert run(line) == 0  # the same call replaces the folder
    assert json.loads(capsys.readouterr().out) == document


def test_a_profile_has_the_stage_times_and_the_largest_batch(tmp_path: Path, logits: str, capsys: Captured) -> None:
    make_profile(tmp_path / "profile.json")
    assert run(["bench", logits, "--profile", str(tmp_path / "profile.json"), *QUICK, "--load", "100%", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["stage_seconds"]["fixed"] == pytest.approx([1e-3] * 3)
    assert document["stage_seconds"]["per_row"] == pytest.approx([5e-4] * 3)
    assert document["stage_seconds"]["largest_batch"] == 4
    assert document["capacity"] == pytest.approx(1 / 4.5e-3)
    assert document["samples"] == 60


def test_one_batch_size_is_enough_and_said(tmp_path: Path, logits: str, capsys: Captured) -> None:
    times = fit_times(make_profile(tmp_path / "profile.json", sizes=(2,)))
    assert times.fixed == (0.0,) * 3
    assert times.seconds(1, 2) == pytest.approx(2e-3)
    assert run(["bench", logits, "--profile", str(tmp_path / "profile.json"), *QUICK, "--load", "100%"]) == 0
    assert "has one batch size" in capsys.readouterr().err


@pytest.mark.parametrize(("medians", "fixed", "per_row"), [((2e-3, 1e-3), 1.5e-3, 0.0), ((1e-3, 9e-3), 0.0, 37e-3 / 17)])
def test_fitted_times_are_never_negative(tmp_path: Path, medians: tuple[float, ...], fixed: float, per_row: float) -> None:
    from dataclasses import replace

    seconds = torch.tensor([[[median] * 4] * 3 for median in medians], dtype=torch.float64)
    times = fit_times(replace(make_profile(tmp_path / "profile.json"), stage_seconds=seconds))
    assert times.fixed == pytest.approx((fixed,) * 3)
    assert times.per_row == pytest.approx((per_row,) * 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "gian"], "did you mean 'gain'?"),
        (["--load", "0"], "--load is '0'"),
        (["--load", "100%", "logits.npz"], "--load is 'logits.npz'"),
        (["--load", "1e9"], "--load is '1e9'"),
        (["--deadline", "soon"], "'soon' is not a valid duration"),
        (["--deadline", "0ms"], "--deadline is '0ms'"),
        (["--requests", "0"], "--requests is 0"),
        (["--workers", "-1"], "--workers is -1"),
        (["--seed", "-1"], "--seed is -1"),
        (["--rule", "prodct"], "prodct"),
        (["nowhere.npz"], "nowhere.npz"),
        (["--profile", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], said: str, capsys: Captured) -> None:
    assert run(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_times_and_logits_must_be_of_one_model(tmp_path: Path, logits: str, capsys: Captured) -> None:
    assert run(["bench", logits]) == 2
    assert "--profile is not given" in capsys.readouterr().err
    make_profile(tmp_path / "profile.json")
    assert run(["bench", "--profile", str(tmp_path / "profile.json")]) == 2
    assert "the profile has 3 exits and the logits 7" in capsys.readouterr().err


def test_logits_without_labels_are_refused(tmp_path: Path, logits: str, capsys: Captured) -> None:
    np.save(tmp_path / "logits.npy", np.load(logits)["logits"])
    assert run(["bench", str(tmp_path / "logits.npy")]) == 2
    assert "has no labels" in capsys.readouterr().err

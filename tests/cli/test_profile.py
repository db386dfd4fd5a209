"""The command `anytime profile` as its users meet it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from anytime.artifacts import verify_bundle
from anytime.cli import run
from anytime.loading.models import input_shape, make_example, open_model_or_name
from anytime.models import create, measure_cost, names, save
from anytime.run import Profile, Runner

QUICK = ("--engine", "eager", "--repeats", "2")
Captured = pytest.CaptureFixture[str]


def test_the_table_has_one_row_per_exit_and_the_machine(capsys: Captured) -> None:
    assert run(["profile", "mlp-toy", *QUICK, "--batch", "1,4"]) == 0
    out, err = capsys.readouterr()
    assert all(f"│    {exit} │" in out for exit in range(1, 6))
    assert "p99, batch 4" in out
    assert f"torch {torch.__version__}" in out
    assert "load average" in out
    assert "threads 1" in out
    assert "random weights" in err


def test_the_folder_has_a_page_and_a_file_that_a_runner_takes(tmp_path: Path, capsys: Captured) -> None:
    model = create("mlp-toy", classes=3).eval()
    save(model, tmp_path / "model")
    out = tmp_path / "profile"
    assert run(["profile", str(tmp_path / "model"), *QUICK, "--batch", "2,1", "--out", str(out), "--json"]) == 0
    printed, err = capsys.readouterr()
    document = json.loads(printed)
    assert "random weights" not in err
    verify_bundle(out)
    found = Profile.load(out / "profile.json")
    assert (found.exits, found.classes, found.batch_sizes, found.repeats) == (5, 3, (1, 2), 2)
    assert found.macs == measure_cost(model, torch.zeros(1, 2)).macs == tuple(document["macs"])
    assert document["seconds"]["2"]["p99"] == list(found.seconds(2, quantile=0.99))
    assert document["input_shape"] == [2]
    assert document["machine"] == found.machine
    assert "All numbers" in (out / "profile.html").read_text()
    with Runner(model, engine="eager", profile=out / "profile.json") as runner:
        assert runner.predict(torch.zeros(1, 2), deadline="1h").exit == 5


def test_times_rise_from_exit_to_exit_and_with_the_quantile(capsys: Captured) -> None:
    assert run(["profile", "mlp-toy", "--engine", "folded", "--repeats", "5", "--json"]) == 0
    times = json.loads(capsys.readouterr().out)["seconds"]["1"]
    for values in times.values():
        assert values == sorted(values)
    for exit in range(5):
        assert times["p50"][exit] <= times["p90"][exit] <= times["p99"][exit] <= times["max"][exit]


def test_a_text_model_is_measured_on_word_pieces(capsys: Captured) -> None:
    assert run(["profile", "encoder-tiny", *QUICK, "--input-shape", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["input_shape"] == [8]


@pytest.mark.parametrize("name", names())
def test_every_network_has_an_example_to_measure_on(name: str) -> None:
    with torch.device("meta"):  # the large ones have no numbers, and need none
        opened = open_model_or_name(name)
    shape = input_shape(opened.model)
    assert not opened.trained
    assert opened.classes > 1
    assert make_example(opened.model, shape, 2).shape == (2, *shape)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["msdnet-cifr"], "did you mean 'msdnet-cifar'?"),
        (["./nowhere"], "there is no folder"),
        (["mlp-toy", "--batch", "0"], "--batch is '0'"),
        (["mlp-toy", "--batch", "one"], "--batch is 'one'"),
        (["mlp-toy", "--repeats", "0"], "repeats is"),
        (["mlp-toy", "--threads", "0"], "threads is 0"),
        (["mlp-toy", "--engine", "steam"], "engine is 'steam'"),
        (["mlp-toy", "--input-shape", "3"], "(1, 3)"),
        (["resnet-cifar-20", "--input-shape", "5,32,32"], "inputs of shape (5, 32, 32)"),
        (["resnet-cifar-20", "--input-shape", "3,x"], "--input-shape is '3,x'"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], said: str, capsys: Captured) -> None:
    assert run(["profile", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err

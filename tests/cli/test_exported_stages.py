"""Folders of exported stages as the models of `anytime predict` and `anytime profile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anytime
from anytime.artifacts import seal
from anytime.cli import run
from anytime.models import MLP, MLPConfig, create, measure_cost, save
from anytime.run.export import export
from anytime.run.export.description import check_description

pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
Captured = pytest.CaptureFixture[str]
WORDS = ["ant", "bee", "cat", "dog", "eel"]


@pytest.fixture(scope="module")
def network() -> MLP:
    torch.manual_seed(0)
    return MLP(MLPConfig(classes=5, inputs=2, width=8, exits=3)).eval()


@pytest.fixture(scope="module")
def folder(network: MLP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved network, the stages that the command makes of it in both formats, and inputs."""
    made = tmp_path_factory.mktemp("made")
    save(network, made / "model")
    (made / "data.json").write_text(json.dumps({"name": "points", "class_names": WORDS, "mean": [], "std": []}))
    seal(made, ["data.json"], kind="run")
    for format in ("onnx", "torch-export"):
        assert run(["export", str(made), "--format", format, "--out", str(made / format)]) == 0
    np.save(made / "x.npy", np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32))
    return made


def document(capsys: Captured, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("format", ["onnx", "torch-export"])
def test_predict_gives_the_network_s_answers(format: str, folder: Path, network: MLP, capsys: Captured) -> None:
    trust = ["--trust"] if format == "torch-export" else []
    found = document(capsys, "predict", str(folder / format), str(folder / "x.npy"), *trust)
    with torch.inference_mode():
        wanted = anytime.Product()(network(torch.from_numpy(np.load(folder / "x.npy"))))
    assert (found["exits"], found["exit"], found["engine"], found["rule"]) == (3, 3, "exported", repr(anytime.Product()))
    for exit, grown in enumerate(found["growth"]):
        for row, answer in enumerate(grown["answers"]):
            assert answer["name"] == WORDS[answer["label"]]
            assert answer["probability"] == pytest.approx(float(wanted.probs[exit, row].max()), abs=1e-4)


def test_predict_takes_budgets_with_exported_stages(folder: Path, network: MLP, capsys: Captured) -> None:
    macs = measure_cost(network, torch.zeros(1, 2)).macs
    stages, x = str(folder / "onnx"), str(folder / "x.npy")
    found = document(capsys, "predict", stages, x, "--macs", str(macs[1]))
    assert (found["exit"], found["stopped"]) == (2, "macs")
    assert document(capsys, "predict", stages, x, "--exits", "1")["exit"] == 1
    assert document(capsys, "predict", stages, x, "--deadline", "60s")["deadline_met"] is True
    assert run(["predict", stages, x, "--macs", str(macs[1])]) == 0
    assert "would exceed --macs" in capsys.readouterr().out


def test_predict_takes_a_budget_of_macs_with_a_network(folder: Path, network: MLP, capsys: Captured) -> None:
    macs = measure_cost(network, torch.zeros(1, 2)).macs
    words = ("predict", str(folder), str(folder / "x.npy"), "--engine", "eager", "--macs")
    assert document(capsys, *words, str(macs[1]))["stopped"] == "macs"
    assert run([*words, "1"]) == 2
    assert "a budget of 1 MACs" in capsys.readouterr().err


def test_profile_measures_exported_stages(folder: Path, network: MLP, capsys: Captured) -> None:
    found = document(capsys, "profile", str(folder / "onnx"), "--repeats", "3", "--batch", "1,2")
    assert found["macs"] == list(measure_cost(network, torch.zeros(1, 2)).macs)
    assert (found["exits"], found["classes"], found["engine"]) == (3, 5, "exported")
    assert run(["profile", str(folder / "torch-export"), "--repeats", "3"]) == 2
    assert "--trust" in capsys.readouterr().err
    assert run(["profile", str(folder / "torch-export"), "--repeats", "3", "--trust"]) == 0


def test_pixels_are_normalised_as_the_run_says(tmp_path: Path, capsys: Captured) -> None:
    torch.manual_seed(0)
    model = create("msdnet-cifar", classes=5, exits=2, base=1, step=1, channels=4, growth=2,
                   growth_factors=(1, 2), bottleneck_factors=(1, 2), image_size=16).eval()  # fmt: skip
    save(model, tmp_path / "model")
    stored = {"name": "pets", "class_names": WORDS, "mean": [0.2, 0.3, 0.4], "std": [0.5, 0.6, 0.7]}
    (tmp_path / "data.json").write_text(json.dumps(stored))
    seal(tmp_path, ["data.json"], kind="run")
    assert run(["export", str(tmp_path), "--rule", "latest", "--out", str(tmp_path / "stages")]) == 0
    np.save(tmp_path / "pixels.npy", np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8))
    words = (str(tmp_path / "pixels.npy"),)
    exact = document(capsys, "predict", str(tmp_path), *words, "--engine", "eager", "--rule", "latest")
    found = document(capsys, "predict", str(tmp_path / "stages"), *words)
    for one, other in zip(exact["answers"], found["answers"], strict=True):
        assert other["probability"] == pytest.approx(one["probability"], abs=1e-4)
        assert other["name"] in WORDS


def test_stages_of_a_text_model_read_tokens(tmp_path: Path, capsys: Captured) -> None:
    torch.manual_seed(0)
    model = create("encoder-tiny", classes=5, vocabulary=40).eval()
    export(model, tmp_path / "stages", rule="caching", example=torch.randint(1, 40, (1, 12)))
    np.save(tmp_path / "tokens.npy", np.array([3, 4, 5, 6]))
    found = document(capsys, "predict", str(tmp_path / "stages"), str(tmp_path / "tokens.npy"))
    with torch.inference_mode():
        wanted = anytime.Caching()(model(torch.tensor([[3, 4, 5, 6]])))
    assert found["answers"][0]["probability"] == pytest.approx(float(wanted.probs[-1].max()), abs=1e-4)
    assert document(capsys, "profile", str(tmp_path / "stages"), "--repeats", "2", "--input-shape", "4")["macs"] is None
    np.save(tmp_path / "far.npy", np.array([10**6]))
    np.save(tmp_path / "float.npy", np.zeros(4, np.float32))
    for name, hint in (("far.npy", "stage 1 of 3 failed"), ("float.npy", "integers of shape")):
        assert run(["predict", str(tmp_path / "stages"), str(tmp_path / name)]) == 2
        assert hint in capsys.readouterr().err
    assert run(["predict", str(tmp_path / "stages"), str(tmp_path / "tokens.npy"), "--macs", "1e6"]) == 2
    assert "MACs" in capsys.readouterr().err


def test_wrong_calls_are_named(folder: Path, capsys: Captured) -> None:
    stages, x = str(folder / "onnx"), str(folder / "x.npy")
    for words, hint in (
        (["predict", stages, x, "--engine", "eager"], "--engine is 'eager'"),
        (["predict", stages, x, "--rule", "latest"], "contain the rule"),
        (["predict", stages, str(folder / "absent.npy")], "there is no"),
        (["predict", str(folder / "torch-export"), x], "--trust"),
        (["export", stages, "--out", str(folder / "again")], "has exported stages"),
    ):
        assert run(words) == 2
        assert hint in capsys.readouterr().err


@pytest.mark.parametrize("example", [[], [[2, 2]], [["2"]], [[3]], 3, [[True]]])
def test_an_example_of_other_sizes_than_the_inputs_is_refused(example: object, folder: Path) -> None:
    document = json.loads((folder / "onnx" / "exported.json").read_text())
    check_description({**document, "example": None})  # as earlier releases wrote
    with pytest.raises(ValueError, match="an example of other sizes"):
        check_description({**document, "example": example})

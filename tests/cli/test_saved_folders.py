"""Folders of `anytime.save` on the command line, with a function of the user's that builds the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anytime
from anytime.calibrate import fit_temperature
from anytime.cli import run
from anytime.errors import FormatError, ShapeError
from anytime.loading.inputs import read_input
from anytime.policy import Confidence
from anytime.run import open_folder
from anytime.run.export import load_exported

Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
CODE = """
import torch
from torch import nn

def make_backbone():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(9, 6), nn.Linear(6, 5)

    def forward(self, input_ids, attention_mask):
        return self.last((self.words(input_ids) * attention_mask[..., None]).sum(1))
"""
WORDS = ["ant", "bee", "cat", "dog", "eel"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: `makes_models_here.py`, a saved model `saved`, and inputs."""
    (tmp_path / "makes_models_here.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    made: dict[str, Any] = {}
    exec(CODE, made)
    torch.manual_seed(0)
    model = anytime.attach_exits(made["make_backbone"](), at=["1"], example=torch.zeros(1, 3)).eval()
    logits, labels = torch.randn(2, 50, 5), torch.arange(50) % 5
    anytime.save(
        model, tmp_path / "saved", rule="caching", calibration=fit_temperature(logits, labels), policy=Confidence((0.0, 1.0)),
        class_names=WORDS,
    )  # fmt: skip
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32))
    return tmp_path


BUILD = ("--build", "makes_models_here:make_backbone")


def document(capsys: Captured, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_predict_uses_what_was_saved_and_options_win(place: Path, capsys: Captured) -> None:
    found = document(capsys, "predict", "saved", "x.npy", *BUILD)
    assert "Scaled(inner=Caching" in found["rule"]
    assert (found["exit"], found["stopped"]) == (1, "policy")
    assert {answer["name"] for answer in found["answers"]} <= set(WORDS)
    assert "Scaled(inner=Latest" in document(capsys, "predict", "saved", "x.npy", *BUILD, "--rule", "latest")["rule"]
    assert run(["predict", "saved", "x.npy", *BUILD]) == 0
    assert "stopped: the saved policy stopped it" in capsys.readouterr().out


def test_profile_and_export_build_the_model(place: Path, capsys: Captured) -> None:
    found = document(capsys, "profile", "saved", *BUILD, "--repeats", "2", "--engine", "eager")
    assert (found["input_shape"], found["exits"], len(found["macs"])) == ([3], 2, 2)
    pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    assert run(["export", "saved", "--out", "stages", *BUILD]) == 0
    exported = load_exported(place / "stages")
    assert "Scaled(inner=Caching" in exported.rule
    assert exported.class_names == WORDS


def test_the_module_of_build_is_not_left_on_the_path(place: Path, capsys: Captured) -> None:
    import sys

    before = list(sys.path)
    document(capsys, "profile", "saved", *BUILD, "--repeats", "1", "--engine", "eager")
    assert sys.path == before
    (place / "saved" / "hidden_in_the_model.py").write_text("raise SystemExit('ran')")
    assert run(["profile", "saved", "--build", "hidden_in_the_model:make"]) == 2


def test_several_tensors_come_from_named_arrays(place: Path, capsys: Captured) -> None:
    made: dict[str, Any] = {}
    exec(CODE, made)
    x = {"input_ids": torch.tensor([[1, 2, 3], [4, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    model = anytime.attach_exits(made["Two"](), at=["words"], example=x)
    opened = open_folder(anytime.save(model, place / "two"), build=made["Two"])
    np.savez(place / "x.npz", **{name: tensor.numpy().astype(np.int32) for name, tensor in x.items()})
    read, note = read_input("x.npz", opened)
    assert isinstance(read, dict)
    assert note is None
    assert all(read[name].dtype == torch.int64 and torch.equal(read[name], x[name]) for name in x)
    two = ("--build", "makes_models_here:Two")
    found = document(capsys, "predict", "two", "x.npz", *two, "--rule", "latest", "--engine", "eager", "--macs", "1e9")
    assert [answer["label"] for answer in found["answers"]] == model.eval()(x)[-1].argmax(-1).tolist()
    found = document(capsys, "profile", "two", *two, "--repeats", "1", "--engine", "eager", "--batch", "1,3")
    assert found["input_shape"] == {"input_ids": [3], "attention_mask": [3]}
    np.savez(place / "wrong.npz", input_ids=x["input_ids"].numpy())
    np.savez(place / "floats.npz", input_ids=np.zeros((2, 3)), attention_mask=np.zeros((2, 3)))
    for file, kind, hint in (
        ("wrong.npz", FormatError, "attention_mask"),
        ("x.npy", FormatError, "a .npz with the arrays input_ids, attention_mask"),
        ("floats.npz", ShapeError, "float64"),
    ):
        with pytest.raises(kind, match=hint):
            read_input(file, opened)


def test_token_ids_of_a_single_tensor_are_read(place: Path) -> None:
    class Words(torch.nn.Module):
        """A bag of words."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.last = torch.nn.EmbeddingBag(9, 6), torch.nn.Linear(6, 5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.last(self.words(ids))  # type: ignore[no-any-return]

    model = anytime.attach_exits(Words(), at=["words"], example=torch.zeros(2, 4, dtype=torch.long))
    opened = open_folder(anytime.save(model, place / "words"), build=Words)
    np.save(place / "ids.npy", np.ones((3, 7), dtype=np.int16))
    read, _ = read_input("ids.npy", opened)
    assert isinstance(read, torch.Tensor)
    assert (read.dtype, read.shape) == (torch.int64, (3, 7))


def test_evaluate_takes_the_folder_of_a_run(capsys: Captured) -> None:
    folder = ROOT / "results" / "minilm-sst2-seed0"
    found = document(capsys, "evaluate", str(folder), "--sets", "none")
    assert found["exits"] == 6
    assert run(["evaluate", str(folder), "--json", "--sets", "none"]) == 0
    assert f"evaluating {folder / 'test-sample.npz'}, a random sample of the test rows" in capsys.readouterr().err


def test_pixels_of_a_network_that_normalises_them_itself_stay_pixels(place: Path) -> None:
    class Pixels(torch.nn.Module):
        """Takes bytes."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.conv(x / 255).mean((-1, -2)))  # type: ignore[no-any-return]

    model = anytime.attach_exits(Pixels(), at=["conv"], example=torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    opened = open_folder(anytime.save(model, place / "pixels"), build=Pixels)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    np.save(place / "pixels.npy", pixels)
    read, _ = read_input("pixels.npy", opened)
    assert isinstance(read, torch.Tensor)
    assert read.dtype == torch.uint8
    assert torch.equal(read, torch.from_numpy(pixels).permute(0, 3, 1, 2))


def test_a_model_without_an_example_is_profiled_with_a_shape(place: Path, capsys: Captured) -> None:
    (place / "yields_logits.py").write_text(
        "import torch\n\nclass Yielding(torch.nn.Module):\n    num_exits = 2\n\n    def __init__(self):\n"
        "        super().__init__()\n        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])\n\n"
        "    def exits(self, x):\n        for layer in self.layers:\n            x = layer(x)\n            yield x\n"
    )
    made: dict[str, Any] = {}
    exec((place / "yields_logits.py").read_text(), made)
    anytime.save(made["Yielding"](), place / "yielding")
    words = ("profile", "yielding", "--build", "yields_logits:Yielding", "--repeats", "1")
    assert run([*words]) == 2
    assert "example=x" in capsys.readouterr().err
    assert document(capsys, *words, "--input-shape", "2")["exits"] == 2


def test_a_model_without_an_example_takes_the_arrays_given(place: Path, capsys: Captured) -> None:
    made: dict[str, Any] = {}
    exec(CODE, made)
    body = [made["make_backbone"]() for _ in range(2)]
    anytime.save(anytime.models.Ensemble(body), place / "ensemble")
    found = document(capsys, "predict", "ensemble", "x.npy", *BUILD, "--engine", "eager")
    assert (found["inputs"], found["exits"]) == (4, 2)


def test_a_model_in_half_precision_is_profiled(place: Path, capsys: Captured) -> None:
    model = anytime.load(place / "saved", build=_backbone())
    anytime.save(model.half(), place / "half")
    assert document(capsys, "profile", "half", *BUILD, "--repeats", "1", "--engine", "eager")["exits"] == 2


def _backbone() -> Any:
    made: dict[str, Any] = {}
    exec(CODE, made)
    return made["make_backbone"]

"""The command `anytime export` as its users meet it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import anytime
from anytime.artifacts import write_bundle
from anytime.calibrate import TunedRule
from anytime.cli import run
from anytime.models import MLP, MLPConfig, ResNet, ResNetConfig, load, measure_cost, save
from anytime.run.export import load_exported


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save(MLP(MLPConfig(classes=4, inputs=3, width=8, exits=2)), tmp_path / "model")
    return tmp_path / "model"


def test_a_saved_model_becomes_stages_that_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert run(["export", str(folder), "--format", "torch-export", "--rule", "caching", "--out", str(out)]) == 0
    printed, talk = capsys.readouterr()
    assert printed.strip() == str(out)
    assert "2 stages" in talk
    exported = load_exported(out, trusted=True)
    assert exported.rule == "Caching(ties='earlier')"
    assert exported.macs == list(measure_cost(load(folder), torch.zeros(1, 3)).macs)
    assert [prediction.probs.shape for prediction in exported.run(torch.zeros(5, 3))] == [(5, 4)] * 2


def test_stages_of_an_earlier_export_are_not_counted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(tmp_path / "out", {"stage_3.pt2": b""}, kind="export")
    assert run(["export", str(folder), "--format", "torch-export", "--out", str(tmp_path / "out")]) == 0
    assert "2 stages" in capsys.readouterr().err
    assert not (tmp_path / "out" / "stage_3.pt2").exists()


def test_onnx_is_the_default(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    assert run(["export", str(folder), "--out", str(tmp_path / "out"), "--example-size", "3"]) == 0
    document = json.loads((tmp_path / "out" / "exported.json").read_text())
    assert (document["kind"], anytime.parse_rule(document["rule"])) == ("onnx", anytime.Caching())  # below five classes


def test_a_model_that_takes_several_tensors_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra 'text' of the tests is not installed")
    pytest.importorskip("onnxruntime", reason="the extra 'engines' is not installed")
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    bert = BertForSequenceClassification(BertConfig(**sizes, max_position_embeddings=16, num_labels=6)).eval()
    x = {"input_ids": torch.ones(2, 7, dtype=torch.int64), "attention_mask": torch.ones(2, 7, dtype=torch.int64)}
    model = anytime.attach_exits(bert, at=["bert.encoder.layer.0"], example=x).eval()
    anytime.save(model, tmp_path / "model")
    assert run(["export", str(tmp_path / "model"), "--out", str(tmp_path / "out")]) == 0
    *_, answer = load_exported(tmp_path / "out").run(x)
    with torch.no_grad():
        torch.testing.assert_close(answer.probs, anytime.Product()(model(x)).probs[-1])
    assert run(["profile", str(tmp_path / "out"), "--repeats", "1"]) == 0  # with rows that are not too long


def test_the_size_of_images_comes_from_the_model(tmp_path: Path) -> None:
    save(ResNet(ResNetConfig(classes=4, depth=8, width=4, channels=2, image_size=8, at=(0.5,))), tmp_path / "model")
    words = ["export", str(tmp_path / "model"), "--format", "torch-export", "--rule", "latest", "--out", str(tmp_path / "out")]
    assert run(words) == 0
    assert load_exported(tmp_path / "out", trusted=True).description["stages"][0]["inputs"][0]["shape"] == ["batch", 2, 8, 8]


def test_wrong_calls_leave_with_2(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned = tmp_path / "rule.json"
    empty = torch.zeros(0, dtype=torch.int64)
    TunedRule(exits=7, classes=4, text="product", name="product", objective="", metrics={}, rows=1, seed=0, seen=empty).save(
        tuned
    )
    out = ["--out", str(tmp_path / "out")]
    for words, hint in (
        ([str(folder), *out, "--rule", "prodct"], "did you mean 'product'"),
        ([str(folder), *out, "--rule", str(tuned)], "7 exits"),
        ([str(folder), *out, "--example-size", "3x32"], "--example-size is '3x32'"),
        ([str(folder), *out, "--format", "tflite"], "format"),
        ([str(folder)], "out"),
        ([str(tmp_path / "absent"), *out], "there is no folder"),
    ):
        assert run(["export", *words]) == 2
        assert hint in capsys.readouterr().err.lower()
    assert not (tmp_path / "out").exists()

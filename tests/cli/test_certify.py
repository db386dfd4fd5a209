"""The command `anytime certify` as its users meet it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from anytime.calibrate import Certificate
from anytime.cli import run


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 8, 200)
    logits = rng.normal(size=(4, 200, 8)) * 2 + 3 * np.eye(8)[labels]
    np.savez(tmp_path / "logits.npz", logits=logits.astype(np.float32), labels=labels)
    return tmp_path / "logits.npz"


def test_sentences_go_to_stdout(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["certify", str(file), "--rule", "latest", "--drop", "0.2", "--confidence", "0.9"]) == 0
    out, err = capsys.readouterr()
    assert "With 90 % confidence at most" in out
    assert "of inputs lose 0.2 or more of the true class's probability." in out
    assert "at least" in out
    assert "same source" in err


def test_the_document_and_the_file_hold_the_certificate(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "certificate.json"
    assert run(["certify", str(file), "--json", "--out", str(saved), "--strict"]) == 0
    document = json.loads(capsys.readouterr().out)
    found = Certificate.load(saved)
    assert document["drop_bound"] == found.drop_bound
    assert document["sentences"] == list(found.sentences)
    assert (found.exits, found.classes, found.rows, found.text, found.strict) == (4, 8, 200, "product", True)


def test_probabilities_must_be_named(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with np.load(file) as data:
        exponentials = np.exp(data["logits"])
        np.savez(tmp_path / "p.npz", logits=exponentials / exponentials.sum(-1, keepdims=True), labels=data["labels"])
    counts = []
    assert run(["certify", str(tmp_path / "p.npz"), "--rule", "latest"]) == 2
    assert "--probabilities" in capsys.readouterr().err
    for name, more in (("p.npz", ["--probabilities"]), ("logits.npz", [])):
        assert run(["certify", str(tmp_path / name), "--rule", "latest", "--json", *more]) == 0
        counts.append(json.loads(capsys.readouterr().out)["losses"])
    assert counts[0] == counts[1]


def test_wrong_calls_leave_with_2(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "logits.npy", np.zeros((2, 3, 4), dtype=np.float32))
    for words, hint in (
        ([str(tmp_path / "logits.npy")], "--labels"),
        ([str(file), "--confidence", "95"], "confidence is 95"),
        ([str(file), "--rule", "prodct"], "did you mean 'product'"),
        ([str(file), "--rule", str(tmp_path / "none.json")], "there is no"),
        ([str(tmp_path / "absent.npz")], "there is no file"),
    ):
        assert run(["certify", *words]) == 2
        assert hint in capsys.readouterr().err

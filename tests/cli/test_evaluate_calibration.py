"""The command `anytime evaluate FILE --calibration FILE2` as its users meet it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import yaml

import anytime
from anytime.artifacts import verify_bundle
from anytime.calibrate import FittedProduct
from anytime.cli import run


def write(path: Path, seed: int, *, rows: int = 200, first: int = 0, classes: int = 8, exits: int = 4) -> Path:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, rows)
    logits = rng.normal(size=(exits, rows, classes)) * 2 + 3 * np.eye(classes)[labels]
    np.savez(path, logits=logits.astype(np.float32), labels=labels, indices=np.arange(first, first + rows))
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    return str(write(tmp_path / "test.npz", 0)), str(write(tmp_path / "cal.npz", 1, first=200))


def test_the_document_gains_one_key_and_keeps_its_names(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    test, calibration = files
    assert run(["evaluate", test, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run(["evaluate", test, "--calibration", calibration, "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert set(document) - set(plain) == {"calibration"}
    assert list(document["rules"]) == ["latest", "caching", "product", "scaled caching", "fitted product"]
    for name, figures in document["rules"].items():
        assert set(figures) == set(plain["rules"]["latest"])
        assert figures["set_size"] == document["calibration"]["rules"][name]["set_size"]
    assert document["rules"]["product"]["label_drop_percent"] == plain["rules"]["product"]["label_drop_percent"]
    assert document["settings"]["sets"]["calibration_rows"] == document["calibration"]["calibrating_rows"] == 100


def test_a_folder_holds_the_section_and_the_fitted_product(files: tuple[str, str], tmp_path: Path) -> None:
    test, calibration = files
    out = tmp_path / "run"
    arguments = ["evaluate", test, "--out", str(out)]
    assert run([*arguments, "--calibration", calibration, "--costs", "1,2,4,8"]) == 0
    verify_bundle(out)
    assert isinstance(anytime.load(out / "fitted-product.json"), FittedProduct)
    assert yaml.safe_load((out / "config.yaml").read_text())["calibration"] == "cal.npz"
    assert "What can be guaranteed" in (out / "report.html").read_text()
    assert json.loads((out / "metrics.json").read_text())["calibration"]["costs"] == [1.0, 2.0, 4.0, 8.0]
    assert run(arguments) == 0
    verify_bundle(out)
    assert not (out / "fitted-product.json").exists()
    assert "What can be guaranteed" not in (out / "report.html").read_text()


def test_the_table_has_a_row_a_rule(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    test, calibration = files
    assert run(["evaluate", test, "--calibration", calibration, "--rules", "latest,product", "--sets", "none", "--strict"]) == 0
    out = capsys.readouterr().out
    assert "calibrated on cal.npz: 100 rows to fit, 100 for sets and thresholds" in out
    assert "95 % confidence" in out
    assert "scaled caching" not in out


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "expected:" in err
    assert "fix:" in err
    return err


def test_the_same_rows_are_refused_however_they_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test = write(tmp_path / "test.npz", 0)
    (tmp_path / "soft.npz").symlink_to(test)
    os.link(test, tmp_path / "hard.npz")
    for name in ("test.npz", "soft.npz", "hard.npz"):
        assert "calibration and test" in refused(["evaluate", str(test), "--calibration", str(tmp_path / name)], capsys)
    copy = write(tmp_path / "copy.npz", 0, first=1000)
    assert "200 of the 200 calibration rows" in refused(["evaluate", str(test), "--calibration", str(copy)], capsys)
    with np.load(test) as file:
        again = {"logits": file["logits"] + 1e-3, "labels": file["labels"], "indices": file["indices"]}
    np.savez(tmp_path / "again.npz", **again)  # the same images by another run of the model
    assert "'indices'" in refused(["evaluate", str(test), "--calibration", str(tmp_path / "again.npz")], capsys)


def test_a_single_shared_row_is_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test, calibration = write(tmp_path / "test.npz", 0), write(tmp_path / "cal.npz", 1, first=200)
    with np.load(test) as one, np.load(calibration) as other:
        logits, labels = other["logits"].copy(), other["labels"]
        logits[:, 5] = one["logits"][:, 9]
    np.savez(calibration, logits=logits, labels=labels)
    out = tmp_path / "run"
    assert run(["evaluate", str(test), "--calibration", str(calibration), "--json", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    told = "1 row of cal.npz is among the inputs of this report and left out"
    assert told in printed.err
    assert told in (out / "report.html").read_text()
    assert json.loads(printed.out)["calibration"]["dropped_rows"] == 1


def test_mistakes_are_explained(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    test, calibration = files
    assert "no file" in refused(["evaluate", test, "--calibration", "nowhere.npz"], capsys)
    few = write(tmp_path / "few.npz", 2, classes=5, first=500)
    assert "5 classes" in refused(["evaluate", test, "--calibration", str(few)], capsys)
    short = write(tmp_path / "short.npz", 2, exits=3, first=500)
    assert "3 exits" in refused(["evaluate", test, "--calibration", str(short)], capsys)
    np.savez(tmp_path / "bare.npz", logits=np.random.default_rng(5).normal(size=(4, 60, 8)))
    assert "no labels" in refused(["evaluate", test, "--calibration", str(tmp_path / "bare.npz")], capsys)
    assert "no labels" in refused(["evaluate", str(tmp_path / "bare.npz"), "--calibration", calibration], capsys)

"""The command `anytime conformal` as its users meet it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import anytime
from anytime.cli import run
from anytime.conformal import ConformalSets, NestedSets


def write(path: Path, seed: int, rows: int = 300, first: int = 0, classes: int = 8) -> str:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, rows)
    logits = rng.normal(size=(4, rows, classes)) * 2 + 6 * np.eye(classes)[labels]
    np.savez(path, logits=logits.astype(np.float32), labels=labels, indices=np.arange(first, first + rows))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    return write(tmp_path / "cal.npz", 0), write(tmp_path / "test.npz", 1, first=300)


@pytest.mark.parametrize("variant", ["paper", "original", "aps", "nested"])
def test_each_variant_gives_metrics_and_a_file(
    files: tuple[str, str], variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sets.json"
    assert run(["conformal", *files, "--variant", variant, "--alpha", "0.1", "--json", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert str(out) in printed.err
    assert (document["exits"], document["classes"], document["samples"]) == (4, 8, 300)
    assert document["calibration_rows"] == (210 if variant == "original" else 300)
    for name in ("size", "coverage", "simultaneous_coverage", "empty", "nestedness"):
        assert len(document[name]) == 4
    assert document["coverage"][-1] > 0.82
    if variant == "nested":
        assert NestedSets.load(out).alpha == 0.1
        assert document["nestedness"] == [1.0] * 4
        return
    fitted = ConformalSets.load(out)
    assert fitted.text == document["rule"]
    assert ("Tempered" in document["rule"]) == (variant == "original")
    assert (fitted.lam_reg == (0.0,) * 4) == (variant == "aps")


def test_results_depend_on_the_seed_only(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for seed in ("0", "0", "1"):
        assert run(["conformal", *files, "--json", "--variant", "original", "--seed", seed]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert found[0]["size"] != found[2]["size"]


def test_exits_calibrated_together_are_nested(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["conformal", *files, "--json", "--simultaneous", "--shared", "--rule", "latest"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rule"] == "latest"
    assert document["simultaneous"] is document["shared"] is True
    assert document["nestedness"] == [1.0] * 4
    assert document["coverage"] == document["simultaneous_coverage"]


def test_the_table_has_a_row_an_exit(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["conformal", *files]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "paper sets of product" in out
    assert "nestedness" in out
    assert "sets that grow" in out
    assert sum(line.startswith("│") for line in out.splitlines()) == 4


def test_a_coverage_out_of_reach_is_said_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("cal.npz", 0), ("test.npz", 1)):
        rng = np.random.default_rng(seed)
        np.savez(tmp_path / name, logits=rng.normal(size=(3, 50, 5)), labels=rng.integers(0, 5, 50))
    assert run(["conformal", str(tmp_path / "cal.npz"), str(tmp_path / "test.npz"), "--variant", "nested"]) == 0
    assert "no thresholds reach 95 %" in capsys.readouterr().out


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "expected:" in err
    assert "fix:" in err
    return err


def test_the_same_rows_are_refused_however_they_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cal = write(tmp_path / "cal.npz", 0)
    assert "calibration and test" in refused(["conformal", cal, cal], capsys)
    (tmp_path / "link.npz").symlink_to(cal)
    assert "calibration and test" in refused(["conformal", cal, str(tmp_path / "link.npz")], capsys)
    copy = write(tmp_path / "copy.npz", 0, first=1000)
    assert "300 of the 300 calibration rows" in refused(["conformal", cal, copy], capsys)
    with np.load(cal) as file:
        other = {"logits": file["logits"] + 1e-3, "labels": file["labels"], "indices": file["indices"]}
    np.savez(tmp_path / "again.npz", **other)  # the same images by another run of the model
    assert "'indices'" in refused(["conformal", cal, str(tmp_path / "again.npz")], capsys)


def test_equal_indices_with_other_labels_are_rows_of_another_data_set(tmp_path: Path) -> None:
    assert run(["conformal", write(tmp_path / "cal.npz", 0), write(tmp_path / "test.npz", 1)]) == 0


def test_mistakes_are_explained(files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cal, test = files
    assert "TEST" in refused(["conformal", cal], capsys)
    assert "no file" in refused(["conformal", cal, "nowhere.npz"], capsys)
    assert "alpha" in refused(["conformal", cal, test, "--alpha", "1.5"], capsys)
    assert "did you mean" in refused(["conformal", cal, test, "--rule", "prodct"], capsys)
    assert "--rule" in refused(["conformal", cal, test, "--variant", "nested", "--rule", "latest"], capsys)
    assert "--shared" in refused(["conformal", cal, test, "--variant", "nested", "--shared"], capsys)
    few = write(tmp_path / "few.npz", 2, classes=5)
    assert "8 classes" in refused(["conformal", cal, few], capsys)
    np.savez(tmp_path / "unlabelled.npz", logits=np.zeros((2, 3, 4), dtype=np.float32))
    assert "labels" in refused(["conformal", cal, str(tmp_path / "unlabelled.npz")], capsys)
    np.savez(tmp_path / "flat.npz", logits=np.zeros((3, 4), dtype=np.float32), labels=np.zeros(3, dtype=np.int64))
    assert "rank 2" in refused(["conformal", cal, str(tmp_path / "flat.npz")], capsys)
    probabilities = np.full((2, 3, 4), 0.25, dtype=np.float32)
    np.savez(tmp_path / "probabilities.npz", logits=probabilities, labels=np.zeros(3, dtype=np.int64))
    assert "probabilities" in refused(["conformal", str(tmp_path / "probabilities.npz"), test], capsys)


def test_a_single_shared_row_is_left_out_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibration, test = write(tmp_path / "cal.npz", 0), write(tmp_path / "test.npz", 1, first=1000)
    with np.load(calibration) as one, np.load(test) as other:
        logits, labels = one["logits"].copy(), one["labels"]
        logits[:, 5] = other["logits"][:, 9]
    np.savez(calibration, logits=logits, labels=labels)
    assert run(["conformal", calibration, test, "--out", str(tmp_path / "sets.json")]) == 0
    assert "left out 1 rows of cal.npz" in capsys.readouterr().err
    assert ConformalSets.load(tmp_path / "sets.json").rows == len(labels) - 1


def test_sets_of_one_kind_replace_those_of_the_other(files: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "sets.json"
    for variant, kind in (("nested", NestedSets), ("paper", ConformalSets), ("nested", NestedSets)):
        assert run(["conformal", *files, "--variant", variant, "--out", str(out)]) == 0
        assert isinstance(anytime.load(out), kind)

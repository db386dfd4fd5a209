"""No command writes over its inputs, or over anything that it did not write itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from anytime.artifacts import bundle_kind, read_bundle, verify_bundle, write_bundle
from anytime.calibrate import certify, fit_temperature
from anytime.cli import run
from anytime.errors import FileError, OverwriteError
from anytime.models import create, save
from anytime.outputs import check_file, check_folder
from anytime.run.export import export


def rows(path: Path, seed: int, count: int = 150) -> Path:
    source = np.random.default_rng(seed)
    np.savez(path, logits=source.normal(0, 3, (3, count, 4)).astype(np.float32), labels=source.integers(0, 4, count))
    return path


def state(folder: Path) -> dict[str, str]:
    """Every file below a folder with its content."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Two files of logits, a model, and the beginning of a run that has no manifest."""
    rows(tmp_path / "v.npz", 0)
    rows(tmp_path / "t.npz", 1)
    torch.manual_seed(0)
    save(create("mlp-toy", classes=4), tmp_path / "model")
    (tmp_path / "run").mkdir()
    rows(tmp_path / "run" / "test.npz", 2)
    (tmp_path / "run" / "config.yaml").write_text("data: digits\n")
    (tmp_path / "run" / "environment.json").write_text("{}")
    (tmp_path / "link.npz").symlink_to(tmp_path / "t.npz")
    (tmp_path / "hard.npz").hardlink_to(tmp_path / "t.npz")
    (tmp_path / "link-to-model").symlink_to(tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "evaluate run/test.npz --out run",
        "evaluate run/test.npz --out run/../run",
        "evaluate t.npz --out run",
        "evaluate t.npz --out model",
        "evaluate t.npz --out .",
        "evaluate t.npz --out t.npz",
        "certify t.npz --out t.npz",
        "certify t.npz --out run/../t.npz",
        "certify t.npz --out link.npz",
        "certify t.npz --out hard.npz",
        "certify t.npz --out v.npz",
        "certify t.npz --out run/config.yaml",
        "certify t.npz --out run",
        "conformal v.npz t.npz --out v.npz",
        "conformal v.npz t.npz --out t.npz",
        "conformal v.npz t.npz --out model/config.json",
        "tune v.npz --out run",
        "tune v.npz --out model",
        "export model --out model --format torch-export",
        "export model --out link-to-model --format torch-export",
        "export model --out run --format torch-export",
        "profile model --out model --engine eager --repeats 20",
        "profile mlp-toy --out run --engine eager --repeats 20",
        "demo --out run",
        "demo --out model",
        "train digits-msdnet --out run",
        "train digits-msdnet --out model",
        "train --config run/config.yaml --out run",
        "train digits-msdnet --out t.npz",
        "reproduce regression --scale smoke --page run/config.yaml",
        "reproduce regression --scale smoke --page t.npz",
    ],
)
def test_a_command_that_would_write_over_something_is_refused_before_the_work(
    place: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    before = state(place)
    assert run(command.split()) == 2
    assert state(place) == before
    said = capsys.readouterr().err
    assert "expected: " in said
    assert "fix: " in said
    assert "Traceback" not in said


def test_the_folder_of_a_study_is_not_written_over(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "out" / "regression").mkdir(parents=True)
    (place / "out" / "regression" / "notes.txt").write_text("mine")
    before = state(place)
    assert run(["reproduce", "regression", "--scale", "smoke", "--out", str(place / "out")]) == 2
    assert state(place) == before


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("evaluate t.npz --out out --rules latest --sets none", "evaluate"),
        ("tune v.npz --out out --at-most 1 --accuracy 0", "tune"),
        ("profile mlp-toy --out out --engine eager --repeats 20", "profile"),
        ("certify t.npz --out out", None),
        ("conformal v.npz t.npz --out out", None),
    ],
)
def test_a_command_may_replace_what_it_wrote_itself(
    place: Path, command: str, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for _ in range(2):
        assert run(command.split()) == 0
    if kind is not None:
        assert bundle_kind(place / "out") == kind
        verify_bundle(place / "out")
    other = "certify t.npz --out out" if "conformal" in command else "conformal v.npz t.npz --out out"
    before = state(place)
    assert run(other.split()) == 2
    assert state(place) == before


def test_an_input_inside_the_old_results_is_not_replaced_with_them(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert run(["evaluate", "t.npz", "--out", "report", "--calibration", "v.npz", "--rules", "latest", "--sets", "none"]) == 0
    before = state(place)
    assert run(["evaluate", "t.npz", "--out", "report", "--rules", "latest,report/fitted-product.json", "--sets", "none"]) == 2
    (place / "rule.json").hardlink_to(place / "report" / "fitted-product.json")
    assert run(["evaluate", "t.npz", "--out", "report", "--rules", "latest,rule.json", "--sets", "none"]) == 2
    (place / "rule.json").unlink()
    assert state(place) == before


def test_saving_a_fitted_object_keeps_other_files(place: Path) -> None:
    with np.load(place / "t.npz") as file:
        logits, labels = torch.from_numpy(file["logits"]), torch.from_numpy(file["labels"])
    temperature, certificate = fit_temperature(logits, labels), certify(logits, labels)
    before = state(place)
    for path in (place / "t.npz", place / "link.npz", place / "run" / "config.yaml"):
        with pytest.raises(OverwriteError) as caught:
            temperature.save(path)
        assert "another path" in caught.value.fix
    assert state(place) == before
    path = temperature.save(place / "fitted.json")
    temperature.save(path)
    with pytest.raises(OverwriteError):
        certificate.save(path)


def test_python_functions_do_not_write_one_kind_over_another(place: Path) -> None:
    model = create("mlp-toy", classes=4)
    before = state(place)
    with pytest.raises(OverwriteError, match="'model'"):
        export(model, place / "model", rule="latest", example=torch.zeros(1, 2), format="torch-export")
    assert state(place) == before
    save(model, place / "model")
    write_bundle(place / "report", {"metrics.json": b"{}"}, kind="evaluate")
    with pytest.raises(OverwriteError, match="'evaluate'"):
        save(model, place / "report")
    with pytest.raises(OverwriteError, match="'evaluate'"):
        write_bundle(place / "report", {"a": b""}, kind="mine")
    assert read_bundle(place / "report") == {"metrics.json": b"{}"}


@pytest.mark.parametrize("damage", [lambda text: text[:-20], lambda text: text.replace("version", "wersion"), lambda text: ""])
def test_a_folder_with_a_damaged_manifest_is_not_written_over(place: Path, damage: Callable[[str], str]) -> None:
    manifest = place / "model" / "manifest.json"
    manifest.write_text(damage(manifest.read_text()))
    before = state(place)
    with pytest.raises(FileError):
        save(create("mlp-toy", classes=4), place / "model")
    with pytest.raises(FileError):
        check_folder(place / "model", kind="model")
    assert state(place) == before


def test_a_bundle_replaces_all_of_an_older_one_and_nothing_else(tmp_path: Path) -> None:
    write_bundle(tmp_path, {"a": b"1", "b": b"2"}, kind="test")
    (tmp_path / "mine").write_bytes(b"3")
    write_bundle(tmp_path, {"a": b"4"}, kind="test")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "mine", "manifest.json"}
    assert json.loads((tmp_path / "manifest.json").read_text())["kind"] == "test"


def test_new_and_empty_places_are_fine(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "new", "new/er"):
        check_folder(tmp_path / folder, kind="test", inputs=(tmp_path, None, tmp_path / "absent"))
    check_file(tmp_path / "new" / "file", ours=lambda head: False, inputs=("x" * 5000,))

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from anytime.artifacts import verify_bundle
from anytime.errors import FileError
from anytime.evaluation import Evaluation
from anytime.report import write_folder

ENVIRONMENT = {"python": "3.12.0", "packages": {"torch": "2.0"}, "machine": {}}


def test_the_folder_contains_all_files(plain: Evaluation, tmp_path: Path) -> None:
    report = write_folder(tmp_path / "run", plain, source="my-model.npz", environment=ENVIRONMENT)
    verify_bundle(tmp_path / "run")
    assert report == tmp_path / "run" / "report.html"
    assert "<h1>my-model</h1>" in report.read_text(encoding="utf-8")
    assert json.loads((report.parent / "metrics.json").read_text())["rules"].keys() == plain.rules.keys()
    assert json.loads((report.parent / "environment.json").read_text()) == ENVIRONMENT
    config = yaml.safe_load((report.parent / "config.yaml").read_text())
    assert (config["file"], config["costs"], config["seed"]) == ("my-model.npz", [1.0, 2.5, 4.0, 7.0], 0)


def test_the_csv_has_one_row_per_rule_and_exit(plain: Evaluation, tmp_path: Path) -> None:
    write_folder(tmp_path, plain, source="m.npz", environment=ENVIRONMENT)
    with (tmp_path / "per_exit.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["rule"], row["exit"]) for row in rows[:5]] == [("latest", str(exit)) for exit in (1, 2, 3, 4)] + [
        ("caching", "1")
    ]
    assert [float(row["accuracy"]) for row in rows[8:]] == list(plain.rules["product"].accuracy)


def test_a_folder_that_cannot_be_written_raises_a_file_error(plain: Evaluation, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError):
        write_folder(tmp_path / "file", plain, source="m.npz", environment=ENVIRONMENT)

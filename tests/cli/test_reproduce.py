"""The command `anytime reproduce` as its users meet it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import anytime.reproduce
from anytime.artifacts import verify_bundle
from anytime.cli import run
from anytime.errors import OptionError
from anytime.reproduce import Band, ClassMap, Finding, Line, Plot, find
from anytime.reproduce.drawing import draw_finding
from anytime.reproduce.studies import ensembles

SMOKE = ["--scale", "smoke"]


def test_list_names_every_study_and_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 31
    assert rows[3] == {
        "name": "label-drops",
        "shows": "drops of the true class's probability",
        "figure": "Figure 4",
        "needs": ["msdnet on cifar10 or cifar100"],
    }
    assert run(["reproduce", "list"]) == 0
    assert "msdnet-finetuned" in capsys.readouterr().out


def test_a_study_prints_its_numbers_and_writes_a_whole_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "correctness", *SMOKE, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "70.8 %" in out
    assert "do not test the paper" in out
    verify_bundle(tmp_path / "correctness")
    document = json.loads((tmp_path / "correctness" / "finding.json").read_text())
    assert document["study"] == "correctness"
    assert ET.fromstring((tmp_path / "correctness" / "figure.svg").read_text()).tag.endswith("svg")


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "trajectories", *SMOKE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["figure"] == "Figure 2"


def test_a_missing_run_is_named_with_exit_code_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "accuracy", "--runs", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "no run of msdnet on cifar10 or cifar100" in error
    assert "anytime train cifar100-msdnet" in error


def test_a_study_without_its_run_says_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "l2w", "--runs", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "no run of l2w" in error
    assert "anytime train cifar100-l2w" in error


def test_a_wrong_name_or_folder_is_a_wrong_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reproduce", "acuracy", *SMOKE]) == 2
    assert "did you mean 'accuracy'?" in capsys.readouterr().err
    assert run(["reproduce", "accuracy", "--runs", str(tmp_path / "nowhere")]) == 2


def fail(context: object) -> Finding:
    raise OptionError("a bad day", expected="a good one", fix="sleep")


def test_all_continues_after_a_failure_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = (find("accuracy"), find("spiral"), find("regression"))
    monkeypatch.setattr(anytime.reproduce, "CATALOGUE", few)
    monkeypatch.setitem(ensembles.SPIRAL_STEPS, "full", 1)
    monkeypatch.setattr(ensembles, "regression", fail)
    page = tmp_path / "docs" / "page.md"
    assert run(["reproduce", "all", "--runs", str(tmp_path), "--page", str(page)]) == 1
    out, error = capsys.readouterr()
    assert "spiral" in out
    assert "accuracy failed: " in error
    assert "regression failed: a bad day" in error
    text = page.read_text()
    assert "## spiral" in text
    assert "- `accuracy`" in text
    assert (page.parent / "pictures" / "reproduction" / "spiral.svg").exists()


def test_all_skips_studies_without_runs_and_a_single_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(anytime.reproduce, "CATALOGUE", (find("dvit"),))
    assert run(["reproduce", "all", "--runs", str(tmp_path)]) == 0
    assert "dvit failed: " in capsys.readouterr().err
    assert run(["reproduce", "dvit", "--runs", str(tmp_path)]) == 1


def test_a_figure_has_every_kind_of_mark() -> None:
    line = Line("a <b>", (1.0, 2.0), (1.0, None), 0, (0.5, None), (2.0, 3.0))
    band = Band("area", (0.0, 1.0, 2.0), (0.0, 0.0, None), (1.0, 1.0, None), 2)
    plots = (
        Plot("one", "exit", "y", (line,), exits=2),
        Plot("two", "x", "%", (Line("", (0.1, 0.2), (0.0, 50.0), 1, faint=True),), kind="symlog", bands=(band,)),
        ClassMap("three", (((1, 1.0), (1, 1.0)), ((2, 0.0), (3, 0.5)))),
    )
    text = draw_finding(Finding("x", "t & u", "f", "full", (), "", "", plots))
    ET.fromstring(text)
    assert text.count('class="cross"') == 3  # two of the paper's values, and one in the legend
    assert text.count('class="spread"') == 1
    assert text.count('class="area"') == 2  # the band, and its entry in the legend
    assert text.count("fill-opacity=") == 2  # two kinds of cells: an empty one is not drawn
    assert text.count("h256.0v128.0h-256.0z") == 1  # equal neighbours are one rectangle
    assert "a &lt;b&gt;" in text


@pytest.mark.long
def test_everything_runs_at_the_smallest_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["reproduce", "all", *SMOKE, "--out", "out", "--page", "page.md"]) == 0
    assert len(list((tmp_path / "out").iterdir())) == len(anytime.reproduce.CATALOGUE)


def test_all_prints_one_document_and_writes_every_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = (find("accuracy"), find("correctness"))  # tests/reproduce runs every study; these need no training
    monkeypatch.setattr(anytime.reproduce, "CATALOGUE", few)
    assert run(["reproduce", "all", *SMOKE, "--out", str(tmp_path / "out"), "--json"]) == 0
    assert [each["study"] for each in json.loads(capsys.readouterr().out)] == ["accuracy", "correctness"]
    assert {path.parent.name for path in (tmp_path / "out").rglob("finding.json")} == {"accuracy", "correctness"}

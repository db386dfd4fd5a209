"""The page says what was found, and first what does not fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anytime.cli import run
from anytime.reproduce import Claim, Comparison, Finding, Measured, find
from anytime.reproduce.page import render


def finding(rows: int, *, missed: int) -> Finding:
    compared = tuple(
        Comparison(f"number {at}", 1.0, Measured(2.0 if at < missed else 1.0, 0.1), 0.5, unit="%") for at in range(rows)
    )
    claims = (Claim("it holds", True, "so"), Claim("it fails", False, "thus"))
    table = (("a|b", "c"),)
    return Finding(
        "label-drops", "falls", "Figure 4", "full", ("run-1",), "all", "A note.", (), compared, claims, {}, ("x", "y"), table
    )


def page(*findings: Finding) -> str:
    return render(findings, [find("dvit")], pictures="pictures", command="anytime reproduce all")


def test_a_short_table_stands_open_and_a_long_one_is_folded_behind_its_misses() -> None:
    assert "<details>" not in page(finding(3, missed=1))
    text = page(finding(20, missed=2))
    before, _, after = text.partition("<details>")
    assert before.count("NOT within") == 2
    assert after.count("| number") == 20


def test_the_head_counts_what_is_within_and_what_holds() -> None:
    text = page(finding(20, missed=2))
    assert "Of 20 numbers held against the paper's, 18 lie within the tolerance; of 2 claims, 1 hold." in text
    assert "Made by `anytime reproduce all`" in text


def test_every_finding_has_its_picture_runs_note_and_claims() -> None:
    text = page(finding(1, missed=0))
    for words in (
        "![falls](pictures/label-drops.svg)",
        "A note.",
        "run-1",
        "- holds: it holds (so)",
        "- DOES NOT HOLD: it fails",
    ):
        assert words in text


def test_a_cell_cannot_break_the_table() -> None:
    assert "| a/b | c |" in page(finding(1, missed=0))


def test_what_is_not_there_is_named_with_the_run_it_needs() -> None:
    assert re.search(r"## Not there yet\n\n- `dvit` .*needs a run of dvit on cifar10 or cifar100", page(finding(1, missed=0)))


@pytest.mark.parametrize(("flag", "place"), [("--page", "."), ("--images", "nowhere")])
def test_a_path_that_cannot_be_used_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, place: str
) -> None:
    out = tmp_path / "out"
    assert run(["reproduce", "trajectories", "--scale", "smoke", "--out", str(out), flag, str(tmp_path / place)]) == 2
    assert str(tmp_path / place) in capsys.readouterr().err
    assert not any(tmp_path.iterdir())

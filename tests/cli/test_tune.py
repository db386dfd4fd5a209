"""The command `anytime tune` as its users meet it, and its rule in the hands of the other commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from anytime.artifacts import verify_bundle
from anytime.calibrate import ChoiceCertificate, Frontier, TunedRule, fit_product, fit_temperature
from anytime.calibrate.tuning.figures import frontier_figures
from anytime.cli import run
from anytime.cli.rules import read_rule
from anytime.combine.named import split_rules as split
from anytime.conformal import ConformalSets
from anytime.evaluation import open_logits
from anytime.report.pages.frontier import render_frontier


def write(path: Path, seed: int, rows: int = 300) -> Path:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 8, rows)
    logits = rng.normal(size=(3, rows, 8)) * 2 + 3 * np.eye(8)[labels]
    np.savez(path, logits=logits.astype(np.float16), labels=labels)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with logits to tune on, others to test on, and a tuning."""
    home = tmp_path_factory.mktemp("tuned")
    write(home / "held-out.npz", 0)
    write(home / "test.npz", 1)
    assert run(["tune", str(home / "held-out.npz"), "--at-most", "0.3", "--out", str(home / "tuned")]) == 0
    return home


def test_the_bundle_has_rule_frontier_and_chart(folder: Path) -> None:
    verify_bundle(folder / "tuned")
    names = {path.name for path in (folder / "tuned").iterdir()}
    assert names == {"rule.json", "frontier.json", "frontier.html", "manifest.json"}
    chosen, found = TunedRule.load(folder / "tuned" / "rule.json"), Frontier.load(folder / "tuned" / "frontier.json")
    assert chosen.objective.startswith("least ece with drop_0.1 at most 0.3 and accuracy at least")
    assert chosen.metrics["drop_0.1"] <= 0.3
    assert chosen.text in found.texts
    assert chosen.rows == found.fitting_rows + found.choosing_rows == 300


def test_the_table_marks_the_choice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", str(folder / "held-out.npz"), "--at-most", "0.3", "--all"]) == 0
    out, err = capsys.readouterr()
    assert "chosen" in out
    assert "caching" in out
    assert "rules are in the Pareto set" in out
    assert err == ""


def test_a_certificate_uses_held_out_rows(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--at-most", "0.4", "--certify-confidence", "0.9", "--json", "--out", str(tmp_path / "out")]
    assert run(["tune", str(folder / "held-out.npz"), *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rows"] == {"fitting": 100, "choosing": 100, "certifying": 100}
    promise = ChoiceCertificate.load(tmp_path / "out" / "certificate.json")
    assert promise.chosen == document["chosen"]["rule"] == TunedRule.load(tmp_path / "out" / "rule.json").text
    assert document["certificate"]["sentence"] == promise.sentence
    assert "With 90 % confidence at most 40 % of inputs" in (tmp_path / "out" / "frontier.html").read_text()
    # An objective out of reach is a failed check, and leaves no old rule or certificate behind.
    words[1] = "0.0001"
    assert run(["tune", str(folder / "held-out.npz"), *words]) == 1
    assert "no rule can be certified" in capsys.readouterr().err
    assert not (tmp_path / "out" / "rule.json").exists()
    verify_bundle(tmp_path / "out")
    assert run(["tune", str(folder / "held-out.npz"), "--at-most", "-1", "--out", str(tmp_path / "out")]) == 1
    out, err = capsys.readouterr()
    assert "Pareto" in out
    assert "the nearest is" in err
    assert not (tmp_path / "out" / "certificate.json").exists()


def test_other_commands_take_the_saved_rule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = str(folder / "tuned" / "rule.json")
    assert (
        run(["evaluate", str(folder / "test.npz"), "--json", "--rules", f"latest,product(clipped(2), weights=ones),{rule}"])
        == 0
    )
    assert list(json.loads(capsys.readouterr().out)["rules"]) == ["latest", "product(clipped(2), weights=ones)", rule]
    assert run(["certify", str(folder / "test.npz"), "--json", "--rule", rule]) == 0
    assert json.loads(capsys.readouterr().out)["rule"] == TunedRule.load(rule).text
    for verb, flag in (("certify", "--rule"), ("evaluate", "--rules")):
        assert run([verb, str(folder / "held-out.npz"), flag, rule]) == 2
        assert "300 of the 300 rows" in capsys.readouterr().err
    cal, test = write(folder / "calibration.npz", 7), str(folder / "test.npz")
    assert run(["conformal", str(cal), test, "--rule", rule, "--out", str(folder / "sets.json")]) == 0
    assert ConformalSets.load(folder / "sets.json").rule == TunedRule.load(rule).rule
    assert run(["conformal", str(folder / "held-out.npz"), test, "--rule", rule]) == 2
    assert "300 of the 300 rows" in capsys.readouterr().err
    assert run(["evaluate", str(folder / "test.npz"), "--rules", f"{rule},{rule}"]) == 2
    assert "appears twice" in capsys.readouterr().err


def test_other_fitted_rules_can_be_read_and_other_things_cannot(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = open_logits(folder / "held-out.npz")
    powers, temperature = fit_product(file.logits[:], file.labels), fit_temperature(file.logits[:], file.labels)
    assert read_rule(str(powers.save(tmp_path / "powers.json"))) == powers.rule
    assert read_rule(str(temperature.save(tmp_path / "temperature.json"))) == temperature.rule
    assert run(["certify", str(folder / "test.npz"), "--rule", str(folder / "tuned" / "frontier.json")]) == 2
    assert "contains a frontier, which has no rule" in capsys.readouterr().err


def test_commas_in_brackets_and_quotes_do_not_split() -> None:
    assert split("a(b, c),d[1,2] , 'x,y',") == ["a(b, c)", "d[1,2]", "'x,y'"]
    assert split("") == []


def test_the_chart_is_self_contained_and_shows_every_rule(folder: Path) -> None:
    found = Frontier.load(folder / "tuned" / "frontier.json")
    page = (folder / "tuned" / "frontier.html").read_text()
    assert not re.search(r"https?://|url\(|@import|<script|\son\w+=", page)
    assert page.count('class="ring"') == len(frontier_figures(found)) == 3
    drawn = [one for one in found.candidates if one.metrics["accuracy"] >= found.floor["accuracy"]]
    for figure in frontier_figures(found):
        marks = [index for series in figure.chart.series[1:] for index, _, _ in series.points()]
        assert len(marks) == len(drawn)
    evil = "</style><img src=x>"
    assert evil not in render_frontier(found, source=evil, title=evil)
    assert "ring" not in render_frontier(found, source="x").split("</style>")[1]


def test_wrong_calls_leave_with_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, hint in (
        (["--least", "speed"], "speed"),
        (["--drop", "2"], "drop is 2"),
        (["--accuracy", "1.1"], "the nearest is"),
    ):
        assert run(["tune", str(folder / "held-out.npz"), *words]) == 2
        assert hint in capsys.readouterr().err


def test_an_error_names_the_row_of_the_file_and_a_percentage_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "bad.npz", 0)
    stored = dict(np.load(path))
    assert run(["tune", str(path), "--at-most", "5"]) == 2
    assert "1 % is 0.01" in capsys.readouterr().err
    stored["logits"][1, 3, 2] = np.nan
    np.savez(path, **stored)
    assert run(["tune", str(path)]) == 2
    assert "exit 2, row 3, class 2" in capsys.readouterr().err


def write_two(path: Path, rows: int = 400) -> Path:
    """Two classes, as a sentiment has them: the sign of one number decides, and exits agree more and more."""
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 2, rows)
    margin = (2 * labels - 1) * np.linspace(0.8, 2, 4)[:, None] + 1.2 * rng.normal(size=(4, rows))
    np.savez(path, logits=np.stack((-margin, margin), -1).astype(np.float16), labels=labels)
    return path


def test_two_classes_are_recommended_a_rule_by_their_own_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_two(tmp_path / "two.npz")
    assert run(["tune", str(path), "--at-most", "0.1"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "Recommended:" in words
    assert "least ece with drop_0.1 at most 0.1" in words
    assert "For fewer than 5 classes the paper advises caching over the product; this holds here" in words
    assert run(["tune", str(path), "--at-most", "0.1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["classes"] == 2
    figures = document["references"]
    assert {"latest", "caching", "product", "fitted product, λ = 3"} <= figures.keys()
    assert figures["caching"]["drop_0.1"] < figures["product"]["drop_0.1"]
    for name in ("caching", "product"):
        assert f"{100 * figures[name]['drop_0.1']:.2f} %" in document["recommendation"]
    chosen = document["chosen"]
    assert chosen["drop_0.1"] <= 0.1
    assert f"{chosen['name']} {100 * chosen['accuracy']:.2f} % right" in document["recommendation"]
    # No rule keeps this bound: the metrics are printed all the same.
    assert run(["tune", str(path), "--at-most", "-1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["recommendation"].startswith("No rule satisfies the bounds.")


def test_many_classes_get_no_advice_on_few(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", str(folder / "held-out.npz"), "--at-most", "0.3"]) == 0
    assert "fewer than" not in capsys.readouterr().out


def test_evaluate_gives_advice_on_two_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_two(tmp_path / "two.npz")
    assert run(["evaluate", str(path)]) == 0
    error = capsys.readouterr().err
    assert "The paper advises Caching for fewer than 5 classes; here there are 2." in error
    assert "`anytime tune` chooses a rule by such metrics" in error

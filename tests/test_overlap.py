"""The same rows are recognised in every precision, and different rows are not taken for the same: one check for all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from anytime.calibrate import certify, tune
from anytime.calibrate.tuning.tuned import TunedRule
from anytime.checks import check_disjoint, fingerprints, shared_rows
from anytime.cli import run
from anytime.errors import FormatError, OverlapError

ROOT = Path(__file__).parents[1]
IMDB = ROOT / "results" / "minilm-imdb-seed0"


def some(rows: int, *, exits: int = 3, classes: int = 5, seed: int = 0, scale: float = 4.0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(exits, rows, classes, generator=source)
    return logits, torch.randint(classes, (rows,), generator=source)


def saved(path: Path, logits: Tensor, labels: Tensor, dtype: type = np.float32) -> Path:
    np.savez(path, logits=logits.numpy().astype(dtype), labels=labels.numpy())
    return path


@pytest.mark.parametrize("scale", [4.0, 1e-30, 1e-3, 1e4, 1e30])
def test_a_fingerprint_is_the_same_in_every_precision_that_can_hold_the_row(scale: float) -> None:
    logits, _ = some(400, scale=scale)
    known = fingerprints(logits)
    assert len(known.unique()) == 400
    assert torch.equal(fingerprints(logits.double()), known)
    assert torch.equal(fingerprints(list(logits)), known)
    if scale == 4.0:
        assert torch.equal(fingerprints(logits.half()), known)
        assert torch.equal(fingerprints(logits.half().double()), known)


@pytest.mark.parametrize("scale", [1e300, 1e-300, 5e-310])
def test_rows_beyond_float32_are_told_apart(scale: float) -> None:
    logits = scale * some(400)[0].double()
    assert len(fingerprints(logits).unique()) == 400
    assert torch.equal(fingerprints(logits.flip(1)), fingerprints(logits).flip(0))


def test_a_fingerprint_is_of_all_exits_and_does_not_know_the_sign_of_zero() -> None:
    logits, _ = some(50)
    for exit in range(3):
        other = logits.clone()
        other[exit] += 1.0
        assert not torch.isin(fingerprints(other), fingerprints(logits)).any()
    zero = torch.zeros(2, 1, 3)
    assert torch.equal(fingerprints(zero), fingerprints(-zero))
    assert len(fingerprints(torch.tensor([[[0.0, -torch.inf]], [[0.0, -1.0]]]))) == 1


def test_rows_that_agree_at_one_exit_alone_are_disjoint() -> None:
    (first, _), (second, _) = some(100), some(100, seed=1)
    second[0] = first[0]
    check_disjoint(first, second, names=("fitting", "testing"))
    check_disjoint(list(first), list(second), names=("fitting", "testing"))
    with pytest.raises(OverlapError, match="100 of the 100 rows for testing are among those for fitting"):
        check_disjoint(first, first.half(), names=("fitting", "testing"))


def test_a_few_shared_rows_are_named_and_one_in_a_hundred_is_refused() -> None:
    prints = fingerprints(some(300)[0])
    assert shared_rows(prints, prints[:2], names=("rows", "others")).nonzero()[:, 0].tolist() == [0, 1]
    with pytest.raises(OverlapError, match="3 of the 300"):
        shared_rows(prints, prints[:3], names=("rows", "others"))


def test_a_certificate_leaves_out_the_few_rows_that_the_rule_was_tuned_on() -> None:
    logits, labels = some(300)
    rule = tune(*some(100, seed=1)).choose(least="ece", at_least={})
    seen = TunedRule(**{**vars(rule), "seen": fingerprints(logits[:, :2])})
    assert certify(logits, labels, seen).rows == 298
    assert certify(logits, labels, rule).rows == 300


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_certify_refuses_the_tuned_rows_saved_in_any_precision(
    tmp_path: Path, dtype: type, capsys: pytest.CaptureFixture
) -> None:
    logits, labels = some(120)
    file = saved(tmp_path / "held-out.npz", logits, labels)
    assert run(["tune", str(file), "--at-most", "1", "--accuracy", "0", "--out", str(tmp_path / "tuned")]) == 0
    again = saved(tmp_path / "again.npz", logits, labels, dtype)
    rule = str(tmp_path / "tuned" / "rule.json")
    for verb in (["certify", str(again), "--rule", rule], ["evaluate", str(again), "--rules", rule]):
        assert run(verb) == 2
        assert "120 of the 120 rows" in capsys.readouterr().err
    other = saved(tmp_path / "other.npz", *some(120, seed=7), dtype)
    assert run(["certify", str(other), "--rule", rule]) == 0


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_conformal_and_evaluate_refuse_the_same_rows_in_another_precision(tmp_path: Path, dtype: type) -> None:
    logits, labels = some(200)
    one, other = saved(tmp_path / "one.npz", logits, labels), saved(tmp_path / "other.npz", logits, labels, dtype)
    assert run(["conformal", str(one), str(other)]) == 2
    assert run(["evaluate", str(other), "--calibration", str(one)]) == 2


def test_a_rule_tuned_on_one_published_file_is_used_on_another(tmp_path: Path) -> None:
    # At the first exit 144 of these 25,000 rows equal one of the others by chance, at all exits none does.
    with np.load(IMDB / "val-sample.npz") as val, np.load(IMDB / "test-sample.npz") as test:
        at_first = np.isin(
            fingerprints(torch.from_numpy(test["logits"][:1])), fingerprints(torch.from_numpy(val["logits"][:1]))
        )
        assert at_first.sum() == 144
        tuning = {name: val[name][..., :400, :] if name == "logits" else val[name][:400] for name in ("logits", "labels")}
        at = np.concatenate([at_first.nonzero()[0], np.arange(300)])
        rest = {"logits": test["logits"][:, at], "labels": test["labels"][at]}
    np.savez(tmp_path / "tuning.npz", **tuning)
    np.savez(tmp_path / "rest.npz", **rest)
    rule = str(tmp_path / "tuned" / "rule.json")
    assert run(["tune", str(tmp_path / "tuning.npz"), "--at-most", "1", "--out", str(tmp_path / "tuned")]) == 0
    assert run(["evaluate", str(tmp_path / "rest.npz"), "--rules", f"latest,{rule}", "--json"]) == 0
    assert run(["certify", str(tmp_path / "rest.npz"), "--rule", rule]) == 0


def test_tune_never_refuses_its_own_split_for_an_input_that_the_file_holds_twice(tmp_path: Path) -> None:
    logits, labels = some(150)
    twice = saved(tmp_path / "twice.npz", torch.cat([logits, logits], 1), torch.cat([labels, labels]))
    assert run(["tune", str(twice), "--at-most", "0.9", "--accuracy", "0", "--certify-confidence", "0.9"]) in (0, 1)


def test_a_rule_file_with_fingerprints_of_the_old_kind_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from anytime.fitted import _checksum

    rule = tune(*some(100)).choose(least="ece", at_least={})
    path = rule.save(tmp_path / "rule.json")
    document = json.loads(path.read_text())
    assert document.pop("sha256")
    assert document["version"] == 3
    document["version"] = 1
    path.write_text(json.dumps({**document, "sha256": _checksum(document)}))
    with pytest.raises(FormatError, match="version 1 of a tuned-rule") as caught:
        TunedRule.load(path)
    assert "fit it again" in caught.value.fix
    file = saved(tmp_path / "rows.npz", *some(60, seed=1))
    assert run(["certify", str(file), "--rule", str(path)]) == 2
    assert "version 1 of a tuned-rule" in capsys.readouterr().err

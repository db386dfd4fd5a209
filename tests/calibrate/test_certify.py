"""Certificates against plain sums of binomial probabilities; the claims over many draws are in tests/long."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import anytime
from anytime.calibrate.certify import (
    Certificate,
    ChoiceCertificate,
    certify,
    certify_choice,
    fraction_bound,
    p_value,
    rounded_down,
    rounded_up,
)
from anytime.calibrate.tuning.tuned import TunedRule
from anytime.checks import fingerprints
from anytime.errors import IntegrityError, LabelError, OptionError, OverlapError, ScaleError, ShapeError


def plain_tail(count: int, rows: int, fraction: float) -> float:
    """P(at most `count` of `rows`), term by term."""
    return math.fsum(math.comb(rows, k) * fraction**k * (1 - fraction) ** (rows - k) for k in range(count + 1))


def some(rows: int, seed: int = 0, exits: int = 3, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    noise = 2 * torch.randn(exits, rows, classes, generator=generator)
    return noise + 2 * torch.nn.functional.one_hot(labels, classes), labels


def tuned(text: str, seen: torch.Tensor, exits: int = 3, classes: int = 4) -> TunedRule:
    return TunedRule(exits, classes, text, "a rule", "least ece", {"ece": 0.1}, seen.numel(), 0, seen)


@given(st.integers(1, 60), st.data(), st.floats(0.5, 0.999))
def test_at_the_bound_so_few_drops_are_just_unlikely(rows: int, data: st.DataObject, confidence: float) -> None:
    count = data.draw(st.integers(0, rows))
    bound = fraction_bound(count, rows, confidence)
    if count == rows:
        assert bound == 1
    else:
        assert plain_tail(count, rows, bound) == pytest.approx(1 - confidence, abs=1e-9)


@given(st.integers(1, 60), st.data(), st.floats(0.001, 0.999))
def test_the_p_value_is_the_plain_sum(rows: int, data: st.DataObject, fraction: float) -> None:
    count = data.draw(st.integers(0, rows))
    assert p_value(count, rows, fraction) == pytest.approx(plain_tail(count, rows, fraction), abs=1e-9)


@pytest.mark.parametrize("rows", [1, 20, 200])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_the_chance_of_a_false_bound_is_at_most_what_is_stated_whatever_the_truth(rows: int, confidence: float) -> None:
    bounds = [fraction_bound(count, rows, confidence) for count in range(rows + 1)]
    for truth in np.linspace(0.001, 0.999, 97):
        wrong = [count for count in range(rows + 1) if bounds[count] < truth]
        assert (plain_tail(max(wrong), rows, truth) if wrong else 0) <= 1 - confidence + 1e-9


def test_counts_follow_the_definitions() -> None:
    logits, labels = some(200)
    found = certify(logits, labels, "latest", drop=0.2)
    probs = logits.double().softmax(-1).numpy()
    drops = losses = 0
    for row, label in enumerate(labels.tolist()):
        path, right = probs[:, row, label], probs[:, row].argmax(-1) == label
        drops += any(path[a] - path[b] >= 0.2 for a in range(3) for b in range(a, 3))
        losses += any(right[a] and not right[a + 1] for a in range(2))
    assert (found.drops, found.losses, found.rows) == (drops, losses, 200)
    assert found.drop_bound == fraction_bound(drops, 200, 0.95)
    assert found.monotone_bound == 1 - fraction_bound(losses, 200, 0.95)
    assert found.joint_drop_bound == fraction_bound(drops, 200, 0.975) > found.drop_bound
    assert found.joint_monotone_bound < found.monotone_bound


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = some(101)
    whole = certify(logits, labels, "product")
    # The package's name `certify` is the function, so the module is looked up by its full name.
    monkeypatch.setattr(sys.modules["anytime.calibrate.measure"], "_BLOCK", 40)
    assert certify(logits, labels, "product") == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_drop_of_exactly_the_threshold_counts_unless_strict(dtype: torch.dtype) -> None:
    # Few of these probabilities are exact in binary, so a plain comparison depends on how exp and log round.
    before = torch.arange(11, 100, dtype=torch.float64) / 100
    for hundredths in (1, 10):
        after = before - hundredths / 100
        logits = torch.stack([torch.stack((p, 1 - p), -1) for p in (before, after)]).log().add(2).to(dtype)
        labels = torch.zeros(logits.shape[1], dtype=torch.int64)
        assert certify(logits, labels, "latest", drop=hundredths / 100).drops == len(labels)
        assert certify(logits, labels, "latest", drop=hundredths / 100, strict=True).drops == 0


def test_one_exit_can_lose_nothing() -> None:
    logits, labels = some(299, exits=1)
    found = certify(logits, labels, "latest")
    assert (found.drops, found.losses) == (0, 0)
    assert found.drop_bound < 0.01


def test_a_rule_may_be_text_an_object_or_tuned() -> None:
    logits, labels = some(100)
    text = "product(softplus)"
    known = certify(logits, labels, anytime.parse_rule(text))
    assert known.text == repr(anytime.parse_rule(text))
    for given_ in (text, tuned(text, fingerprints(some(50, seed=1)[0]))):
        found = certify(logits, labels, given_)
        assert (found.drops, found.losses) == (known.drops, known.losses)
        assert found.text == text


def test_a_tuned_rule_refuses_the_rows_it_has_seen_and_other_shapes() -> None:
    logits, labels = some(100)
    rule = tuned("product", fingerprints(logits[:, :7]))
    with pytest.raises(OverlapError, match="7 of the 100"):
        certify(logits, labels, rule)
    certify(logits[:, 7:], labels[7:], rule)
    for exits, classes in ((2, 4), (3, 5)):
        other, known = some(50, exits=exits, classes=classes)
        with pytest.raises(ShapeError, match=f"{exits} exits and {classes} classes"):
            certify(other, known, rule)
        with pytest.raises(ShapeError, match="fitted"):
            rule(other)
    torch.testing.assert_close(rule(logits).log_probs, anytime.Product()(logits).log_probs)


def test_words_round_so_that_they_stay_true() -> None:
    ups = [rounded_up(fraction) for fraction in (0.013, 0.01301, 0.0099, 0.009901, 1.0)]
    assert ups == ["1.3 %", "1.4 %", "0.99 %", "1.00 %", "100.0 %"]
    downs = [rounded_down(fraction) for fraction in (0.98, 0.9799, 0.99999, 0.0)]
    assert downs == ["98.0 %", "97.9 %", "99.99 %", "0.0 %"]


@given(st.floats(0, 1))
def test_rounded_bounds_are_bounds(fraction: float) -> None:
    assert float(rounded_up(fraction).split()[0]) >= 100 * fraction - 1e-9
    assert float(rounded_down(fraction).split()[0]) <= 100 * fraction + 1e-9


def test_sentences_state_the_guarantees() -> None:
    found = Certificate(7, 100, "product", 0.1, False, 0.95, 1000, 8, 30, 0.0143, 0.9599, 0.0157, 0.958)
    assert found.sentence == "With 95 % confidence at most 1.5 % of inputs lose 0.1 or more of the true class's probability."
    assert found.sentences[1:] == (
        "With 95 % confidence at least 95.9 % of inputs never go from right to wrong.",
        "With 95 % confidence both hold at once with 1.6 % and 95.8 %.",
    )


def test_sequence_stops_at_the_first_failure_and_others_do_not() -> None:
    logits, labels = some(400, exits=4, classes=6)
    # The hard product hardly drops, the latest often does.
    rules = ["product(heaviside)", "latest", "product(heaviside, weights=ones)"]
    fractions = [certify(logits, labels, rule, drop=0.3).drops / 400 for rule in rules]
    at_most = (fractions[0] + fractions[1]) / 2
    found = certify_choice(logits, labels, rules, drop=0.3, at_most=at_most)
    assert found.passed == (True, False, False)
    assert found.chosen == rules[0]
    for control in ("holm", "bonferroni"):
        other = certify_choice(logits, labels, rules, drop=0.3, at_most=at_most, control=control)  # type: ignore[arg-type]
        assert other.passed == (True, False, True)
        assert other.p_values == found.p_values
    assert [p_value(count, 400, at_most) for count in found.drops] == list(found.p_values)


@given(st.lists(st.floats(0, 0.2), min_size=1, max_size=8))
def test_holm_contains_bonferroni_and_is_the_step_down_procedure(chances: list[float]) -> None:
    from anytime.calibrate.certify import _rejected

    holm, bonferroni = _rejected(chances, 0.05, "holm"), _rejected(chances, 0.05, "bonferroni")
    assert all(a or not b for a, b in zip(holm, bonferroni, strict=True))
    # Plainly: a hypothesis is rejected if it and every smaller one pass their steps.
    order = sorted(range(len(chances)), key=lambda index: chances[index])
    alive, plain = True, [False] * len(chances)
    for step, index in enumerate(order):
        alive = alive and chances[index] <= 0.05 / (len(chances) - step)
        plain[index] = alive
    assert list(holm) == plain


def test_scores_pick_among_the_certified_only() -> None:
    logits, labels = some(400, exits=4, classes=6)
    rules = ["product(heaviside)", "product(heaviside, weights=ones)", "latest"]
    fractions = [certify(logits, labels, rule, drop=0.3).drops / 400 for rule in rules]
    at_most = (fractions[1] + fractions[2]) / 2
    found = certify_choice(logits, labels, rules, drop=0.3, at_most=at_most, scores=[0.2, 0.3, 0.1])
    assert found.certified == tuple(rules[:2])
    assert found.chosen == rules[0]
    assert certify_choice(logits, labels, rules, drop=0.3, at_most=at_most).chosen == rules[1]


def test_no_rule_is_chosen_if_none_can_be_certified() -> None:
    logits, labels = some(100)
    found = certify_choice(logits, labels, ["latest"], drop=0.01, at_most=0.001)
    assert found.chosen is None
    assert found.certified == ()
    assert found.sentence.startswith("None of 1 rules can be certified with 95 % confidence: at most 0.1 % of inputs lose")


@pytest.mark.parametrize("kind", [Certificate, ChoiceCertificate])
def test_certificates_go_through_their_files(kind: type, tmp_path: Path) -> None:
    logits, labels = some(100)
    made = certify(logits, labels) if kind is Certificate else certify_choice(logits, labels, ["product", "latest"])
    path = made.save(tmp_path / "it.json")
    assert kind.load(path) == made
    made.check_fits(3, 4)
    with pytest.raises(ShapeError):
        made.check_fits(3, 5)
    document = json.loads(path.read_text())
    document["fields"]["rows"] = 10_000
    path.write_text(json.dumps(document))
    with pytest.raises(IntegrityError):
        kind.load(path)


def test_wrong_calls_are_refused() -> None:
    logits, labels = some(60)
    for wrong in ({"drop": 0.0}, {"drop": 1.5}, {"drop": math.nan}, {"confidence": 1.0}, {"confidence": 95}):
        with pytest.raises(OptionError):
            certify(logits, labels, **wrong)  # type: ignore[arg-type]
    for wrong in ({"at_most": 0.0}, {"control": "none"}, {"scores": [1.0, 2.0]}):
        with pytest.raises(OptionError):
            certify_choice(logits, labels, ["latest"], **wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="0 rules"):
        certify_choice(logits, labels, [])
    with pytest.raises(OptionError, match="not Product"):
        certify(logits, labels, anytime.Product)  # type: ignore[arg-type]
    with pytest.raises(LabelError, match="no rows"):
        certify(logits[:, :0], labels[:0])
    with pytest.raises(ScaleError):
        certify(logits.softmax(-1), labels)


def test_a_tuned_rule_goes_through_its_file(tmp_path: Path) -> None:
    logits, _ = some(300)
    made = tuned("product(clipped(2))", fingerprints(logits))
    read = TunedRule.load(made.save(tmp_path / "rule.json"))
    assert torch.equal(read.seen, made.seen)
    assert (read.text, read.objective, read.metrics, read.rule) == (
        made.text,
        made.objective,
        made.metrics,
        anytime.parse_rule(made.text),
    )
    with pytest.raises(OptionError, match="there is no 'prodct'"):
        tuned("prodct", made.seen)


def test_fingerprints_tell_rows_apart() -> None:
    logits, _ = some(500)
    assert len(set(fingerprints(logits).tolist())) == 500
    assert torch.equal(fingerprints(logits.flip(1)), fingerprints(logits).flip(0))
    assert torch.equal(fingerprints(logits[:, :, :]), fingerprints(logits.transpose(1, 2).contiguous().transpose(1, 2)))
    assert fingerprints(logits[:, :0]).numel() == 0

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anytime.evaluation import Evaluation
from anytime.metrics.rule_metrics import Consistency, DiminishingReturns
from anytime.report.pages.card import card
from anytime.report.pages.rules import looks
from anytime.report.pages.verdict import sentences, verdict

Change = Callable[..., Evaluation]
Falls = Callable[..., dict[str, Any]]


def only(evaluation: Evaluation, *rules: str) -> Evaluation:
    return replace(evaluation, rules={rule: evaluation.rules[rule] for rule in rules})


def renamed(evaluation: Evaluation, old: str, new: str) -> Evaluation:
    return replace(evaluation, rules={new if rule == old else rule: figures for rule, figures in evaluation.rules.items()})


def accuracy(last: float) -> dict[str, list[float]]:
    return {"accuracy": [0.6, 0.65, 0.68, last]}


def test_product_that_mends_and_gains(change: Change, falls: Falls) -> None:
    found = change(
        latest={**falls(24.2, 48), **accuracy(0.7)},
        caching={**falls(6.7, 14), **accuracy(0.71)},
        product={**falls(0, 0.1), **accuracy(0.722)},
    )
    said = verdict(found)
    assert said.headline == "Not as it is; with Product, yes."
    assert said.grade == "good"
    assert said.sentences[0] == (
        "24 % of inputs lose 0.5 or more of the true class's probability on the way; "
        "Product brings this to 0 % and gains 2.2 points of accuracy at the last exit."
    )


@pytest.mark.parametrize(
    ("before", "after", "last", "end"),
    [
        (24, 0, 0.698, "Product brings this to 0 % and costs 0.2 points of accuracy at the last exit."),
        (24, 0, 0.71, "Product brings this to 0 % and gains 1 point of accuracy at the last exit."),
        (24, 3.2, 0.7, "Product brings this to 3.2 % and leaves the accuracy at the last exit as it is."),
        (24, 24, 0.7, "Product changes nothing in this, nor in the accuracy at the last exit."),
        (24, 24, 0.69, "Product leaves this as it is and costs 1 point of accuracy at the last exit."),
        (2, 9.3, 0.7, "Product raises this to 9.3 % and leaves the accuracy at the last exit as it is."),
    ],
)
def test_the_first_sentence_says_what_product_changes(
    change: Change, falls: Falls, before: float, after: float, last: float, end: str
) -> None:
    found = change(latest={**falls(before, 40), **accuracy(0.7)}, product={**falls(after, 40), **accuracy(last)})
    assert sentences(found)[0].endswith(end)


def test_a_model_that_is_monotone_already(change: Change, falls: Falls) -> None:
    same = {**falls(0, 1.5), **accuracy(0.7)}
    said = verdict(change(latest=same, caching=same, product=same))
    assert said.headline == "Yes, as it is."
    assert said.sentences[0].startswith(
        "No input loses 0.5 or more of the true class's probability on the way; Product changes nothing"
    )


def test_a_good_rule_at_too_high_a_price_is_only_a_part(change: Change, falls: Falls) -> None:
    bad = {**falls(30, 60), **accuracy(0.7)}
    said = verdict(change(latest=bad, caching=bad, product={**falls(0, 0), **accuracy(0.5)}))
    assert said.headline == "Only in part, with Product."
    assert said.grade == "fair"


def test_nothing_helps(change: Change, falls: Falls) -> None:
    bad = {**falls(30, 60), **accuracy(0.7)}
    said = verdict(change(latest=bad, caching=bad, product=bad))
    assert (said.headline, said.grade) == ("No, with none of these rules.", "poor")
    assert verdict(only(change(latest=bad), "latest")).headline == "No."


def test_a_fair_model_is_trusted_in_part_or_mended(change: Change, falls: Falls) -> None:
    fair, good = {**falls(3, 10), **accuracy(0.7)}, {**falls(0.1, 1), **accuracy(0.7)}
    assert verdict(change(latest=fair, caching=fair, product=fair)).headline == "Only in part."
    assert verdict(change(latest=fair, caching=good, product=fair)).headline == "In part as it is; with Caching, yes."


def test_caching_that_does_better_is_named_and_few_classes_are_the_reason(change: Change, falls: Falls) -> None:
    found = change(latest=falls(9, 20), caching=falls(1.2, 3), product=falls(4.5, 8), classes=3)
    said = " ".join(sentences(found))
    assert "Caching does better than Product here: 1.2 % of inputs lose 0.5 or more, against 4.5 %." in said
    assert "fewer than 5 classes; here there are 3" in said
    assert "fewer than 5 classes" not in " ".join(sentences(replace(found, classes=10)))


def test_caching_that_does_worse_is_not_praised(change: Change, falls: Falls) -> None:
    said = " ".join(sentences(change(latest=falls(9, 20), caching=falls(2, 3), product=falls(0, 5))))
    assert "does better" not in said


def test_frequent_collapse_is_said_and_costs_the_verdict(change: Change, falls: Falls) -> None:
    bad = {**falls(30, 60), **accuracy(0.7)}
    lost = {**falls(0, 1), **accuracy(0.7), "collapsed_percent": [0.0, 3.0, 12.0, 21.5]}
    said = verdict(change(latest=bad, caching=bad, product=lost))
    assert said.headline == "Only in part, with Product."
    assert any(sentence.startswith("Product collapses on 22 % of inputs by exit 4") for sentence in said.sentences)


def test_much_worse_calibration_is_said(change: Change) -> None:
    found = change(latest={"ece": [0.14, 0.15, 0.16, 0.17]}, product={"ece": [0.4, 0.65, 0.5, 0.19]})
    said = next(sentence for sentence in sentences(found) if "confidence" in sentence)
    assert "at exit 2 it is off by 0.65 on average (ECE), Latest's by 0.15, and 0.19 against 0.17 at the last" in said
    assert "Before the last exits, do not read it as a chance of being right" in said
    close = change(latest={"ece": [0.14] * 4}, product={"ece": [0.17] * 4})
    assert not any("(ECE)" in sentence for sentence in sentences(close))


def test_forgetting_is_said_for_both(change: Change) -> None:
    found = change(latest={"correct_monotone_percent": 70.8}, product={"correct_monotone_percent": 87.2})
    assert "29 % of inputs are answered right at some exit and wrong at a later one; with Product, 13 %." in sentences(found)


def test_a_model_that_gets_worse_on_average_is_called_out(change: Change) -> None:
    found = change(latest={"accuracy": [0.5, 0.7, 0.65, 0.6]})
    assert any(
        said.startswith("Even on average the model gets worse: 70.0 % of inputs are right at exit 2")
        for said in sentences(found)
    )


def test_without_labels_the_final_answer_is_followed(make: Callable[..., Evaluation], falls: Falls) -> None:
    found = make(labelled=False, samples=400)
    drops = {rule: falls(24 if rule == "latest" else 0)["final_drop_percent"] for rule in found.rules}
    found = replace(found, rules={rule: replace(each, final_drop_percent=drops[rule]) for rule, each in found.rules.items()})
    said = verdict(found)
    assert said.question == "Is this model steady at any time?"
    assert said.sentences[0] == (
        "24 % of inputs lose 0.5 or more of the final answer's probability on the way; Product brings this to 0 %."
    )
    assert any("No labels" in sentence for sentence in said.sentences)
    assert not any("accuracy" in sentence for sentence in said.sentences)


def test_few_inputs_come_with_a_bound(change: Change) -> None:
    assert "With only 30 inputs, a share of 0 % here can still be up to 9.5 % in truth (at 95 % confidence)." in sentences(
        change(samples=30)
    )
    assert not any("With only" in sentence for sentence in sentences(change(samples=5000)))


def test_one_rule_alone_is_described_alone(change: Change, falls: Falls) -> None:
    said = sentences(only(change(latest=falls(24, 40)), "latest"))
    assert said[0] == "24 % of inputs lose 0.5 or more of the true class's probability on the way."


def test_without_product_the_most_monotone_rule_is_described(change: Change, falls: Falls) -> None:
    found = only(change(latest=falls(24, 40), caching=falls(3, 9)), "latest", "caching")
    assert "; Caching brings this to 3.0 %" in sentences(found)[0]


def test_a_product_with_options_stands_for_product_under_the_users_name(change: Change, falls: Falls) -> None:
    found = renamed(change(latest=falls(24, 40), product=falls(0, 0)), "product", "product(softplus)")
    assert "; product(softplus) brings this to 0 %" in sentences(found)[0]


def test_the_strict_setting_changes_the_words(change: Change, plain: Evaluation) -> None:
    found = change(settings={**plain.settings, "drops_counted": "above the threshold"})
    assert " more than 0.5 of the true class's" in sentences(found)[0]


def test_the_card_grades_four_properties_for_each_rule(plain: Evaluation) -> None:
    found = card(plain)
    assert [property.name for property in found] == ["Interruptible", "Monotone", "Consistent", "Diminishing returns"]
    for property in found:
        assert [mark.rule for mark in property.marks] == ["latest", "caching", "product"]
        assert all(mark.grade in ("good", "fair", "poor") and mark.number and mark.meaning for mark in property.marks)


@pytest.mark.parametrize(
    ("big", "small", "grade"),
    [(0.5, 5.0, "good"), (0.51, 5.0, "fair"), (0.5, 5.1, "fair"), (5.0, 20.0, "fair"), (5.1, 5.1, "poor")],
)
def test_the_limits_of_monotonicity(change: Change, falls: Falls, big: float, small: float, grade: str) -> None:
    assert card(change(latest=falls(big, small)))[1].marks[0].grade == grade


def test_the_other_limits(change: Change) -> None:
    def grades(**figures: Any) -> list[str]:
        return [property.marks[0].grade for property in card(change(latest=figures))]

    assert grades(accuracy=[0.7, 0.7, 0.7, 0.8])[0] == "good"
    assert grades(accuracy=[0.4, 0.7, 0.7, 0.8])[0] == "fair"
    assert grades(accuracy=[0.1, 0.7, 0.7, 0.8])[0] == "poor"
    assert grades(accuracy=[0.0] * 4)[0] == "poor"
    assert grades(collapsed_percent=[0, 0, 0, 11.0])[0] == "poor"
    assert grades(consistency=Consistency(concordance=0.9, correlation=0.99, exponent=1.0))[2] == "good"
    assert grades(consistency=Consistency(concordance=0.9, correlation=0.2, exponent=0.1))[2] == "fair"
    assert grades(consistency=Consistency(concordance=0.1, correlation=0.99, exponent=-0.1))[2] == "poor"
    assert grades(consistency=Consistency(concordance=None, correlation=None, exponent=None))[2] == "unknown"
    assert grades(diminishing_returns=DiminishingReturns((1.0, 1.0, 1.0), 0.03, 40.0))[3] == "fair"


def test_two_exits_and_no_labels_leave_grades_open(make: Callable[..., Evaluation]) -> None:
    assert {mark.grade for mark in card(make(exits=2))[3].marks} == {"unknown"}
    found = card(make(labelled=False))
    assert [{mark.grade for mark in property.marks} == {"unknown"} for property in found] == [False, False, True, True]


def test_the_rules_of_the_paper_keep_their_looks_and_no_two_are_alike() -> None:
    names = ["product(softplus)", "latest", "mixture", "product", "caching", "product(sigmoid)", "product(heaviside)"]
    found = looks(names)
    assert len(set(found.values())) == len(names)
    assert (found["latest"].css, found["caching"].css, found["product"].css) == ("s0", "s1", "s2")

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anytime.evaluation import Evaluation
from anytime.evaluation.rules import looks
from anytime.metrics.rule_metrics import Consistency, DiminishingReturns
from anytime.report.pages.card import card
from anytime.report.pages.verdict import sentences, verdict

Change = Callable[..., Evaluation]
Drops = Callable[..., dict[str, Any]]


def only(evaluation: Evaluation, *rules: str) -> Evaluation:
    return replace(evaluation, rules={rule: evaluation.rules[rule] for rule in rules})


def renamed(evaluation: Evaluation, old: str, new: str) -> Evaluation:
    return replace(evaluation, rules={new if rule == old else rule: metrics for rule, metrics in evaluation.rules.items()})


def accuracy(last: float) -> dict[str, list[float]]:
    return {"accuracy": [0.6, 0.65, 0.68, last]}


def test_product_that_fixes_the_drops_and_gains_accuracy(change: Change, drops: Drops) -> None:
    found = change(
        latest={**drops(24.2, 48), **accuracy(0.7)},
        caching={**drops(6.7, 14), **accuracy(0.71)},
        product={**drops(0, 0.1), **accuracy(0.722)},
    )
    said = verdict(found)
    assert said.headline == "Not as it is; with Product, yes."
    assert said.grade == "good"
    assert said.sentences[0] == (
        "24 % of inputs lose 0.5 or more of the true class's probability between two exits; "
        "Product reduces this to 0 % and gains 2.2 points of accuracy at the last exit."
    )


@pytest.mark.parametrize(
    ("before", "after", "last", "end"),
    [
        (24, 0, 0.698, "Product reduces this to 0 % and costs 0.2 points of accuracy at the last exit."),
        (24, 0, 0.71, "Product reduces this to 0 % and gains 1 point of accuracy at the last exit."),
        (24, 3.2, 0.7, "Product reduces this to 3.2 % and keeps the accuracy at the last exit."),
        (24, 24, 0.7, "Product changes neither this nor the accuracy at the last exit."),
        (24, 24, 0.69, "Product does not change this and costs 1 point of accuracy at the last exit."),
        (2, 9.3, 0.7, "Product raises this to 9.3 % and keeps the accuracy at the last exit."),
    ],
)
def test_the_first_sentence_says_what_product_changes(
    change: Change, drops: Drops, before: float, after: float, last: float, end: str
) -> None:
    found = change(latest={**drops(before, 40), **accuracy(0.7)}, product={**drops(after, 40), **accuracy(last)})
    assert sentences(found)[0].endswith(end)


def test_a_model_that_is_monotone_already(change: Change, drops: Drops) -> None:
    same = {**drops(0, 1.5), **accuracy(0.7)}
    said = verdict(change(latest=same, caching=same, product=same))
    assert said.headline == "Yes, as it is."
    assert said.sentences[0].startswith(
        "No input loses 0.5 or more of the true class's probability between two exits; Product changes neither"
    )


def test_a_good_rule_at_too_high_a_price_is_only_a_part(change: Change, drops: Drops) -> None:
    bad = {**drops(30, 60), **accuracy(0.7)}
    said = verdict(change(latest=bad, caching=bad, product={**drops(0, 0), **accuracy(0.5)}))
    assert said.headline == "Only in part, with Product."
    assert said.grade == "fair"


def test_nothing_helps(change: Change, drops: Drops) -> None:
    bad = {**drops(30, 60), **accuracy(0.7)}
    said = verdict(change(latest=bad, caching=bad, product=bad))
    assert (said.headline, said.grade) == ("No, with none of these rules.", "poor")
    assert verdict(only(change(latest=bad), "latest")).headline == "No."


def test_a_fair_model_is_trusted_in_part_or_fixed_by_a_rule(change: Change, drops: Drops) -> None:
    fair, good = {**drops(3, 10), **accuracy(0.7)}, {**drops(0.1, 1), **accuracy(0.7)}
    assert verdict(change(latest=fair, caching=fair, product=fair)).headline == "Only in part."
    assert verdict(change(latest=fair, caching=good, product=fair)).headline == "In part as it is; with Caching, yes."


def test_caching_that_does_better_is_named_and_few_classes_are_the_reason(change: Change, drops: Drops) -> None:
    found = change(latest=drops(9, 20), caching=drops(1.2, 3), product=drops(4.5, 8), classes=3)
    said = " ".join(sentences(found))
    assert "Caching does better than Product here: 1.2 % of inputs drop by 0.5 or more, against 4.5 %." in said
    assert "fewer than 5 classes; here there are 3" in said
    assert "fewer than 5 classes" not in " ".join(sentences(replace(found, classes=10)))


def test_caching_that_does_worse_is_not_mentioned(change: Change, drops: Drops) -> None:
    said = " ".join(sentences(change(latest=drops(9, 20), caching=drops(2, 3), product=drops(0, 5))))
    assert "does better" not in said


def test_frequent_collapse_is_reported_and_lowers_the_verdict(change: Change, drops: Drops) -> None:
    bad = {**drops(30, 60), **accuracy(0.7)}
    lost = {**drops(0, 1), **accuracy(0.7), "collapsed_percent": [0.0, 3.0, 12.0, 21.5]}
    said = verdict(change(latest=bad, caching=bad, product=lost))
    assert said.headline == "Only in part, with Product."
    assert any(sentence.startswith("Product collapses on 22 % of inputs by exit 4") for sentence in said.sentences)


def test_much_worse_calibration_is_reported(change: Change) -> None:
    found = change(latest={"ece": [0.14, 0.15, 0.16, 0.17]}, product={"ece": [0.4, 0.65, 0.5, 0.19]})
    said = next(sentence for sentence in sentences(found) if "confidence" in sentence)
    assert "at exit 2 its ECE is 0.65 against 0.15 for Latest, and 0.19 against 0.17 at the last" in said
    assert "Before the last exits, do not read it as a probability of being correct" in said
    close = change(latest={"ece": [0.14] * 4}, product={"ece": [0.17] * 4})
    assert not any("ECE" in sentence for sentence in sentences(close))


def test_forgetting_is_reported_for_both(change: Change) -> None:
    found = change(latest={"correct_monotone_percent": 70.8}, product={"correct_monotone_percent": 87.2})
    assert "29 % of inputs are correct at some exit and wrong at a later one; with Product, 13 %." in sentences(found)


def test_a_model_that_gets_worse_on_average_is_reported(change: Change) -> None:
    found = change(latest={"accuracy": [0.5, 0.7, 0.65, 0.6]})
    assert any(
        said.startswith("Even on average the model gets worse: the accuracy is 70.0 % at exit 2") for said in sentences(found)
    )


def test_without_labels_the_final_answer_is_followed(make: Callable[..., Evaluation], drops: Drops) -> None:
    found = make(labelled=False, samples=400)
    wanted = {rule: drops(24 if rule == "latest" else 0)["final_drop_percent"] for rule in found.rules}
    found = replace(found, rules={rule: replace(each, final_drop_percent=wanted[rule]) for rule, each in found.rules.items()})
    said = verdict(found)
    assert said.question == "Is this model stable at any time?"
    assert said.sentences[0] == (
        "24 % of inputs lose 0.5 or more of the final answer's probability between two exits; Product reduces this to 0 %."
    )
    assert any("no labels" in sentence for sentence in said.sentences)
    assert not any("accuracy" in sentence for sentence in said.sentences)


def test_few_inputs_have_a_bound(change: Change) -> None:
    assert "With only 30 inputs, an observed 0 % can mean up to 9.5 % (at 95 % confidence)." in sentences(change(samples=30))
    assert not any("With only" in sentence for sentence in sentences(change(samples=5000)))


def test_one_rule_alone_is_described_alone(change: Change, drops: Drops) -> None:
    said = sentences(only(change(latest=drops(24, 40)), "latest"))
    assert said[0] == "24 % of inputs lose 0.5 or more of the true class's probability between two exits."


def test_without_product_the_most_monotone_rule_is_described(change: Change, drops: Drops) -> None:
    found = only(change(latest=drops(24, 40), caching=drops(3, 9)), "latest", "caching")
    assert "; Caching reduces this to 3.0 %" in sentences(found)[0]


def test_a_product_with_options_is_described_under_its_own_name(change: Change, drops: Drops) -> None:
    found = renamed(change(latest=drops(24, 40), product=drops(0, 0)), "product", "product(softplus)")
    assert "; product(softplus) reduces this to 0 %" in sentences(found)[0]


def test_strict_counting_changes_the_wording(change: Change, plain: Evaluation) -> None:
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
def test_the_limits_of_monotonicity(change: Change, drops: Drops, big: float, small: float, grade: str) -> None:
    assert card(change(latest=drops(big, small)))[1].marks[0].grade == grade


def test_the_other_limits(change: Change) -> None:
    def grades(**metrics: Any) -> list[str]:
        return [property.marks[0].grade for property in card(change(latest=metrics))]

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


def test_two_exits_leave_a_grade_unknown_and_no_labels_leave_none(make: Callable[..., Evaluation]) -> None:
    assert {mark.grade for mark in card(make(exits=2))[3].marks} == {"unknown"}
    found = card(make(labelled=False))
    assert all(mark.grade != "unknown" for property in found for mark in property.marks)


def test_the_rules_of_the_paper_keep_their_looks_and_no_two_are_alike() -> None:
    names = ["product(softplus)", "latest", "mixture", "product", "caching", "product(sigmoid)", "product(heaviside)"]
    found = looks(names)
    assert len(set(found.values())) == len(names)
    assert (found["latest"].css, found["caching"].css, found["product"].css) == ("s0", "s1", "s2")

"""The product is advised against where it has few classes, once, with figures, and only where it stands alone."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from anytime import Caching, Latest, Powers, Product, evaluate
from anytime.calibrate import tune
from anytime.combine import Heaviside, Rule, Softplus, ThresholdReLU
from anytime.combine.advice import FEW_CLASSES, MEASURED, RUN, Answers, advise
from anytime.errors import FewClassesWarning
from anytime.models import MLP, MLPConfig
from anytime.run import Runner

RESULTS = Path(__file__).parents[2] / "results"
FIT = Powers(past=(1.0, 0.5), now=(1.0, 0.5))


def some(classes: int, rows: int = 120, exits: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    noise = 2 * torch.randn(exits, rows, classes, generator=generator)
    return noise + 2 * torch.nn.functional.one_hot(labels, classes), labels


@pytest.mark.parametrize("rule", [Product(), Product(shift="1/K"), Product(Heaviside()), Product(ThresholdReLU(0.5))])
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_a_product_that_can_lose_all_evidence_is_advised_against(rule: Product, classes: int) -> None:
    said = advise(rule, classes)
    assert said is not None
    assert said.startswith(f"Product with {classes} classes")
    for name, found in MEASURED.items():
        assert f"{name} {found.accuracy:.1f} % accuracy" in said
        assert f"{found.drops:.1f} % drop" in said


@pytest.mark.parametrize("rule", [Latest(), Caching(), Product(Softplus()), FIT])
def test_other_rules_are_left_alone(rule: Rule[Any]) -> None:
    assert advise(rule, 2) is None


def test_from_five_classes_on_there_is_nothing_to_say() -> None:
    assert advise(Product(), FEW_CLASSES) is None


def test_own_figures_stand_first_where_there_are_some() -> None:
    said = advise(Product(), 2, Answers(81.25, 12.5, 4.0, 3.0, 0.16))
    assert said is not None
    assert (
        "On these rows: 81.2 % accuracy (mean over exits), 12.5 % drop by .1, 4.0 % by .5 or more, 3.0 % collapsed, ECE 0.160."
        in said
    )


def test_evaluate_warns_with_the_figures_of_these_rows_where_the_product_is_alone() -> None:
    logits, labels = some(2)
    with pytest.warns(FewClassesWarning, match="On these rows") as caught:
        found = evaluate(logits, labels, rules="product", sets=None).rules["product"]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert f"{found.label_drop_percent['0.1']:.1f} % drop" in str(caught[0].message)
    with pytest.warns(FewClassesWarning) as caught:
        evaluate(logits, rules=[Product()])
    assert "On these rows" not in str(caught[0].message)


def test_a_comparison_speaks_for_itself() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluate(*some(2))
        evaluate(*some(2), rules=("caching", "product"))
        evaluate(*some(2), rules="caching")
        evaluate(*some(5), rules="product")
        tune(*some(2), penalties=(3.0,))
        Product()(some(2)[0])


def test_a_runner_warns_when_it_is_made_and_not_again() -> None:
    model = MLP(MLPConfig(classes=2, exits=2))
    with pytest.warns(FewClassesWarning, match="Product with 2 classes") as caught:
        runner = Runner(model, "product")
    assert [each.filename for each in caught] == [__file__]
    with runner, warnings.catch_warnings():
        warnings.simplefilter("error")
        runner.predict(torch.zeros(1, 2))


@pytest.mark.parametrize(("classes", "rule"), [(2, Caching()), (4, Caching()), (5, Product())])
def test_where_nobody_names_a_rule_caching_answers_for_few_classes(classes: int, rule: Rule[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Runner(MLP(MLPConfig(classes=classes, exits=2))) as runner:
            assert runner.rule == rule


def test_a_runner_with_a_rule_that_data_chose_does_not_warn() -> None:
    model, frontier = MLP(MLPConfig(classes=2, exits=2)), tune(*some(2), penalties=(3.0,))
    product = next(one for one in frontier.candidates if one.name == "product")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Runner(model, "caching"), Runner(model, calibration=frontier.tuned(product, objective="a test")):
            pass


@pytest.mark.skipif(not (RESULTS / RUN).is_dir(), reason=f"no run {RUN} in results/")
def test_the_figures_are_those_of_the_published_run() -> None:
    rules = json.loads((RESULTS / RUN / "test-metrics.json").read_text())["rules"]
    for name, found in MEASURED.items():
        figures = rules[name]
        assert found.accuracy == pytest.approx(100 * sum(figures["accuracy"]) / len(figures["accuracy"]), abs=0.06)
        assert found.drops == pytest.approx(figures["label_drop_percent"]["0.1"], abs=0.06)
        assert found.deep == pytest.approx(figures["label_drop_percent"]["0.5"], abs=0.06)
        assert found.collapsed == pytest.approx(figures["collapsed_percent"][-1], abs=0.06)
        assert found.ece == pytest.approx(sum(figures["ece"]) / len(figures["ece"]), abs=6e-4)

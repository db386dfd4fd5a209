"""What goes into an answer besides time: policies, calibration, regression, ensembles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anytime
from anytime.calibrate import fit_product, fit_temperature
from anytime.combine import Cached
from anytime.conformal import Raps
from anytime.conformal.sets import fit_conformal_sets
from anytime.errors import OptionError, ShapeError, StateError
from anytime.models import MLP, Ensemble, IntervalMLP, MLPConfig, measure_cost
from anytime.policy import Confidence, Entropy, Patience, Policy, fit_budget_policy
from anytime.run import Budget, Runner, RunOptions
from anytime.run.engines.eager import EagerEngine


@pytest.fixture(scope="module")
def many() -> Tensor:
    """Five exits, 200 inputs, four classes."""
    return torch.randn(5, 200, 4, generator=torch.Generator().manual_seed(1)) * 2 + 1


POLICIES = [
    Confidence(0.6),
    Confidence((0.9, 0.8, 0.7, 0.6, 0.0)),
    Confidence(0.8, otherwise="most_confident"),
    Confidence(0.0),
    Confidence(2.0),
    Confidence(2.0, otherwise="most_confident"),
    Entropy(0.5),
    Patience(2),
    Patience(3, otherwise="most_confident"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("rule", [anytime.Product(), Cached(anytime.Product())], ids=repr)
def test_rows_that_stop_leave_and_come_back_in_order(fakes: Any, many: Tensor, policy: Policy, rule: Any) -> None:
    engine = fakes.FakeEngine(many)
    with Runner(engine, rule, engine, policy=policy, macs=range(1, 6)) as runner:
        answer = runner.predict(engine.rows)
    offline = policy.answer(rule(many))
    torch.testing.assert_close(answer.log_probs, offline.log_probs)
    assert isinstance(answer.exit, Tensor)
    assert answer.exit.equal(offline.exit)
    assert answer.fell_back.equal(offline.fell_back)
    assert answer.labels.equal(offline.labels)
    assert isinstance(answer.macs, Tensor)
    assert answer.macs.equal(answer.exit.double())
    assert answer.reason == ("policy" if int(offline.exit.max()) < 5 else "finished")


def test_rows_really_leave_the_batch(fakes: Any, many: Tensor) -> None:
    engine = fakes.FakeEngine(many)
    with Runner(engine, engine=engine, policy=Patience(2)) as runner:
        runner.predict(engine.rows)
    sizes = [len(rows) for rows in engine.kept]
    assert sizes
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] < 200


@pytest.mark.parametrize("exits", [1, 2, 4])
@pytest.mark.parametrize("policy", [Confidence(0.8), Confidence(0.8, otherwise="most_confident")], ids=repr)
def test_a_batch_that_is_interrupted_has_every_rows_best_answer(fakes: Any, many: Tensor, policy: Policy, exits: int) -> None:
    engine, rule = fakes.FakeEngine(many), anytime.Product()
    with Runner(engine, rule, engine, policy=policy) as runner:
        answer = runner.predict(engine.rows, budget=Budget(exits=exits))
        streamed = list(runner.stream(engine.rows, budget=Budget(exits=exits)))
    # Up to there it is as if there were no more exits, with the weights of all of them.
    prediction = rule(many)
    prefix = anytime.Prediction(prediction.log_probs[:exits], prediction.fell_back[:exits])
    offline = policy.answer(prefix)
    torch.testing.assert_close(answer.log_probs, offline.log_probs)
    assert answer.exit.equal(offline.exit)  # type: ignore[union-attr]
    assert len(streamed) == exits
    torch.testing.assert_close(streamed[-1].log_probs, offline.log_probs)


def test_a_deadline_counts_for_the_batch_while_rows_leave(fakes: Any, many: Tensor) -> None:
    clock = fakes.FakeClock(waited=True)
    engine = fakes.FakeEngine(many, (1.0, 1.0, 9.0, 1.0, 1.0), clock)
    with Runner(engine, engine=engine, policy=Confidence(0.9), options=RunOptions(clock=clock)) as runner:
        answer = runner.predict(engine.rows, deadline=3.0)
        clock.resume()
    assert (answer.reason, answer.elapsed) == ("deadline", 3.0)
    assert set(answer.exit.tolist()) == {1, 2}  # type: ignore[union-attr]


def test_a_fitted_policy_is_used(fakes: Any, many: Tensor) -> None:
    rule = anytime.Caching()
    fitted = fit_budget_policy(rule(many).log_probs, costs=range(1, 6), budget=2.5)
    engine = fakes.FakeEngine(many)
    with Runner(engine, rule, engine, policy=fitted) as runner:
        answer = runner.predict(engine.rows)
    assert answer.exit.equal(fitted.apply(rule(many)))  # type: ignore[union-attr]
    with pytest.raises(ShapeError, match="exits"):
        Runner(fakes.FakeEngine(many[:3]), rule, fakes.FakeEngine(many[:3]), policy=fitted)


def test_a_policy_with_numbers_for_other_exits_is_refused(fakes: Any, many: Tensor) -> None:
    engine = fakes.FakeEngine(many)
    with Runner(engine, engine=engine, policy=Confidence((0.5, 0.5))) as runner, pytest.raises(OptionError, match="exits"):
        runner.predict(engine.rows)
    assert engine.open == 0


def test_a_temperature_becomes_part_of_the_rule(fakes: Any, many: Tensor) -> None:
    labels = many[-1].argmax(-1)
    fitted = fit_temperature(many, labels)
    engine = fakes.FakeEngine(many)
    for rule, expected in (
        (None, fitted.rule),
        (anytime.Product(), fitted.rule_for(anytime.Product())),
        ("caching", fitted.rule_for(anytime.Caching())),
    ):
        with Runner(engine, rule, engine, calibration=fitted) as runner:
            answer = runner.predict(engine.rows)
        assert runner.rule == expected
        torch.testing.assert_close(answer.log_probs, expected(many).log_probs[-1])


def test_a_fitted_product_is_the_rule(fakes: Any, many: Tensor) -> None:
    fitted = fit_product(many, many[-1].argmax(-1), steps=3)
    engine = fakes.FakeEngine(many)
    with Runner(engine, engine=engine, calibration=fitted) as runner:
        assert runner.rule == fitted.rule
    with pytest.raises(OptionError, match="fitted"):
        Runner(engine, "caching", engine, calibration=fitted)


@pytest.mark.parametrize("randomised", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_sets_come_with_the_answer(fakes: Any, many: Tensor, randomised: bool, shared: bool) -> None:
    rule = anytime.Caching()
    labels = many[-1].argmax(-1)
    sets = fit_conformal_sets(many, labels, rule=rule, raps=Raps(alpha=0.2, randomised=randomised), shared=shared)
    engine = fakes.FakeEngine(many)
    with Runner(engine, engine=engine, calibration=sets) as runner:
        assert runner.rule == rule
        answers = list(runner.stream(engine.rows))
        again = list(runner.stream(engine.rows))
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(200, 1 if shared else 5, generator=generator).expand(200, 5)
    for exit, answer in enumerate(answers):
        expected = sets.set_at(exit + 1, rule(many).log_probs[exit], draws[:, exit] if randomised else None)
        assert answer.prediction_set is not None
        assert answer.prediction_set.equal(expected)
        coverage = answer.prediction_set[torch.arange(200), labels].double().mean()
        assert coverage >= 0.7
        if not randomised:
            assert again[exit].prediction_set.equal(expected)  # type: ignore[union-attr]


def test_each_row_has_the_set_of_the_exit_its_answer_is_from(fakes: Any, many: Tensor) -> None:
    rule, policy = anytime.Caching(), Confidence(0.8, otherwise="most_confident")
    sets = fit_conformal_sets(many, many[-1].argmax(-1), rule=rule, raps=Raps(alpha=0.2, randomised=False))
    engine = fakes.FakeEngine(many)
    with Runner(engine, engine=engine, calibration=sets, policy=policy) as runner:
        answer = runner.predict(engine.rows)
    stopped = policy.answer(rule(many))
    every = torch.stack([sets.set_at(exit, now) for exit, now in enumerate(rule(many).log_probs, 1)])
    assert answer.prediction_set is not None
    assert answer.prediction_set.equal(every[stopped.source - 1, torch.arange(200)])


def test_sets_of_another_rule_are_refused(fakes: Any, many: Tensor) -> None:
    sets = fit_conformal_sets(many, many[-1].argmax(-1), rule="latest")
    engine = fakes.FakeEngine(many)
    with pytest.raises(OptionError, match="calibration was fitted"):
        Runner(engine, "product", engine, calibration=sets)
    other = fakes.FakeEngine(many[:3])
    with pytest.raises(ShapeError, match="exits"):
        Runner(other, engine=other, calibration=sets)


def test_the_prior_has_the_whole_set(fakes: Any, many: Tensor) -> None:
    sets = fit_conformal_sets(many, many[-1].argmax(-1), rule="latest")
    engine = fakes.FakeEngine(many)
    with Runner(engine, engine=engine, calibration=sets, options=RunOptions(on_too_short="prior")) as runner:
        answer = runner.predict(engine.rows, deadline=0)
    torch.testing.assert_close(answer.probs, torch.full((200, 4), 0.25))
    assert answer.prediction_set is not None
    assert bool(answer.prediction_set.all())


def test_regression_gives_intervals_that_shrink() -> None:
    torch.manual_seed(0)
    model, x = IntervalMLP(exits=4).eval(), torch.randn(7, 1)
    with Runner(model, anytime.Intersection(), EagerEngine(model)) as runner:
        answers = [runner.predict(x), runner.predict(x, deadline=60)]
        streamed = list(runner.stream(x))
    with torch.no_grad():
        offline = anytime.Intersection()(*model.intervals(x))
    for answer in (*answers, streamed[-1]):
        torch.testing.assert_close(answer.lower, offline.lower[-1])
        torch.testing.assert_close(answer.upper, offline.upper[-1])
        assert answer.fell_back.equal(offline.fell_back[-1])
    for exit, answer in enumerate(streamed):
        torch.testing.assert_close(answer.upper, offline.upper[exit])
    with pytest.raises(StateError, match="regression"):
        _ = answers[0].probs
    with pytest.raises(OptionError, match="policy"):
        Runner(model, anytime.Intersection(), EagerEngine(model), policy=Confidence(0.9))


def test_a_classifier_is_refused_as_regression(fakes: Any, many: Tensor) -> None:
    engine = fakes.FakeEngine(many)
    with Runner(engine, anytime.Intersection(), engine) as runner, pytest.raises(ShapeError, match="lower"):
        runner.predict(engine.rows)


def test_a_deep_ensemble_answers_member_by_member() -> None:
    torch.manual_seed(0)
    model = Ensemble([nn.Linear(8, 5) for _ in range(4)]).eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        offline = anytime.Product()(model(x)).log_probs
    with Runner(model, anytime.Product(), EagerEngine(model)) as runner:
        for exit, answer in enumerate(runner.stream(x)):
            torch.testing.assert_close(answer.log_probs, offline[exit])
        torch.testing.assert_close(runner.predict(x, deadline=60).log_probs, offline[-1])


def test_macs_are_measured_for_a_budget_in_macs() -> None:
    model, x = MLP(MLPConfig(classes=5, inputs=8, exits=5)).eval(), torch.randn(3, 8)
    costs = measure_cost(model, x).macs
    with Runner(model, engine=EagerEngine(model)) as runner:
        answer = runner.predict(x, budget=Budget(macs=costs[2]))
    assert (answer.exit, answer.macs, answer.reason) == (3, costs[2], "macs")

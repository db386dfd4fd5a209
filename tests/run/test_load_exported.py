"""Exported stages run by the runner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import anytime
from anytime.calibrate import fit_temperature
from anytime.conformal import fit_conformal_sets
from anytime.errors import InputError, OptionError
from anytime.models import MLP, MLPConfig
from anytime.policy import Confidence
from anytime.run.export import export

pytest.importorskip("onnxruntime", reason="the extra `engines` is not installed")


@pytest.fixture(scope="module")
def model() -> MLP:
    torch.manual_seed(0)
    return MLP(MLPConfig(classes=4, exits=3)).eval()


@pytest.fixture(scope="module")
def folder(model: MLP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(
        model, tmp_path_factory.mktemp("out") / "stages", rule=anytime.Caching(), example=torch.zeros(1, 2), macs=(1, 2, 3)
    )


X = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))


def test_answers_are_those_of_the_model_and_its_rule(model: MLP, folder: Path) -> None:
    with torch.no_grad():
        wanted = anytime.Caching()(model(X))
    with anytime.Runner.load(folder) as runner:
        streamed = list(runner.stream(X))
        answer = runner.predict(X, budget=anytime.Budget(exits=2))
        late = runner.predict(X, deadline="10s")
    for exit, found in enumerate(streamed):
        torch.testing.assert_close(found.log_probs, wanted.log_probs[exit], atol=1e-5, rtol=1e-4)
    assert (answer.exit, answer.exits, answer.macs) == (2, 3, 2.0)
    torch.testing.assert_close(late.log_probs, wanted.log_probs[-1], atol=1e-5, rtol=1e-4)
    assert runner.rule == anytime.Caching()


def test_rows_that_stop_leave_the_exported_batch(model: MLP, folder: Path) -> None:
    policy = Confidence(0.4)
    with torch.no_grad():
        wanted = policy.answer(anytime.Caching()(model(X)))
    with anytime.Runner.load(folder, policy=policy) as runner:
        answer = runner.predict(X)
    assert torch.equal(torch.as_tensor(answer.exit), wanted.exit)
    torch.testing.assert_close(answer.log_probs, wanted.log_probs, atol=1e-5, rtol=1e-4)


def test_sets_for_the_rule_inside_are_accepted_and_another_rule_is_not(model: MLP, folder: Path) -> None:
    labels = torch.arange(200) % 4
    with torch.no_grad():
        logits = model(torch.randn(200, 2, generator=torch.Generator().manual_seed(2)))
    with anytime.Runner.load(folder, calibration=fit_conformal_sets(logits, labels, rule="caching")) as runner:
        assert runner.predict(X).prediction_set is not None
    for wrong in ({"rule": "product"}, {"calibration": fit_temperature(logits, labels)}):
        with pytest.raises(OptionError, match="contain the rule"):
            anytime.Runner.load(folder, **wrong)


def test_nan_is_named_by_its_row(folder: Path) -> None:
    x = X.clone()
    x[3, 0] = torch.nan
    with anytime.Runner.load(folder) as runner, pytest.raises(InputError, match="row 3"):
        runner.predict(x)


def test_a_confidence_to_stop_at_is_heeded_by_exported_stages(folder: Path) -> None:
    reached = anytime.Budget(confidence=0.1)
    with anytime.Runner.load(folder) as runner:
        for low in (runner.predict(X, budget=reached), *runner.stream(X, budget=reached)):
            assert (low.exit, low.reason) == (1, "confidence")
        high = runner.predict(X, budget=anytime.Budget(confidence=1.0))
    assert (high.exit, high.reason) == (3, "finished")


def test_a_confidence_to_stop_at_beside_a_policy_is_refused(folder: Path) -> None:
    with anytime.Runner.load(folder, policy=Confidence(0.4)) as runner, pytest.raises(OptionError, match="decides itself"):
        runner.predict(X, budget=anytime.Budget(confidence=0.9))

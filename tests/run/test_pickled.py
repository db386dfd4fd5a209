"""Runners in other processes and as copies: pickle, spawn, copy.deepcopy."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from anytime.calibrate import fit_temperature
from anytime.errors import AnytimeError, StateError
from anytime.models import MLP, MLPConfig
from anytime.policy import Confidence
from anytime.run import Forecast, Runner, RunOptions
from anytime.run.engines import make_engine
from anytime.run.export import export

X = torch.randn(3, 2, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> MLP:
    torch.manual_seed(0)
    return MLP(MLPConfig(classes=5, exits=3)).eval()


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one.log_probs, other.log_probs, atol=1e-5, rtol=1e-4)


def test_a_runner_works_in_a_process_that_is_spawned(model: MLP) -> None:
    with Runner(model, "caching", "folded", example=X) as runner:
        runner.warm_up(X)
        wanted = runner.predict(X)
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            same(pool.apply(runner.predict, (X,)), wanted)
            same(pool.apply(runner.predict, (X,), {"deadline": "20s"}), wanted)


@pytest.mark.parametrize("engine", ["eager", "folded", "onnxruntime"])
def test_a_copy_has_the_rule_the_calibration_the_policy_and_the_stage_times(engine: str, model: MLP) -> None:
    if engine == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="the extra `engines` is not installed")
    with torch.no_grad():
        logits = model(torch.randn(200, 2, generator=torch.Generator().manual_seed(2)))
    temperature = fit_temperature(logits, torch.arange(200) % 5, "latest")
    options = RunOptions(largest_batch=3, forecast=Forecast(window=7))
    with Runner(model, None, engine, calibration=temperature, policy=Confidence(0.3), example=X, options=options) as runner:
        runner.warm_up(X)
        times = runner._forecast.seconds(1, 3)
        with copy.deepcopy(runner) as other, pickle.loads(pickle.dumps(runner)) as third:
            for one in (other, third):
                assert (one.rule, one.engine.name, one._options.largest_batch) == (runner.rule, engine, 3)
                assert one._forecast.seconds(1, 3) == times > 0
                answer = one.predict(X, deadline="20s")
                same(answer, runner.predict(X))
                assert torch.equal(torch.as_tensor(answer.exit), torch.as_tensor(runner.predict(X).exit))
                assert one.engine is not runner.engine


def test_a_runner_that_takes_a_dict_is_copied_with_its_example(two: Any) -> None:
    x = two.texts()
    with Runner(two.TwoInputs().eval(), "latest", "folded", example=x) as runner, copy.deepcopy(runner) as other:
        same(other.predict(x, deadline="20s"), runner.predict(x))


def test_a_copy_outlives_the_original(model: MLP) -> None:
    with Runner(model) as runner:
        wanted, other = runner.predict(X), copy.copy(runner)
    same(other.predict(X, deadline="20s"), wanted)
    other.close()


def test_a_runner_of_exported_stages_reads_its_folder_again(model: MLP, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("onnxruntime", reason="the extra `engines` is not installed")
    monkeypatch.chdir(tmp_path)
    export(model, "stages", rule="caching", example=X)
    with Runner.load("stages") as runner:
        stored, wanted = pickle.dumps(runner), runner.predict(X)
    monkeypatch.chdir("/")
    with pickle.loads(stored) as other:
        same(other.predict(X), wanted)
    shutil.rmtree(tmp_path / "stages")
    with pytest.raises(AnytimeError, match="stages"):
        pickle.loads(stored)


def test_a_runner_with_an_engine_object_says_why_it_cannot_be_copied(model: MLP) -> None:
    with Runner(model, engine=make_engine(model, "eager")) as runner:
        for attempt in (pickle.dumps, copy.deepcopy, copy.copy):
            with pytest.raises(StateError, match="an engine object, a EagerEngine"):
                attempt(runner)

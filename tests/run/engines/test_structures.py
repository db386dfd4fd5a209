"""A dict or tuple of tensors through the runner, all engines, profiles, batches and exported stages."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anytime.combine import Exponential, Product
from anytime.errors import InputError, OptionError, ShapeError
from anytime.models import attach_exits
from anytime.policy import Confidence
from anytime.policy.compact import run_batch
from anytime.run import Budget, Runner, RunOptions, StageReport, profile_model
from anytime.run.engines import ENGINES, Engine, make_engine
from anytime.run.engines.cuda import CudaGraphsEngine
from anytime.run.export import export, load_exported
from anytime.testing import check_engine

RULE = Product(Exponential())


@pytest.fixture(scope="module")
def model(two: Any) -> Any:
    return two.TwoInputs().eval()


@pytest.fixture(scope="module")
def folder(model: Any, two: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime", reason="the extra `engines` is not installed")
    return export(model, tmp_path_factory.mktemp("out") / "stages", rule=RULE, example=two.texts())


def engine_for(name: str, model: Any, two: Any, request: Any) -> Engine:
    if name == "cuda-graphs":
        return CudaGraphsEngine(model, two.texts(), sizes=(1, 2, 4), recorder=request.getfixturevalue("recorder"))
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime", reason="the extra `engines` is not installed")
    return make_engine(model, name, example=two.texts())


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def wanted(model: Any, x: dict[str, Tensor]) -> Tensor:
    return RULE(model(x)).log_probs


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_gives_the_logits_of_the_model(name: str, model: Any, two: Any, request: Any) -> None:
    engine = engine_for(name, model, two, request)
    for x in (two.texts(), two.texts(1, 3), tuple(model_order(two.texts(3)))):
        run = engine.begin(x)
        found = torch.stack([run.advance() for _ in range(two.EXITS)])
        with torch.no_grad():
            same(found, model(x))


def model_order(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return x["input_ids"], x["attention_mask"]


@pytest.mark.parametrize("name", ENGINES)
def test_rows_leave_and_runs_join(name: str, model: Any, two: Any, request: Any) -> None:
    engine: Any = engine_for(name, model, two, request)
    x, y = two.texts(3), two.texts(2, seed=2)
    first, second = engine.begin(x), engine.begin(y)
    first.advance()
    second.advance()
    assert first.kind == second.kind
    joint = first.join([second])
    joint.keep(torch.tensor([4, 0]))
    with torch.no_grad():
        expected = torch.stack([model(y)[1, 1], model(x)[1, 0]])
    same(joint.advance(), expected)


def test_a_model_that_has_a_generator_only_gets_the_inputs_as_they_were_given(two: Any) -> None:
    model, x = two.OnlyExits(), two.texts()
    with Runner(model, RULE) as runner:
        answer = runner.predict(x, deadline="20s")
        same(answer.log_probs, wanted(model.model, x)[-1])
        runner.warm_up(x)
    assert list(model.seen[0]) == ["attention_mask", "input_ids"]
    assert make_engine(model, "auto", example=x).name == "eager"


@pytest.mark.parametrize("engine", ["eager", "folded", "onnxruntime", "auto"])
def test_the_runner_answers_in_every_way(engine: str, model: Any, two: Any) -> None:
    if engine in ("onnxruntime", "auto"):
        pytest.importorskip("onnxruntime", reason="the extra `engines` is not installed")
    x = two.texts()
    expected = wanted(model, x)

    async def awaited(runner: Runner) -> list[Tensor]:
        last = (await runner.predict_async(x, deadline="20s")).log_probs
        return [last, *[answer.log_probs async for answer in runner.stream_async(x)]]

    with Runner(model, RULE, engine, example=two.texts(1)) as runner:
        runner.warm_up(two.texts(1))
        same(runner.predict(x).log_probs, expected[-1])
        same(runner.predict(x, deadline="20s").log_probs, expected[-1])
        same(runner.submit(x).result().log_probs, expected[-1])
        for answer, each in zip(runner.stream(x), expected, strict=True):
            same(answer.log_probs, each)
        last, *streamed = asyncio.run(awaited(runner))
        same(last, expected[-1])
        same(torch.stack(streamed), expected)


def test_macs_are_counted_for_a_budget(model: Any, two: Any) -> None:
    with Runner(model, RULE) as runner:
        first = runner.predict(two.texts(1), budget=Budget(exits=1, macs=1e9)).macs
        assert isinstance(first, float)
        assert runner.predict(two.texts(1), budget=Budget(macs=first)).exit == 1


def test_requests_join_if_their_structure_and_sizes_fit(model: Any, two: Any) -> None:
    long, short = [two.texts(1, 7, seed=seed) for seed in (1, 2)], [two.texts(1, 5, seed=seed) for seed in (3, 4)]
    requests = [long[0], short[0], model_order(long[1]), long[1], short[1]]
    reports: list[StageReport] = []
    go_on = threading.Event()

    def hold(report: StageReport) -> None:
        reports.append(report)
        assert go_on.wait(20)

    with Runner(model, RULE, options=RunOptions(workers=1)) as runner:
        runner.on_stage = hold
        first = runner.submit(long[0], budget=Budget(exits=1))
        tasks = [runner.submit(x) for x in requests]  # they wait while the first one is held
        go_on.set()
        answers = [task.result() for task in (first, *tasks)]
    for x, answer in zip(requests, answers[1:], strict=True):
        same(answer.log_probs, wanted(model, x)[-1])
    assert max(report.requests for report in reports) == 2


def test_rows_that_stop_leave_the_batch(model: Any, two: Any) -> None:
    x, policy = two.texts(6), Confidence(0.6)
    with torch.no_grad():
        expected = policy.answer(RULE(model(x)))
    found = run_batch(model, x, RULE, policy, compact_when=1)
    assert torch.equal(found.exit, expected.exit)
    with Runner(model, RULE, policy=policy) as runner:
        answer = runner.predict(x)
    assert torch.equal(torch.as_tensor(answer.exit), expected.exit)
    same(answer.log_probs, expected.log_probs)


def test_a_profile_repeats_the_rows_of_each_tensor(model: Any, two: Any) -> None:
    profile = profile_model(make_engine(model, "eager"), two.texts(2), batch_sizes=(1, 3), repeats=2)
    assert (profile.exits, profile.classes, profile.batch_sizes) == (two.EXITS, two.CLASSES, (1, 3))


def test_exported_stages_name_their_inputs(folder: Path, model: Any, two: Any) -> None:
    from onnxruntime import InferenceSession

    assert [each.name for each in InferenceSession(folder / "stage_1.onnx").get_inputs()] == list(model.input_names)
    stage = json.loads((folder / "exported.json").read_text())["stages"][0]
    assert [each["name"] for each in stage["inputs"]] == list(model.input_names)
    assert stage["inputs"][0]["shape"] == ["batch", "length"]
    assert load_exported(folder).input_names == model.input_names


@pytest.mark.parametrize("format", ["onnx", "torch-export"])
def test_loaded_stages_answer_as_the_model(format: Any, folder: Path, model: Any, two: Any, tmp_path: Path) -> None:
    if format != "onnx":
        folder = export(model, tmp_path / "stages", rule=RULE, example=two.texts(), format=format)
    with Runner.load(folder, trusted=True, example=two.texts(1)) as runner:
        runner.warm_up(two.texts(1))
        for x in (two.texts(), two.texts(2, 4), model_order(two.texts(1))):
            same(runner.predict(x, deadline="20s").log_probs, wanted(model, x)[-1])
        tasks = {seed: runner.submit(two.texts(1, seed=seed)) for seed in (5, 6, 7)}
        for seed, task in tasks.items():
            same(task.result().log_probs, wanted(model, two.texts(1, seed=seed))[-1])


def test_a_tuple_without_names_is_exported_by_its_places(two: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the extra `engines` is not installed")
    model = two.TwoInputs().eval()
    model.input_names = ()
    x = model_order(two.texts())
    loaded = load_exported(export(model, tmp_path, rule=RULE, example=x))
    assert loaded.input_names == ("x_0", "x_1")
    with torch.no_grad():
        same(list(loaded.run(x))[-1].log_probs, RULE(model(x)).log_probs[-1])


def test_an_attached_model_of_two_inputs_is_exported(two: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the extra `engines` is not installed")

    class Backbone(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(two.VOCABULARY, 8)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
            self.head = torch.nn.Linear(8, 5)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            x = self.words(input_ids)
            for layer in self.layers:
                x = torch.tanh(layer(x)) * attention_mask[..., None]
            logits: Tensor = self.head(x.sum(1))
            return logits

    x = two.texts()
    model = attach_exits(Backbone().eval(), ["layers.0", "layers.2"], example=x)
    assert model.staged
    with Runner.load(export(model, tmp_path, rule=RULE, example=x)) as runner:
        same(runner.predict(x).log_probs, wanted(model, x)[-1])


def test_progress_is_told_after_each_stage(model: Any, two: Any, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    export(
        model,
        tmp_path,
        rule=RULE,
        example=two.texts(),
        format="torch-export",
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_the_battery_of_engines_accepts_a_dict(model: Any, two: Any) -> None:
    check_engine(make_engine(model, "folded", example=two.texts()), model, two.texts())


@pytest.mark.parametrize("name", ["logits", "next_carry_0", "input ids"])
def test_names_that_stages_use_themselves_are_refused(name: str, two: Any, tmp_path: Path) -> None:
    model = two.TwoInputs().eval()
    model.input_names = (name, "attention_mask")
    ids, mask = model_order(two.texts())
    with pytest.raises(OptionError, match=repr(name)):
        export(model, tmp_path / "stages", rule=RULE, example={name: ids, "attention_mask": mask})
    assert not (tmp_path / "stages").exists()


def test_sizes_that_belong_together_are_compared(folder: Path, two: Any) -> None:
    ids, mask = model_order(two.texts())
    with pytest.raises(ShapeError, match=r"x\['attention_mask'\] has shape \(4, 5\)"):
        load_exported(folder).begin((ids, mask[:, :5]))
    with pytest.raises(InputError, match="one tensor of inputs"):
        load_exported(folder).begin(ids)

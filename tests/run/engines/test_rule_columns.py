"""A rule inside the CUDA graphs engine gives the answers of the rule on the CPU, whatever happens to the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import anytime
from anytime.combine import Latest, Prediction, State, parse_rule
from anytime.errors import InputError
from anytime.policy import Patience
from anytime.run import Budget, Runner, RunOptions
from anytime.run.combining import ByRule
from anytime.run.engines.base import Ahead
from anytime.run.engines.cuda import CudaGraphsEngine
from anytime.run.engines.cuda.rule import ByColumns, RuleColumns

RULES = ("latest", "caching", "product", "product(softplus)", "mixture", "cached(product)", "product(shift=1/K)")
ALL = Ahead(stages=9, seconds=1.0, resolution=1.0)
pytestmark = pytest.mark.filterwarnings("ignore:Product with 4 classes")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def rule_of(text: str) -> Any:
    if text == "product(shift=1/K)":
        return anytime.Product(shift="1/K")
    return parse_rule(text)


def close(found: Prediction, wanted: Prediction) -> None:
    torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.fell_back, wanted.fell_back)
    assert torch.equal(found.labels, wanted.labels)


def read(engine: CudaGraphsEngine, outputs: Sequence[Tensor]) -> Prediction:
    combiner = ByColumns(engine.rule, engine.classes)  # type: ignore[arg-type]
    combiner.unchecked = False
    return combiner.after(outputs, engine.num_exits)


def logits_of(model: Any, x: Tensor) -> Tensor:
    return torch.stack(list(model.exits(x)))


@pytest.mark.parametrize("text", RULES)
def test_every_rule_gives_the_same_answers_as_on_the_cpu(make_network: Any, recorder: Any, text: str) -> None:
    model, x = make_network("msdnet")
    rule = rule_of(text)
    engine = CudaGraphsEngine(model, x, sizes=(1, 4), pack=False, rule=rule, recorder=recorder)
    assert engine.rule == rule
    assert "the rule is part of the graphs" in engine.why
    for rows in (1, 3, 6):  # of a size, padded, and without a graph
        batch = torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(rows))
        wanted = rule(logits_of(model, batch))
        for ahead in (Ahead(), ALL):
            run: Any = engine.begin_with_rule(batch)
            run.ahead = ahead
            outputs: list[Tensor] = []
            for exit in range(3):
                outputs.append(run.advance())
                close(read(engine, outputs), wanted.at(exit))


def test_plain_runs_of_the_engine_return_logits(make_network: Any, recorder: Any) -> None:
    model, x = make_network("msdnet")
    engine = CudaGraphsEngine(model, x, sizes=(2,), pack=False, rule=anytime.Product(), recorder=recorder)
    run = engine.begin(x)
    found = torch.stack([run.advance() for _ in range(3)])
    torch.testing.assert_close(found, logits_of(model, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", ["product", "caching"])
def test_the_state_of_the_rule_travels_with_the_rows(make_network: Any, recorder: Any, text: str) -> None:
    model, x = make_network("msdnet")
    rule = rule_of(text)
    engine = CudaGraphsEngine(model, x, sizes=(1, 2), pack=False, rule=rule, recorder=recorder)
    wanted = rule(logits_of(model, x))
    runs: list[Any] = [engine.begin_with_rule(x[[row]]) for row in (1, 0)]
    for run in runs:
        run.ahead = ALL
        run.advance()
    joint = runs[0].join(runs[1:])
    close(read(engine, [joint.advance()]), wanted.at(1, [1, 0]))
    joint.keep(torch.tensor([1]))
    close(read(engine, [joint.advance()]), wanted.at(2, [0]))

    one: Any = engine.begin_with_rule(x)
    one.ahead = ALL
    one.advance()
    first, second = one.split([1, 1])
    assert first.advance().shape == second.advance().shape == (1, 2 * 4 + 3)
    close(read(engine, [first.advance()]), wanted.at(2, [0]))
    close(read(engine, [second.advance()]), wanted.at(2, [1]))


def test_a_runner_reads_its_answers_from_the_columns(make_network: Any, recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make_network("msdnet")
    engine = CudaGraphsEngine(model, x, sizes=(1, 2), pack=False, rule=anytime.Product(), recorder=recorder)
    logits = logits_of(model, x)
    wanted = anytime.Product()(logits)
    with Runner(engine, anytime.Product(), engine) as runner:
        assert "rule evaluated by CUDA graphs" in repr(runner)
        close(runner.predict(x).prediction, wanted.at(2))  # type: ignore[arg-type]  # the first one is checked on the CPU
        monkeypatch.setattr(ByRule, "after", None)
        for answer in runner.stream(x):
            close(answer.prediction, wanted.at(answer.last_exit - 1))  # type: ignore[arg-type]
        for budget in (Budget(), Budget(exits=2), Budget(time=20.0)):
            answer = runner.predict(x, budget=budget)
            close(answer.prediction, wanted.at(answer.last_exit - 1))  # type: ignore[arg-type]
            assert answer.logits is not None
            torch.testing.assert_close(answer.logits, logits[: answer.last_exit], rtol=1e-4, atol=1e-5)
        tasks = [runner.submit(x[[row]]) for row in (0, 1)]
        for row, task in enumerate(tasks):
            close(task.result(20).prediction, wanted.at(2, [row]))  # type: ignore[arg-type]


def test_wrong_logits_are_reported_as_by_the_rule(make_network: Any, recorder: Any) -> None:
    model, x = make_network("msdnet")
    engine = CudaGraphsEngine(model, x, sizes=(1, 2), pack=False, rule=anytime.Product(), recorder=recorder)
    with Runner(engine, anytime.Product(), engine) as runner:
        runner.predict(x)
        bad = x.clone()
        bad[1] = torch.nan
        with pytest.raises(InputError, match="exit 1"):
            runner.predict(bad)
        tasks = [runner.submit(row[None]) for row in bad]
        assert tasks[0].result(20).exit == 3  # only the one at fault fails
        with pytest.raises(InputError):
            tasks[1].result(20)


def test_a_policy_steps_on_the_logits(make_network: Any, recorder: Any) -> None:
    model, x = make_network("msdnet")
    engine = CudaGraphsEngine(model, x, sizes=(1, 2), pack=False, rule=anytime.Product(), recorder=recorder)
    plain = CudaGraphsEngine(model, x, sizes=(1, 2), pack=False, recorder=recorder)
    with (
        Runner(engine, anytime.Product(), engine, policy=Patience(1)) as runner,
        Runner(plain, anytime.Product(), plain, policy=Patience(1)) as other,
    ):
        found, wanted = runner.predict(x), other.predict(x)
        close(found.prediction, wanted.prediction)  # type: ignore[arg-type]
        assert torch.equal(torch.as_tensor(found.exit), torch.as_tensor(wanted.exit))


def test_another_rule_runs_on_the_cpu(make_network: Any, recorder: Any) -> None:
    model, x = make_network("msdnet")
    engine = CudaGraphsEngine(model, x, sizes=(2,), pack=False, rule=anytime.Product(), recorder=recorder)
    with Runner(engine, "caching", engine, options=RunOptions(resolution=0)) as runner:
        close(runner.predict(x).prediction, parse_rule("caching")(logits_of(model, x)).at(2))  # type: ignore[arg-type]
        assert "rule evaluated by torch" in repr(runner)


@dataclass(frozen=True)
class Own(Latest):
    """A rule of a user's, which may do anything."""


class Wrong(RuleColumns):
    """A rule that gives other answers on the GPU."""

    def step(self, exit: int, logits: Tensor, state: Any) -> Any:
        left, columns = super().step(exit, logits, state)
        return left, columns + 1


def test_a_rule_that_cannot_be_recorded_is_left_out_with_the_reason(
    make_network: Any, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = make_network("mlp")
    engine = CudaGraphsEngine(model, x, sizes=(2,), rule=Own(), recorder=recorder)
    assert engine.rule is None
    assert "Own, or a part of it, is not a rule of this library" in engine.why
    monkeypatch.setattr("anytime.run.engines.cuda.rule.RuleColumns", Wrong)
    engine = CudaGraphsEngine(model, x, sizes=(2,), rule=anytime.Product(), recorder=recorder)
    assert "on the GPU Product(" in engine.why
    assert "returns other values" in engine.why

    def fail(*_: Any) -> State:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(RuleColumns, "step", fail)
    monkeypatch.setattr("anytime.run.engines.cuda.rule.RuleColumns", RuleColumns)
    engine = CudaGraphsEngine(model, x, sizes=(2,), rule=anytime.Product(), recorder=recorder)
    assert "the rule is left out: RuntimeError: operation not permitted" in engine.why
    run = engine.begin(x)
    torch.testing.assert_close(run.advance(), logits_of(model, x)[0], rtol=1e-4, atol=1e-5)


@GPU
@pytest.mark.parametrize("text", RULES)
def test_on_a_gpu_every_rule_gives_the_same_answers(make_network: Any, text: str) -> None:
    model, x = make_network("msdnet")
    rule = rule_of(text)
    engine = CudaGraphsEngine(model, x, sizes=(1, 4), pack=None if text == "product" else False, rule=rule)
    assert engine.rule == rule, engine.why
    for rows in (1, 3, 6):
        batch = torch.randn(rows, 3, 32, 32)
        for ahead in (Ahead(), ALL):
            runs: list[Any] = [engine.begin_with_rule(batch) for _ in range(2)]
            outputs: list[list[Tensor]] = [[], []]
            for exit in range(3):
                for run, seen in zip(runs, outputs, strict=True):
                    run.ahead = ahead
                    seen.append(run.advance())
                    logits = torch.stack([each[:, : engine.classes] for each in seen])
                    close(read(engine, seen), rule.after(logits, 3))
                    torch.testing.assert_close(logits, logits_of(model, batch)[: exit + 1], rtol=1e-3, atol=1e-3)


@GPU
def test_on_a_gpu_queued_stages_give_the_answers_of_stages_one_by_one(make_network: Any) -> None:
    model, x = make_network("msdnet")
    engine = CudaGraphsEngine(model.cuda(), x, sizes=(1, 2), rule=anytime.Product())
    with (
        Runner(model, anytime.Product(), engine) as runner,
        Runner(model, anytime.Product(), engine, options=RunOptions(resolution=0)) as one_by_one,
    ):
        for turn in range(100):
            batch = torch.randn(1 + turn % 2, 3, 32, 32)
            wanted = one_by_one.predict(batch, deadline=20.0)
            for answer in (runner.predict(batch), runner.predict(batch, deadline=20.0), *runner.stream(batch)):
                if answer.exit == 3:
                    torch.testing.assert_close(answer.log_probs, wanted.log_probs, rtol=1e-4, atol=1e-4)
                    assert torch.equal(answer.labels, wanted.labels)
            short = runner.predict(batch, budget=Budget(exits=1 + turn % 3))
            assert short.exit == 1 + turn % 3

"""Requests that wait for the same stage share a batch: the same answers, fewer runs, errors only for the request at fault."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anytime
from anytime.errors import NonFiniteError
from anytime.models import MLP, MLPConfig
from anytime.run import Runner
from anytime.run.engines import make_engine
from anytime.run.engines.running import advance_together


@pytest.fixture
def network() -> MLP:
    torch.manual_seed(0)
    return MLP(MLPConfig(classes=5, exits=4)).eval()


@pytest.mark.parametrize("name", ["eager", "folded", "onnxruntime"])
def test_runs_that_share_stages_give_the_logits_of_runs_alone(network: MLP, name: str) -> None:
    if name == "onnxruntime":
        pytest.importorskip("onnxruntime")
    x = torch.randn(7, 2)
    engine = make_engine(network, name, example=x[:1])
    alone, parts = engine.begin(x), [x[:2], x[2:3], x[3:]]
    runs: list[Any] = [engine.begin(part) for part in parts]
    for exit in range(4):
        together = runs if exit % 2 == 0 else runs[1:]  # now all, now some
        advance_together(together)
        joined = torch.cat([run.advance() for run in runs])
        torch.testing.assert_close(joined, alone.advance())


class Counted(MLP):
    """Counts the rows of every run of a stage, and waits in the first one until it may go on."""

    def __init__(self) -> None:
        super().__init__(MLPConfig(classes=5, exits=3))
        self.stages_run: list[tuple[int, int]] = []
        self.reached, self.go_on = threading.Event(), threading.Event()

    def stage(self, exit: int, carry: Any) -> Any:
        self.stages_run.append((exit, len(carry[0])))
        if len(self.stages_run) == 1:
            self.reached.set()
            assert self.go_on.wait(20)
        return super().stage(exit, carry)


def submit_while_one_runs(model: Counted, runner: Runner, inputs: list[Tensor]) -> list[Any]:
    """Submit all inputs while a first request occupies the only slot."""
    first = runner.submit(torch.zeros(1, 2))
    assert model.reached.wait(20)
    tasks = [runner.submit(x) for x in inputs]
    model.go_on.set()
    assert first.result().exit == 3
    return tasks


@pytest.fixture
def model() -> Counted:
    torch.manual_seed(0)
    counted = Counted().eval()
    assert isinstance(counted, Counted)
    return counted


@pytest.fixture
def make_runner(model: Counted) -> Callable[[], Runner]:
    return lambda: Runner(model, anytime.Product(), workers=1)


def test_waiting_requests_share_batches_and_get_their_own_answers(model: Counted, make_runner: Callable[[], Runner]) -> None:
    inputs = list(torch.randn(8, 1, 2))
    with make_runner() as runner:
        answers = [task.result() for task in submit_while_one_runs(model, runner, inputs)]
    assert max(rows for _, rows in model.stages_run) == 8
    expected = anytime.Product()(torch.stack(list(model.exits(torch.cat(inputs)))))
    for row, answer in enumerate(answers):
        assert answer.exit == 3
        torch.testing.assert_close(answer.probs[0], expected.probs[-1, row])
        assert int(answer.label) == int(expected.labels[-1, row])


def test_requests_with_several_rows_count_by_their_rows(model: Counted, make_runner: Callable[[], Runner]) -> None:
    with make_runner() as runner:
        tasks = submit_while_one_runs(model, runner, [torch.randn(9, 2) for _ in range(4)])
        assert [len(task.result().probs) for task in tasks] == [9] * 4
    assert 9 <= max(rows for _, rows in model.stages_run) <= 16  # two of them are more than a batch holds


def test_a_request_that_fails_is_the_only_one_that_fails(model: Counted, make_runner: Callable[[], Runner]) -> None:
    inputs = list(torch.randn(4, 1, 2))
    inputs[2] = torch.full((1, 2), torch.nan)
    with make_runner() as runner:
        tasks = submit_while_one_runs(model, runner, inputs)
        with pytest.raises(NonFiniteError):
            tasks[2].result()
        for place in (0, 1, 3):
            assert tasks[place].result().exit == 3


def test_a_stage_that_fails_for_the_batch_runs_for_each_request_alone(
    model: Counted, make_runner: Callable[[], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = MLP.stage

    def fail_in_batches(self: MLP, exit: int, carry: Any) -> Any:
        if len(carry[0]) > 1:
            raise RuntimeError("no room for a batch")
        return stage(self, exit, carry)

    monkeypatch.setattr(MLP, "stage", fail_in_batches)
    with make_runner() as runner:
        tasks = submit_while_one_runs(model, runner, list(torch.randn(4, 1, 2)))
        assert [task.result().exit for task in tasks] == [3] * 4


def test_inputs_of_other_shapes_do_not_share_a_batch(model: Counted, make_runner: Callable[[], Runner]) -> None:
    with make_runner() as runner:
        tasks = submit_while_one_runs(model, runner, [torch.randn(1, 2), torch.randn(1, 2).double(), torch.randn(1, 2)])
        assert [task.result().exit for task in tasks] == [3] * 3
    assert (0, 2) in model.stages_run
    assert (0, 3) not in model.stages_run

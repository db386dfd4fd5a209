"""How many stages run at once: by the engine's device, the cores, and what was measured."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anytime.models import MLP, MLPConfig
from anytime.run import Runner
from anytime.run.timing import slots


@pytest.fixture
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "count_cores", lambda: 4)


@pytest.mark.usefixtures("_four_cores")
@pytest.mark.parametrize(
    ("device", "workers", "threads", "most"),
    [("cuda", 8, 1, 1), ("cpu", 8, 1, 4), ("cpu", 2, 1, 2), ("cpu", 8, 2, 2), ("cpu", 8, 9, 1)],
)
def test_there_is_one_slot_on_a_gpu_and_one_per_so_many_cores_on_a_cpu(
    device: str, workers: int, threads: int, most: int
) -> None:
    engine: Any = SimpleNamespace(device=torch.device(device), in_python=False)
    assert slots.most_slots(engine, workers, threads) == slots.count_slots(engine, workers, threads) == most


@pytest.mark.usefixtures("_four_cores")
def test_stages_that_run_from_python_have_one_slot_until_it_is_measured() -> None:
    engine: Any = SimpleNamespace()
    assert slots.count_slots(engine, 8, 1) == 1
    assert slots.most_slots(engine, 8, 1) == 4


@pytest.mark.parametrize(
    ("rates", "best"), [({1: 1.0, 2: 0.3, 4: 0.1}, 1), ({1: 1.0, 2: 2.0, 4: 4.0}, 4), ({1: 1.0, 2: 1.9, 4: 2.0}, 2)]
)
def test_more_threads_must_pay(monkeypatch: pytest.MonkeyPatch, rates: dict[int, float], best: int) -> None:
    monkeypatch.setattr(slots, "_throughput", lambda run, count: rates[count])
    assert slots.measure_slots(lambda: None, 4) == best


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_threads_are_measured_than_there_can_be_slots(most: int) -> None:
    running, highest, lock = 0, 0, threading.Lock()

    def run() -> None:
        nonlocal running, highest
        with lock:
            running += 1
            highest = max(highest, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1

    assert 1 <= slots.measure_slots(run, most) <= most
    assert highest <= most


def test_warm_up_measures_how_many_stages_to_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anytime.run.runner.measure_slots", lambda run, most: (run(), 2)[1])
    with Runner(MLP(MLPConfig(classes=5, inputs=8, exits=3)).eval()) as runner:
        assert runner.load_status.workers == 1
        runner.warm_up(torch.zeros(1, 8))
        assert runner.load_status.workers == 2

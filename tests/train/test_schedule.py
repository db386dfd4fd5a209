from __future__ import annotations

from itertools import pairwise

import pytest

from anytime.train import TrainConfig, learning_rate


def rates(config: TrainConfig, per_epoch: int = 10) -> list[float]:
    return [learning_rate(step, steps_per_epoch=per_epoch, config=config) for step in range(config.epochs * per_epoch)]


def test_the_published_schedule_divides_by_ten_at_epochs_150_and_225() -> None:
    found = rates(TrainConfig(), per_epoch=1)
    assert found[:150] == [0.1] * 150
    assert found[150:225] == pytest.approx([0.01] * 75)
    assert found[225:] == pytest.approx([0.001] * 75)


def test_cosine_decreases_from_the_peak_to_nearly_zero() -> None:
    found = rates(TrainConfig(epochs=10, lr=0.4, schedule="cosine"))
    assert found[0] == 0.4
    assert found[50] == pytest.approx(0.2)
    assert found[-1] < 0.001
    assert all(a > b for a, b in pairwise(found))


@pytest.mark.parametrize("schedule", ["step", "cosine"])
def test_warm_up_increases_evenly_to_the_peak(schedule: str) -> None:
    found = rates(TrainConfig(epochs=10, lr=1.1, schedule=schedule, warmup=1))  # type: ignore[arg-type]
    assert found[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert found[10] == 1.1

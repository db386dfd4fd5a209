from __future__ import annotations

import math
import random
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytime.errors import OptionError
from anytime.run.timing.forecast import DurationWindow, Forecast

times = st.lists(st.floats(0, 10), min_size=1, max_size=60)


@given(times, st.integers(1, 20), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_window_gives_the_quantile_of_its_last_values(values: list[float], length: int, share: float) -> None:
    kept = np.sort(values[-length:])
    window = DurationWindow(length, share, values)
    assert window.slow == kept[math.ceil(share * len(kept)) - 1]
    assert window.median == kept[math.ceil(0.5 * len(kept)) - 1]


@given(times, st.floats(0.5, 1))
def test_a_forecast_is_never_below_what_most_took(values: list[float], share: float) -> None:
    forecast = Forecast(quantile=share, window=100)
    for value in values:
        forecast.note(2, 1, value)
    assert sum(value <= forecast.slow(2, 1) for value in values) >= share * len(values)
    assert forecast.shortest(2, 1) == min(values) <= forecast.seconds(2, 1) <= forecast.slow(2, 1)


def test_a_busy_machine_is_noticed_within_a_hundred_requests_and_forgotten_within_a_hundred() -> None:
    draw, forecast = random.Random(0), Forecast()
    for _ in range(300):
        forecast.note(1, 1, draw.uniform(0.9, 1.1))
    assert forecast.slow(1, 1) < 1.2
    for _ in range(100):  # one in five is held up
        forecast.note(1, 1, draw.choice([1.0, 1.0, 1.0, 1.0, 5.0]))
    assert forecast.slow(1, 1) == 5.0
    assert forecast.seconds(1, 1) == 1.0
    for _ in range(100):
        forecast.note(1, 1, draw.uniform(0.9, 1.1))
    assert forecast.slow(1, 1) < 1.2


def test_one_hiccup_in_a_hundred_changes_little() -> None:
    forecast = Forecast()
    for number in range(100):
        forecast.note(1, 1, 50.0 if number == 70 else 1.0)
    assert forecast.seconds(1, 1) == forecast.slow(1, 1) == 1.0


def decline_until_tried(forecast: Forecast, stage: int, *, now: float = 0.0) -> int:
    count = 1
    while not forecast.decline(stage, 1, "thread", now):
        count += 1
    return count


def test_one_in_a_hundred_is_tried_and_a_fast_trial_resets_the_forecast() -> None:
    forecast = Forecast()
    forecast.seed(4, 1, [9.0] * 100)
    for taken in (9.0, 8.0, 20.0):  # as slow as before
        assert decline_until_tried(forecast, 4) == 100
        forecast.note(4, 1, taken)
        assert forecast.seconds(4, 1) == 9.0
    assert decline_until_tried(forecast, 4) == 100
    forecast.note(4, 1, 1.2)
    assert forecast.seconds(4, 1) == forecast.slow(4, 1) == 1.2


def test_a_fast_run_that_is_not_a_trial_is_one_among_the_others() -> None:
    forecast = Forecast()
    forecast.seed(1, 1, [9.0] * 100)
    forecast.note(1, 1, 1.0)
    assert forecast.seconds(1, 1) == 9.0


def test_after_a_second_of_nothing_but_refusals_one_is_tried() -> None:
    forecast = Forecast()
    forecast.seed(1, 1, [9.0] * 100)
    tried = [forecast.decline(1, 1, "thread", 50 + 0.1 * tenth) for tenth in range(24)]
    assert [tenth for tenth, each in enumerate(tried) if each] == [10, 21]


def test_what_runs_now_and_then_is_not_tried() -> None:
    forecast = Forecast()
    for turn in range(50):
        forecast.note(2, 1, 9.0)
        assert not any(forecast.decline(2, 1, "thread", float(turn)) for _ in range(90))
    assert forecast.seconds(2, 1) == 9.0


def test_what_was_never_seen_is_tried() -> None:
    assert Forecast().decline(1, 1, "thread", 0.0)


def test_a_slow_wake_up_is_tried_again_as_well() -> None:
    forecast = Forecast()
    for _ in range(100):
        forecast.note(1, 1, 1.0)
        forecast.note_dispatch("thread", 9.0)
    assert decline_until_tried(forecast, 1) == 100
    forecast.note(1, 1, 1.0)
    forecast.note_dispatch("thread", 0.1)
    assert forecast.dispatch("thread") == (0.1, 0.1, 0.1)


def test_an_unknown_batch_size_lies_on_a_line_between_its_neighbours_or_in_proportion_beyond_them() -> None:
    forecast = Forecast()
    assert forecast.seconds(1, 1) == 0.0
    forecast.note(1, 4, 1.0)
    forecast.note(1, 8, 1.5)
    assert forecast.seconds(1, 8) == 1.5
    assert forecast.seconds(1, 6) == forecast.slow(1, 6) == 1.25
    assert forecast.seconds(1, 1) == 1.0
    assert forecast.seconds(1, 16) == 3.0
    assert forecast.seconds(2, 4) == 0.0
    assert not forecast.decline(1, 16, "thread", 0.0)


@pytest.mark.parametrize(
    ("seconds", "most", "pays"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0}, 16, 16),  # a batch takes as long as one row
        ({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0}, 16, 1),  # rows one after the other
        ({1: 4.2, 2: 6.8, 4: 12.0, 8: 20.3, 16: 40.0}, 16, 8),
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0}, 4, 4),
        ({1: 1.0, 2: 2.0}, 16, 16),  # larger ones are unknown
        ({}, 16, 16),
    ],
)
def test_the_batch_that_pays_is_the_smallest_with_almost_the_best_time_per_row(
    seconds: dict[int, float], most: int, pays: int
) -> None:
    forecast = Forecast()
    for size, taken in seconds.items():
        forecast.seed(1, size, [taken] * 10)
    assert forecast.paying_batch(most) == pays


def test_a_batch_size_may_be_noted_while_the_one_that_pays_is_determined() -> None:
    forecast = Forecast()

    class Interrupted(DurationWindow):
        def __len__(self) -> int:
            forecast.note(1, 1, 1.0)
            return super().__len__()

    for size in (1, 2, 4, 8):
        forecast.seed(1, size, [1.0] * 10)
    forecast._stages[1][2] = Interrupted(100, 0.97, [1.0] * 10)
    assert forecast.paying_batch(8) == 8


def test_memory_stays_flat_over_many_batch_sizes() -> None:
    forecast = Forecast()
    for batch in range(1, 1000):
        forecast.note(1, batch, float(batch))
    assert len(forecast._stages[1]) == 64
    assert forecast.seconds(1, 999) == 999.0


def test_seeds_are_replaced_one_by_one() -> None:
    forecast = Forecast(window=10)
    forecast.seed(1, 1, [1.0] * 8 + [3.0] * 2)
    assert forecast.slow(1, 1) == 3.0
    for _ in range(10):
        forecast.note(1, 1, 2.0)
    assert forecast.slow(1, 1) == 2.0


def test_dispatch_times_are_recorded_per_mode_and_forgotten() -> None:
    forecast = Forecast(window=5)
    assert forecast.dispatch("thread") == (0.0, 0.0, 0.0)
    forecast.note_dispatch("thread", 0.3)
    assert forecast.dispatch("thread") == (0.3, 0.3, 0.3)
    assert forecast.dispatch("asyncio") == (0.0, 0.0, 0.0)
    for _ in range(5):
        forecast.note_dispatch("thread", 0.1)
    assert forecast.dispatch("thread") == (0.1, 0.1, 0.1)


@pytest.mark.parametrize(("rare", "slow"), [(0.4, 0.0), (0.8, 0.3), (5.0, 4.5)])
def test_slow_wake_ups_may_use_the_grace_period_and_typical_ones_may_not(rare: float, slow: float) -> None:
    forecast = Forecast()
    for taken in [0.2] * 90 + [rare] * 10:
        forecast.note_dispatch("thread", taken)
    assert forecast.dispatch("thread", 0.5) == pytest.approx((0.2, slow, slow))
    assert forecast.dispatch("thread", 0.5, 0.1) == pytest.approx((0.1, min(slow, 0.1), min(slow, 0.1)))


def test_a_clock_that_went_back_gives_no_negative_time() -> None:
    forecast = Forecast()
    forecast.note(1, 1, -5.0)
    forecast.note_dispatch("thread", -5.0)
    assert forecast.seconds(1, 1) == forecast.dispatch("thread").slow == 0.0


def test_a_forecast_is_thread_safe() -> None:
    forecast = Forecast(window=7)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(2000):
            forecast.note(1, 1, draw.random())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    window = forecast._stages[1][1]
    assert sorted(window._recent) == window._ordered


@pytest.mark.parametrize(
    "options", [{"quantile": 0}, {"quantile": 1.1}, {"quantile": math.nan}, {"window": 0}, {"window": True}]
)
def test_invalid_arguments_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        Forecast(**options)  # type: ignore[arg-type]

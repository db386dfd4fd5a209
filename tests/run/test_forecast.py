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
    assert sum(value <= forecast.stage(2, 1) for value in values) >= share * len(values)


def test_a_busy_machine_is_noticed_within_a_hundred_requests_and_forgotten_within_a_hundred() -> None:
    draw, forecast = random.Random(0), Forecast()
    for _ in range(300):
        forecast.note(0, 1, draw.uniform(0.9, 1.1))
    assert forecast.stage(0, 1) < 1.2
    for _ in range(100):  # one in five is held up
        forecast.note(0, 1, draw.choice([1.0, 1.0, 1.0, 1.0, 5.0]))
    assert forecast.stage(0, 1) == 5.0
    for _ in range(100):
        forecast.note(0, 1, draw.uniform(0.9, 1.1))
    assert forecast.stage(0, 1) < 1.2


def test_one_hiccup_in_a_hundred_changes_little() -> None:
    forecast = Forecast()
    for number in range(100):
        forecast.note(0, 1, 50.0 if number == 70 else 1.0)
    assert forecast.stage(0, 1) == 1.0


def decline_until_tried(forecast: Forecast, exit: int) -> int:
    count = 1
    while not forecast.decline(exit, 1, "thread"):
        count += 1
    return count


def test_one_in_a_hundred_is_tried_and_four_fast_trials_reset_the_forecast() -> None:
    forecast = Forecast()
    forecast.seed(3, 1, [9.0] * 100)
    for taken in (1.0, 1.0, 9.0, 1.0, 1.0, 1.1):
        assert decline_until_tried(forecast, 3) == 100
        forecast.note(3, 1, taken)
        assert forecast.stage(3, 1) == 9.0
    assert decline_until_tried(forecast, 3) == 100
    forecast.note(3, 1, 1.2)
    assert forecast.stage(3, 1) == 1.2
    assert forecast.outlook(4, 1, "caller").needed[3] == 1.2


def test_what_runs_now_and_then_is_not_forgotten() -> None:
    forecast = Forecast()
    for _ in range(50):
        forecast.note(1, 1, 9.0)
        for _ in range(90):
            forecast.outlook(2, 1, "thread")
            assert not forecast.decline(1, 1, "thread")
    assert forecast.stage(1, 1) == 9.0


def test_an_unknown_batch_size_takes_as_long_as_the_next_larger_or_in_proportion() -> None:
    forecast = Forecast()
    assert forecast.stage(0, 1) == 0.0
    forecast.note(0, 4, 1.0)
    forecast.note(0, 8, 1.5)
    forecast.note(0, 8, 1.5)
    assert forecast.stage(0, 8) == 1.5
    assert forecast.stage(0, 5) == 1.5
    assert forecast.stage(0, 1) == 1.0
    assert forecast.stage(0, 16) == 3.0
    assert forecast.stage(1, 4) == 0.0
    assert not forecast.decline(0, 16, "thread")
    assert not forecast.decline(1, 1, "thread")  # nothing is known there


def test_memory_stays_flat_over_many_batch_sizes() -> None:
    forecast = Forecast()
    for batch in range(1, 1000):
        forecast.note(0, batch, float(batch))
    assert len(forecast._stages[0]) == 64
    assert forecast.stage(0, 999) == 999.0


def test_seeds_are_replaced_one_by_one() -> None:
    forecast = Forecast(window=10)
    forecast.seed(0, 1, [1.0] * 8 + [3.0] * 2)
    assert forecast.stage(0, 1) == 3.0
    for _ in range(10):
        forecast.note(0, 1, 2.0)
    assert forecast.stage(0, 1) == 2.0


def test_dispatch_times_are_recorded_and_forgotten() -> None:
    forecast = Forecast(window=5)
    assert forecast.outlook(1, 1, "thread").dispatch == 0.0
    forecast.note_dispatch("thread", 0.3)
    assert forecast.outlook(1, 1, "thread").dispatch == 0.3
    assert forecast.outlook(1, 1, "asyncio").dispatch == 0.0
    for _ in range(4):
        while not forecast.decline(0, 1, "thread"):
            pass
        forecast.note_dispatch("thread", 0.1)
    assert forecast.outlook(1, 1, "thread").needed[0] == 0.1


def test_a_caller_that_runs_the_stages_needs_time_for_a_slow_stage_or_a_slow_dispatch_but_not_both() -> None:
    forecast = Forecast(window=10, quantile=0.9)
    for taken in (1.0, 1.0, 1.0, 5.0, 5.0):
        forecast.note(0, 1, taken)
    assert forecast.outlook(1, 1, "caller").needed[0] == 5.0
    for taken in (0.1, 0.1, 0.1, 2.0, 2.0):
        forecast.note_dispatch("caller", taken)
    assert forecast.outlook(1, 1, "caller").needed[0] == 5.1
    for _ in range(2):
        forecast.note_dispatch("caller", 7.0)
    assert forecast.outlook(1, 1, "caller").needed[0] == 8.0
    assert forecast.outlook(2, 1, "caller").needed[1] == 7.0


@pytest.mark.parametrize(
    ("mode", "grace", "wanted"), [("caller", 0.4, 4.7), ("caller", 4.5, 1.1), ("thread", 0.4, 1.3), ("thread", 9.0, 1.1)]
)
def test_slow_times_may_use_the_grace_period_and_typical_ones_may_not(mode: str, grace: float, wanted: float) -> None:
    forecast = Forecast(window=10, quantile=0.9)
    for taken in (1.0, 1.0, 1.0, 5.0, 5.0):
        forecast.note(0, 1, taken)
    for taken in (0.1, 0.1, 0.1, 0.7, 0.7):
        forecast.note_dispatch(mode, taken)
    outlook = forecast.outlook(1, 1, mode, grace)
    assert outlook.needed[0] == pytest.approx(wanted)
    assert outlook.dispatch == pytest.approx(max(0.0, 0.7 - grace) if mode == "thread" else 0.1)


@pytest.mark.parametrize(("rare", "waking"), [(0.5, 0.0), (0.8, 0.3), (5.0, 0.7)])
def test_all_but_the_rarest_wake_ups_end_within_the_grace_period(rare: float, waking: float) -> None:
    forecast = Forecast()
    for taken in [0.2] * 90 + [0.7 if rare > 0.7 else 0.4] * 8 + [rare] * 2:
        forecast.note_dispatch("thread", taken)
    outlook = forecast.outlook(1, 1, "thread", 0.5)
    assert outlook.dispatch == pytest.approx(waking)
    assert outlook.needed[0] == pytest.approx(max(waking, 0.2))


def test_with_many_durations_requests_are_processed_together() -> None:
    forecast = Forecast()
    forecast.seed(0, 1, [1.0] * 100)
    for _ in range(100):
        forecast.note_dispatch("thread", 0.1)
    before = forecast.outlook(1, 1, "thread")
    seen = []
    for _ in range(100):
        forecast.note_all([(0, 1, 5.0)])
        forecast.note_dispatch("thread", 0.3)
        seen.append(forecast.outlook(1, 1, "thread"))
    assert seen[:7] == [before] * 7
    assert seen[7].dispatch == 0.3
    assert seen[55].needed[0] == 5.3
    assert forecast.stage(0, 1) == 5.0


@pytest.mark.parametrize("mode", ["thread", "asyncio"])
def test_a_waiting_caller_needs_time_for_a_typical_stage_and_a_slow_wake_up(mode: str) -> None:
    forecast = Forecast(window=100)
    for taken in (1.0, 1.0, 1.0, 5.0, 5.0):
        forecast.note(0, 1, taken)
    assert forecast.outlook(1, 1, mode).needed[0] == 1.0
    for taken in [0.1] * 90 + [0.5] * 8 + [9.0] * 2:
        forecast.note_dispatch(mode, taken)
    assert forecast.outlook(1, 1, mode).needed[0] == 1.5
    assert forecast.outlook(1, 1, mode).dispatch == 0.5


def test_a_clock_that_went_back_gives_no_negative_time() -> None:
    forecast = Forecast()
    forecast.note(0, 1, -5.0)
    forecast.note_dispatch("thread", -5.0)
    assert forecast.stage(0, 1) == forecast.outlook(1, 1, "thread").dispatch == 0.0


def test_a_forecast_is_thread_safe() -> None:
    forecast = Forecast(window=7)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(2000):
            forecast.note(0, 1, draw.random())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    window = forecast._stages[0][1]
    assert sorted(window._recent) == window._ordered


@pytest.mark.parametrize(
    "options", [{"quantile": 0}, {"quantile": 1.1}, {"quantile": math.nan}, {"window": 0}, {"window": True}]
)
def test_invalid_arguments_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        Forecast(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["thread", "caller"])
def test_a_slow_first_run_is_retried_as_long_as_the_next_ones_are_fast(mode: str) -> None:
    forecast = Forecast()
    forecast.note(0, 1, 9.0)
    for _ in range(4):
        assert forecast.decline(0, 1, mode, left=2.0)
        forecast.note(0, 1, 1.0)
    assert forecast.outlook(1, 1, mode).needed[0] == 1.0


def test_two_slow_runs_are_taken_as_typical() -> None:
    forecast = Forecast()
    forecast.note(0, 1, 9.0)
    assert forecast.decline(0, 1, "caller", left=2.0)
    forecast.note(0, 1, 9.0)
    assert not any(forecast.decline(0, 1, "caller", left=2.0) for _ in range(99))


def test_one_spike_among_few_wake_ups_refuses_no_request() -> None:
    forecast = Forecast()
    for taken in (0.1, 0.1, 7.0):
        forecast.note(0, 1, 1.0)
        forecast.note_dispatch("thread", taken)
    for _ in range(4):
        assert forecast.outlook(1, 1, "thread").needed[0] > 2.0
        assert forecast.decline(0, 1, "thread", left=2.0)
        forecast.note_dispatch("thread", 0.1)
    assert forecast.outlook(1, 1, "thread").needed[0] == 1.1


def test_few_durations_do_not_start_a_later_stage() -> None:
    forecast = Forecast()
    forecast.note(1, 1, 9.0)
    assert not forecast.decline(1, 1, "thread", left=2.0)


def test_a_new_batch_size_is_tried_while_others_run() -> None:
    forecast = Forecast()
    forecast.seed(1, 1, [1.0] * 100)
    assert forecast.stage(1, 8) == 8.0
    assert not forecast.decline(1, 8, "thread", left=0.5)
    assert forecast.decline(1, 8, "thread", left=3.0)
    forecast.note(1, 8, 2.0)
    assert forecast.stage(1, 8) == 2.0


@pytest.mark.parametrize(("mode", "shortest", "tried"), [("thread", 1.0, 1), ("caller", 1.0, 0), ("thread", 9.0, 0)])
def test_a_request_that_may_fit_and_cannot_be_late_is_tried_after_a_second_of_refusals(
    mode: str, shortest: float, tried: int
) -> None:
    forecast = Forecast()
    forecast.seed(0, 1, [shortest] + [9.0] * 99)
    assert sum(forecast.decline(0, 1, mode, left=2.0, now=50 + 0.1 * tenth) for tenth in range(12)) == tried


@pytest.mark.parametrize(("mode", "left", "tried"), [("thread", 2.0, 99), ("caller", 2.0, 999), ("caller", 9.0, 99)])
def test_a_caller_that_cannot_abandon_a_stage_tries_what_may_fit(mode: str, left: float, tried: int) -> None:
    forecast = Forecast()
    forecast.seed(0, 1, [9.0] * 100)
    assert [forecast.decline(0, 1, mode, left=left) for _ in range(tried + 1)] == [False] * tried + [True]


def test_a_request_too_short_for_any_stage_does_not_reset_the_refusals() -> None:
    forecast = Forecast()
    forecast.seed(0, 1, [1.0] + [9.0] * 99)
    assert not forecast.decline(0, 1, "thread", left=0.5, now=50.0)
    assert not forecast.decline(0, 1, "thread", left=2.0, now=50.1)
    assert not forecast.decline(0, 1, "thread", left=0.5, now=51.0)
    assert forecast.decline(0, 1, "thread", left=2.0, now=51.2)

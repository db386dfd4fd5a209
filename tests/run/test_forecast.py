from __future__ import annotations

import math
import random
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytime.errors import OptionError
from anytime.run.timing.forecast import Forecast, Window

times = st.lists(st.floats(0, 10), min_size=1, max_size=60)


@given(times, st.integers(1, 20), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_window_gives_the_quantile_of_its_last_values(values: list[float], length: int, share: float) -> None:
    kept = np.sort(values[-length:])
    window = Window(length, share, values)
    assert window.slow == kept[math.ceil(share * len(kept)) - 1]
    assert window.usual == kept[math.ceil(0.5 * len(kept)) - 1]


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


def test_one_in_a_hundred_is_tried_and_four_quick_tries_in_a_row_are_believed() -> None:
    forecast = Forecast()
    forecast.seed(3, 1, [9.0] * 100)
    for taken in (1.0, 1.0, 9.0, 1.0, 1.0, 1.1):
        assert decline_until_tried(forecast, 3) == 100
        forecast.note(3, 1, taken)
        assert forecast.stage(3, 1) == 9.0
    assert decline_until_tried(forecast, 3) == 100
    forecast.note(3, 1, 1.2)
    assert forecast.stage(3, 1) == 1.2
    assert forecast.outlook(4, 1, "here").needed[3] == 1.2


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


def test_handing_over_is_learnt_and_forgotten_too() -> None:
    forecast = Forecast(window=5)
    assert forecast.outlook(1, 1, "thread").waking == 0.0
    forecast.note_handing("thread", 0.3)
    assert forecast.outlook(1, 1, "thread").waking == 0.3
    assert forecast.outlook(1, 1, "asyncio").waking == 0.0
    for _ in range(4):
        while not forecast.decline(0, 1, "thread"):
            pass
        forecast.note_handing("thread", 0.1)
    assert forecast.outlook(1, 1, "thread").needed[0] == 0.1


def test_who_runs_the_stages_needs_time_for_a_slow_stage_or_a_slow_end_but_not_for_both() -> None:
    forecast = Forecast(window=10, quantile=0.9)
    for taken in (1.0, 1.0, 1.0, 5.0, 5.0):
        forecast.note(0, 1, taken)
    assert forecast.outlook(1, 1, "here").needed[0] == 5.0
    for taken in (0.1, 0.1, 0.1, 2.0, 2.0):
        forecast.note_handing("here", taken)
    assert forecast.outlook(1, 1, "here").needed[0] == 5.1
    for _ in range(2):
        forecast.note_handing("here", 7.0)
    assert forecast.outlook(1, 1, "here").needed[0] == 8.0
    assert forecast.outlook(2, 1, "here").needed[1] == 7.0


@pytest.mark.parametrize(
    ("way", "grace", "wanted"), [("here", 0.4, 4.7), ("here", 4.5, 1.1), ("thread", 0.4, 1.3), ("thread", 9.0, 1.1)]
)
def test_what_is_slow_may_run_into_the_grace_but_not_what_is_usual(way: str, grace: float, wanted: float) -> None:
    forecast = Forecast(window=10, quantile=0.9)
    for taken in (1.0, 1.0, 1.0, 5.0, 5.0):
        forecast.note(0, 1, taken)
    for taken in (0.1, 0.1, 0.1, 0.7, 0.7):
        forecast.note_handing(way, taken)
    outlook = forecast.outlook(1, 1, way, grace)
    assert outlook.needed[0] == pytest.approx(wanted)
    assert outlook.waking == pytest.approx(max(0.0, 0.7 - grace) if way == "thread" else 0.1)


@pytest.mark.parametrize(("rare", "waking"), [(0.5, 0.0), (0.8, 0.3), (5.0, 0.7)])
def test_all_but_the_rarest_awakenings_end_within_the_grace_but_it_makes_nobody_more_careful(
    rare: float, waking: float
) -> None:
    forecast = Forecast()
    for taken in [0.2] * 90 + [0.7 if rare > 0.7 else 0.4] * 8 + [rare] * 2:
        forecast.note_handing("thread", taken)
    outlook = forecast.outlook(1, 1, "thread", 0.5)
    assert outlook.waking == pytest.approx(waking)
    assert outlook.needed[0] == pytest.approx(max(waking, 0.2))


def test_where_much_is_known_a_few_requests_are_learnt_from_together() -> None:
    forecast = Forecast()
    forecast.seed(0, 1, [1.0] * 100)
    for _ in range(100):
        forecast.note_handing("thread", 0.1)
    before = forecast.outlook(1, 1, "thread")
    seen = []
    for _ in range(100):
        forecast.note_all([(0, 1, 5.0)])
        forecast.note_handing("thread", 0.3)
        seen.append(forecast.outlook(1, 1, "thread"))
    assert seen[:7] == [before] * 7
    assert seen[7].waking == 0.3
    assert seen[55].needed[0] == 5.3
    assert forecast.stage(0, 1) == 5.0


@pytest.mark.parametrize("way", ["thread", "asyncio"])
def test_who_waits_has_an_answer_in_time_and_needs_time_for_a_usual_stage_and_a_slow_awakening(way: str) -> None:
    forecast = Forecast(window=100)
    for taken in (1.0, 1.0, 1.0, 5.0, 5.0):
        forecast.note(0, 1, taken)
    assert forecast.outlook(1, 1, way).needed[0] == 1.0
    for taken in [0.1] * 90 + [0.5] * 8 + [9.0] * 2:
        forecast.note_handing(way, taken)
    assert forecast.outlook(1, 1, way).needed[0] == 1.5
    assert forecast.outlook(1, 1, way).waking == 0.5


def test_a_clock_that_went_back_gives_no_negative_time() -> None:
    forecast = Forecast()
    forecast.note(0, 1, -5.0)
    forecast.note_handing("thread", -5.0)
    assert forecast.stage(0, 1) == forecast.outlook(1, 1, "thread").waking == 0.0


def test_threads_may_share_it() -> None:
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
def test_nonsense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        Forecast(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["thread", "here"])
def test_a_slow_first_run_is_doubted_as_long_as_the_next_ones_are_quick(way: str) -> None:
    forecast = Forecast()
    forecast.note(0, 1, 9.0)
    for _ in range(4):
        assert forecast.decline(0, 1, way, left=2.0)
        forecast.note(0, 1, 1.0)
    assert forecast.outlook(1, 1, way).needed[0] == 1.0


def test_a_first_run_that_was_no_exception_is_believed_after_the_second() -> None:
    forecast = Forecast()
    forecast.note(0, 1, 9.0)
    assert forecast.decline(0, 1, "here", left=2.0)
    forecast.note(0, 1, 9.0)
    assert not any(forecast.decline(0, 1, "here", left=2.0) for _ in range(99))


def test_one_spike_among_few_awakenings_refuses_no_request() -> None:
    forecast = Forecast()
    for taken in (0.1, 0.1, 7.0):
        forecast.note(0, 1, 1.0)
        forecast.note_handing("thread", taken)
    for _ in range(4):
        assert forecast.outlook(1, 1, "thread").needed[0] > 2.0
        assert forecast.decline(0, 1, "thread", left=2.0)
        forecast.note_handing("thread", 0.1)
    assert forecast.outlook(1, 1, "thread").needed[0] == 1.1


def test_little_knowledge_is_no_reason_to_begin_a_later_stage() -> None:
    forecast = Forecast()
    forecast.note(1, 1, 9.0)
    assert not forecast.decline(1, 1, "thread", left=2.0)


def test_a_batch_size_that_was_never_seen_has_its_turn_though_others_run_all_the_time() -> None:
    forecast = Forecast()
    forecast.seed(1, 1, [1.0] * 100)
    assert forecast.stage(1, 8) == 8.0
    assert not forecast.decline(1, 8, "thread", left=0.5)
    assert forecast.decline(1, 8, "thread", left=3.0)
    forecast.note(1, 8, 2.0)
    assert forecast.stage(1, 8) == 2.0


@pytest.mark.parametrize(("way", "quickest", "tried"), [("thread", 1.0, 1), ("here", 1.0, 0), ("thread", 9.0, 0)])
def test_after_a_second_of_refusals_who_may_fit_and_cannot_be_late_is_tried(way: str, quickest: float, tried: int) -> None:
    forecast = Forecast()
    forecast.seed(0, 1, [quickest] + [9.0] * 99)
    assert sum(forecast.decline(0, 1, way, left=2.0, now=50 + 0.1 * tenth) for tenth in range(12)) == tried


@pytest.mark.parametrize(("way", "left", "tried"), [("thread", 2.0, 99), ("here", 2.0, 999), ("here", 9.0, 99)])
def test_who_cannot_leave_a_stage_tries_what_may_fit(way: str, left: float, tried: int) -> None:
    forecast = Forecast()
    forecast.seed(0, 1, [9.0] * 100)
    assert [forecast.decline(0, 1, way, left=left) for _ in range(tried + 1)] == [False] * tried + [True]


def test_a_request_too_short_for_anything_does_not_stop_the_clock_of_refusals() -> None:
    forecast = Forecast()
    forecast.seed(0, 1, [1.0] + [9.0] * 99)
    assert not forecast.decline(0, 1, "thread", left=0.5, now=50.0)
    assert not forecast.decline(0, 1, "thread", left=2.0, now=50.1)
    assert not forecast.decline(0, 1, "thread", left=0.5, now=51.0)
    assert forecast.decline(0, 1, "thread", left=2.0, now=51.2)

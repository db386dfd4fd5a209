"""How many stages run side by side, by what gets the most done; time is made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anytime.run.timing.pace import Pace


def work(pace: Pace, per_second: Callable[[int], float], *, stages: int, now: float = 0.0) -> float:
    """So many stages of 10 ms of work each, of which so many a second get done at each level."""
    for _ in range(stages):
        now += 0.01 / per_second(pace.level)
        pace.note(0.01, now)
    return now


def held_up(level: int) -> float:
    return {1: 1.0, 2: 0.3, 3: 0.2, 4: 0.1}[level]


def side_by_side(level: int) -> float:
    return float(level)


@pytest.mark.parametrize(("per_second", "best"), [(held_up, 1), (side_by_side, 4)])
def test_the_number_that_gets_the_most_done_is_found_and_kept(per_second: Callable[[int], float], best: int) -> None:
    pace = Pace(4)
    now = work(pace, per_second, stages=200)
    levels = []
    for _ in range(2000):
        now = work(pace, per_second, stages=1, now=now)
        levels.append(pace.level)
    assert levels.count(best) > 1700


def test_a_change_is_noticed() -> None:
    pace = Pace(2)
    now = work(pace, held_up, stages=500)
    assert pace._rates[1] > pace._rates[2]
    work(pace, side_by_side, stages=2000, now=now)
    assert pace._rates[2] > pace._rates[1]


def test_time_in_which_there_was_too_little_to_do_does_not_count() -> None:
    pace, now = Pace(2), 0.0
    for _ in range(100):
        now = work(pace, side_by_side, stages=10, now=now) + 1000.0
        pace.pause()
    assert pace._rates == {}


def test_one_core_needs_no_trial() -> None:
    pace = Pace(1)
    work(pace, side_by_side, stages=100)
    assert pace.level == 1

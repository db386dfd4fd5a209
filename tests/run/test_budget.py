from __future__ import annotations

import math
import threading
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytime.errors import OptionError
from anytime.run import Budget
from anytime.run.budget import make_budget, seconds


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("5ms", 0.005),
        ("300us", 300e-6),
        ("300 µs", 300e-6),
        ("7ns", 7e-9),
        ("2s", 2.0),
        ("1.5 S", 1.5),
        (".5s", 0.5),
        ("1e-3s", 0.001),
        ("2min", 120.0),
        ("1h", 3600.0),
        (timedelta(milliseconds=20), 0.02),
        (0.25, 0.25),
        (3, 3.0),
        (0, 0.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
    ],
)
def test_durations_are_read(value: Any, expected: float) -> None:
    assert seconds(value) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "value",
    [
        "5",
        "ms",
        "",
        "-5ms",
        "5 parsecs",
        "nan s",
        "inf",
        "5ms2s",
        "٣ms",
        -1,
        -0.001,
        math.nan,
        math.inf,
        timedelta(-1),
        1e30,
        10**400,
        -(10**400),
        True,
        [],
        None,
        b"5ms",
    ],
)
def test_invalid_durations_are_refused(value: Any) -> None:
    with pytest.raises(OptionError) as error:
        seconds(value)
    assert "duration" in error.value.got


@pytest.mark.parametrize(
    "limits",
    [
        {"macs": 0},
        {"macs": -1},
        {"macs": math.nan},
        {"macs": math.inf},
        {"macs": True},
        {"exits": 0},
        {"exits": 1.5},
        {"exits": True},
        {"macs": "1e6"},
        {"macs": 10**400},
        {"exits": "3"},
        {"until": 3},
        {"until": threading.Event},
        {"time": "soon"},
    ],
)
def test_invalid_budgets_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Budget(**limits)


def test_numpy_numbers_become_python_numbers() -> None:
    budget = Budget(macs=np.float32(5), exits=np.int64(2))  # type: ignore[arg-type]
    assert (budget, type(budget.macs), type(budget.exits)) == (Budget(macs=5.0, exits=2), float, int)


maybe_time = st.none() | st.floats(0, 1e6)
maybe_exits = st.none() | st.integers(1, 20)


@given(maybe_time, maybe_exits, maybe_time, maybe_exits)
def test_combined_budgets_apply_both_limits(first: Any, few: Any, second: Any, more: Any) -> None:
    both = Budget(time=first, exits=few) & Budget(time=second, exits=more)
    assert both.time == min((time for time in (first, second) if time is not None), default=None)
    assert both.exits == min((exits for exits in (few, more) if exits is not None), default=None)
    assert both == Budget(time=second, exits=more) & Budget(time=first, exits=few)


def test_either_event_ends_a_budget_of_two() -> None:
    event, said = threading.Event(), [False]
    both = Budget(until=event) & Budget(until=lambda: said[0])
    assert not both.happened()
    said[0] = True
    assert both.happened()
    said[0] = False
    event.set()
    assert both.happened()
    assert not Budget().happened()


def test_a_deadline_is_counted_from_the_call() -> None:
    assert Budget(time="2s").deadline(10.0) == 12.0
    assert Budget(exits=2).deadline(10.0) is None


def test_budget_and_deadline_are_combined() -> None:
    assert make_budget(Budget(time="5ms", exits=2), "3ms") == Budget(time="3ms", exits=2)
    assert make_budget() == Budget()
    with pytest.raises(OptionError, match="Budget"):
        make_budget("5ms")


def test_flops_are_twice_the_macs() -> None:
    budget = Budget(flops=2e9)
    assert budget == Budget(macs=1e9)
    assert (budget.macs, budget.flops) == (1e9, 2e9)
    assert Budget().flops is None
    assert (Budget(flops=2e9) & Budget(macs=3e9, exits=2)) == Budget(macs=1e9, exits=2)
    assert replace(budget, exits=3) == Budget(macs=1e9, exits=3)
    with pytest.raises(OptionError, match="both"):
        Budget(macs=1e9, flops=2e9)
    for wrong in (0, -1, math.nan, math.inf, True, "1e6", 10**400):
        with pytest.raises(OptionError, match="flops is"):
            Budget(flops=wrong)  # type: ignore[arg-type]

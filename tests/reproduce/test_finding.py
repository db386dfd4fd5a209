"""Verdicts follow from the numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anytime.errors import OptionError, ShapeError
from anytime.reproduce import Claim, Comparison, Finding, Measured
from anytime.reproduce.finding import each_over_seeds, over_seeds

numbers = st.floats(-1e6, 1e6)


def finding(*rows: Comparison, claims: tuple[Claim, ...] = (), scale: str = "full") -> Finding:
    return Finding("x", "a title", "Figure 9", scale, ("run",), "rows", "A note.", (), rows, claims)


@given(st.lists(numbers, min_size=2, max_size=9))
def test_mean_and_deviation_over_seeds_are_numpys(values: list[float]) -> None:
    found = over_seeds(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert found.deviation == pytest.approx(np.std(values, ddof=1), rel=1e-9, abs=1e-6)


def test_one_seed_has_no_deviation() -> None:
    assert over_seeds([3.0]) == Measured(3.0, None)
    assert each_over_seeds([[1.0, 2.0]]) == [Measured(1.0), Measured(2.0)]


def test_no_seed_is_refused() -> None:
    with pytest.raises(OptionError, match="no values"):
        over_seeds([])


def test_curves_of_different_lengths_are_not_averaged() -> None:
    with pytest.raises(ShapeError, match="curves of 3, 2 points"):
        each_over_seeds([[1.0, 2.0, 3.0], [1.0, 2.0]])


@given(numbers, numbers, st.floats(0, 100))
def test_within_is_a_distance_of_at_most_the_tolerance(paper: float, ours: float, tolerance: float) -> None:
    row = Comparison("it", paper, Measured(ours), tolerance)
    distance = abs(ours - paper)
    if abs(distance - tolerance) > 1e-6:
        assert row.within == (distance < tolerance)
    assert row.difference == ours - paper


def test_a_difference_that_exceeds_the_tolerance_by_rounding_is_within() -> None:
    assert Comparison("it", 0.3, Measured(0.1 + 0.1), 0.1).within is True


def test_a_miss_by_a_hundredth_of_a_point_is_a_miss() -> None:
    assert Comparison("it", 72.7, Measured(70.69), 2.0).within is False


def test_a_bound_is_kept_or_not() -> None:
    assert Comparison("it", None, Measured(0.0), at_most=0.0).within is True
    assert Comparison("it", None, Measured(0.01), at_most=0.0).within is False


def test_without_a_tolerance_there_is_no_verdict() -> None:
    row = Comparison("it", 1.0, Measured(5.0))
    assert row.within is None
    assert row.cells()[-1] == "–"


def test_the_verdict_counts() -> None:
    rows = (
        Comparison("a", 1.0, Measured(1.0), 0.1),
        Comparison("b", 1.0, Measured(2.0), 0.1),
        Comparison("c", 1.0, Measured(2.0)),
    )
    assert finding(*rows, claims=(Claim("d", True, ""),)).verdict == "1 of 2 numbers within tolerance; 1 of 1 claim holds"
    assert finding().verdict == "nothing to compare"


def test_a_small_scale_is_not_compared_with_the_paper() -> None:
    row = Comparison("a", 1.0, Measured(9.0), 0.1, at_most=2.0)
    small = finding(row, scale="smoke").without_tolerances()
    assert small.comparisons[0].within is None
    assert small.comparisons[0].paper == 1.0
    assert small.note.startswith("The scale smoke only checks")


def test_the_document_includes_verdicts() -> None:
    document = json.loads(json.dumps(finding(Comparison("a", 1.0, Measured(9.0), 0.1)).to_json()))
    assert document["comparisons"][0]["within"] is False
    assert document["comparisons"][0]["difference"] == 8.0
    assert "plots" not in document


def test_a_zero_has_no_minus() -> None:
    assert Comparison("it", 0.1, Measured(0.0999, 0.0), 1.0, unit="%").cells()[3] == "+0.00"

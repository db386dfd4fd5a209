"""Prediction sets with coverage, fitted on held-out rows."""

from anytime.conformal.nested import NestedAnswer, NestedSets, NestedState, fit_nested_sets
from anytime.conformal.nested_intervals import IntervalsState, NestedInterval, NestedIntervals, fit_nested_intervals
from anytime.conformal.nesting import (
    SetMetrics,
    measure_sets,
    nestedness,
    running_intersection,
    support_sets,
)
from anytime.conformal.raps import Raps, members_of, rank_of, sort_rows
from anytime.conformal.sets import ConformalSets, conformal_sets, fit_conformal_sets, tuning_split

__all__ = [
    "ConformalSets",
    "IntervalsState",
    "NestedAnswer",
    "NestedInterval",
    "NestedIntervals",
    "NestedSets",
    "NestedState",
    "Raps",
    "SetMetrics",
    "conformal_sets",
    "fit_conformal_sets",
    "fit_nested_intervals",
    "fit_nested_sets",
    "measure_sets",
    "members_of",
    "nestedness",
    "rank_of",
    "running_intersection",
    "sort_rows",
    "support_sets",
    "tuning_split",
]

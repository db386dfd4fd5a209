"""Every check of a caller's value, once.

The functions return the value, ready for use (tensors in at least float32), or raise a typed error. They never change it.
"""

from anytime.checks.inputs import Inputs, check_inputs, count_rows, join_inputs, map_inputs, repeat_rows, tensors_of
from anytime.checks.numbers import (
    LARGEST_OLD_SEED,
    LARGEST_SEED,
    check_choice,
    check_count,
    check_counts,
    check_flag,
    check_fraction,
    check_memory,
    check_number,
    check_seed,
    check_threads,
    free_memory,
)
from anytime.checks.overlap import MOST_SHARED, check_disjoint, fingerprints, shared_rows
from anytime.checks.tensors import (
    as_float,
    as_tensor,
    check_costs,
    check_labelled,
    check_labels,
    check_log_probs,
    check_logits,
    check_probabilities,
    check_scale,
    check_step,
)

__all__ = [
    "LARGEST_OLD_SEED",
    "LARGEST_SEED",
    "MOST_SHARED",
    "Inputs",
    "as_float",
    "as_tensor",
    "check_choice",
    "check_costs",
    "check_count",
    "check_counts",
    "check_disjoint",
    "check_flag",
    "check_fraction",
    "check_inputs",
    "check_labelled",
    "check_labels",
    "check_log_probs",
    "check_logits",
    "check_memory",
    "check_number",
    "check_probabilities",
    "check_scale",
    "check_seed",
    "check_step",
    "check_threads",
    "count_rows",
    "fingerprints",
    "free_memory",
    "join_inputs",
    "map_inputs",
    "repeat_rows",
    "shared_rows",
    "tensors_of",
]

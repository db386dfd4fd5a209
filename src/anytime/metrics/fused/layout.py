"""Where the kernel writes what: the numbers of the quantities in its three results, `(quantities, rules, exits, rows)`."""

from __future__ import annotations

ANSWER, SUPPORT, SIZE = range(3)
"""Whole numbers."""
FELL_BACK, CORRECT, COVERED = range(3)
"""Marks, 0 or 1."""
CONFIDENCE, FINAL, ENTROPY, SQUARE, LABEL, SCORE = range(6)
"""Real numbers."""
NO_SETS, SCORES, SIZES = range(3)
"""What is computed of prediction sets: nothing, the labels' scores, or the sizes of the sets."""

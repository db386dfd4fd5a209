"""Findings in words: the cells of the tables on a terminal and on the page."""

from __future__ import annotations

from anytime.reproduce.finding import Comparison, Finding, Measured

HEADINGS = ("what", "paper", "ours", "difference", "asked", "verdict")


def comparison_cells(found: Finding) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows of the numbers beside the paper's."""
    return HEADINGS, [cells(row) for row in found.comparisons]


def claim_cells(found: Finding) -> list[str]:
    """The claims, each with its verdict and the numbers behind it."""
    return [f"{'holds' if claim.holds else 'DOES NOT HOLD'}: {claim.what} ({claim.detail})" for claim in found.claims]


def cells(row: Comparison) -> tuple[str, ...]:
    """One comparison as words.

    >>> cells(Comparison("accuracy", 65.3, Measured(63.4, 0.4), 2.0, unit="%"))
    ('accuracy', '65.3 %', '63.40 ± 0.40 %', '−1.90', '± 2', 'within')
    """
    asked = [] if row.tolerance is None else [f"± {row.tolerance:g}"]
    asked += [] if row.at_most is None else [f"≤ {row.at_most:g}"]
    verdict = {None: "–", True: "within", False: "NOT within"}[row.within]
    unit = f" {row.unit}" if row.unit else ""
    paper = "–" if row.paper is None else f"{row.paper:g}{unit}"
    difference = "–" if row.difference is None else signed(row.difference, row)
    return row.what, paper, f"{written(row.ours, row)}{unit}", difference, " and ".join(asked) or "–", verdict


def number(value: float, row: Comparison) -> str:
    """A number of ours with enough digits to tell it from its tolerance: two for percentages and sizes, three for the rest."""
    text = f"{value:.{2 if row.unit in ('%', 'classes') else 3}f}".replace("-", "−")
    return text.lstrip("−") if not text.strip("−0.") else text


def signed(value: float, row: Comparison) -> str:
    """A difference with its sign."""
    text = number(value, row)
    return text if text.startswith("−") else f"+{text}"


def written(value: Measured, row: Comparison) -> str:
    """A mean with its deviation, where there is one."""
    return number(value.mean, row) + ("" if value.deviation is None else f" ± {number(value.deviation, row)}")

"""Prediction sets with coverage, fitted on held-out rows."""

from anytime.conformal.raps import Raps, rank_of, sort_rows

__all__ = ["Raps", "rank_of", "sort_rows"]

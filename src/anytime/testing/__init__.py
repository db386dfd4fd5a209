"""Batteries of checks for your own rules and models; `anytime.testing.strategies` has hypothesis strategies."""

from anytime.testing.models import check_model
from anytime.testing.rules import check_rule

__all__ = ["check_model", "check_rule"]

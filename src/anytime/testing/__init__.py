"""Test batteries for your own rules, models, engines and policies; `anytime.testing.strategies` has hypothesis strategies."""

from anytime.testing.engines import check_engine
from anytime.testing.models import check_model
from anytime.testing.policies import check_policy
from anytime.testing.rules import check_rule

__all__ = ["check_engine", "check_model", "check_policy", "check_rule"]

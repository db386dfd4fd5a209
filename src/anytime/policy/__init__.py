"""Early stopping: policies, budgets, risk control, and running a batch that shrinks as its inputs stop."""

from anytime.policy.budget import (
    BudgetCurve,
    BudgetPolicy,
    BudgetTally,
    budget_curve,
    exit_fractions,
    fit_budget_policy,
    fraction_thresholds,
)
from anytime.policy.compact import RunningBatch, run_batch
from anytime.policy.plain import PlainPolicy
from anytime.policy.risk import RiskControl, betting_bound, exit_losses, fit_risk_control, hoeffding_bentkus
from anytime.policy.stopping import Confidence, DecisionWindow, Entropy, FittedPolicy, Margin, Patience, Policy, Stopped
from anytime.policy.window import WindowPolicy, fit_window_policy

__all__ = [
    "BudgetCurve",
    "BudgetPolicy",
    "BudgetTally",
    "Confidence",
    "DecisionWindow",
    "Entropy",
    "FittedPolicy",
    "Margin",
    "Patience",
    "PlainPolicy",
    "Policy",
    "RiskControl",
    "RunningBatch",
    "Stopped",
    "WindowPolicy",
    "betting_bound",
    "budget_curve",
    "exit_fractions",
    "exit_losses",
    "fit_budget_policy",
    "fit_risk_control",
    "fit_window_policy",
    "fraction_thresholds",
    "hoeffding_bentkus",
    "run_batch",
]

"""When to stop by oneself: policies, budgets, risk control, and running a batch that shrinks as its inputs stop."""

from anytime.policy.budget import BudgetCurve, BudgetPolicy, budget_curve, exit_shares, fit_budget, share_thresholds
from anytime.policy.compact import run_batch
from anytime.policy.risk import RiskControl, betting_bound, control_risk, exit_losses, hoeffding_bentkus
from anytime.policy.stopping import Confidence, Entropy, FittedPolicy, Margin, Patience, Policy, Stopped, Window
from anytime.policy.window import WindowPolicy, fit_window

__all__ = [
    "BudgetCurve",
    "BudgetPolicy",
    "Confidence",
    "Entropy",
    "FittedPolicy",
    "Margin",
    "Patience",
    "Policy",
    "RiskControl",
    "Stopped",
    "Window",
    "WindowPolicy",
    "betting_bound",
    "budget_curve",
    "control_risk",
    "exit_losses",
    "exit_shares",
    "fit_budget",
    "fit_window",
    "hoeffding_bentkus",
    "run_batch",
    "share_thresholds",
]

"""Metrics: trajectories per exit and input, and sums over inputs."""

from anytime.metrics.accumulate import Metrics
from anytime.metrics.calibration import brier, ece, histogram, mean_iou, nll, oracle_accuracy, oracle_auroc_as_released
from anytime.metrics.monotonicity import drop, forgot, improvable, is_monotone, learned, reach, rise
from anytime.metrics.properties import concavity_gap, concordance, error_against_cost, gains, is_concave
from anytime.metrics.rule_metrics import RuleMetrics
from anytime.metrics.summary import Summary
from anytime.metrics.trajectories import Trajectories, follow

__all__ = [
    "Metrics",
    "RuleMetrics",
    "Summary",
    "Trajectories",
    "brier",
    "concavity_gap",
    "concordance",
    "drop",
    "ece",
    "error_against_cost",
    "follow",
    "forgot",
    "gains",
    "histogram",
    "improvable",
    "is_concave",
    "is_monotone",
    "learned",
    "mean_iou",
    "nll",
    "oracle_accuracy",
    "oracle_auroc_as_released",
    "reach",
    "rise",
]

"""The method: activations, rules and intervals. Pure functions and small states, nothing else."""

from anytime.combine.activations import (
    Activation,
    AdaptiveReLU,
    ClippedReLU,
    Exponential,
    Heaviside,
    ReLU,
    Sigmoid,
    Softplus,
    ThresholdReLU,
)
from anytime.combine.base import Rule
from anytime.combine.intervals import Intersection, Interval, IntervalState
from anytime.combine.learned import Arithmetic, Geometric
from anytime.combine.named import parse_rule
from anytime.combine.powers import Powers
from anytime.combine.prediction import Prediction, State
from anytime.combine.rules import Caching, Latest, Mixture, Product
from anytime.combine.scaled import Cached, Scaled, Tempered

__all__ = [
    "Activation",
    "AdaptiveReLU",
    "Arithmetic",
    "Cached",
    "Caching",
    "ClippedReLU",
    "Exponential",
    "Geometric",
    "Heaviside",
    "Intersection",
    "Interval",
    "IntervalState",
    "Latest",
    "Mixture",
    "Powers",
    "Prediction",
    "Product",
    "ReLU",
    "Rule",
    "Scaled",
    "Sigmoid",
    "Softplus",
    "State",
    "Tempered",
    "ThresholdReLU",
    "parse_rule",
]

"""The rules that compiled code knows, as numbers. This module does not need numba."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anytime.combine.activations import ClippedReLU, Exponential, Heaviside, ReLU, Softplus, ThresholdReLU
from anytime.combine.rules import Caching, Latest, Mixture, Product, log_fractions, weights_of

LATEST, CACHING_EARLIER, CACHING_LATER, PRODUCT, MIXTURE = range(5)
LOGARITHM, SOFTPLUS, EXPONENTIAL = range(3)
_ACTIVATIONS = (ReLU, ClippedReLU, Heaviside, ThresholdReLU, Softplus, Exponential)  # not their subclasses


@dataclass(frozen=True)
class Encoded:
    """A rule in numbers, see `anytime.evaluation.compiled.row`."""

    kind: int
    activation: int
    evidence: tuple[float, float, float, float]
    weights: Sequence[float]
    fractions: Sequence[tuple[float, float]]


def encode_known(
    combiners: Mapping[Any, Any], log_odds: Collection[Any], exits: int, classes: int, real: Any
) -> dict[Any, Encoded]:
    """The rules that compiled code knows, by name; `log_odds` are those whose log-odds are wanted."""
    known = {}
    for name, combine in combiners.items():
        found = encode(combine, exits, classes, real)
        # The log-odds of a mixture may be beyond the numbers that its mean can tell apart.
        if found is not None and not (found.kind == MIXTURE and name in log_odds):
            known[name] = found
    return known


def encode(combine: Any, exits: int, classes: int, real: Any) -> Encoded | None:
    """The rule whose `combine` this is in numbers, or None if compiled code does not know it."""
    rule = getattr(combine, "__self__", None)
    if rule is None or combine != rule.combine:
        return None
    nothing = [(-math.inf, 0.0)] * exits
    match rule:
        case Latest() | Caching() if type(rule) in (Latest, Caching):
            kinds = {"earlier": CACHING_EARLIER, "later": CACHING_LATER}
            kind = kinds[rule.ties] if isinstance(rule, Caching) else LATEST
            return Encoded(kind, LOGARITHM, (0.0, 0.0, 0.0, 0.0), [0.0] * exits, nothing)
        case Product() | Mixture() if type(rule) in (Product, Mixture):
            known = _evidence(rule.activation, real)
            if known is None:
                return None
            weights = weights_of(rule.weights, exits)
            shift = 1.0 / classes if isinstance(rule.shift, str) else float(rule.shift)
            activation, *numbers = known
            gate, floor, cap = numbers
            if isinstance(rule, Product):
                return Encoded(PRODUCT, activation, (shift, gate, floor, cap), weights, nothing)
            fractions = [log_fractions(weights, exit) for exit in range(exits)]
            return Encoded(MIXTURE, activation, (shift, gate, floor, cap), [0.0] * exits, fractions)
    return None


def _evidence(activation: Any, real: Any) -> tuple[int, float, float, float] | None:
    """Kind, gate, floor and cap of an activation's evidence."""
    if type(activation) not in _ACTIVATIONS:
        return None
    least = float(np.finfo(real).min) / 1e9
    match activation:
        case ReLU():
            return LOGARITHM, 0.0, 0.0, math.inf
        case ClippedReLU(limit):
            return LOGARITHM, 0.0, 0.0, math.log(limit)
        case Heaviside(threshold):
            return LOGARITHM, threshold, 1.0, 0.0
        case ThresholdReLU(threshold, "clamp") if threshold > 0:
            return LOGARITHM, -math.inf, threshold, math.inf
        case ThresholdReLU(threshold):
            return LOGARITHM, threshold, 0.0, math.inf
        case Softplus():
            return SOFTPLUS, -math.inf, least, math.inf
        case Exponential():
            return EXPONENTIAL, -math.inf, least, math.inf
    return None

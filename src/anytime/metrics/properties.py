"""The anytime properties beyond monotonicity, which the paper names in section 2 and does not measure.

*Consistency*: quality is correlated with computation; with ten times the computation, about a tenth of the error.
*Diminishing returns*: the largest gains come early.

Quality is the label's probability q, error is 1 - q, computation is the cumulative cost c of the exits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anytime.metrics.monotonicity import rounding

SAME = 0.01  # smaller changes of a probability count as none


def concordance(quality: Tensor, costs: Tensor) -> tuple[Tensor, Tensor]:
    """Whether more computation means more quality, per input.

    Over all pairs of an earlier and a later exit, weighted by their difference in cost: +1 if quality rises by
    at least 0.01, -1 if it drops by as much, 0 otherwise.

    Args:
        quality: `(exits, batch)`, or of several rules `(exits, rules, batch)`.
        costs: `(exits,)`, increasing, on the device of `quality`.

    Returns:
        The weighted mean in [-1, 1], `(batch,)`, and whether the input moves at all: one that is certain from the
        first exit on has no direction.
    """
    exits, least = len(costs), SAME - rounding(quality)
    score, gaps = torch.zeros_like(quality[0]), costs - costs[:, None]
    on_device = _to(gaps, quality)
    for early in range(exits - 1):
        change = quality[early + 1 :] - quality[early]
        score += (on_device[early, early + 1 :] * change.sign() * (change.abs() >= least)).sum(0)
    return score / gaps.triu().sum() if exits > 1 else score, quality.amax(0) - quality.amin(0) >= least


def is_concave(quality: Tensor, costs: Tensor) -> Tensor:
    """Inputs with diminishing returns: no exit is more than 0.01 below the concave hull of its curve, `(batch,)`."""
    return concavity_gap(quality, costs) <= SAME + rounding(quality)


def concavity_gap(quality: Tensor, costs: Tensor) -> Tensor:
    """The largest distance of the curve of quality over cost from its concave hull, `(batch,)`; 0 for a concave curve."""
    gap, cost = torch.zeros_like(quality[0]), costs.to(quality)
    gaps = _to(cost[:, None] - cost, quality)
    steepest = torch.full_like(quality, -torch.inf)  # the steepest chord from each exit to one after the current
    for exit in range(len(costs) - 1, 0, -1):
        further = gaps[exit, :exit]
        slope = (quality[exit] - quality[:exit]) / further
        gap = torch.maximum(gap, ((steepest[:exit] - slope) * further).amax(0))
        torch.maximum(steepest[:exit], slope, out=steepest[:exit])
    return gap


def _to(gaps: Tensor, quality: Tensor) -> Tensor:
    """Differences of costs, `(exits, exits)`, with the type and the further dimensions of `quality`."""
    return gaps.to(quality).view(*gaps.shape, *[1] * (quality.ndim - 1))


def gains(quality: Tensor, costs: Tensor) -> Tensor:
    """Mean quality gained per unit of cost at each further exit, `(exits - 1,)`."""
    return quality.diff() / costs.to(quality).diff()


def error_against_cost(quality: Tensor, costs: Tensor) -> tuple[float | None, float | None]:
    """The correlation of log cost with -log error over the exits, and the exponent a of error ∝ cost^-a.

    `quality` is the mean per exit. Both are None where the error is zero or does not change.
    """
    error = 1 - quality.double()
    if bool((error <= 0).any()):
        return None, None
    x, y = costs.double().log(), -error.log()
    x, y = x - x.mean(), y - y.mean()
    if float(y.abs().max()) < 1e-12 or float(x.abs().max()) < 1e-12:
        return None, None
    return float((x @ y) / (x.norm() * y.norm())), float((x @ y) / (x @ x))

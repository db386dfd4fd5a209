"""Metrics of sets over the exits: size, coverage, and whether they only shrink.

Sets of classes are booleans, `(exits, batch, classes)`. A set that readmits a class contradicts the exit that ruled it out;
nestedness, |∩_{l≤t} C_l| / |C_t|, is 1 if that never happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anytime.checks import as_tensor, check_labels
from anytime.combine import Prediction
from anytime.errors import DtypeError, ShapeError
from anytime.metrics.monotonicity import SIZE_RISES, reach, rise


@dataclass(frozen=True)
class SetMetrics:
    """Metrics of some sets; lists have one number per exit.

    Attributes:
        size: Mean number of classes.
        coverage: Fraction of labels in the set.
        simultaneous_coverage: Fraction of labels in the sets of this and all earlier exits.
        empty: Fraction of empty sets.
        nestedness: Mean of |∩_{l≤t} C_l| / |C_t|, which is 1 for an empty C_t.
        size_rise_percent: Percentage of inputs whose set grows by this many classes between an earlier and a later exit.
    """

    size: list[float]
    coverage: list[float]
    simultaneous_coverage: list[float]
    empty: list[float]
    nestedness: list[float]
    size_rise_percent: dict[str, float]


def measure_sets(members: Any, labels: Any) -> SetMetrics:
    """Metrics of sets of any origin.

    Args:
        members: Booleans, `(exits, batch, classes)`.
        labels: `(batch,)`.

    Example:
        >>> sets = torch.tensor([[[True, True, False]], [[True, False, True]]])
        >>> measure_sets(sets, torch.tensor([0])).nestedness
        [1.0, 0.5]
    """
    inside = _check_members(members)
    _, batch, classes = inside.shape
    if batch == 0:
        raise ShapeError("members have no rows", expected="at least one row", fix="pass the sets of some inputs")
    wanted = check_labels(labels, batch=batch, classes=classes, device=inside.device)
    covered = inside[:, torch.arange(batch, device=inside.device), wanted]
    size = inside.sum(-1)
    rises = reach(rise(size), SIZE_RISES).tolist()
    return SetMetrics(
        size=_means(size),
        coverage=_means(covered),
        simultaneous_coverage=_means(covered.cummin(0).values),
        empty=_means(size == 0),
        nestedness=_means(nestedness(inside)),
        size_rise_percent={str(limit): 100 * count / batch for limit, count in zip(SIZE_RISES, rises, strict=True)},
    )


def running_intersection(members: Any) -> Tensor:
    """The classes in this and all earlier sets: nested by construction, with lower coverage."""
    return _check_members(members).cummin(0).values


def nestedness(members: Any) -> Tensor:
    """|∩_{l≤t} C_l| / |C_t| of each input, `(exits, batch)`."""
    inside = _check_members(members)
    size = inside.sum(-1)
    return torch.where(size == 0, 1.0, inside.cummin(0).values.sum(-1) / size.clamp(min=1))


def support_sets(prediction: Prediction) -> Tensor:
    """The classes of positive probability: for the product, those that no exit so far has ruled out.

    These sets only shrink and cost nothing, but their coverage is not controlled: measure it. After a collapse the set of a row
    holds all classes.

    Args:
        prediction: From `rule(logits)`.
    """
    return prediction.log_probs > -torch.inf


def _check_members(members: Any) -> Tensor:
    inside = as_tensor(members, "members")
    if inside.dtype != torch.bool:
        raise DtypeError(f"members are {inside.dtype}", expected="booleans", fix="pass what sets() returns")
    if inside.ndim != 3 or len(inside) == 0:
        raise ShapeError(
            f"members have shape {tuple(inside.shape)}", expected="(exits, batch, classes)", fix="pass the sets of all exits"
        )
    return inside


def _means(values: Tensor) -> list[float]:
    means: list[float] = values.double().mean(-1).tolist()
    return means

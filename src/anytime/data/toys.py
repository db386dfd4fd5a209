"""Random toy data: a spiral with four arms, and a curve with a gap.

They stand for the two tasks of appendix B.6 of the paper, which gives no formulas; these are our own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anytime.checks import LARGEST_OLD_SEED, check_count, check_number, check_seed


@dataclass(frozen=True, eq=False)
class PointData:
    """Points and their targets.

    Attributes:
        name: `spiral` or `curve`.
        inputs: `(N, dimensions)`, float32.
        targets: `(N,)`: int64 class labels, or float32 values.
    """

    name: str
    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


def make_spiral(rows: int = 1000, *, arms: int = 4, turns: float = 0.75, noise: float = 0.05, seed: int = 0) -> PointData:
    """Sample points on the arms of a spiral in about the unit circle; the class is the arm.

    Args:
        rows: The number of points, divided evenly between the arms.
        arms: The number of arms and classes.
        turns: Turns of each arm around the center.
        noise: Standard deviation of the points around their arm.
        seed: Of the random points.

    Example:
        >>> make_spiral(8).targets.tolist()
        [0, 1, 2, 3, 0, 1, 2, 3]
    """
    _check(rows, noise)
    check_count(arms, "arms")
    random = np.random.RandomState(check_seed(seed, most=LARGEST_OLD_SEED))
    arm = np.arange(rows) % arms
    radius = np.sqrt(random.uniform(0.01, 1.0, rows))
    angle = 2 * np.pi * (arm / arms + turns * radius)
    points = np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=1) + noise * random.standard_normal((rows, 2))
    return PointData("spiral", torch.from_numpy(points.astype(np.float32)), torch.from_numpy(arm.astype(np.int64)))


def make_curve(rows: int = 200, *, noise: float = 0.1, seed: int = 0) -> PointData:
    """Sample x + sin(4x) + sin(13x)/2 with noise, for x from -1 to 1 except for a gap from -0.2 to 0.3.

    Args:
        rows: The number of points.
        noise: Standard deviation of the values around the curve.
        seed: Of the random points.
    """
    _check(rows, noise)
    random = np.random.RandomState(check_seed(seed, most=LARGEST_OLD_SEED))
    x = random.uniform(-1.0, 0.5, rows)
    x = np.where(x < -0.2, x, x + 0.5)
    y = x + np.sin(4 * x) + np.sin(13 * x) / 2 + noise * random.standard_normal(rows)
    return PointData("curve", torch.from_numpy(x.astype(np.float32))[:, None], torch.from_numpy(y.astype(np.float32)))


def _check(rows: int, noise: float) -> None:
    check_count(rows, "rows")
    check_number(noise, "noise", low=0)

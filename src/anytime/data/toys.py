"""Toy data for the two tasks of appendix B.6 of the paper: a spiral with four arms, and a curve with two gaps.

The paper gives no formula for its spiral; this one is our own. Its curve is the simple 1-d set of Antorán et al. (2020), Depth
Uncertainty in Neural Networks.
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
        name: `spiral` or `simple-1d`.
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


def make_simple_1d() -> tuple[PointData, PointData]:
    """The simple 1-d regression set: 501 training and 501 test points of x - x²/10 + cos(πx/2), with noise of .25.

    Thirds of the points have x from -1 to 0, from 1.7 to 2.5, and from 4 to 5. Both sets are then standardised: x by the
    training points, y by the test points, as in the file that the repository of Depth Uncertainty Networks contains.

    Example:
        >>> train, test = make_simple_1d()
        >>> len(train), len(test), round(float(train.inputs[0]), 5), round(float(train.targets[0]), 5)
        (501, 501, -1.07471, -0.16771)
    """
    random = np.random.RandomState(0)
    x = np.concatenate([random.uniform(low, high, 334) for low, high in ((-1, 0), (1.7, 2.5), (4, 5))])
    y = x - 0.1 * x**2 + np.cos(np.pi * x / 2) + 0.25 * random.standard_normal(len(x))
    test, train = np.split(np.random.RandomState(42).permutation(len(x)), 2)
    x, y = (x - x[train].mean()) / x[train].std(), (y - y[test].mean()) / y[test].std()
    every = torch.from_numpy(x.astype(np.float32))[:, None], torch.from_numpy(y.astype(np.float32))
    return PointData("simple-1d", *(part[train] for part in every)), PointData("simple-1d", *(part[test] for part in every))


def _check(rows: int, noise: float) -> None:
    check_count(rows, "rows")
    check_number(noise, "noise", low=0)

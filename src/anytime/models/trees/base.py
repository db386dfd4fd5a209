"""What `TreeExits` needs of an ensemble: the sum over its first trees, extended by further ones, and logits from that sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anytime.errors import OptionError

Array = NDArray[Any]
FARTHEST = 80.0
"""How far a score counts below the largest of its row: a leaf of boosting can hold -1e13, which would move the mean."""


class Trees(ABC):
    """The trees of a fitted classifier, in the order in which they were trained.

    Attributes:
        rounds: How many steps there are to cut between: trees of a forest, or boosting rounds, which have a tree per class.
        classes: The number of classes.
        features: The number of columns of the inputs.
        dtype: What the library converts its inputs to.
        takes_nan: Whether NaN is a missing value.
        averages: Whether an exit is the mean of votes, as in a forest, rather than a sum of scores.
    """

    rounds: int
    classes: int
    features: int
    dtype: torch.dtype = torch.float64
    takes_nan: bool = True
    averages: bool = False

    def prepare(self, x: Array) -> Array:
        """What the trees read, from inputs of the right type and size; once per request."""
        return x

    @abstractmethod
    def add(self, x: Array, total: Array | None, first: int, last: int) -> Array:
        """A new sum, `(rows, ...)`: `total` and what rounds `first` to `last` add; None is the sum before the first round."""

    def logits(self, total: Array, rounds: int) -> Array:
        """Logits, `(rows, classes)`, from the sum over so many rounds."""
        return centred(total)


def centred(scores: Array) -> Array:
    """Raw scores of boosting as logits whose mean in each row is 0; the softmax stays the same.

    Libraries start from different constants, such as the logarithms of the class frequencies, which are all negative. Rules
    that read the sign of a logit would see these instead of evidence. One score per row, of the second of two classes, becomes
    two logits.

    >>> centred(np.array([[2.0], [-1.0]])).tolist(), centred(np.array([[-1.0, -2.0, -6.0]])).tolist()
    ([[-1.0, 1.0], [0.5, -0.5]], [[2.0, 1.0, -3.0]])
    """
    if scores.ndim == 1 or scores.shape[1] == 1:
        half = scores.reshape(-1, 1) / 2
        return np.concatenate((-half, half), axis=1)
    near = np.maximum(scores, scores.max(axis=1, keepdims=True) - FARTHEST)
    centre: Array = near - near.mean(axis=1, keepdims=True)
    return centre


def unsupported(got: str, expected: str, fix: str = "train one of these, or write exits(x) for your own model") -> OptionError:
    """The error for an ensemble that cannot be cut."""
    return OptionError(got, expected=expected, fix=fix)

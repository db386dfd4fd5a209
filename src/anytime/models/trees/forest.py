"""Random forests and extra trees of scikit-learn: an exit is the mean of the probabilities of the first trees.

Their logarithms would be log-probabilities, all negative: a ReLU product finds no evidence in them. As logits they are counted
from the logarithm of 1/classes: positive for a class that is more probable than by chance. The softmax is the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from anytime.models.trees.base import Array, Trees, unsupported

SMOOTHING = 0.01
"""So much of a tree that votes for all classes alike is added, so that a class without a vote has a finite logit."""


class Forest(Trees):
    """`RandomForestClassifier` and `ExtraTreesClassifier`."""

    dtype = torch.float32
    averages = True

    def __init__(self, estimator: Any) -> None:
        if estimator.n_outputs_ != 1:
            raise unsupported(
                f"the forest has {estimator.n_outputs_} outputs", "one label per row", "train a forest for each of the outputs"
            )
        self._trees = [each.tree_ for each in estimator.estimators_]
        self.rounds, self.features, self.classes = len(self._trees), estimator.n_features_in_, len(estimator.classes_)
        allowed = estimator.__sklearn_tags__().input_tags.allow_nan
        self.takes_nan = bool(allowed) and getattr(estimator, "monotonic_cst", None) is None

    def add(self, x: Array, total: Array | None, first: int, last: int) -> Array:
        """Run the trees one by one; the sum of their probabilities."""
        votes = np.zeros((len(x), self.classes)) if total is None else total.copy()
        for tree in self._trees[first:last]:
            votes += tree.predict(x)[:, : self.classes]
        return votes

    def logits(self, total: Array, rounds: int) -> Array:
        """log(classes · mean probability)."""
        return np.asarray(np.log((self.classes * total + SMOOTHING) / (rounds + SMOOTHING)))

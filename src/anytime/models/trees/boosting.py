"""Gradient boosting of scikit-learn.

Its public `staged_decision_function` makes the same sums, but tree by tree in one generator that cannot be resumed with fewer
rows, so both classes read the trees themselves. `tests/models/test_trees.py` compares every exit with the public function.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from anytime.models.trees.base import Array, Trees, centred, unsupported


class HistBoosting(Trees):
    """`HistGradientBoostingClassifier`."""

    def __init__(self, estimator: Any) -> None:
        self._estimator = estimator
        self.rounds, self.features = estimator.n_iter_, estimator.n_features_in_
        self.classes = len(estimator.classes_)
        self._encoder = estimator._preprocessor
        if self._encoder is not None:
            categories = self._encoder.named_transformers_["encoder"].categories_
            if any(known.dtype.kind not in "fiub" for known in categories):
                raise unsupported(
                    "the trees were trained on categories that are not numbers",
                    "columns of numbers, which a tensor can hold",
                    "encode the categories with OrdinalEncoder first, and train with categorical_features=[their columns]",
                )

    def prepare(self, x: Array) -> Array:
        """Encode categories and move their columns to where the trees expect them, if there are any."""
        return x if self._encoder is None else np.asarray(self._encoder.transform(x))

    def add(self, x: Array, total: Array | None, first: int, last: int) -> Array:
        """Run the trees one by one, in one thread."""
        own = self._estimator
        start = own._baseline_prediction if total is None else total
        scores = np.empty((len(x), own.n_trees_per_iteration_))
        scores[:] = start
        own._predict_iterations(x, own._predictors[first:last], scores, is_binned=False, n_threads=1)
        return scores


class Boosting(Trees):
    """`GradientBoostingClassifier`."""

    dtype = torch.float32
    takes_nan = False

    def __init__(self, estimator: Any) -> None:
        self._estimator = estimator
        self.rounds, self.features = len(estimator.estimators_), estimator.n_features_in_
        self.classes = len(estimator.classes_)
        # Without an estimator of the user's own the scores start from constants.
        plain = estimator.init is None or estimator.init == "zero"
        self._start = estimator._raw_predict_init(np.zeros((1, self.features))) if plain else None
        self._scale = 2.0 if estimator.loss == "exponential" else 1.0  # whose probability is the logistic function of 2·score

    def add(self, x: Array, total: Array | None, first: int, last: int) -> Array:
        """Run the trees in one call of scikit-learn's own function, five times faster than a call per tree."""
        from sklearn.ensemble._gradient_boosting import predict_stages

        if total is None:
            total = self._estimator._raw_predict_init(x) if self._start is None else self._start.repeat(len(x), axis=0)
        scores = np.array(total)
        predict_stages(self._estimator.estimators_[first:last], x, self._estimator.learning_rate, scores)
        return scores

    def logits(self, total: Array, rounds: int) -> Array:
        """The scores, centred."""
        return centred(self._scale * total)

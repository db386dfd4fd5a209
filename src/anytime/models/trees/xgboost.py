"""XGBoost's classifier and its booster, which reads the JSON files that `save_model` writes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch

from anytime.models.trees.base import Array, Trees, unsupported

_OBJECTIVES = ("binary:logistic", "binary:logitraw", "multi:softprob", "multi:softmax")


class XgBoost(Trees):
    """A booster of trees, up to its best iteration if it stopped early."""

    dtype = torch.float32

    def __init__(self, estimator: Any) -> None:
        booster = estimator.get_booster() if hasattr(estimator, "get_booster") else estimator
        learner = json.loads(booster.save_config())["learner"]
        objective, kind = learner["objective"]["name"], learner["gradient_booster"]["name"]
        if objective not in _OBJECTIVES or kind != "gbtree":
            raise unsupported(
                f"an XGBoost model of kind {kind!r} with the objective {objective!r}",
                f"trees (gbtree) with one of the objectives {', '.join(_OBJECTIVES)}",
                "train an XGBClassifier with its default booster and objective",
            )
        self._booster = booster.copy()  # the caller's keeps its own settings
        self._booster.set_param({"nthread": 1, "device": "cpu"})
        self._missing = getattr(estimator, "missing", math.nan)
        self.features, self.classes = booster.num_features(), max(2, int(learner["learner_model_param"]["num_class"]))
        best = booster.attr("best_iteration")
        self.rounds = booster.num_boosted_rounds() if best is None else int(best) + 1

    def add(self, x: Array, total: Array | None, first: int, last: int) -> Array:
        """Run the rounds in one call; the sum so far takes the place of the constant that the first rounds start from."""
        scores = self._booster.inplace_predict(
            x,
            iteration_range=(first, last),
            predict_type="margin",
            missing=self._missing,
            validate_features=False,
            base_margin=total,
        )
        return np.asarray(scores)

"""LightGBM's classifier and its booster, which reads the text files that `Booster.save_model` writes."""

from __future__ import annotations

from typing import Any

import numpy as np

from anytime.models.trees.base import Array, Trees, centred, unsupported

_OBJECTIVES = ("binary", "multiclass")


class LightGbm(Trees):
    """A booster, up to its best iteration if it stopped early."""

    def __init__(self, estimator: Any) -> None:
        self._booster = getattr(estimator, "booster_", estimator)
        header = _header(self._booster.model_to_string(num_iteration=1))
        objective, *settings = header.get("objective", "none").split()
        if objective not in _OBJECTIVES or "average_output" in header:
            raise unsupported(
                f"a LightGBM model with the objective {objective!r}" + (", averaged" if "average_output" in header else ""),
                f"boosting with the objective {' or '.join(_OBJECTIVES)}",
                "train an LGBMClassifier with its default objective and boosting_type='gbdt'",
            )
        self.features, self.classes = self._booster.num_feature(), max(2, int(header["num_class"]))
        best = self._booster.best_iteration
        self.rounds = best if best > 0 else self._booster.current_iteration()
        self._scale = float(dict(each.split(":") for each in settings).get("sigmoid", 1))

    def add(self, x: Array, total: Array | None, first: int, last: int) -> Array:
        """Run the rounds in one call, in one thread."""
        scores = self._booster.predict(x, start_iteration=first, num_iteration=last - first, raw_score=True, num_threads=1)
        return np.asarray(scores if total is None else total + scores)

    def logits(self, total: Array, rounds: int) -> Array:
        """The scores, centred; those of two classes times the setting `sigmoid`."""
        return centred(self._scale * total)


def _header(text: str) -> dict[str, str]:
    """The settings at the top of a model's text."""
    lines = text.partition("\n\n")[0].splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}

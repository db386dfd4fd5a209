"""Gradient boosting and forests as models with exits: an exit is the answer of the first trees.

Nothing is trained, and nothing is computed twice: a stage runs the trees between two exits and adds them to the sum that it is
given, so a deadline saves the trees after it. The last exit is the estimator itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from anytime.checks import check_choice, check_count, check_counts, check_inputs
from anytime.errors import InputError, OptionError, ShapeError, StateError
from anytime.models.base import Carry
from anytime.models.trees.base import Array, Trees
from anytime.models.trees.boosting import Boosting, HistBoosting
from anytime.models.trees.forest import Forest
from anytime.models.trees.lightgbm import LightGbm
from anytime.models.trees.xgboost import XgBoost

Spacing = Literal["equal", "geometric"]

# By the name of a class or of one it derives from, so that no library is imported.
_KINDS: dict[tuple[str, str], Callable[[Any], Trees]] = {
    ("sklearn", "HistGradientBoostingClassifier"): HistBoosting,
    ("sklearn", "GradientBoostingClassifier"): Boosting,
    ("sklearn", "ForestClassifier"): Forest,
    ("lightgbm", "LGBMClassifier"): LightGbm,
    ("lightgbm", "Booster"): LightGbm,
    ("xgboost", "XGBClassifier"): XgBoost,
    ("xgboost", "Booster"): XgBoost,
}


class TreeExits:
    """A fitted ensemble of trees as a staged model, for arrays or tensors `(batch, features)` of numbers.

    Logits of boosting are the raw scores, centred over the classes; those of a forest are log(classes · probability). Their
    softmax is the estimator's `predict_proba`, for forests up to a smoothing of 0.01 votes. Class i is `estimator.classes_[i]`.
    The trees run in one thread, on the CPU.

    Args:
        estimator: A fitted `HistGradientBoostingClassifier`, `GradientBoostingClassifier`, `RandomForestClassifier`,
            `ExtraTreesClassifier`, `LGBMClassifier` or `XGBClassifier`, or a booster of the last two libraries.
        exits: How many exits, at most one per round; or the rounds (trees of a forest) up to each exit, such as
            `(10, 30, 100)`.
        spacing: For a number of exits, whether all stages have as many rounds (`equal`), or each exit has as many times the
            rounds of the one before (`geometric`), for an early first answer.

    Attributes:
        rounds: The rounds up to each exit: the costs for `anytime.evaluate(..., costs=model.rounds)`.
        num_exits: The number of exits.
        classes: The number of classes.
        features: The number of columns of the inputs.
        averages: Whether an exit is the mean of the trees' votes (forests), not a sum of scores (boosting).

    Example:
        >>> from sklearn.datasets import load_digits
        >>> from sklearn.ensemble import RandomForestClassifier
        >>> x, y = load_digits(return_X_y=True)
        >>> model = TreeExits(RandomForestClassifier(50, random_state=0).fit(x, y), exits=5, spacing="geometric")
        >>> model.rounds
        (2, 5, 10, 23, 50)
        >>> model(x[:3]).shape
        torch.Size([5, 3, 10])
    """

    staged = True

    def __init__(self, estimator: Any, exits: int | Sequence[int] = 8, *, spacing: Spacing = "equal") -> None:
        check_places(exits, spacing)
        self._trees = _open(estimator)
        self._kind = type(estimator).__name__
        self.rounds = _places(exits, spacing, self._trees.rounds)
        self.num_exits = len(self.rounds)
        self.classes, self.features = self._trees.classes, self._trees.features
        self.averages = self._trees.averages

    def stage(self, exit: int, carry: Carry) -> tuple[Carry, Tensor]:
        """Run the trees between two exits; see `anytime.models.MultiExit.stage`.

        Args:
            exit: The index of the stage, from 0.
            carry: The inputs for the first stage, `(x,)`; then the inputs and the sum over the trees so far.
        """
        if not 0 <= exit < self.num_exits or len(carry) != (2 if exit else 1):
            raise StateError(
                f"stage({exit}, carry) got {len(carry)} tensors, and there are {self.num_exits} stages",
                expected="a stage counted from 0, with what the one before it returned, or (x,) for the first",
                fix="pass the first result of each stage to the next, and stop after the last",
            )
        x, total = (carry[0].numpy(), carry[1].numpy()) if exit else (self._first(carry[0]), None)
        done = self.rounds[exit]
        total = self._trees.add(x, total, self.rounds[exit - 1] if exit else 0, done)
        logits = torch.from_numpy(self._trees.logits(total, done)).float()
        return ((torch.from_numpy(x), torch.from_numpy(total)) if exit + 1 < self.num_exits else ()), logits

    def exits(self, x: Any) -> Iterator[Tensor]:
        """Yield the logits of each exit, `(batch, classes)`; trees after the last requested exit are not run."""
        inputs = check_inputs(x)
        if not isinstance(inputs, Tensor):
            raise InputError(
                f"x is a {type(x).__name__}", expected="one array or tensor (batch, features)", fix="stack the columns"
            )
        carry: Carry = (inputs,)
        for exit in range(self.num_exits):
            carry, logits = self.stage(exit, carry)
            yield logits

    def __call__(self, x: Any) -> Tensor:
        """The logits of all exits, `(exits, batch, classes)`."""
        return torch.stack(tuple(self.exits(x)))

    def __repr__(self) -> str:
        return f"TreeExits({self._kind}, rounds={self.rounds}, classes={self.classes}, features={self.features})"

    def _first(self, given: Tensor) -> Array:
        """What the trees read: checked, in the type of the library."""
        if given.ndim != 2 or given.shape[1] != self.features:
            raise ShapeError(
                f"x has shape {tuple(given.shape)}",
                expected=f"(batch, {self.features}): the columns that the trees were trained on",
                fix="pass a row as x[None]" if given.shape == (self.features,) else "pass the same columns, in the same order",
            )
        x = np.ascontiguousarray(given.detach().to("cpu", self._trees.dtype).numpy())
        single = self._trees.dtype == torch.float32
        if (not self._trees.takes_nan and np.isnan(x).any()) or (single and np.isinf(x).any()):
            raise InputError(
                "x holds NaN or infinity" + (", or numbers beyond float32" if single else ""),
                expected="finite numbers" + (", or NaN for missing ones" if self._trees.takes_nan else ""),
                fix="fill missing values as in training, e.g. with sklearn.impute.SimpleImputer, and clip large ones",
            )
        return np.ascontiguousarray(self._trees.prepare(x))


def check_kind(estimator: Any) -> Callable[[Any], Trees]:
    """What opens the trees of an estimator, fitted or not; others are refused."""
    if isinstance(estimator, type):
        raise OptionError(
            f"the estimator is the class {estimator.__name__}",
            expected="an instance",
            fix=f"write {estimator.__name__}() with parentheses",
        )
    parents = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(estimator).__mro__]
    make = next((_KINDS[parent] for parent in parents if parent in _KINDS), None)
    if make is None:
        known = (name if name != "Booster" else f"{library}.Booster" for library, name in _KINDS)
        raise OptionError(
            f"the estimator is a {type(estimator).__name__}",
            expected=f"one of {', '.join(known)}",
            fix="use one of these; of a pipeline take the last step, pipeline[-1], and give it the transformed inputs",
        )
    return make


def _open(estimator: Any) -> Trees:
    """The trees of a fitted estimator."""
    make = check_kind(estimator)
    if not (hasattr(estimator, "classes_") or type(estimator).__name__ == "Booster"):
        raise StateError(
            f"the {type(estimator).__name__} is not fitted",
            expected="an estimator after fit(X, y)",
            fix="fit it first, or use anytime.integrations.sklearn.AnytimeClassifier, which fits it and cuts it",
        )
    return make(estimator)


def check_places(exits: Any, spacing: Any) -> None:
    """Refuse exits that suit no ensemble."""
    check_choice(spacing, "spacing", ("equal", "geometric"))
    if not isinstance(exits, Sequence) or isinstance(exits, str):
        check_count(exits, "exits", fix="pass a number of exits such as 8, or increasing rounds such as (10, 30, 100)")
        return
    given = check_counts(exits, "exits", fix="pass a number of exits, or increasing rounds such as (10, 30, 100)")
    if list(given) != sorted(set(given)):
        raise OptionError(f"exits is {given}", expected="increasing rounds", fix=f"pass {tuple(sorted(set(given)))}")


def _places(exits: int | Sequence[int], spacing: str, rounds: int) -> tuple[int, ...]:
    """The rounds up to each exit.

    >>> _places(4, "equal", 10), _places(4, "geometric", 1000), _places(8, "equal", 3), _places((2, 5), "equal", 10)
    ((2, 5, 8, 10), (6, 32, 178, 1000), (1, 2, 3), (2, 5))
    """
    if isinstance(exits, Sequence):
        if exits[-1] > rounds:
            raise OptionError(
                f"exits is {tuple(exits)}",
                expected=f"numbers up to {rounds}, the rounds of the ensemble",
                fix=f"end with {rounds}, or pass a number of exits: exits=8",
            )
        return tuple(int(exit) for exit in exits)
    count = min(exits, rounds)
    steps = np.arange(1, count + 1) / count
    wanted = rounds * steps if spacing == "equal" else rounds**steps
    places: list[int] = []
    for number, place in enumerate(wanted, 1):  # each at least one after the one before, and room for those after it
        least = places[-1] + 1 if places else 1
        places.append(min(max(least, round(float(place))), rounds - (count - number)))
    return tuple(places)

"""A scikit-learn classifier that answers by a deadline: gradient boosting or a forest, cut into exits when it is fitted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.model_selection import train_test_split
from sklearn.utils import get_tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from anytime.calibrate import fit_product, fit_temperature
from anytime.checks import check_number
from anytime.combine import Latest, Rule
from anytime.combine.advice import default_rule
from anytime.combine.named import as_rule
from anytime.errors import DtypeError, LabelError, OptionError
from anytime.models.trees.exits import Spacing, TreeExits, check_kind, check_places
from anytime.models.trees.xgboost import XgBoost
from anytime.run import Answer, Runner, RunOptions
from anytime.run.budget import Duration, seconds

_Array = NDArray[Any]


class AnytimeClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Fits trees, cuts them into exits, and answers by a deadline.

    Inputs are arrays of numbers: encode categories in a step before it.

    Args:
        estimator: One of the classifiers that `anytime.models.TreeExits` takes, not yet fitted; None for a
            `HistGradientBoostingClassifier`.
        exits: How many exits, or the rounds (trees of a forest) up to each.
        spacing: `equal` or `geometric`, for a number of exits; as for `TreeExits`.
        rule: How the exits are combined: a rule or its text; `fitted` for the fitted product, which needs `calibrate`. None is
            the latest exit for boosting, whose exits are sums over all trees so far, and for a forest the product or, with
            fewer than five classes, caching; docs/trees.md has the measurements.
        calibrate: The fraction of the training rows that the trees do not see, to fit the rule's temperatures with (or the
            fitted product); None for no calibration.
        options: Scheduling of requests with a deadline. By default torch's threads are left as they are.
        random_state: The seed of the split for `calibrate`; the estimator has its own.

    Attributes:
        classes_: The labels, sorted.
        estimator_: The fitted trees.
        model_: The same as a model with exits, `TreeExits`.
        rule_: The rule in use.
        runner_: The `anytime.Runner` that answers, for budgets other than a time, answers with their exit, streams and asyncio.
            Its answers count classes from 0, in the order of `classes_`.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> from sklearn.ensemble import RandomForestClassifier
        >>> x, y = load_digits(return_X_y=True)
        >>> trees = AnytimeClassifier(RandomForestClassifier(64, random_state=0), exits=8).fit(x[:1000], y[:1000])
        >>> trees.predict(x[1000:1003], deadline="1s")
        array([1, 4, 0])
        >>> trees.runner_.predict(x[1000:1001], deadline="1s").exit
        8
    """

    def __init__(
        self,
        estimator: Any = None,
        exits: int | Sequence[int] = 8,
        *,
        spacing: Spacing = "equal",
        rule: Rule[Any] | str | None = None,
        calibrate: float | None = None,
        options: RunOptions | None = None,
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.exits = exits
        self.spacing = spacing
        self.rule = rule
        self.calibrate = calibrate
        self.options = options
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None, **fit_params: Any) -> Self:  # noqa: N803
        """Fit the trees, and the rule if `calibrate` is set.

        Args:
            X: The inputs, `(rows, features)`.
            y: The labels, `(rows,)`, of any type.
            sample_weight: The weight of each row for the trees.
            fit_params: Passed on to the estimator's `fit`; a value per row is not split for `calibrate`.
        """
        self._check_parameters()
        with _explained():
            X, y = validate_data(self, X, y, dtype=(np.float64, np.float32), ensure_all_finite=self._finite())  # noqa: N806
            if sample_weight is not None:
                fit_params["sample_weight"] = _check_sample_weight(sample_weight, X)
        _check_labels(y)
        classes, codes = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise LabelError(
                "the labels are all of one class", expected="at least two classes", fix="add rows of other classes"
            )
        rows, held = self._split(codes)
        if "sample_weight" in fit_params:
            fit_params["sample_weight"] = fit_params["sample_weight"][rows]
        estimator = clone(self._estimator())
        # XGBoost takes only labels counted from 0; the others may have class weights by label.
        labels = codes if check_kind(estimator) is XgBoost else y
        estimator.fit(X[rows], labels[rows], **fit_params)
        model = TreeExits(estimator, self.exits, spacing=self.spacing)
        if model.classes != len(classes):
            raise LabelError(
                f"the trees saw {model.classes} of {len(classes)} classes",
                expected="rows of every class among those that the trees are trained on",
                fix="hold out fewer rows: a smaller calibrate",
            )
        self.rule_ = self._choose_rule(model, *((None, None) if held is None else (X[held], codes[held])))
        self.classes_, self.estimator_, self.model_ = classes, estimator, model
        self._open()
        return self

    def predict(self, X: Any, *, deadline: Duration | None = None) -> _Array:  # noqa: N803
        """The labels, `(rows,)`.

        Args:
            X: The inputs.
            deadline: A duration from now on for all rows together, such as `"1ms"`: the answer is that of the trees that ran by
                then. If not even the first exit fits, `anytime.DeadlineTooShort` is raised, or `anytime.Overloaded` behind
                other requests.
        """
        labels = self._answer(X, deadline).labels.numpy()
        return cast(_Array, self.classes_[labels])

    def predict_proba(self, X: Any, *, deadline: Duration | None = None) -> _Array:  # noqa: N803
        """The probabilities, `(rows, classes)`; arguments as for `predict`."""
        return _probabilities(self._answer(X, deadline))

    def staged_predict_proba(self, X: Any) -> Iterator[_Array]:  # noqa: N803
        """Yield the probabilities after each exit; trees after the last requested exit are not run."""
        checked = self._checked(X)
        for answer in self.runner_.stream(checked):
            yield _probabilities(answer)

    def warm_up(self, X: Any) -> Self:  # noqa: N803
        """Measure the stage times for batches of this size, so that the first deadline is met with a forecast."""
        checked = self._checked(X)
        self.runner_.warm_up(checked)
        return self

    def _answer(self, X: Any, deadline: Duration | None) -> Answer:  # noqa: N803
        began = time.perf_counter()
        checked = self._checked(X)
        if deadline is None:
            return self.runner_.predict(checked)
        return self.runner_.predict(checked, deadline=max(0.0, seconds(deadline) - (time.perf_counter() - began)))

    def _checked(self, X: Any) -> _Array:  # noqa: N803
        check_is_fitted(self)
        with _explained():
            kept: _Array = validate_data(self, X, dtype=(np.float64, np.float32), reset=False, ensure_all_finite=self._finite())
        return kept

    def _finite(self) -> bool | str:
        return "allow-nan" if get_tags(self._estimator()).input_tags.allow_nan else True

    def _estimator(self) -> Any:
        return HistGradientBoostingClassifier() if self.estimator is None else self.estimator

    def _check_parameters(self) -> None:
        """Refuse parameters that do not fit together, before anything is trained."""
        if self.calibrate is not None:
            check_number(self.calibrate, "calibrate", above=0, below=1)
        elif self.rule == "fitted":
            raise OptionError(
                "rule is 'fitted' and calibrate is None", expected="rows to fit the rule on", fix="pass calibrate=0.2"
            )
        if self.rule not in (None, "fitted"):
            as_rule(self.rule)
        check_places(self.exits, self.spacing)
        check_kind(self._estimator())
        if not hasattr(self._estimator(), "fit"):
            raise OptionError(
                f"the estimator is a {type(self.estimator).__name__}, which is trained already",
                expected="a classifier with fit(X, y)",
                fix="cut it with anytime.models.TreeExits(booster)",
            )

    def _split(self, codes: _Array) -> tuple[Any, Any]:
        """The rows to train on, and those held out, if any."""
        if self.calibrate is None:
            return slice(None), None
        try:
            return tuple(
                train_test_split(
                    np.arange(len(codes)), test_size=self.calibrate, stratify=codes, random_state=self.random_state
                )
            )
        except ValueError as error:
            raise LabelError(
                f"{len(codes)} rows of {len(np.unique(codes))} classes with calibrate={self.calibrate}: {error}",
                expected="at least two rows of every class, and some of each class in both parts",
                fix="pass more rows, or calibrate=None",
            ) from None

    def _choose_rule(self, model: TreeExits, held: _Array | None, codes: _Array | None) -> Rule[Any]:
        """The rule, fitted on the rows held out, if any."""
        if self.rule is None:
            rule: Rule[Any] = default_rule(model.classes) if model.averages else Latest()
        elif self.rule != "fitted":
            rule = as_rule(self.rule)
        if held is None:
            return rule
        logits, labels = model(held), torch.from_numpy(codes)
        return fit_product(logits, labels).rule if self.rule == "fitted" else fit_temperature(logits, labels, rule).rule

    def _open(self) -> None:
        self.runner_ = Runner(self.model_, self.rule_, options=self.options or RunOptions(threads=None))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "runner_"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model_" in state:
            self._open()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self._finite() == "allow-nan"
        return tags


def _check_labels(y: _Array) -> None:
    """Refuse labels that are not classes, such as numbers on a scale."""
    try:
        check_classification_targets(y)
    except ValueError as error:
        raise LabelError(
            str(error),
            expected="one class per row: integers, texts or booleans",
            fix="cut numbers on a scale into classes, e.g. with numpy.digitize, or use a regressor without exits",
        ) from error


_FIXES = {
    "feature names": "pass the columns of fit in their order: X[model.feature_names_in_]",
    "Sparse data": "pass X.toarray()",
    "1D array": "pass one row as x[None]",
    "1d array": "pass one label per row: y.argmax(1) if they are one-hot, y.ravel() for a column",
    "could not convert": "encode words in a step before: make_pipeline(OrdinalEncoder(), AnytimeClassifier())",
    "contains NaN": "fill missing values in a step before: make_pipeline(SimpleImputer(), AnytimeClassifier())",
    "infinity": "limit the values, e.g. with numpy.clip(X, -1e9, 1e9)",
}
"""What to do, by a part of scikit-learn's message."""


@contextmanager
def _explained() -> Iterator[None]:
    """Complete scikit-learn's errors about inputs and labels."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise DtypeError(
            str(error),
            expected="inputs (rows, features) of numbers, the same features as in fit, and one label and weight per row",
            fix=next(
                (fix for part, fix in _FIXES.items() if part in str(error)), "pass the rows and columns of fit as numbers"
            ),
        ) from error


def _probabilities(answer: Answer) -> _Array:
    """Probabilities in float64, which sum to one as scikit-learn expects."""
    return answer.log_probs.double().softmax(-1).numpy()

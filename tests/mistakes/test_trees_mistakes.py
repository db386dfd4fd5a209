"""Mistakes with trees: each raises a typed error with what was passed, what was expected and how to fix it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.datasets import load_digits
from sklearn.ensemble import (
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import anytime
from anytime.errors import AnytimeError, DtypeError, InputError, LabelError, OptionError, ShapeError, StateError
from anytime.integrations.sklearn import AnytimeClassifier
from anytime.models import TreeExits

X, Y = load_digits(return_X_y=True)
X, Y = X[:120], Y[:120]
FOREST = RandomForestClassifier(6, random_state=0).fit(X, Y)
MODEL = TreeExits(FOREST, exits=3)
BOOSTING = TreeExits(GradientBoostingClassifier(n_estimators=2).fit(X, Y))
CLASSIFIER = AnytimeClassifier(RandomForestClassifier(6, random_state=0), exits=3)
HOLED = np.where(X == 0, np.nan, X)


def lightgbm(**settings: Any) -> TreeExits:
    from lightgbm import LGBMClassifier

    return TreeExits(LGBMClassifier(n_estimators=2, verbose=-1, n_jobs=1, **settings).fit(X, Y))


def xgboost(**settings: Any) -> TreeExits:
    from xgboost import XGBClassifier

    return TreeExits(XGBClassifier(n_estimators=2, n_jobs=1, **settings).fit(X, Y))


def categories() -> TreeExits:
    words = np.array([["a"], ["b"]] * 30, dtype=object)
    trees = HistGradientBoostingClassifier(max_iter=2, categorical_features=[0]).fit(words, [0, 1] * 30)
    return TreeExits(trees)


class DataFrame:
    """What the message needs of pandas."""

    shape = (120, 64)

    def to_numpy(self) -> object:
        """The values."""
        return X


def predict(x: Any) -> object:
    with anytime.Runner(MODEL) as runner:
        return runner.predict(x)


CALLS: dict[str, tuple[Callable[[], object], type[AnytimeError], str]] = {
    "a regressor": (lambda: TreeExits(RandomForestRegressor(2).fit(X, Y)), OptionError, "RandomForestRegressor"),
    "a class": (lambda: TreeExits(RandomForestClassifier), OptionError, "parentheses"),
    "a pipeline": (lambda: TreeExits(make_pipeline(StandardScaler(), FOREST)), OptionError, "last step"),
    "before fit": (lambda: TreeExits(RandomForestClassifier()), StateError, "fit"),
    "two outputs": (lambda: TreeExits(RandomForestClassifier(2).fit(X, np.stack((Y, Y), 1))), OptionError, "one label per row"),
    "categories that are words": (categories, OptionError, "OrdinalEncoder"),
    "no exits": (lambda: TreeExits(FOREST, exits=0), OptionError, "exits is 0"),
    "exits as text": (lambda: TreeExits(FOREST, exits="3"), OptionError, "exits is '3'"),  # type: ignore[arg-type]
    "decreasing rounds": (lambda: TreeExits(FOREST, exits=(3, 2)), OptionError, "pass (2, 3)"),
    "more rounds than there are": (lambda: TreeExits(FOREST, exits=(3, 7)), OptionError, "up to 6"),
    "an unknown spacing": (lambda: TreeExits(FOREST, spacing="geometrical"), OptionError, "'geometric'"),  # type: ignore[arg-type]
    "a single row": (lambda: MODEL(X[0]), ShapeError, "x[None]"),
    "a column too few": (lambda: MODEL(X[:, 1:]), ShapeError, "(batch, 64)"),
    "a column too few in a runner": (lambda: predict(X[:, 1:]), ShapeError, "(batch, 64)"),
    "no rows": (lambda: MODEL(X[:0]), ShapeError, "at least one"),
    "a list of rows": (lambda: MODEL(X[:2].tolist()), DtypeError, "list"),
    "inputs in a dict": (lambda: MODEL({"x": torch.from_numpy(X)}), InputError, "stack the columns"),
    "missing values that the trees do not take": (lambda: BOOSTING(HOLED), InputError, "SimpleImputer"),
    "infinity": (lambda: MODEL(np.where(X == 0, np.inf, X)), InputError, "infinity"),
    "beyond float32": (lambda: MODEL(X * 1e40), InputError, "float32"),
    "a stage after the last": (lambda: MODEL.stage(3, ()), StateError, "3 stages"),
    "a later stage with inputs": (lambda: MODEL.stage(1, (torch.from_numpy(X),)), StateError, "(x,) for the first"),
    "a budget in MACs": (
        lambda: anytime.Runner(MODEL).predict(X, budget=anytime.Budget(macs=1e6)),
        OptionError,
        "pass macs=[...]",
    ),
    "an estimator that is not made of trees": (lambda: AnytimeClassifier(StandardScaler()).fit(X, Y), OptionError, "Standard"),
    "exits of no ensemble, before training": (lambda: AnytimeClassifier(None, exits=-1).fit(X, Y), OptionError, "exits is -1"),
    "a lightgbm booster to train": (
        lambda: AnytimeClassifier(lightgbm()._trees._booster).fit(X, Y),  # type: ignore[attr-defined]
        OptionError,
        "TreeExits(booster)",
    ),
    "a fraction of one": (lambda: AnytimeClassifier(FOREST, calibrate=1.0).fit(X, Y), OptionError, "calibrate is 1.0"),
    "a rule to fit without rows": (lambda: AnytimeClassifier(FOREST, rule="fitted").fit(X, Y), OptionError, "calibrate=0.2"),
    "an unknown rule": (lambda: AnytimeClassifier(FOREST, rule="prodct").fit(X, Y), OptionError, "'product'"),
    "one class": (lambda: AnytimeClassifier(FOREST).fit(X, np.zeros(120)), LabelError, "one class"),
    "too few rows to hold out": (
        lambda: AnytimeClassifier(FOREST, calibrate=0.2).fit(X[:12], Y[:12]),
        LabelError,
        "two rows of every class",
    ),
    "a sparse matrix": (lambda: MODEL(csr_matrix(X)), DtypeError, ".toarray()"),
    "a sparse matrix to train on": (lambda: CLASSIFIER.fit(csr_matrix(X), Y), DtypeError, "X.toarray()"),
    "infinity to train on": (lambda: CLASSIFIER.fit(np.where(X == 0, np.inf, X), Y), DtypeError, "numpy.clip"),
    "a missing value to train on": (
        lambda: AnytimeClassifier(GradientBoostingClassifier()).fit(HOLED, Y),
        DtypeError,
        "SimpleImputer",
    ),
    "a data frame": (lambda: MODEL(DataFrame()), DtypeError, ".to_numpy()"),
    "words to train on": (lambda: CLASSIFIER.fit([["a"], ["b"]], [0, 1]), DtypeError, "OrdinalEncoder"),
    "words to predict": (lambda: CLASSIFIER.fit(X, Y).predict([["a"] * 64]), DtypeError, "OrdinalEncoder"),
    "a single row to predict": (lambda: CLASSIFIER.fit(X, Y).predict(X[0]), DtypeError, "x[None]"),
    "columns missing to predict": (lambda: CLASSIFIER.fit(X, Y).predict(X[:, 1:]), DtypeError, "63 features"),
    "numbers as labels": (lambda: CLASSIFIER.fit(X, Y + 0.5), LabelError, "numpy.digitize"),
    "too few weights": (lambda: CLASSIFIER.fit(X, Y, sample_weight=np.ones(3)), DtypeError, "(3,)"),
    "two labels per row": (lambda: CLASSIFIER.fit(X, np.stack((Y, Y), 1)), DtypeError, "argmax"),
    "a duration without a unit": (
        lambda: AnytimeClassifier(FOREST).fit(X, Y).predict(X[:1], deadline="1 fortnight"),
        OptionError,
        "5ms",
    ),
    "averaged lightgbm": (
        lambda: lightgbm(boosting_type="rf", subsample=0.5, subsample_freq=1),
        OptionError,
        "boosting_type='gbdt'",
    ),
    "one against the rest": (lambda: lightgbm(objective="multiclassova"), OptionError, "multiclassova"),
    "a linear xgboost": (lambda: xgboost(booster="gblinear"), OptionError, "gbtree"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # libraries warn of their own about some of these
@pytest.mark.parametrize("mistake", CALLS)
def test_a_mistake_with_trees_is_explained(mistake: str, explained: Any) -> None:
    call, kind, hint = CALLS[mistake]
    for library in ("lightgbm", "xgboost"):
        if (library in mistake or (library == "lightgbm" and "rest" in mistake)) and find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    explained(call, kind, hint)

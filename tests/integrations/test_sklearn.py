"""The classifier is one of scikit-learn's: its battery passes, it works in pipelines and searches, and it keeps deadlines."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.ensemble import GradientBoostingClassifier, HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import anytime
from anytime.combine import Powers, Scaled, Tempered
from anytime.integrations.sklearn import AnytimeClassifier

X, Y = load_digits(return_X_y=True)
NAMES = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"], dtype=object)[Y]
# These estimators fail it themselves: a random forest draws rows, not weights, boosting counts rows in a leaf, and XGBoost
# sums in float32 in another order.
WEIGHTS = {"check_sample_weight_equivalence_on_dense_data": "the trees themselves are not equivalent"}


def forest(**settings: Any) -> AnytimeClassifier:
    return AnytimeClassifier(RandomForestClassifier(24, random_state=0), exits=4, **settings)


def lightgbm() -> Any:
    from lightgbm import LGBMClassifier

    return LGBMClassifier(n_estimators=10, verbose=-1, n_jobs=1, min_child_samples=2)


def xgboost() -> Any:
    from xgboost import XGBClassifier

    return XGBClassifier(n_estimators=10, n_jobs=1)


@pytest.mark.filterwarnings("ignore::UserWarning")  # the battery fits on a handful of rows
def test_the_battery_of_scikit_learn_passes_without_exception() -> None:
    check_estimator(AnytimeClassifier(HistGradientBoostingClassifier(max_iter=12)), on_skip=None)


OTHERS: dict[str, Callable[[], AnytimeClassifier]] = {
    "default": AnytimeClassifier,
    "forest": lambda: AnytimeClassifier(RandomForestClassifier(10, random_state=0)),
    "calibrated": lambda: AnytimeClassifier(
        GradientBoostingClassifier(n_estimators=10, random_state=0), calibrate=0.3, random_state=0
    ),
    "lightgbm": lambda: AnytimeClassifier(lightgbm()),
    "xgboost": lambda: AnytimeClassifier(xgboost()),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_the_battery_of_scikit_learn_passes_for_other_trees(name: str) -> None:
    if name in ("lightgbm", "xgboost") and find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    check_estimator(OTHERS[name](), on_skip=None, expected_failed_checks={} if name == "default" else WEIGHTS)


def test_labels_of_any_type_come_back_and_the_score_is_that_of_the_last_exit() -> None:
    trees = forest(rule="latest").fit(X[:400], NAMES[:400])
    assert set(trees.predict(X[400:420])) <= set(NAMES)
    assert trees.score(X[400:600], NAMES[400:600]) == trees.estimator_.score(X[400:600], NAMES[400:600])
    own = trees.estimator_.predict_proba(X[400:500])
    np.testing.assert_allclose(trees.predict_proba(X[400:500]), own, atol=1e-3)
    *_, last = trees.staged_predict_proba(X[400:500])
    np.testing.assert_allclose(last, trees.predict_proba(X[400:500]))


@pytest.mark.parametrize("make", [lightgbm, xgboost])
def test_other_libraries_get_labels_they_understand(make: Callable[[], Any]) -> None:
    pytest.importorskip(make.__name__)
    trees = AnytimeClassifier(make(), exits=3).fit(X[:300], NAMES[:300])
    assert trees.score(X[:300], NAMES[:300]) > 0.9


def test_class_weights_are_by_label() -> None:
    weights = dict.fromkeys(NAMES[:300], 1.0)
    AnytimeClassifier(RandomForestClassifier(4, class_weight=weights)).fit(X[:300], NAMES[:300])


def test_an_answer_by_a_deadline_is_that_of_the_exit_that_was_reached() -> None:
    trees = forest().fit(X[:400], Y[:400]).warm_up(X[:1])
    np.testing.assert_array_equal(trees.predict(X[400:410], deadline="60s"), trees.predict(X[400:410]))
    np.testing.assert_allclose(trees.predict_proba(X[400:410], deadline="60s"), trees.predict_proba(X[400:410]))
    with pytest.raises(TimeoutError, match="deadline"):
        trees.predict(X, deadline="1ns")
    two = trees.runner_.predict(X[400:410], budget=anytime.Budget(exits=2))
    staged = list(trees.staged_predict_proba(X[400:410]))
    np.testing.assert_allclose(two.probs.numpy(), staged[1], atol=1e-6)


def test_options_reach_the_runner() -> None:
    options = anytime.RunOptions(on_too_short="prior", threads=None)
    trees = forest(options=options).fit(X[:300], Y[:300])
    np.testing.assert_allclose(trees.predict_proba(X[:1], deadline="1ns"), np.full((1, 10), 0.1), atol=1e-6)


def test_fitting_and_answering_leave_torchs_threads_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        forest().fit(X[:200], Y[:200]).predict(X[:3], deadline="60s")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("rule", "kind"), [("latest", Scaled), ("product", Tempered), (None, Tempered), ("fitted", Powers)])
def test_calibration_fits_the_rule_on_rows_the_trees_have_not_seen(rule: str | None, kind: type) -> None:
    trees = forest(rule=rule, calibrate=0.3, random_state=0).fit(X[:500], Y[:500])
    assert isinstance(trees.rule_, kind)
    # Bootstrap counts of the first tree: as many rows as it was given.
    assert len(trees.estimator_.estimators_samples_[0]) == 350


def test_sample_weights_are_split_with_the_rows() -> None:
    weights = np.where(Y[:500] < 5, 1.0, 0.0)
    trees = forest(calibrate=0.2, random_state=0).fit(X[:500], Y[:500], sample_weight=weights)
    assert trees.predict(X[:500]).max() < 5


def test_it_works_in_pipelines_and_searches_and_survives_pickle_and_clone() -> None:
    pipeline = make_pipeline(StandardScaler(), forest())
    found = GridSearchCV(pipeline, {"anytimeclassifier__estimator__max_depth": [1, 8], "anytimeclassifier__exits": [2]}, cv=2)
    found.fit(X[:300], NAMES[:300])
    assert found.best_params_["anytimeclassifier__estimator__max_depth"] == 8
    best = found.best_estimator_
    assert list(best.predict(X[:3], deadline="60s")) == list(best.predict(X[:3]))
    again = pickle.loads(pickle.dumps(best))
    np.testing.assert_allclose(again.predict_proba(X[:5]), best.predict_proba(X[:5]))
    assert clone(best[-1]).get_params()["estimator__max_depth"] == 8
    with pytest.raises(NotFittedError):
        clone(best[-1]).predict(X[:1])


def test_the_default_rule_depends_on_the_trees_and_the_number_of_classes() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    assert isinstance(forest().fit(x, y).rule_, anytime.Caching)
    assert isinstance(forest().fit(X[:200], Y[:200]).rule_, anytime.Product)
    assert isinstance(AnytimeClassifier(GradientBoostingClassifier(n_estimators=2)).fit(X[:200], Y[:200]).rule_, anytime.Latest)

"""Trees as models with exits: every exit is what the library itself computes from the first trees, and nothing is run twice."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.naive_bayes import GaussianNB

import anytime
from anytime.errors import OptionError
from anytime.models import TreeExits, is_staged
from anytime.models.trees.base import centred
from anytime.models.trees.forest import SMOOTHING
from anytime.run.engines import make_engine
from anytime.testing import check_model

DATA = {"ten classes": load_digits(return_X_y=True), "two classes": load_breast_cancer(return_X_y=True)}
needs_lightgbm = pytest.mark.skipif(find_spec("lightgbm") is None, reason="LightGBM is not installed")
needs_xgboost = pytest.mark.skipif(find_spec("xgboost") is None, reason="XGBoost is not installed")


def lightgbm(**settings: Any) -> Any:
    from lightgbm import LGBMClassifier

    return LGBMClassifier(**{"n_estimators": 12, "num_leaves": 7, "n_jobs": 1, "verbose": -1, **settings})


def xgboost(**settings: Any) -> Any:
    from xgboost import XGBClassifier

    return XGBClassifier(**{"n_estimators": 12, "max_depth": 3, "n_jobs": 1, **settings})


MAKERS: dict[str, Callable[[], Any]] = {
    "histogram boosting": lambda: HistGradientBoostingClassifier(max_iter=12, max_leaf_nodes=7),
    "boosting": lambda: GradientBoostingClassifier(n_estimators=12, max_depth=2, subsample=0.5, random_state=0),
    "forest": lambda: RandomForestClassifier(12, random_state=0),
    "extra trees": lambda: ExtraTreesClassifier(12, random_state=0),
    "lightgbm": lightgbm,
    "xgboost": xgboost,
}
KINDS = [pytest.param(kind, marks={"lightgbm": needs_lightgbm, "xgboost": needs_xgboost}.get(kind, ())) for kind in MAKERS]


def fitted(estimator: Any, data: str = "ten classes") -> tuple[Any, np.ndarray]:
    """An estimator after a fit, and rows that it has not seen."""
    x, y = DATA[data]
    return estimator.fit(x[:200], y[:200]), x[200:260]


def softmax(logits: torch.Tensor) -> np.ndarray:
    return logits.double().softmax(-1).numpy()


def expected(kind: str, estimator: Any, x: np.ndarray, rounds: tuple[int, ...]) -> list[np.ndarray]:
    """The probabilities after the first rounds, by the public functions of the library."""
    match kind:
        case "histogram boosting" | "boosting":
            return [list(estimator.staged_predict_proba(x))[done - 1] for done in rounds]
        case "forest" | "extra trees":
            votes = np.cumsum([tree.predict_proba(x) for tree in estimator.estimators_], axis=0)
            smooth = SMOOTHING / votes.shape[2]
            return [(votes[done - 1] + smooth) / (done + SMOOTHING) for done in rounds]
        case "lightgbm":
            return [estimator.predict_proba(x, num_iteration=done, validate_features=False) for done in rounds]
    return [estimator.predict_proba(x, iteration_range=(0, done)) for done in rounds]


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("kind", KINDS)
def test_each_exit_is_the_ensemble_after_its_first_rounds(kind: str, data: str) -> None:
    estimator, x = fitted(MAKERS[kind](), data)
    model = TreeExits(estimator, exits=5)
    wanted = expected(kind, estimator, x, model.rounds)
    np.testing.assert_allclose(softmax(model(x)), np.stack(wanted), atol=2e-6)
    np.testing.assert_allclose(softmax(model(x)[-1]), estimator.predict_proba(x), atol=SMOOTHING / model.rounds[-1] + 2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_battery_for_models_passes(kind: str) -> None:
    estimator, x = fitted(MAKERS[kind]())
    model = TreeExits(estimator, exits=4)
    assert is_staged(model)
    check_model(model, torch.from_numpy(x[:6]), classes=10, tolerance=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_row_have_both_signs_so_that_a_product_finds_evidence(kind: str) -> None:
    for data in DATA:
        estimator, x = fitted(MAKERS[kind](), data)
        logits = TreeExits(estimator, exits=3)(x)
        undecided = logits.abs().amax(-1) < 1e-6
        assert bool(((logits.amax(-1) > 0) | undecided).all())
        assert bool(((logits.amin(-1) < 0) | undecided).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_runs_only_its_own_rounds(kind: str) -> None:
    estimator, x = fitted(MAKERS[kind]())
    model = TreeExits(estimator, exits=(2, 5, 12))
    asked: list[tuple[int, int]] = []
    add = model._trees.add

    def watched(x: Any, total: Any, first: int, last: int) -> Any:
        asked.append((first, last))
        return add(x, total, first, last)

    model._trees.add = watched  # type: ignore[method-assign]
    exits = model.exits(x)
    next(exits)
    next(exits)
    assert asked == [(0, 2), (2, 5)]


@pytest.mark.parametrize(("kind", "single"), [("histogram boosting", False), ("forest", True)])
def test_float64_inputs_reach_the_trees_unrounded(kind: str, single: bool) -> None:
    """Thresholds of histogram boosting are float64: a row just above one must not be rounded to it."""
    x = np.array([[1.0], [1.0 + 1e-12]] * 40)
    model = TreeExits(MAKERS[kind]().fit(x, [0, 1] * 40), exits=2)
    with anytime.Runner(model) as runner:
        assert (runner.predict(x[:2]).labels.tolist() == [0, 1]) is not single
    if not single:
        assert not np.array_equal(model(x[:2].astype(np.float32))[-1][1], model(x[:2])[-1][1])


def test_number_of_exits_is_at_most_that_of_the_rounds() -> None:
    estimator, _ = fitted(RandomForestClassifier(3, random_state=0))
    assert TreeExits(estimator, exits=8).rounds == (1, 2, 3)
    assert TreeExits(estimator, exits=2, spacing="geometric").rounds == (2, 3)
    assert TreeExits(estimator, exits=(1,)).num_exits == 1


@pytest.mark.parametrize("data", DATA)
def test_an_init_estimator_of_the_user_is_part_of_the_first_exit(data: str) -> None:
    for init in (GaussianNB(), DummyClassifier(strategy="prior"), "zero"):
        estimator, x = fitted(GradientBoostingClassifier(init=init, n_estimators=3, random_state=0), data)
        np.testing.assert_allclose(softmax(TreeExits(estimator, exits=3)(x))[-1], estimator.predict_proba(x), atol=1e-6)


def test_one_extreme_leaf_leaves_the_logits_of_the_other_classes_as_they_are() -> None:
    logits = centred(np.array([[3.0, 1.0, -4.5e13]])).astype(np.float32)
    assert float(logits[0, 0] - logits[0, 1]) == pytest.approx(2.0, abs=1e-4)
    assert np.abs(logits).max() < 100


def test_the_exponential_loss_has_its_own_probabilities() -> None:
    estimator, x = fitted(GradientBoostingClassifier(loss="exponential", n_estimators=5), "two classes")
    np.testing.assert_allclose(softmax(TreeExits(estimator, exits=2)(x))[-1], estimator.predict_proba(x), atol=1e-6)


def test_categories_given_as_numbers_and_missing_values_work() -> None:
    x = np.array([[code, number] for number in range(20) for code in (3.0, 7.0, np.nan)])
    y = np.array([0, 1, 2] * 20)
    model = TreeExits(HistGradientBoostingClassifier(max_iter=20, categorical_features=[0]).fit(x, y), exits=4)
    assert model(x)[-1].argmax(-1).tolist() == y.tolist()


@needs_lightgbm
def test_lightgbm_stops_at_its_best_iteration_and_reads_its_own_files(tmp_path: Path) -> None:
    import lightgbm as library

    x, y = DATA["two classes"]
    settings = {"objective": "binary", "sigmoid": 2.0, "num_leaves": 7, "verbose": -1, "num_threads": 1}
    train = library.Dataset(x[:200], y[:200])
    stop = library.early_stopping(2, verbose=False)
    booster = library.train(settings, train, 200, [train.create_valid(x[200:300], y[200:300])], callbacks=[stop])
    model = TreeExits(booster, exits=4)
    assert model.rounds[-1] == booster.best_iteration < 200
    np.testing.assert_allclose(softmax(model(x)[-1])[:, 1], booster.predict(x), atol=1e-6)
    booster.save_model(tmp_path / "model.txt")
    again = TreeExits(library.Booster(model_file=tmp_path / "model.txt"), exits=4)
    torch.testing.assert_close(again(x), model(x))


@needs_xgboost
def test_xgboost_stops_at_its_best_iteration_and_reads_its_own_files(tmp_path: Path) -> None:
    from xgboost import Booster

    x, y = DATA["ten classes"]
    x = np.where(x == 16, -1, x)  # a marker for missing values
    estimator = xgboost(n_estimators=200, early_stopping_rounds=2, missing=-1)
    estimator.fit(x[:200], y[:200], eval_set=[(x[200:260], y[200:260])], verbose=False)
    model = TreeExits(estimator, exits=4)
    assert model.rounds[-1] == estimator.best_iteration + 1 < 200
    np.testing.assert_allclose(softmax(model(x)[-1]), estimator.predict_proba(x), atol=1e-6)
    estimator.save_model(tmp_path / "model.json")
    again = TreeExits(Booster(model_file=tmp_path / "model.json"), exits=4)
    known = np.where(x == -1, np.nan, x)
    torch.testing.assert_close(again(known), model(x))


@needs_xgboost
def test_the_settings_of_the_users_booster_stay_as_they_are() -> None:
    estimator, _ = fitted(xgboost(n_jobs=2))
    before = estimator.get_booster().save_config()
    TreeExits(estimator)
    assert estimator.get_booster().save_config() == before


def test_a_runner_answers_within_budgets_and_drops_rows_that_are_done() -> None:
    estimator, x = fitted(MAKERS["forest"]())
    model = TreeExits(estimator, exits=4)
    with anytime.Runner(model, rule="latest") as runner:
        assert runner.predict(x, budget=anytime.Budget(exits=2)).exit == 2
        answer = runner.predict(x, deadline="60s")
        assert (answer.exit, answer.deadline_met) == (4, True)
        torch.testing.assert_close(answer.logits, model(x))
    with anytime.Runner(model, rule="latest", policy=anytime.policy.Confidence(0.8)) as runner:
        exits = runner.predict(x).exit
        assert 1 <= int(exits.min()) < int(exits.max()) == 4


def test_engines_that_trace_torch_code_refuse_trees() -> None:
    estimator, x = fitted(MAKERS["forest"]())
    model, example = TreeExits(estimator), torch.from_numpy(x[:2]).float()
    assert make_engine(model, "auto", example=example).name == "eager"
    for engine in ("folded", "onnxruntime"):
        with pytest.raises(OptionError, match="TreeExits"):
            make_engine(model, engine, example=example)


def test_a_model_of_trees_can_be_pickled() -> None:
    estimator, x = fitted(MAKERS["boosting"]())
    model = TreeExits(estimator)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), model(x))


def test_inputs_of_any_number_type_are_taken() -> None:
    estimator, x = fitted(MAKERS["forest"]())
    model = TreeExits(estimator, exits=2)
    for given in (x.astype(np.uint8), torch.from_numpy(x).int(), torch.from_numpy(x).bfloat16(), x[:, ::-1][:, ::-1]):
        torch.testing.assert_close(model(given), model(x))

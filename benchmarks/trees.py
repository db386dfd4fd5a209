"""What the rules change for boosting and forests, on two data sets of scikit-learn, and what cutting them into stages costs.

    python benchmarks/trees.py                       the rules: digits (10 classes) and breast cancer (2), five random splits
    python benchmarks/trees.py --spacing geometric   the same with an early first exit
    python benchmarks/trees.py --times               stage times, and deadlines of 1 and 5 ms for one row and for 256

The rival is the ensemble itself: `latest` is its own answer after the first trees, as `staged_predict_proba` gives it, and its
own `predict_proba` is what the stages together are timed against. Half of the rows train the trees, a fifth fits temperatures
and the fitted product, the rest is measured on. Numbers are means over the splits and standard deviations.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.ensemble import (
    ExtraTreesClassifier,
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.model_selection import train_test_split
from torch import Tensor

import anytime
from anytime.calibrate import fit_product, fit_temperature
from anytime.models import TreeExits
from anytime.run.engines import make_engine
from anytime.run.timing.clock import MonotonicClock
from anytime.run.timing.profile import profile_model

EXITS = 8
DATA: dict[str, Callable[..., Any]] = {"digits": load_digits, "breast cancer": load_breast_cancer}
COLUMNS = ("mean accuracy", "last exit", "drops ≥ .05, %", "≥ .1, %", "monotone, %", "never correct, %", "mean ECE", "last ECE")
PLACES = (3, 3, 1, 1, 1, 1, 3, 3)
ROWS, BATCH, REQUESTS = (1, 256), 256, 100


def ensembles(seed: int) -> dict[str, Any]:
    """The ensembles, each with a hundred rounds; those of libraries that are not installed are left out."""
    found = {
        "RandomForest": RandomForestClassifier(100, random_state=seed),
        "ExtraTrees": ExtraTreesClassifier(100, random_state=seed),
        "HistGradientBoosting": HistGradientBoostingClassifier(max_iter=100, random_state=seed),
        "GradientBoosting": GradientBoostingClassifier(n_estimators=100, random_state=seed),
    }
    if find_spec("lightgbm"):
        from lightgbm import LGBMClassifier

        found["LightGBM"] = LGBMClassifier(n_estimators=100, n_jobs=1, verbose=-1, random_state=seed)
    if find_spec("xgboost"):
        from xgboost import XGBClassifier

        found["XGBoost"] = XGBClassifier(n_estimators=100, n_jobs=1, random_state=seed)
    return found


def rules(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """The rules as they are, and fitted on validation rows."""
    fitted = {f"{name} at temperatures": fit_temperature(logits, labels, name) for name in ("latest", "caching", "product")}
    plain = {name: anytime.parse_rule(name) for name in ("latest", "caching", "product", "product(softplus)")}
    return {**plain, **fitted, "fitted product": fit_product(logits, labels)}


def numbers(found: Any) -> list[float]:
    drops = found.label_drop_percent
    return [
        float(np.mean(found.accuracy)),
        found.accuracy[-1],
        drops["0.05"],
        drops["0.1"],
        found.correct_monotone_percent,
        found.never_correct_percent,
        float(np.mean(found.ece)),
        found.ece[-1],
    ]


def measure(data: str, kind: str, seed: int, spacing: Any) -> dict[str, Any]:
    """The metrics of each rule, on rows that neither the trees nor the fitted rules have seen."""
    x, y = DATA[data](return_X_y=True)
    train, rest = train_test_split(np.arange(len(y)), train_size=0.5, stratify=y, random_state=seed)
    held, test = train_test_split(rest, train_size=0.4, stratify=y[rest], random_state=seed)
    model = TreeExits(ensembles(seed)[kind].fit(x[train], y[train]), EXITS, spacing=spacing)
    known = rules(model(x[held]), torch.from_numpy(y[held]))
    return anytime.evaluate(model(x[test]), torch.from_numpy(y[test]), rules=known, sets=None).rules


def compare(seeds: int, spacing: str, kinds: list[str]) -> None:
    """A table per data set and ensemble, and the accuracy at each exit."""
    for data in DATA:
        for kind in kinds:
            runs = [measure(data, kind, seed, spacing) for seed in range(seeds)]
            print(f"\n**{data}, {kind}**\n\n| rule | {' | '.join(COLUMNS)} |\n| --- |{' --- |' * len(COLUMNS)}")
            means = {}
            for rule in runs[0]:
                values = np.array([numbers(run[rule]) for run in runs])
                means[rule], spread = values.mean(0), values.std(0)
                cells = [f"{m:.{p}f} ± {s:.{p}f}" for m, s, p in zip(means[rule], spread, PLACES, strict=True)]
                print(f"| {rule} | {' | '.join(cells)} |")
            for rule in ("latest", "caching", "product"):
                accuracy = np.mean([run[rule].accuracy for run in runs], 0)
                print(f"accuracy per exit, {rule}: {' '.join(f'{each:.3f}' for each in accuracy)}")
            ratio = means["latest"][3] / max(means["product"][3], 1e-9)
            print(f"drops of .1 or more: latest / product = {ratio:.1f}", flush=True)


class CpuClock(MonotonicClock):
    """The time this thread runs: other load on the machine does not count."""

    def now(self) -> float:
        """Seconds."""
        return time.thread_time()


def median(run: Callable[[], object], times: int = 30) -> float:
    """Milliseconds of the processor."""
    taken = []
    for _ in range(times + 1):
        begin = time.thread_time()
        run()
        taken.append(time.thread_time() - begin)
    return 1e3 * statistics.median(taken[1:])


def time_stages(kinds: list[str]) -> None:
    """What stages cost beside the ensemble's own `predict_proba`, and whether deadlines are met."""
    x, y = load_digits(return_X_y=True)
    own = {kind: estimator.fit(x[:1000], y[:1000]) for kind, estimator in ensembles(0).items() if kind in kinds}
    models = {kind: TreeExits(estimator, EXITS) for kind, estimator in own.items()}
    names = ("ensemble", "rows", "each stage, ms", "all, ms", "trees alone, ms", "own predict_proba, ms", "all / own")
    print(f"| {' | '.join(names)} |\n| --- |{' --- |' * (len(names) - 1)}")
    for kind, model in models.items():
        engine = make_engine(model, "eager")
        profile = profile_model(engine, x[:BATCH], batch_sizes=ROWS, repeats=30, clock=CpuClock())
        for size, stages in zip(profile.batch_sizes, profile.stage_seconds[..., 0], strict=True):
            alone = median(partial(add_all, model, x[:size]))
            itself = median(partial(own[kind].predict_proba, x[:size]))
            total, each = 1e3 * float(stages.sum()), " ".join(f"{1e3 * one:.2f}" for one in stages.tolist())
            times = f"{total:.2f} | {alone:.2f} | {itself:.2f} | {total / itself:.2f}"
            print(f"| {kind} | {size} | {each} | {times} |", flush=True)
    print("\n| ensemble | rows | deadline | in time, % | mean exit | refused, % | slowest answer, ms |\n| --- |" + " --- |" * 6)
    for kind, model in models.items():
        with anytime.Runner(model) as runner:
            for size in ROWS:
                runner.warm_up(x[:size])
            for size in ROWS:
                for deadline in ("1ms", "5ms"):
                    print(f"| {kind} | {size} | {deadline} | {' | '.join(race(runner, x, size, deadline))} |", flush=True)


def add_all(model: TreeExits, rows: Any) -> None:
    """The trees alone, without checks, tensors and logits."""
    trees, total, before = model._trees, None, 0
    rows = trees.prepare(rows.astype(np.float32 if trees.dtype == torch.float32 else np.float64))
    for done in model.rounds:
        total = trees.add(rows, total, before, done)
        before = done


def race(runner: anytime.Runner, x: Any, size: int, deadline: str) -> list[str]:
    """Requests one after the other, half a millisecond apart."""
    answers = []
    for number in range(REQUESTS):
        time.sleep(5e-4)
        begin = number % (len(x) - size)
        try:
            answers.append(runner.predict(x[begin : begin + size], deadline=deadline))
        except (anytime.DeadlineTooShort, anytime.Overloaded):
            continue
    met = 100 * sum(answer.deadline_met for answer in answers) / max(1, len(answers))
    refused = 100 * (1 - len(answers) / REQUESTS)
    exits = f"{np.mean([answer.exit for answer in answers]):.1f}" if answers else "-"
    slowest = f"{1e3 * max(answer.elapsed for answer in answers):.2f}" if answers else "-"
    return [f"{met:.0f}", exits, f"{refused:.0f}", slowest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="random splits")
    parser.add_argument("--spacing", default="equal", choices=("equal", "geometric"))
    parser.add_argument("--times", action="store_true", help="time the stages instead")
    parser.add_argument("--only", nargs="*", help="some of the ensembles")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="X does not have valid feature names")
    kinds = [kind for kind in ensembles(0) if not options.only or kind in options.only]
    if options.times:
        time_stages(kinds)
    else:
        compare(options.seeds, options.spacing, kinds)


if __name__ == "__main__":
    main()

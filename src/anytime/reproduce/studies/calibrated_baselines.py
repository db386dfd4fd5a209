"""B.9: calibrating every exit helps monotonicity, more so with caching, and does not reach the product."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from anytime.calibrate import average_logits, fit_laplace, fit_temperature
from anytime.combine import Caching, Latest, Product
from anytime.data import ImageData, load_cifar, normalise
from anytime.errors import OverlapError
from anytime.evaluation import evaluate
from anytime.models.features import collect_features, last_layers
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, at_most, listed
from anytime.reproduce.group import ACCURACY, ECE, LABEL_DROPS, Group
from anytime.reproduce.needs import SEEDS_100
from anytime.reproduce.runs import Run

_FIT_ROWS, _BATCH = 1000, 100


def calibrated_baselines(draft: Draft) -> Finding:
    """Temperature, ensemble and, if weights and images are available, last-layer Laplace; each alone and with caching."""
    runs = draft.runs.need(SEEDS_100)
    fits = [fit_temperature(*run.logits("val")) for run in runs]
    group = Group.measured(
        runs,
        *(
            {"latest": Latest(), "product": Product(), "temperature": fit.rule, "temperature, caching": fit.rule_for(Caching())}
            for fit in fits
        ),
    )
    group = _with(group, "ensemble", _average(runs), runs[0].logits()[1])
    weighed = next((run for run in runs if run.has_weights), None)
    laplace = "Laplace needs the weights of a run and CIFAR's images (--images FOLDER), and was left out."
    if draft.images is not None and weighed is not None:
        group = _with(group, "Laplace", _laplace(weighed, draft.images), weighed.logits()[1])
        laplace = (
            f"Laplace is fitted for one seed to {_FIT_ROWS:,} training images without augmentation, with λ chosen by the NLL "
            "of the kept validation rows and the probit approximation."
        )
    mean, drops = group.all_over_exits(ECE), group.curves(LABEL_DROPS)
    others = [name for name in group.metrics if name not in ("latest", "product")]
    alone = [name for name in others if not name.endswith("caching")]
    by_hundredth, by_tenth, by_half = (group.all_at(LABEL_DROPS, limit) for limit in (0.01, 0.1, 0.5))
    beaten = [
        f"{name} at {limit:g} ({theirs.mean:.2f} against {mine.mean:.2f} %)"
        for name in others
        for limit, mine, theirs in zip(group.limits(LABEL_DROPS), drops["product"], drops[name], strict=True)
        if theirs.mean < mine.mean
    ]
    draft.used += runs
    draft.plots += [
        group.plot("Accuracy", ACCURACY),
        group.plot("Label drops", LABEL_DROPS),
        group.plot("Calibration error", ECE),
    ]
    draft.claim(
        "every baseline without caching is better calibrated than the backbone",
        all(mean[name] < mean["latest"] for name in alone),
        f"mean ECE {listed(mean, '', 3)}",
    )
    draft.claim(
        "with calibrated exits fewer inputs drop than under the backbone, at every threshold",
        all(at_most(drops[name], drops["latest"]) for name in alone),
        "by .1 and .5: "
        + ", ".join(f"{name} {by_tenth[name]:.1f} and {by_half[name]:.1f} %" for name in ("latest", "product", *alone)),
    )
    draft.claim(
        "with caching, calibrated exits drop less",
        all(at_most(drops[f"{name}, caching"], drops[name]) for name in alone),
        f"by .1: {listed({name: by_tenth[name] for name in others})}",
    )
    draft.claim(
        "none of them drops less than the product, at any threshold",
        not beaten,
        f"product {by_hundredth['product']:.2f} % by .01, {by_tenth['product']:.2f} % by .1"
        + (f"; less: {', '.join(beaten)}" if beaten else ""),
    )
    draft.numbers = group.numbers(ACCURACY, LABEL_DROPS, ECE)
    return draft.finding(
        rows=group.rows,
        note=f"The ensemble has {len(runs)} members{', as' if len(runs) == 5 else '; five has'} the paper's. "
        f"Temperatures are fitted on {runs[0].logits('val')[0].shape[1]:,} validation rows. {laplace}",
    )


def _with(group: Group, name: str, log_probs: Tensor, labels: Tensor) -> Group:
    """The group with a baseline that gives log-probabilities, alone and with caching."""
    found = evaluate(log_probs, labels, rules=("latest", "caching"), probabilities=True, sets=None).rules
    return replace(group, metrics={**group.metrics, name: [found["latest"]], f"{name}, caching": [found["caching"]]})


def _average(runs: tuple[Run, ...]) -> Tensor:
    labels = runs[0].logits()[1]
    for run in runs[1:]:
        if not torch.equal(run.logits()[1], labels):
            raise OverlapError(
                f"{run.name} and {runs[0].name} kept different test rows",
                expected="the same rows for all members of an ensemble",
                fix="publish the runs again with the same --rows",
            )
    return average_logits([run.logits()[0] for run in runs])


def _laplace(run: Run, images: Path) -> Tensor:
    """Log-probabilities of the kept test rows from last-layer Laplace."""
    model, data = run.load(), load_cifar("cifar100", images)
    train, _ = run.split(len(data["train"])).apply(data["train"])
    features, labels = collect_features(model, _batches(train.take(torch.arange(_FIT_ROWS))))
    tuning, tuning_labels = collect_features(model, _batches(data["train"].take(run.indices("val"))))
    test, _ = collect_features(model, _batches(data["test"].take(run.indices("test"))))
    layers = list(last_layers(model, torch.zeros(1, 3, 32, 32)))
    posterior = fit_laplace(
        features, labels, layers, prior_precision="grid", tuning_features=tuning, tuning_labels=tuning_labels
    )
    return posterior.predict(test)


def _batches(data: ImageData) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(data), _BATCH):
        part = slice(start, start + _BATCH)
        yield normalise(data.images[part], data.mean, data.std), data.labels[part]

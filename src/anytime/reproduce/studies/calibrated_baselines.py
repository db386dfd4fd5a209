"""Appendix B.9: calibrating every exit helps monotonicity, with caching more so, and does not reach the product."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from anytime.calibrate import average_logits, fit_laplace, fit_temperature
from anytime.combine import Caching, Latest, Product
from anytime.data import ImageData, load_cifar, normalise
from anytime.data.split import Split
from anytime.errors import OverlapError
from anytime.evaluation import evaluate
from anytime.models.base import MultiExit
from anytime.models.features import collect_features, last_layers
from anytime.reading import read_file
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Finding, Line, Measured, Panel
from anytime.reproduce.measure import Figures, curve, limits, line, looks, names_of, plain_numbers, rows_in_words
from anytime.reproduce.needs import SEEDS_100
from anytime.reproduce.runs import Run

_PLAIN = ("latest", "product")
_FIT_ROWS = 1000
_BATCH = 100


def study(context: Context) -> Finding:
    """Temperature, ensemble and, where weights and images are at hand, last-layer Laplace; each alone and with caching."""
    runs = context.runs.need(SEEDS_100)
    found: dict[str, list[Figures]] = {name: [] for name in (*_PLAIN, "temperature", "temperature, caching")}
    for run in runs:
        logits, labels = run.logits()
        fit = fit_temperature(*run.logits("val"))
        rules = dict(zip(found, (Latest(), Product(), fit.rule, fit.rule_for(Caching())), strict=True))
        figures = evaluate(logits, labels, rules=rules, sets=None).to_json()["rules"]
        for name in found:
            found[name].append({name: figures[name]})
    found |= _of_log_probs("ensemble", _average(runs), runs[0].logits()[1])
    weighed = next((run for run in runs if run.has_weights), None)
    laplace = context.images is not None and weighed is not None
    if context.images is not None and weighed is not None:
        found |= _of_log_probs("Laplace", _laplace(weighed, context.images), weighed.logits()[1])
    names = tuple(found)
    accuracy = {name: curve(found[name], name, "accuracy", factor=100) for name in names}
    ece = {name: curve(found[name], name, "ece") for name in names}
    drops = {name: curve(found[name], name, "label_drop_percent") for name in names}
    mean = {name: sum(value.mean for value in values) / len(values) for name, values in ece.items()}
    x, exits = limits(found["latest"], "label_drop_percent"), len(accuracy["latest"])
    others = [name for name in names if name not in _PLAIN]
    lines: dict[str, tuple[Line, ...]] = {
        "accuracy": tuple(line(name, accuracy[name], look) for name, look in looks(names).items()),
        "drops": tuple(line(name, drops[name], look, x=x) for name, look in looks(names).items()),
        "ece": tuple(line(name, ece[name], look) for name, look in looks(names).items()),
    }
    beaten = [
        f"{name} at {limit:g} ({theirs.mean:.2f} against {mine.mean:.2f} %)"
        for name in others
        for limit, mine, theirs in zip(x, drops["product"], drops[name], strict=True)
        if theirs.mean < mine.mean
    ]
    return context.finding(
        runs=names_of(runs),
        rows=rows_in_words(runs, kept=True),
        note=f"The ensemble has {len(runs)} members{', as' if len(runs) == 5 else '; five has'} the paper's. "
        f"Temperatures are fitted on {runs[0].logits('val')[0].shape[1]:,} validation rows. "
        + (
            f"Laplace is of one seed, fitted to {_FIT_ROWS:,} training images taken for themselves, with λ by the NLL of the "
            "kept validation rows and the probit approximation."
            if laplace
            else "Laplace needs the weights of a run and CIFAR's images (--images FOLDER), and was left out."
        ),
        panels=(
            Panel("Accuracy", "exit", "accuracy, %", lines["accuracy"], exits=exits),
            Panel("Label's falls", "falls by at least", "% of inputs", lines["drops"], kind="symlog"),
            Panel("Calibration error", "exit", "ECE", lines["ece"], exits=exits, zero=True),
        ),
        claims=(
            Claim(
                "every baseline without caching is better calibrated than the backbone",
                all(mean[name] < mean["latest"] for name in others if not name.endswith("caching")),
                "mean ECE " + ", ".join(f"{name} {mean[name]:.3f}" for name in names),
            ),
            Claim(
                "calibrating every exit makes it fall less than the backbone, at every threshold",
                all(
                    mine.mean <= base.mean
                    for name in others
                    if not name.endswith("caching")
                    for mine, base in zip(drops[name], drops["latest"], strict=True)
                ),
                "by .1 and .5: " + ", ".join(f"{name} {_two(drops[name])}" for name in names if not name.endswith("caching")),
            ),
            Claim(
                "caching makes the calibrated exits fall less",
                all(
                    cached.mean <= alone.mean
                    for name in others
                    if not name.endswith("caching")
                    for cached, alone in zip(drops[f"{name}, caching"], drops[name], strict=True)
                ),
                "by .1: " + ", ".join(f"{name} {drops[name][2].mean:.2f} %" for name in others),
            ),
            Claim(
                "none of them falls less than the product, at any threshold",
                not beaten,
                f"product {drops['product'][0].mean:.2f} % by .01, {drops['product'][2].mean:.2f} % by .1"
                + (f"; less: {', '.join(beaten)}" if beaten else ""),
            ),
        ),
        numbers={name: plain_numbers(found[name], ("accuracy", "label_drop_percent", "ece"), (name,)) for name in names},
    )


def _two(drops: list[Measured]) -> str:
    return f"{drops[2].mean:.1f} and {drops[-1].mean:.1f} %"


def _of_log_probs(name: str, log_probs: Tensor, labels: Tensor) -> dict[str, list[Figures]]:
    """The figures of answers that are log-probabilities, as they are and cached."""
    figures = evaluate(log_probs, labels, rules=("latest", "caching"), probabilities=True, sets=None).to_json()["rules"]
    return {name: [{name: figures["latest"]}], f"{name}, caching": [{f"{name}, caching": figures["caching"]}]}


def _average(runs: tuple[Run, ...]) -> Tensor:
    labels = runs[0].logits()[1]
    for run in runs[1:]:
        if not torch.equal(run.logits()[1], labels):
            raise OverlapError(
                f"{run.name} has kept other test rows than {runs[0].name}",
                expected="the same rows for all members of an ensemble",
                fix="publish the runs with the same --rows",
            )
    return average_logits([run.logits()[0] for run in runs])


def _laplace(run: Run, images: Path) -> Tensor:
    """Log-probabilities of the kept test rows from last-layer Laplace."""
    model = run.load()
    sets = load_cifar("cifar100", images)
    split = Split.from_json(read_file(run.files["split.json"]).decode(), path=run.files["split.json"])
    train, _ = split.apply(sets["train"])
    fitted, labels = collect_features(model, _batches(train.take(torch.arange(_FIT_ROWS))))
    tuning, wanted = collect_features(model, _batches(sets["train"].take(run.indices("val"))))
    test, _ = collect_features(model, _batches(sets["test"].take(run.indices("test"))))
    posterior = fit_laplace(
        fitted,
        labels,
        _layers(model),
        prior_precision="grid",
        tuning_features=tuning,
        tuning_labels=wanted,
    )
    return posterior.predict(test)


def _layers(model: MultiExit) -> list[torch.nn.Linear]:
    return list(last_layers(model, torch.zeros(1, 3, 32, 32)))


def _batches(data: ImageData) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(data), _BATCH):
        part = slice(start, start + _BATCH)
        yield normalise(data.images[part], data.mean, data.std), data.labels[part]

"""Appendix B.3.1: a threshold b above zero in place of the ReLU's."""

from __future__ import annotations

from itertools import pairwise

from anytime.calibrate import StaticTrial, sweep_static_thresholds
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Finding, Measured, Panel, each_over_seeds
from anytime.reproduce.measure import line, names_of, rows_in_words
from anytime.reproduce.needs import MSDNET_100

THRESHOLDS = (0.0, 1.0, 2.0, 4.0, 6.0)


def study(context: Context) -> Finding:
    """Accuracy, size of the support and its coverage at each exit for several b."""
    runs = context.runs.need(MSDNET_100)
    trials = [sweep_static_thresholds(*run.logits(), thresholds=THRESHOLDS) for run in runs]
    accuracy = [_over_seeds(trials, at, "accuracy", 100) for at in range(len(THRESHOLDS))]
    size = [_over_seeds(trials, at, "set_size", 1) for at in range(len(THRESHOLDS))]
    coverage = [_over_seeds(trials, at, "coverage", 100) for at in range(len(THRESHOLDS))]
    exits = len(size[0])
    panels = tuple(
        Panel(
            title,
            "exit",
            unit,
            tuple(line(f"b = {b:g}", values, look) for look, (b, values) in enumerate(zip(THRESHOLDS, curves, strict=True))),
            exits=exits,
            zero=zero,
        )
        for title, unit, curves, zero in (
            ("Accuracy", "accuracy, %", accuracy, False),
            ("Coverage of the support", "holds the label, %", coverage, False),
            ("Size of the support", "classes", size, True),
        )
    )
    collapsed = [_over_seeds(trials, at, "collapsed", 100)[-1].mean for at in range(len(THRESHOLDS))]
    words = ", ".join(f"b = {b:g}: {share:.1f} %" for b, share in zip(THRESHOLDS, collapsed, strict=True))
    return context.finding(
        runs=names_of(runs),
        rows=rows_in_words(runs, kept=True),
        note="The gate f·[f > b] of the paper's text, under which classes leave the support; its printed formula and its "
        "code, max(f, b), never take a class out when b > 0 (see the study deviations). Where the support is empty the set "
        f"holds all classes and the answer is the current exit's: at the last exit that is {words} of the inputs. The "
        "paper's values of b are not known.",
        panels=panels,
        claims=(
            Claim(
                "a larger b makes smaller sets at the first exit",
                all(after[0].mean <= before[0].mean for before, after in pairwise(size)),
                ", ".join(f"b = {b:g}: {values[0].mean:.1f}" for b, values in zip(THRESHOLDS, size, strict=True)) + " classes",
            ),
            Claim(
                "a larger b covers the label less often at the first exit",
                all(after[0].mean <= before[0].mean for before, after in pairwise(coverage)),
                ", ".join(f"b = {b:g}: {values[0].mean:.1f} %" for b, values in zip(THRESHOLDS, coverage, strict=True)),
            ),
            Claim(
                "small b hardly change accuracy at the last exit",
                abs(accuracy[1][-1].mean - accuracy[0][-1].mean) < 1.0,
                ", ".join(f"b = {b:g}: {values[-1].mean:.1f} %" for b, values in zip(THRESHOLDS, accuracy, strict=True)),
            ),
        ),
        numbers={"thresholds": list(THRESHOLDS), "trials": [[vars(trial) for trial in seed] for seed in trials]},
    )


def _over_seeds(trials: list[tuple[StaticTrial, ...]], at: int, key: str, factor: float) -> list[Measured]:
    return each_over_seeds([[factor * value for value in getattr(seed[at], key)] for seed in trials])

"""B.3.1: a threshold above zero in place of the ReLU's: the same for every input, or one that depends on the confidence."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from anytime.calibrate import AdaptiveThreshold, fit_adaptive_threshold, sweep_static_thresholds
from anytime.combine import Latest, Product
from anytime.metrics import follow
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, Measured, at_most, each_over_seeds, means
from anytime.reproduce.group import ACCURACY, COLLAPSED, ECE, LABEL_DROPS, RULES, TEN_AGAIN, Group, rows_in_words, ten_rows
from anytime.reproduce.needs import MSDNET_100
from anytime.reproduce.plots import inputs_plot, line, looks, over_exits
from anytime.reproduce.runs import Run

THRESHOLDS, _SMALL = (0.0, 1.0, 2.0, 4.0, 6.0), 2.0
_ADAPTIVE = "adaptive product"


def static_threshold(draft: Draft) -> Finding:
    """Accuracy, size of the support and its coverage at each exit for several thresholds b."""
    runs = draft.runs.need(MSDNET_100)
    trials = [sweep_static_thresholds(*run.logits(), thresholds=THRESHOLDS) for run in runs]

    def curves(key: str, factor: float) -> list[list[Measured]]:
        return [
            each_over_seeds([[factor * value for value in getattr(seed[place], key)] for seed in trials])
            for place in range(len(THRESHOLDS))
        ]

    def per_b(values: list[float], unit: str) -> str:
        return ", ".join(f"b = {b:g}: {value:.1f}{unit}" for b, value in zip(THRESHOLDS, values, strict=True))

    def first(every: list[list[Measured]]) -> list[float]:
        return [values[0].mean for values in every]

    accuracy, coverage, size = curves("accuracy", 100), curves("coverage", 100), curves("set_size", 1)
    draft.used += runs
    for title, unit, every, zero in (
        ("Accuracy", "accuracy, %", accuracy, False),
        ("Coverage of the support", "contains the label, %", coverage, False),
        ("Size of the support", "classes", size, True),
    ):
        names = tuple(f"b = {b:g}" for b in THRESHOLDS)
        lines = [line(name, values, looks(names)[name]) for name, values in zip(names, every, strict=True)]
        draft.plots.append(over_exits(title, unit, lines, zero=zero))
    last = [values[-1].mean for values in accuracy]
    draft.claim(
        f"b up to {_SMALL:g} hardly change the accuracy at the last exit (by less than half a point)",
        all(abs(value - last[0]) < 0.5 for b, value in zip(THRESHOLDS, last, strict=True) if b <= _SMALL),
        per_b(last, " %"),
    )
    draft.claim("a larger b costs accuracy at the last exit", _falls(last) and last[-1] < last[0], "as listed")
    draft.numbers = {"thresholds": list(THRESHOLDS), "trials": [[vars(trial) for trial in seed] for seed in trials]}
    collapsed = per_b([values[-1].mean for values in curves("collapsed", 100)], " %")
    return draft.finding(
        rows=rows_in_words(runs, kept=True),
        note="That a larger b leaves fewer classes, and covers the label less often, follows from its definition while no row "
        f"collapses; at the first exit {per_b(first(size), '')} classes, and {per_b(first(coverage), ' %')}. The gate f·[f > "
        "b] of the paper's text, under which classes leave the support; its printed formula and its "
        "code, max(f, b), never remove a class when b > 0 (see the study deviations). Where the support is empty, the set "
        f"contains all classes and the answer is the current exit's: at the last exit for {collapsed} of the inputs. The paper "
        "does not give its values of b.",
    )


def _falls(values: list[float]) -> bool:
    return all(after <= before for before, after in pairwise(values))


def fit_adaptive(run: Run, mode: Literal["gate", "clamp"] = "gate") -> AdaptiveThreshold:
    """The regression fitted on half of the kept validation rows of a run, C on the other half."""
    logits, labels = run.logits("val")
    half = logits.shape[1] // 2
    return fit_adaptive_threshold(
        logits[:, :half], labels[:half], tuning_logits=logits[:, half:], tuning_labels=labels[half:], mode=mode
    )


def adaptive_threshold(draft: Draft) -> Finding:
    """Accuracy, drops and calibration error with a threshold fitted on validation rows, and ten inputs."""
    runs = draft.runs.need(MSDNET_100)
    fits = [fit_adaptive(run) for run in runs]
    group = Group.measured(runs, *({**RULES, _ADAPTIVE: Product(fit.activation)} for fit in fits))
    right, drops, ece = group.curves(ACCURACY), group.curves(LABEL_DROPS), group.all_over_exits(ECE)
    by_tenth = group.all_at(LABEL_DROPS, 0.1)
    logits, labels = runs[0].logits()
    every = follow(Latest()(logits), labels).label_probability
    chosen = ten_rows(every)
    after = follow(Product(fits[0].activation)(logits[:, chosen]), labels[chosen]).label_probability
    draft.used += runs
    draft.plots += [
        group.plot("Accuracy", ACCURACY),
        group.plot("Label drops", LABEL_DROPS),
        group.plot("Calibration error", ECE),
        inputs_plot("Ten inputs, adaptive", after, behind=every[:, chosen]),
    ]
    draft.claim(
        "the adaptive threshold lowers the product's calibration error",
        ece[_ADAPTIVE] < ece["product"],
        f"mean over exits {ece[_ADAPTIVE]:.3f}, product {ece['product']:.3f}, latest {ece['latest']:.3f}",
    )
    draft.claim(
        "fewer inputs drop than under the backbone at every threshold, and more than under the plain product",
        at_most(drops[_ADAPTIVE], drops["latest"]) and by_tenth[_ADAPTIVE] >= by_tenth["product"],
        f"by .1: {by_tenth[_ADAPTIVE]:.2f} %, product {by_tenth['product']:.2f} %, latest {by_tenth['latest']:.1f} %",
    )
    draft.claim(
        "it costs some accuracy",
        right[_ADAPTIVE][-1].mean <= right["product"][-1].mean,
        f"adaptive {means(right[_ADAPTIVE])} %; product {means(right['product'])} %",
    )
    collapsed = group.curve(_ADAPTIVE, COLLAPSED)
    draft.numbers = group.numbers(ACCURACY, LABEL_DROPS, ECE, COLLAPSED) | {
        "activations": [vars(fit.activation) for fit in fits]
    }
    scales = ", ".join(f"{fit.activation.scale:.2f}" for fit in fits)
    return draft.finding(
        rows=group.rows,
        note="The regression is fitted at exit 1 on half of the kept validation rows, C on the other half by the lowest mean "
        f"ECE plus mean drop (the paper: 'best trade-off'); C is {scales}, seed by seed. Gate, not clamp, so that rows "
        f"collapse and fall back to the exit's softmax: {means(collapsed)} % of the inputs, exit by exit. The paper fits on a "
        f"tenth of the training rows; ours are {runs[0].logits('val')[0].shape[1]:,} rows in all. {TEN_AGAIN}",
    )

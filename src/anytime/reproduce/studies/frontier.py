"""Our own: which rule belongs where. Accuracy, drops and calibration of every rule, and which of them no other one dominates.

Everything that is fitted is fitted on the kept validation rows and measured on the kept test rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from anytime.calibrate import fit_product, fit_temperature
from anytime.calibrate.measure import drop_name, measure
from anytime.combine import Caching, Latest, Product, Rule
from anytime.reproduce.catalogue import Draft
from anytime.reproduce.finding import Finding, over_seeds
from anytime.reproduce.group import rows_in_words, title_of
from anytime.reproduce.needs import MSDNET, TEXT, TINY
from anytime.reproduce.plots import Line, Plot, looks
from anytime.reproduce.runs import Run

PENALTIES = (0.0, 0.3, 1.0, 3.0, 10.0)
_PLAIN: dict[str, Rule[Any]] = {"latest": Latest(), "caching": Caching(), "product": Product()}
_FITTED, _HOLDING, _AT = "fitted product", "holding product", "at temperatures"
_MARGINS = {_FITTED: None, _HOLDING: 1.0}
_SMALL, _LARGE = 0.05, 0.1
_METRICS = {"accuracy": -1, drop_name(_SMALL): 1, drop_name(_LARGE): 1, "ece": 1, "nll": 1}
"""By name, whether larger (-1) or smaller (1) is better."""
_FEW = 10

Values = Mapping[str, float]


def frontier(draft: Draft) -> Finding:
    """Five metrics of the paper's rules, plain and calibrated, and of the fitted product, without and with held answers."""
    rows: list[str] = []
    wins: dict[str, list[str]] = {}
    lost: list[str] = []
    gaps: dict[str, dict[str, float]] = {}
    few: list[str] = []
    others = {data: runs for need in (TINY, TEXT) for data, runs in draft.runs.by_data(need, optional=True).items()}
    for data, runs in {**draft.runs.by_data(MSDNET), **others}.items():
        title, found = title_of(data), _measure(runs)
        best = {name: [rival for rival in found if _dominates(found[rival], found[name])] for name in found}
        draft.used += runs
        draft.plots.append(_plot(title, found))
        draft.table += [
            (
                title,
                name,
                f"{100 * values['accuracy']:.2f} %",
                f"{100 * values[drop_name(_SMALL)]:.2f}, {100 * values[drop_name(_LARGE)]:.2f} %",
                f"{values['ece']:.3f}",
                f"{values['nll']:.3f}",
                "yes" if not best[name] else f"no: {best[name][0]}",
            )
            for name, values in found.items()
        ]
        fitted = [name for name in found if _family(name)]
        cached = [values for name, values in found.items() if name.startswith("caching")]
        wins[title] = [name for name in fitted if all(_dominates(found[name], values) for values in cached)]
        lost += [f"{title}, {name}" for name in fitted if not all(map(_family, best[name]))]
        gaps[title] = _gaps(found)
        few += [title] if runs[0].logits()[0].shape[2] <= _FEW else []
        draft.numbers[data] = found
        rows.append(f"{title}: {rows_in_words(runs, kept=True)}")
    draft.claim(
        "our own: on every data set some fitted product is better than caching, plain and at temperatures, in all five metrics",
        all(wins.values()),
        "; ".join(f"{title}: {', '.join(names) or 'none'}" for title, names in wins.items()),
    )
    draft.claim(
        "our own: on no data set is a rule of the paper, plain or at temperatures, better than a fitted product in all five",
        not lost,
        "; ".join(lost) or f"for none of {len(PENALTIES)} penalties on {len(wins)} data sets",
    )
    shown = "; ".join(f"{title}: {100 * each[_FITTED]:+.2f} and {100 * each[_HOLDING]:+.2f}" for title, each in gaps.items())
    draft.claim(
        f"our own: with up to {_FEW} classes held answers raise the fitted product's accuracy at the same rate of drops by .05",
        all(gaps[title][_HOLDING] > gaps[title][_FITTED] for title in few),
        f"fitted and holding product, points above caching at temperatures at its rate of drops: {shown}",
    )
    draft.claim(
        "our own: at its rate of drops by .05 the holding product is at least as accurate as caching at temperatures",
        all(each[_HOLDING] >= 0 for each in gaps.values()),
        "not on " + ", ".join(behind)
        if (behind := [title for title, each in gaps.items() if each[_HOLDING] < 0])
        else "everywhere",
    )
    return draft.finding(
        rows="; ".join(rows) + "; temperatures and powers are fitted on the kept validation rows",
        note="Accuracy, ECE and NLL are means over the exits; drops are of the label's probability. A rule is on the frontier "
        "unless another one is at least as good in all five metrics and better in one. The holding product is a fitted product "
        "that keeps its answer unless the label changes or is more certain by 1 in log-odds, `fit_product(margin=1.0)`; "
        "the rule and its margin were chosen on validation rows, after an earlier form without a margin had been seen on these "
        "test rows. Accuracy at a rate of drops is interpolated between the "
        "penalties; outside their range it is that of the nearest one. Some test sets are small: at 500 rows one input is .2 % "
        "of drops. Where each rule belongs: the product where drops must be rare and probabilities need not be calibrated; the "
        "fitted product with λ = 0 where drops do not matter, for the best probabilities, and with a higher λ on many classes; "
        "the holding product where drops matter, on few classes in particular; caching at temperatures on many classes with "
        "accurate exits (Banking77, CLINC150), where it is as good with fewer numbers to fit.",
        headings=("data set", "rule", "accuracy", "drops ≥ .05, ≥ .1", "ECE", "NLL", "on the frontier"),
    )


def _rules(run: Run) -> dict[str, Rule[Any]]:
    held_out = run.logits("val")
    calibrated = {f"{name} {_AT}": fit_temperature(*held_out, rule).rule for name, rule in _PLAIN.items()}
    fitted = {
        f"{family}, λ = {by:g}": fit_product(*held_out, penalty=by, margin=margin).rule
        for family, margin in _MARGINS.items()
        for by in PENALTIES
    }
    return {**_PLAIN, **calibrated, **fitted}


def _measure(runs: tuple[Run, ...]) -> dict[str, dict[str, float]]:
    """Each metric of each rule, the mean over seeds."""
    seeds = [{name: measure(rule, *run.logits(), drops=(_SMALL, _LARGE)) for name, rule in _rules(run).items()} for run in runs]
    return {name: {key: over_seeds([seed[name][key] for seed in seeds]).mean for key in _METRICS} for name in seeds[0]}


def _dominates(one: Values, other: Values) -> bool:
    """Whether a rule is at least as good in every metric, and better in one."""
    gaps = [sign * (one[key] - other[key]) for key, sign in _METRICS.items()]
    return max(gaps) <= 0 and min(gaps) < 0


def _family(name: str) -> str:
    """Of a rule's name, that of its fitted family, empty for the other rules."""
    return next((family for family in _MARGINS if name.startswith(family)), "")


def _gaps(found: Mapping[str, Values]) -> dict[str, float]:
    """By family, its accuracy at the rate of drops of caching at temperatures, minus that of caching."""
    small, rival = drop_name(_SMALL), found[f"caching {_AT}"]
    gaps = {}
    for family in _MARGINS:
        curve = sorted((each[small], each["accuracy"]) for name, each in found.items() if _family(name) == family)
        drops, accuracy = zip(*curve, strict=True)
        gaps[family] = float(np.interp(rival[small], drops, accuracy)) - rival["accuracy"]
    return gaps


def _plot(title: str, found: Mapping[str, Values]) -> Plot:
    """Accuracy over drops by .05: each fitted family as one line."""
    labels = {name: _family(name) or name for name in found}
    chosen = looks(tuple(dict.fromkeys(labels.values())))
    lines = []
    for label, look in chosen.items():
        names = [name for name in found if labels[name] == label]
        x, y = ([100 * found[name][key] for name in names] for key in (drop_name(_SMALL), "accuracy"))
        lines.append(Line(label, tuple(x), tuple(y), look))
    return Plot(title, "drops by .05 or more, %", "mean accuracy, %", tuple(lines))

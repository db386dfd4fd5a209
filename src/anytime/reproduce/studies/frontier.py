"""Our own: which rule belongs where. Accuracy, drops and calibration of every rule, and which of them no other one dominates.

Everything that is fitted is fitted on the kept validation rows and measured on the kept test rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
_FITTED, _AT = "fitted product", "at temperatures"
_SMALL, _LARGE = 0.05, 0.1
_METRICS = {"accuracy": -1, drop_name(_SMALL): 1, drop_name(_LARGE): 1, "ece": 1, "nll": 1}
"""By name, whether larger (-1) or smaller (1) is better."""

Values = Mapping[str, float]


def frontier(draft: Draft) -> Finding:
    """Five metrics of the paper's rules, plain and calibrated, and of the fitted product with several penalties."""
    rows: list[str] = []
    wins: dict[str, list[str]] = {}
    lost: list[str] = []
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
        fitted = [name for name in found if name.startswith(_FITTED)]
        cached = [values for name, values in found.items() if name.startswith("caching")]
        wins[title] = [name for name in fitted if all(_dominates(found[name], values) for values in cached)]
        lost += [f"{title}, {name}" for name in fitted if any(not rival.startswith(_FITTED) for rival in best[name])]
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
    return draft.finding(
        rows="; ".join(rows) + "; temperatures and powers are fitted on the kept validation rows",
        note="Accuracy, ECE and NLL are means over the exits; drops are of the label's probability. A rule is on the frontier "
        "unless another one is at least as good in all five metrics and better in one. Where each rule belongs: the product "
        "where drops must be rare and probabilities need not be calibrated; caching where drops by .05 count, calibration does "
        "not, and classes are few; the fitted product wherever probabilities are used, with λ = 0 for the best ones and a "
        "higher λ for fewer drops, which costs accuracy.",
        headings=("data set", "rule", "accuracy", "drops ≥ .05, ≥ .1", "ECE", "NLL", "on the frontier"),
    )


def _rules(run: Run) -> dict[str, Rule[Any]]:
    held_out = run.logits("val")
    calibrated = {f"{name} {_AT}": fit_temperature(*held_out, rule).rule for name, rule in _PLAIN.items()}
    fitted = {f"{_FITTED}, λ = {by:g}": fit_product(*held_out, penalty=by).rule for by in PENALTIES}
    return {**_PLAIN, **calibrated, **fitted}


def _measure(runs: tuple[Run, ...]) -> dict[str, dict[str, float]]:
    """Each metric of each rule, the mean over seeds."""
    seeds = [{name: measure(rule, *run.logits(), drops=(_SMALL, _LARGE)) for name, rule in _rules(run).items()} for run in runs]
    return {name: {key: over_seeds([seed[name][key] for seed in seeds]).mean for key in _METRICS} for name in seeds[0]}


def _dominates(one: Values, other: Values) -> bool:
    """Whether a rule is at least as good in every metric, and better in one."""
    gaps = [sign * (one[key] - other[key]) for key, sign in _METRICS.items()]
    return max(gaps) <= 0 and min(gaps) < 0


def _plot(title: str, found: Mapping[str, Values]) -> Plot:
    """Accuracy over drops by .05: the fitted products as one line."""

    def point(name: str) -> tuple[float, float]:
        return 100 * found[name][drop_name(_SMALL)], 100 * found[name]["accuracy"]

    others, fitted = [name for name in found if not name.startswith(_FITTED)], [n for n in found if n.startswith(_FITTED)]
    chosen = looks((*others, _FITTED))
    lines = [Line(name, (point(name)[0],), (point(name)[1],), chosen[name]) for name in others]
    x, y = zip(*map(point, fitted), strict=True)
    lines.append(Line(_FITTED, x, y, chosen[_FITTED]))
    return Plot(title, "drops by .05 or more, %", "mean accuracy, %", tuple(lines))

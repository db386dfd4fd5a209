"""What studies have in common: figures of several seeds as lines, comparisons and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anytime.combine import Rule
from anytime.conformal import Raps
from anytime.evaluation import evaluate
from anytime.metrics import drop
from anytime.reproduce import paper
from anytime.reproduce.finding import Comparison, Line, Measured, Panel, each_over_seeds
from anytime.reproduce.needs import MSDNET
from anytime.reproduce.runs import Run, Runs, check_alike

Figures = Mapping[str, Mapping[str, Any]]
"""Figures by rule, as `anytime evaluate --json` has them."""
PLAIN = ("latest", "caching", "product")


def stored(runs: Sequence[Run]) -> list[Figures]:
    """The figures of each run on all its test rows; the runs must be alike, since their numbers are averaged."""
    figures = [run.figures() for run in runs]
    check_alike(
        {
            run.name: {"exits": len(found["latest"]["accuracy"]), "classes": run.classes(), "test rows": run.rows()}
            for run, found in zip(runs, figures, strict=True)
        }
    )
    return figures


def measured(
    runs: Sequence[Run], rules: Mapping[str, Rule[Any]], *, sets: Raps | None = None, strict: bool = False
) -> list[Figures]:
    """The figures of other rules, on the rows of each run whose logits were kept; the runs must be alike, as above."""
    kept = [run.logits() for run in runs]
    check_alike(
        {run.name: {"exits": len(logits), "classes": logits.shape[2]} for run, (logits, _) in zip(runs, kept, strict=True)}
    )
    return [evaluate(logits, labels, rules=dict(rules), sets=sets, strict=strict).to_json()["rules"] for logits, labels in kept]


def curve(figures: Sequence[Figures], rule: str, key: str, *, factor: float = 1.0) -> list[Measured]:
    """A figure of one rule, exit by exit or threshold by threshold, over seeds."""
    found = [each[rule][key] for each in figures]
    curves = [list(values.values()) if isinstance(values, Mapping) else values for values in found]
    return each_over_seeds([[factor * value for value in values] for values in curves])


def limits(figures: Sequence[Figures], key: str) -> tuple[float, ...]:
    """The thresholds of a figure that is counted by thresholds."""
    return tuple(float(limit) for limit in next(iter(figures[0].values()))[key])


def backbones(runs: Runs) -> dict[tuple[str, str], tuple[Run, ...]]:
    """Runs by network and data set: MSDNet, and IMTA on the same data where there is a run of it."""
    groups: dict[tuple[str, str], tuple[Run, ...]] = {}
    for data, found in runs.sets(MSDNET).items():
        groups["msdnet", data] = found
        if others := runs.find("imta", data):
            groups["imta", data] = others
    return groups


_OWN_LOOK = {"latest": 0, "caching": 1, "product": 2}


def looks(names: Sequence[str]) -> dict[str, int]:
    """A look for each line; `latest`, `caching` and `product` have their own everywhere, the others take what is left.

    >>> looks(("latest", "product", "temperature"))
    {'latest': 0, 'product': 2, 'temperature': 1}
    """
    taken = {_OWN_LOOK[name] for name in names if name in _OWN_LOOK}
    free = (index for index in range(len(names) + 3) if index not in taken)
    return {name: _OWN_LOOK[name] if name in _OWN_LOOK else next(free) for name in names}


def line(
    name: str,
    values: Sequence[Measured],
    look: int,
    *,
    x: Sequence[float] | None = None,
    paper_values: Sequence[float | None] = (),
    marks: bool = True,
) -> Line:
    """Values over the exits, or over `x`, as a line with bars of deviation.

    The paper's are left out where they are not as many: they are of a network with other exits.
    """
    places = tuple(float(exit) for exit in range(1, len(values) + 1)) if x is None else tuple(x)
    spread = tuple(value.deviation for value in values)
    bars = spread if any(bar for bar in spread) else ()
    crosses = tuple(paper_values) if len(paper_values) == len(values) else ()
    return Line(name, places, tuple(value.mean for value in values), look, bars, crosses, marks)


def by_exit(
    title: str,
    y_title: str,
    figures: Sequence[Figures],
    key: str,
    *,
    rules: Sequence[str] = PLAIN,
    factor: float = 1.0,
    zero: bool = False,
    paper_values: Mapping[str, Sequence[float | None]] | None = None,
) -> Panel:
    """A figure at each exit, one line a rule."""
    marks = paper_values or {}
    lines = [
        line(rule, curve(figures, rule, key, factor=factor), look, paper_values=_times(marks.get(rule, ()), factor))
        for rule, look in looks(rules).items()
    ]
    return Panel(title, "exit", y_title, tuple(lines), exits=len(lines[0].x), zero=zero)


def by_limit(
    title: str,
    x_title: str,
    figures: Sequence[Figures],
    key: str,
    *,
    rules: Sequence[str] = PLAIN,
    paper_values: Mapping[str, Sequence[float | None]] | None = None,
) -> Panel:
    """Percent of inputs over a threshold, one line a rule, on an axis with a place for zero."""
    marks, x = paper_values or {}, limits(figures, key)
    lines = [
        line(rule, curve(figures, rule, key), look, x=x, paper_values=marks.get(rule, ()))
        for rule, look in looks(rules).items()
    ]
    return Panel(title, x_title, "% of inputs", tuple(lines), kind="symlog")


def against_paper(
    what: Callable[[int], str],
    ours: Sequence[Measured],
    theirs: Sequence[float | None],
    *,
    tolerance: float | None,
    unit: str = "",
) -> list[Comparison]:
    """A row for each point of a curve that the paper has; `what` names the point by its place, from 0.

    There is none for a network with other exits than the paper's: its exits are not the paper's exits of that number.
    """
    if len(ours) != len(theirs):
        return []
    return [
        Comparison(what(place), number, value, tolerance, unit=unit)
        for place, (value, number) in enumerate(zip(ours, theirs, strict=True))
        if number is not None
    ]


def plain_numbers(figures: Sequence[Figures], keys: Sequence[str], rules: Sequence[str] = PLAIN) -> dict[str, Any]:
    """Some figures of every seed, for machines."""
    return {rule: {key: [each[rule][key] for each in figures] for key in keys} for rule in rules}


def ten_rows(quality: Tensor) -> Tensor:
    """Ten inputs that stand for all: those at the 5th, 15th, … 95th percentile of the fall of `quality`, `(exits, rows)`."""
    order = drop(quality).argsort(stable=True)
    places = ((torch.arange(10) + 0.5) / 10 * len(order)).long()
    return order[places]


def title_of(data: str) -> str:
    """A data set's name for people."""
    return paper.DATA.get(data, data)


def rows_in_words(runs: Sequence[Run], *, kept: bool = False) -> str:
    """Which rows the numbers are of: all test rows, or those whose logits were kept."""
    seeds = f"{len(runs)} seed{'s' if len(runs) > 1 else ''}"
    if kept:
        return f"the {runs[0].logits()[0].shape[1]:,} test rows whose logits were kept, {seeds}"
    return f"{runs[0].rows():,} test rows, {seeds}"


def groups_in_words(groups: Mapping[tuple[str, str], Sequence[Run]]) -> str:
    """`rows_in_words` of several networks and data sets."""
    named = ((f"{paper.NETWORKS[network]} on {title_of(data)}", runs) for (network, data), runs in groups.items())
    return "; ".join(f"{name}: {rows_in_words(runs)}" for name, runs in named)


def names_of(*groups: Sequence[Run]) -> tuple[str, ...]:
    """The names of all runs, in order, each once."""
    return tuple(dict.fromkeys(run.name for runs in groups for run in runs))


def text_of(values: Sequence[Measured], *, digits: int = 1) -> str:
    """Means as a list in words: `63.4, 66.5, 69.5`."""
    return ", ".join(f"{value.mean:.{digits}f}" for value in values)


def _times(values: Sequence[float | None], factor: float) -> tuple[float | None, ...]:
    return tuple(None if value is None else factor * value for value in values)

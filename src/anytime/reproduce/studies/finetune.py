"""Appendix B.3.2: a network that learns with the product as its likelihood in the end is calibrated, at a small cost.

All figures are taken on the test rows whose logits were kept of both the backbone and the finetuned network, so that both are
judged by the same inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anytime.combine import Latest, Product, Rule, Softplus
from anytime.metrics import follow
from anytime.reproduce import paper
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Comparison, Finding, Measured, Panel
from anytime.reproduce.measure import (
    Figures,
    against_paper,
    curve,
    limits,
    line,
    measured,
    names_of,
    plain_numbers,
    rows_in_words,
    ten_rows,
    text_of,
    title_of,
)
from anytime.reproduce.needs import FINETUNED, Need
from anytime.reproduce.runs import Run, on_shared_rows
from anytime.reproduce.studies.marginal import TEN, single_lines

_LEARNT: Rule[Any] = Product(Softplus(), weights="ones")
_BASE: dict[str, Rule[Any]] = {"latest": Latest(), "product": Product(), "softplus product": _LEARNT}
_TUNED: dict[str, Rule[Any]] = {"finetuned": _LEARNT, "finetuned, ReLU": Product(weights="ones")}
_DRAWN = {"latest": 0, "product": 2, "finetuned": 3}
_MINOR = 3.0
"""Points of accuracy that we call a minor cost."""


def study(context: Context) -> Finding:
    """Calibration error, falls and accuracy beside the backbone's, for each data set with a finetuned network."""
    panels: list[Panel] = []
    comparisons: list[Comparison] = []
    claims: list[Claim] = []
    table: list[tuple[str, ...]] = []
    numbers: dict[str, Any] = {}
    used: list[Sequence[Run]] = []
    for data, tuned in context.runs.sets(FINETUNED).items():
        base = context.runs.need(Need("msdnet", (data,), recipe=f"{data}-msdnet"))
        together = on_shared_rows((*base, *tuned))
        base, tuned = together[: len(base)], together[len(base) :]
        used += [base, tuned]
        found: dict[str, list[Figures]] = {}
        for runs, rules in ((base, _BASE), (tuned, _TUNED)):
            figures = measured(runs, rules)
            found |= dict.fromkeys(rules, figures)
        title = title_of(data)
        known = paper.ECE["finetuned"] if data == "cifar100" else ()
        panels += [*_panels(title, found, known), _ten(title, base[0], tuned[0])]
        comparisons += against_paper(
            lambda exit, title=title: f"{title}, ECE, finetuned, exit {exit + 1}",  # type: ignore[misc]
            curve(found["finetuned"], "finetuned", "ece")[: len(known)],
            known,
            tolerance=paper.ECE_TOLERANCE,
        )
        claims += _claims(title, data, found)
        table += _rows(title, found)
        numbers[data] = {
            rule: plain_numbers(figures, ("accuracy", "ece", "nll", "label_drop_percent"), (rule,))[rule]
            for rule, figures in found.items()
        }
    return context.finding(
        runs=names_of(*used),
        rows="; ".join(f"{runs[0].name.partition('-seed')[0]}: {rows_in_words(runs, kept=True)}" for runs in used),
        note="Finetuned is the finetuned network under the product it learnt with: softplus, weights of one. Beside it stand "
        "the backbone, its product as everywhere (ReLU, weights i/M), and in the table its product with softplus and weights "
        "of one, which costs no training; and the finetuned network under a ReLU with weights of one, as the released notebook "
        f"calls it. Crosses are the ends of the paper's curve. {TEN}",
        panels=tuple(panels),
        comparisons=tuple(comparisons),
        claims=tuple(claims),
        headings=("data", "network and rule", "accuracy, %", "ECE", "falls by ≥ .1"),
        table=tuple(table),
        numbers=numbers,
    )


def _panels(title: str, found: dict[str, list[Figures]], known: Sequence[float | None]) -> list[Panel]:
    """The paper's three: calibration error, falls, accuracy."""
    values = {
        key: {rule: curve(found[rule], rule, key, factor=factor) for rule in _DRAWN}
        for key, factor in (("ece", 1.0), ("label_drop_percent", 1.0), ("accuracy", 100.0))
    }
    x = limits(found["latest"], "label_drop_percent")
    exits = len(values["ece"]["latest"])
    error = tuple(
        line(rule, values["ece"][rule], look, paper_values=known if rule == "finetuned" else ())
        for rule, look in _DRAWN.items()
    )
    falls = tuple(line(rule, values["label_drop_percent"][rule], look, x=x) for rule, look in _DRAWN.items())
    right = tuple(line(rule, values["accuracy"][rule], look) for rule, look in _DRAWN.items())
    return [
        Panel(f"{title}: calibration error", "exit", "ECE", error, exits=exits, zero=True),
        Panel(f"{title}: label's falls", "falls by at least", "% of inputs", falls, kind="symlog"),
        Panel(f"{title}: accuracy", "exit", "accuracy, %", right, exits=exits),
    ]


def _ten(title: str, base: Run, tuned: Run) -> Panel:
    """The same ten inputs under the backbone, faint, and after finetuning."""
    (before, labels), (after, _) = base.logits(), tuned.logits()
    quality = follow(Latest()(before), labels).label_probability
    chosen = ten_rows(quality)
    learnt = follow(_LEARNT(after[:, chosen]), labels[chosen]).label_probability
    lines = (*single_lines(quality[:, chosen], faint=True), *single_lines(learnt))
    return Panel(f"{title}: ten inputs, finetuned", "exit", "label's probability", lines, exits=len(before), y_range=(0.0, 1.0))


def _claims(title: str, data: str, found: dict[str, list[Figures]]) -> list[Claim]:
    error = {rule: curve(found[rule], rule, "ece") for rule in _DRAWN}
    falls = {rule: curve(found[rule], rule, "label_drop_percent") for rule in _DRAWN}
    right = {rule: curve(found[rule], rule, "accuracy", factor=100) for rule in _DRAWN}
    mean = {rule: _mean(values) for rule, values in error.items()}
    words = {rule: f"{rule} {text_of(values, digits=3)}" for rule, values in error.items()}
    claims = [
        Claim(
            f"{title}: finetuning lowers the product's mean calibration error",
            mean["finetuned"] < mean["product"],
            f"over all exits {mean['finetuned']:.3f}, before {mean['product']:.3f}",
        ),
        Claim(
            f"{title}: finetuned, fewer falls of every size than the backbone",
            all(mine.mean <= theirs.mean for mine, theirs in zip(falls["finetuned"], falls["latest"], strict=True)),
            ", ".join(f"{rule} {values[2].mean:.2f} %" for rule, values in falls.items()) + " by .1",
        ),
        Claim(
            f"{title}: at a minor cost in accuracy ({_MINOR:g} points at most to the product before, at the last exit)",
            right["finetuned"][-1].mean >= right["product"][-1].mean - _MINOR,
            "; ".join(f"{rule} {text_of(values)} %" for rule, values in right.items()),
        ),
    ]
    if data != "cifar10":  # the paper says so of CIFAR-100 alone
        lower = all(mine.mean <= theirs.mean for mine, theirs in zip(error["finetuned"], error["latest"], strict=True))
        what = f"{title}: finetuned, the calibration error is at or under the backbone's at every exit"
        claims.insert(0, Claim(what, lower, f"{words['finetuned']}; {words['latest']}"))
    return claims


def _rows(title: str, found: dict[str, list[Figures]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for rule, figures in found.items():
        falls = curve(figures, rule, "label_drop_percent")[2]
        error, right = (curve(figures, rule, key, factor=factor) for key, factor in (("ece", 1.0), ("accuracy", 100.0)))
        rows.append((title, rule, text_of(right), text_of(error, digits=3), f"{falls.mean:.2f} %"))
    return rows


def _mean(values: Sequence[Measured]) -> float:
    return sum(value.mean for value in values) / len(values)

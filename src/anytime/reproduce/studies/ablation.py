"""Appendix B.2: which part of the product does what: the activation, and multiplying rather than averaging."""

from __future__ import annotations

from typing import Any

from anytime.combine import Activation, Exponential, Heaviside, Mixture, Product, ReLU, Rule
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Finding, Measured, Panel
from anytime.reproduce.measure import by_exit, by_limit, curve, measured, names_of, plain_numbers, rows_in_words
from anytime.reproduce.needs import MSDNET_100

_ACTIVATIONS: dict[str, Activation] = {"ReLU": ReLU(), "Heaviside": Heaviside(), "exponential": Exponential()}
GOOD_ACCURACY, GOOD_DROPS = 1.0, 5.0
"""Within so many points of the best accuracy at the last exit, and at most so many percent of inputs that fall by .1."""


def study(context: Context) -> Finding:
    """Accuracy, falls, calibration error and confidence of six combinations."""
    runs = context.runs.need(MSDNET_100)
    rules: dict[str, Rule[Any]] = {f"product, {name}": Product(kind) for name, kind in _ACTIVATIONS.items()}
    rules |= {f"mixture, {name}": Mixture(kind) for name, kind in _ACTIVATIONS.items()}
    figures = measured(runs, rules)
    names = tuple(rules)
    last = {name: curve(figures, name, "accuracy", factor=100)[-1] for name in names}
    mean = {name: _mean(curve(figures, name, "accuracy", factor=100)) for name in names}
    drops = {name: curve(figures, name, "label_drop_percent")[2] for name in names}
    final = {name: curve(figures, name, "final_drop_percent")[0] for name in names}
    sure = {name: curve(figures, name, "confidence", factor=100) for name in names}
    ece = {name: curve(figures, name, "ece") for name in names}
    best = max(value.mean for value in last.values())
    good = [name for name in names if last[name].mean >= best - GOOD_ACCURACY and drops[name].mean <= GOOD_DROPS]
    grows = [name for name in names if sure[name][-1].mean > 2 * sure[name][0].mean]
    panels: tuple[Panel, ...] = (
        by_exit("Accuracy", "accuracy, %", figures, "accuracy", rules=names, factor=100),
        by_limit("Final answer's falls", "falls by at least", figures, "final_drop_percent", rules=names),
        by_limit("Label's falls", "falls by at least", figures, "label_drop_percent", rules=names),
        by_exit("Calibration error", "ECE", figures, "ece", rules=names, zero=True),
        by_exit("Confidence", "mean confidence, %", figures, "confidence", rules=names, factor=100, zero=True),
    )
    return context.finding(
        runs=names_of(runs),
        rows=rows_in_words(runs, kept=True),
        note="The paper's figures were not read off; its order is checked. Its caption and its text differ: the text finds "
        "the ReLU mixture comparable to the product in accuracy and falls, and rejects it because it never grows confident; "
        "both are told apart here by confidence. All classes that a Heaviside product leaves are equal: ours answers the "
        "first of them, the paper's one at random, which is right about as often as the mean confidence says.",
        panels=panels,
        claims=(
            Claim(
                "the ReLU product is the only one good in both accuracy and falls (the figure's caption)",
                good == ["product, ReLU"],
                f"good are {', '.join(good) or 'none'}: within {GOOD_ACCURACY:g} point of the best last exit, and at most "
                f"{GOOD_DROPS:g} % falling by .1",
            ),
            Claim(
                "only ReLU, multiplied or averaged, is good in both (the text)",
                set(good) == {"product, ReLU", "mixture, ReLU"},
                f"label falls by .1: product {drops['product, ReLU'].mean:.2f} %, mixture {drops['mixture, ReLU'].mean:.2f} %",
            ),
            Claim(
                "of these, only the product grows confident",
                "product, ReLU" in grows and "mixture, ReLU" not in grows,
                f"product {sure['product, ReLU'][0].mean:.1f} → {sure['product, ReLU'][-1].mean:.1f} %, mixture "
                f"{sure['mixture, ReLU'][0].mean:.1f} → {sure['mixture, ReLU'][-1].mean:.1f} %",
            ),
            Claim(
                "the Heaviside product never lowers the final answer's probability, and answers worst",
                final["product, Heaviside"].mean < 1.0 and mean["product, Heaviside"] == min(mean.values()),
                f"{final['product, Heaviside'].mean:.2f} % fall by .01 or more (inputs that collapsed); mean accuracy "
                f"{mean['product, Heaviside']:.1f} % against {mean['product, ReLU']:.1f} %",
            ),
            Claim(
                "averaging or multiplying softmaxes is not enough",
                min(drops["product, exponential"].mean, drops["mixture, exponential"].mean) > 2 * drops["product, ReLU"].mean,
                f"falls by .1: product {drops['product, exponential'].mean:.1f} %, mixture "
                f"{drops['mixture, exponential'].mean:.1f} %, ReLU product {drops['product, ReLU'].mean:.2f} %",
            ),
        ),
        headings=(
            "rule",
            "accuracy, first and last exit",
            "label falls ≥ .1",
            "ECE, first and last",
            "confidence, first and last",
        ),
        table=tuple(
            (
                name,
                f"{curve(figures, name, 'accuracy', factor=100)[0].mean:.1f}, {last[name].mean:.1f} %",
                f"{drops[name].mean:.2f} %",
                f"{ece[name][0].mean:.3f}, {ece[name][-1].mean:.3f}",
                f"{sure[name][0].mean:.1f}, {sure[name][-1].mean:.1f} %",
            )
            for name in names
        ),
        numbers=plain_numbers(figures, ("accuracy", "label_drop_percent", "final_drop_percent", "ece", "confidence"), names),
    )


def _mean(values: list[Measured]) -> float:
    return sum(value.mean for value in values) / len(values)

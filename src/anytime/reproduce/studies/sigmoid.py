"""Appendix B.2: a sigmoid in place of the ReLU."""

from __future__ import annotations

from anytime.combine import Latest, Product, Sigmoid
from anytime.reproduce.catalogue import Context
from anytime.reproduce.finding import Claim, Finding
from anytime.reproduce.measure import by_exit, by_limit, curve, measured, names_of, plain_numbers, rows_in_words, text_of
from anytime.reproduce.needs import MSDNET_100

_MOST = 3.0
"""Points of accuracy: far more than the sigmoid costs, far less than rounding its evidence to ties would."""


def study(context: Context) -> Finding:
    """Accuracy, falls and calibration error of the backbone and of the product with either activation."""
    runs = context.runs.need(MSDNET_100)
    rules = {"latest": Latest(), "sigmoid product": Product(Sigmoid()), "product": Product()}
    figures = measured(runs, rules)
    names = tuple(rules)
    accuracy = {name: curve(figures, name, "accuracy", factor=100) for name in names}
    ece = {name: curve(figures, name, "ece") for name in names}
    drops = {name: curve(figures, name, "label_drop_percent") for name in names}
    mean = {name: sum(value.mean for value in values) / len(values) for name, values in ece.items()}
    better = [
        str(exit)
        for exit, (sigmoid, relu) in enumerate(zip(ece["sigmoid product"], ece["product"], strict=True), 1)
        if sigmoid.mean < relu.mean
    ]
    pairs = list(zip(accuracy["sigmoid product"], accuracy["product"], strict=True))
    costs = [relu.mean - sigmoid.mean for sigmoid, relu in pairs]
    return context.finding(
        runs=names_of(runs),
        rows=rows_in_words(runs, kept=True),
        note="The paper's figure was not read off; what it says of it is checked. The paper explains the loss by large logits "
        "that all map to 1, which does not preserve their ranking. That is rounding: here labels are named before it, and what "
        "is left is the price of the sigmoid itself. "
        + (f"The sigmoid's calibration error is the lower one at exits {', '.join(better)}." if better else ""),
        panels=(
            by_exit("Accuracy", "accuracy, %", figures, "accuracy", rules=names, factor=100),
            by_limit("Label's falls", "falls by at least", figures, "label_drop_percent", rules=names),
            by_exit("Calibration error", "ECE", figures, "ece", rules=names, zero=True),
        ),
        claims=(
            Claim(
                "the sigmoid hurts accuracy: by a point on average over the exits, and nowhere by more than three",
                sum(costs) / len(costs) > 0 and max(costs) < _MOST,
                f"{sum(costs) / len(costs):.1f} points on average, {min(costs):.1f} to {max(costs):.1f}; sigmoid "
                f"{text_of(accuracy['sigmoid product'])} %; ReLU {text_of(accuracy['product'])} %",
            ),
            Claim(
                "the sigmoid hurts calibration, on average over the exits",
                mean["sigmoid product"] > mean["product"],
                f"mean ECE {mean['sigmoid product']:.3f} and {mean['product']:.3f}; sigmoid "
                f"{text_of(ece['sigmoid product'], digits=3)}; ReLU {text_of(ece['product'], digits=3)}",
            ),
        ),
        numbers=plain_numbers(figures, ("accuracy", "label_drop_percent", "ece", "entropy"), names)
        | {"falls_by_at_least_0.1": {name: values[2].mean for name, values in drops.items()}},
    )

"""The metrics with one value per exit: how charts and tables name, scale and explain them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from anytime.display.numbers import Number, exact, fraction, number
from anytime.metrics import RuleMetrics

Values = Callable[[RuleMetrics], Sequence[float] | None]


@dataclass(frozen=True)
class Measure:
    """A metric with one value per exit.

    Attributes:
        title: Its name.
        axis: The title of its axis, with the unit.
        reading: One sentence on how to read the chart.
        values: Gets it from the metrics of a rule; None if there is none.
        text: Formats a value.
        factor: From the stored value to the axis, such as 100 for a fraction shown as a percentage.
        high: The axis never goes above this.
        zero: Whether the axis starts at zero.
        dense: Whether only predictions of positions, such as pixels, have it.
    """

    title: str
    axis: str
    reading: str
    values: Values
    text: Callable[[Number], str] = number
    factor: float = 1.0
    high: float = math.inf
    zero: bool = True
    dense: bool = False

    def texts(self, found: RuleMetrics) -> tuple[str, ...]:
        """The values as text; empty if there are none."""
        return tuple(self.text(value) for value in self.values(found) or ())


def _fraction(title: str, axis: str, reading: str, values: Values) -> Measure:
    return Measure(title, axis, reading, values, text=fraction, factor=100.0, high=100.0, zero=False)


def _percent(title: str, axis: str, reading: str, values: Values) -> Measure:
    return Measure(title, axis, reading, values, text=exact, high=100.0)


MEASURES: Mapping[str, Measure] = {
    "accuracy": _fraction(
        "Accuracy",
        "accuracy, %",
        "The fraction of inputs that a rule answers correctly when stopped at each exit. Higher is better.",
        lambda rule: rule.accuracy,
    ),
    "mean_iou": replace(
        _fraction(
            "Mean intersection over union",
            "mean IoU, %",
            "The overlap of answers and labels per class, averaged over the classes. Higher is better.",
            lambda rule: rule.mean_iou,
        ),
        dense=True,
    ),
    "label_probability": _fraction(
        "Probability of the true class",
        "mean probability, %",
        "The mean probability of the true class; it should rise. The product starts low by design and gains confidence.",
        lambda rule: rule.label_probability,
    ),
    "confidence": _fraction(
        "Confidence",
        "mean confidence, %",
        "The mean probability of the predicted class, correct or not; it should match the accuracy.",
        lambda rule: rule.confidence,
    ),
    "entropy": Measure(
        "Entropy",
        "entropy, nats",
        "The mean uncertainty of the distribution; 0 is certain. In an anytime model it decreases from exit to exit.",
        lambda rule: rule.entropy,
    ),
    "set_size": Measure(
        "Size of the prediction set",
        "classes",
        "The mean number of classes in the prediction set. Smaller is better at equal coverage (in the table).",
        lambda rule: rule.set_size,
    ),
    "set_coverage": _fraction(
        "Coverage of the prediction set",
        "coverage, %",
        "How often the prediction set contains the true class.",
        lambda rule: rule.set_coverage,
    ),
    "ece": Measure(
        "Expected calibration error",
        "ECE",
        "The mean distance between confidence and accuracy over 15 bins. Lower is better.",
        lambda rule: rule.ece,
    ),
    "nll": Measure(
        "Negative log-likelihood",
        "NLL, nats",
        "The mean of −log of the true class's probability. Lower is better; confident mistakes cost most.",
        lambda rule: rule.nll,
    ),
    "brier": Measure(
        "Brier score",
        "Brier score",
        "The squared distance between the distribution and the one-hot label, from 0 to 2. Lower is better.",
        lambda rule: rule.brier,
    ),
    "oracle_accuracy": _fraction(
        "Accuracy with an oracle",
        "accuracy, %",
        "Accuracy if an oracle answers the least confident 0.5 % of inputs: does low confidence find the mistakes?",
        lambda rule: rule.oracle_accuracy,
    ),
    "learned": Measure(
        "Learned",
        "inputs",
        "How many inputs are correct for the first time at each exit. The first exit is in the table only.",
        lambda rule: rule.learned,
    ),
    "forgot": Measure(
        "Forgotten",
        "inputs",
        "How many inputs become wrong for the first time after having been correct. Lower is better.",
        lambda rule: rule.forgot,
    ),
    "hindsight_improvability_percent": _percent(
        "Hindsight improvability",
        "% of wrong inputs",
        "Of the inputs that are wrong at an exit, how many were correct at an earlier one. Ideal is 0.",
        lambda rule: rule.hindsight_improvability_percent,
    ),
    "agreement": _fraction(
        "Agreement with the final answer",
        "same answer, %",
        "How often the answer at an exit is already the answer of the last exit.",
        lambda rule: rule.agreement,
    ),
    "support_size": Measure(
        "Size of the support",
        "classes",
        "How many classes have a positive probability; under a product this can only decrease.",
        lambda rule: rule.support_size,
    ),
    "support_coverage": _fraction(
        "Coverage of the support",
        "coverage, %",
        "How often the true class has a positive probability; a product never recovers a class.",
        lambda rule: rule.support_coverage,
    ),
    "collapsed_percent": _percent(
        "Collapse",
        "% of inputs",
        "Inputs for which no class is left, so that the rule falls back to the current exit. Lower is better.",
        lambda rule: rule.collapsed_percent,
    ),
}

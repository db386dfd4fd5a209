"""What is measured at each exit: how each figure of an evaluation is named, read, scaled and written.

One entry serves the chart, its table and the table of all numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from anytime.metrics import RuleMetrics
from anytime.report.numbers import Number, exact, number, share


@dataclass(frozen=True)
class Measure:
    """A figure with one value an exit.

    Attributes:
        title: What it is.
        axis: The title of the axis, with the unit.
        reading: One sentence on how to read the chart.
        values: Takes it from the metrics of a rule; None where there is none.
        text: How a value is written.
        factor: From the stored value to the axis, such as 100 for a share shown as a percentage.
        bounds: What the axis never goes beyond.
        zero: Whether the axis begins at zero.
    """

    title: str
    axis: str
    reading: str
    values: Callable[[RuleMetrics], Sequence[float] | None]
    text: Callable[[Number], str] = number
    factor: float = 1.0
    bounds: tuple[float, float] = (0.0, math.inf)
    zero: bool = False


def _share(title: str, axis: str, reading: str, values: Callable[[RuleMetrics], Sequence[float] | None]) -> Measure:
    return Measure(title, axis, reading, values, text=share, factor=100.0, bounds=(0.0, 100.0))


MEASURES: Mapping[str, Measure] = {
    "accuracy": _share(
        "Accuracy",
        "accuracy, %",
        "Each line is a rule: the share of inputs it answers right if stopped at that exit; higher is better.",
        lambda rule: rule.accuracy,
    ),
    "label_probability": _share(
        "Probability of the true class",
        "mean probability, %",
        "The mean probability given to the true class; it should rise. Product starts low on purpose and grows sure with time.",
        lambda rule: rule.label_probability,
    ),
    "confidence": _share(
        "Confidence",
        "mean confidence, %",
        "The mean probability of the answer itself, right or wrong; it should match the accuracy.",
        lambda rule: rule.confidence,
    ),
    "entropy": Measure(
        "Entropy",
        "entropy, nats",
        "How undecided the distribution is on average: 0 is certain. In an anytime model it falls from exit to exit.",
        lambda rule: rule.entropy,
        zero=True,
    ),
    "set_size": Measure(
        "Size of the prediction set",
        "classes",
        "How many classes the prediction set holds on average; a smaller set with the same coverage (in the table) is better.",
        lambda rule: rule.set_size,
        zero=True,
    ),
    "set_coverage": _share(
        "Coverage of the prediction set",
        "coverage, %",
        "How often the prediction set holds the true class.",
        lambda rule: rule.set_coverage,
    ),
    "ece": Measure(
        "Expected calibration error",
        "ECE",
        "The mean distance between confidence and accuracy over 15 bins; 0 means that 80 % sure is right 80 % of the time.",
        lambda rule: rule.ece,
        zero=True,
    ),
    "nll": Measure(
        "Negative log-likelihood",
        "NLL, nats",
        "The surprise at the true class; lower is better, and being sure and wrong costs most.",
        lambda rule: rule.nll,
        zero=True,
    ),
    "brier": Measure(
        "Brier score",
        "Brier score",
        "The squared distance between the distribution and the truth, from 0 to 2; lower is better.",
        lambda rule: rule.brier,
        zero=True,
    ),
    "oracle_accuracy": _share(
        "Accuracy with a little help",
        "accuracy, %",
        "Accuracy once the least confident 0.5 % of inputs are handed to an oracle: does low confidence find the mistakes?",
        lambda rule: rule.oracle_accuracy,
    ),
    "learned": Measure(
        "Learned",
        "inputs",
        "How many inputs are right for the first time at this exit. The first exit, where all is new, is only in the table.",
        lambda rule: rule.learned,
        zero=True,
    ),
    "forgot": Measure(
        "Forgotten",
        "inputs",
        "How many inputs are wrong here for the first time after having been right; lower is better.",
        lambda rule: rule.forgot,
        zero=True,
    ),
    "hindsight_improvability_percent": Measure(
        "Hindsight improvability",
        "% of wrong inputs",
        "Of the inputs that are wrong at this exit, how many were right before; an ideal rule stays at 0.",
        lambda rule: rule.hindsight_improvability_percent,
        text=exact,
        bounds=(0.0, 100.0),
        zero=True,
    ),
    "agreement": _share(
        "Agreement with the final answer",
        "same answer, %",
        "How often the answer at this exit is already the one given at the last.",
        lambda rule: rule.agreement,
    ),
    "support_size": Measure(
        "Size of the support",
        "classes",
        "How many classes still have a probability above zero; under a product it can only shrink.",
        lambda rule: rule.support_size,
        zero=True,
    ),
    "support_coverage": _share(
        "Coverage of the support",
        "coverage, %",
        "How often the true class still has a probability above zero; a product never takes a class back.",
        lambda rule: rule.support_coverage,
    ),
    "collapsed_percent": Measure(
        "Collapse",
        "% of inputs",
        "Inputs for which no class is left, so that the rule falls back on the current exit; lower is better.",
        lambda rule: rule.collapsed_percent,
        text=exact,
        bounds=(0.0, 100.0),
        zero=True,
    ),
}

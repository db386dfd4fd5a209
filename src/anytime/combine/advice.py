"""Advice for few classes: below five the paper recommends caching over the product.

Our measurements with two classes agree in part: the product is right more often than caching, but its drops are larger and its
probabilities are poorly calibrated. With three and four, its drops are also nearly twice as frequent (docs/text.md). So
caching is the default rule there, and a caller that uses the product alone, without comparing rules, gets a
`FewClassesWarning` with metrics of its own rows, if they have labels, and of a network of ours.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from anytime.combine.activations import AdaptiveReLU, ClippedReLU, Heaviside, ReLU, ThresholdReLU
from anytime.combine.base import Rule
from anytime.combine.rules import Caching, Product
from anytime.errors import FewClassesWarning

FEW_CLASSES = 5
"""The paper's limit: caching below, the product from here on."""
_LOSING = (ReLU, ClippedReLU, ThresholdReLU, Heaviside, AdaptiveReLU)
"""Activations under which a class can lose all evidence for good."""


class Answers(NamedTuple):
    """Metrics of a rule: accuracy and ECE as means over the exits, the others as percentages of inputs.

    Attributes:
        accuracy: In percent.
        drops: Inputs whose label loses a probability of 0.1 or more.
        deep: Inputs whose label loses 0.5 or more.
        collapsed: Inputs without evidence for any class at the last exit.
        ece: Expected calibration error, as a fraction.
    """

    accuracy: float
    drops: float
    deep: float
    collapsed: float
    ece: float


RUN = "minilm-imdb-seed0"
"""The run in `results/` that these metrics are from, on 25,000 test rows, as `anytime reproduce text` reports them."""
MEASURED = {
    "product": Answers(87.2, 6.4, 4.7, 12.3, 0.113),
    "caching": Answers(86.5, 6.2, 1.5, 0.0, 0.105),
    "fitted product": Answers(86.7, 5.4, 0.0, 0.0, 0.009),
}


def default_rule(classes: int | None) -> Rule[Any]:
    """The rule where the caller names none: the product, or caching with fewer than five classes.

    >>> default_rule(100), default_rule(2)
    (Product(activation=ReLU(), weights='linear', shift=0.0), Caching(ties='earlier'))
    """
    return Caching() if classes is not None and classes < FEW_CLASSES else Product()


def advise(rule: Any, classes: int, own: Answers | None = None) -> str | None:
    """The advice for a caller whose only rule is this one, or None; `own` are its metrics on the caller's own rows.

    There is none for rules that keep evidence for every class, such as `Product(Softplus())`, and for fitted rules.
    """
    if classes >= FEW_CLASSES or not isinstance(rule, Product) or not isinstance(rule.activation, _LOSING):
        return None
    ours = "; ".join(f"{name} {_words(found)}" for name, found in MEASURED.items())
    here = "" if own is None else f" On these rows: {_words(own)}."
    return (
        f"Product with {classes} classes: the paper advises caching for fewer than {FEW_CLASSES}.{here} "
        f"Measured with MiniLM-L6 on IMDB (2 classes): {ours}. "
        "Compare the rules on labelled rows (anytime tune chooses by them), or use Caching()."
    )


def warn_of_few_classes(rule: Any, classes: int, own: Answers | None = None, *, stacklevel: int = 2) -> None:
    """Warn with the text of `advise`, if there is any; `stacklevel` counts from the caller, as in `warnings.warn`."""
    advice = advise(rule, classes, own)
    if advice is not None:
        warnings.warn(advice, FewClassesWarning, stacklevel=stacklevel + 1)


def _words(found: Answers) -> str:
    collapsed = f", {found.collapsed:.1f} % collapsed" if found.collapsed >= 0.05 else ""
    return (
        f"{found.accuracy:.1f} % accuracy (mean over exits), {found.drops:.1f} % drop by .1, {found.deep:.1f} % by .5 or more"
        f"{collapsed}, ECE {found.ece:.3f}"
    )

"""Advice on few classes: with fewer than five the paper recommends caching over the product.

Our figures with two classes agree in part: where the product falls it falls deep, and its probabilities are worth little,
though it is right more often than caching. So caching answers there where nobody names a rule. Whoever lets the product answer
alone, with nothing beside it to compare, is told so once, by a `FewClassesWarning`. The figures are those of the caller's own
rows where there are labels, and else those of a network of ours. Where rules are compared, the comparison says it better.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from anytime.combine.activations import ClippedReLU, Heaviside, ReLU, ThresholdReLU
from anytime.combine.rules import Caching, Product, Rule
from anytime.combine.thresholds import AdaptiveReLU
from anytime.errors import FewClassesWarning

FEW_CLASSES = 5
"""The paper's limit: caching below, the product from here on."""


def default_rule(classes: int | None) -> Rule[Any]:
    """What answers where nobody says: the product, or caching where there are too few classes for it.

    >>> default_rule(100), default_rule(2)
    (Product(activation=ReLU(), weights='linear', shift=0.0), Caching(ties='earlier'))
    """
    return Caching() if classes is not None and classes < FEW_CLASSES else Product()


class Answers(NamedTuple):
    """What a rule does, in percent.

    Attributes:
        accuracy: Mean over the exits.
        falls: Inputs whose label loses a tenth of probability or more on the way.
        deep: Inputs whose label loses a half or more.
        collapsed: Inputs without evidence for any class at the last exit.
        ece: Expected calibration error, mean over the exits, as a share.
    """

    accuracy: float
    falls: float
    deep: float
    collapsed: float
    ece: float


RUN = "minilm-imdb-seed0"
"""The run in `results/` whose figures these are, on 25,000 test rows, as `anytime reproduce text` has them."""
WHERE = "MiniLM-L6 on IMDB (2 classes)"
MEASURED = {
    "product": Answers(87.2, 6.4, 4.7, 12.3, 0.113),
    "caching": Answers(86.5, 6.2, 1.5, 0.0, 0.105),
    "fitted product": Answers(86.7, 5.4, 0.0, 0.0, 0.009),
}
_DO = "Compare the rules on labelled rows (anytime tune chooses by them), or take Caching()"


def advise(rule: Any, classes: int, own: Answers | None = None) -> str | None:
    """What to say to a caller whose only rule is this one; None where there is nothing to say.

    Rules that keep evidence for every class, such as `Product(Softplus())`, and rules that were fitted are left alone.

    Args:
        rule: The rule.
        classes: How many there are.
        own: What the rule does on the caller's own rows, where they have labels.
    """
    if classes >= FEW_CLASSES or not isinstance(rule, Product) or not isinstance(rule.activation, _LOSING):
        return None
    ours = "; ".join(f"{name} {_words(found)}" for name, found in MEASURED.items())
    here = "" if own is None else f" On these rows: {_words(own)}."
    return (
        f"Product with {classes} classes: the paper advises caching for fewer than {FEW_CLASSES}.{here} "
        f"With {WHERE} we measured: {ours}. {_DO}."
    )


def warn_of_few_classes(rule: Any, classes: int, own: Answers | None = None, *, stacklevel: int = 2) -> None:
    """Warn with what `advise` says, if it says something.

    Args:
        rule: The rule.
        classes: How many there are.
        own: What the rule does on the caller's own rows.
        stacklevel: Of the caller that the warning is for, as `warnings.warn` counts from here.
    """
    said = advise(rule, classes, own)
    if said is not None:
        warnings.warn(said, FewClassesWarning, stacklevel=stacklevel + 1)


_LOSING = (ReLU, ClippedReLU, ThresholdReLU, Heaviside, AdaptiveReLU)
"""Activations under which a class can lose all evidence for good."""


def _words(found: Answers) -> str:
    right = (
        f"{found.accuracy:.1f} % right (mean over exits), {found.falls:.1f} % fall by .1 and {found.deep:.1f} % by .5 or more"
    )
    collapsed = f", {found.collapsed:.1f} % collapsed" if found.collapsed >= 0.05 else ""
    return f"{right}{collapsed}, ECE {found.ece:.3f}"

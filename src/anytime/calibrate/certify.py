"""Certificates: bounds on what future inputs lose, from held-out rows.

`certify` bounds, for one rule fixed beforehand, the fraction of future inputs that get worse between exits. A rule picked
because it looked good needs more: among many, some look good by chance. `certify_choice` tests a family of rules so that the
guarantee holds after the choice too (Learn then Test). Both use the exact binomial distribution and assume that future inputs
are independent samples from the same source as these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor

from anytime.calibrate.certificate_figures import certificate_chart, certificate_table, choice_table
from anytime.calibrate.measure import follow_blocks
from anytime.calibrate.tuning.tuned import TunedRule
from anytime.checks import (
    check_choice,
    check_fraction,
    check_labelled,
    check_number,
    check_probabilities,
    check_scale,
    fingerprints,
)
from anytime.combine import Rule, parse_rule
from anytime.combine.named import as_rule, name_of
from anytime.display.numbers import rounded_down, rounded_up
from anytime.display.plot import plot_chart
from anytime.display.table import Displayed, Table
from anytime.errors import OptionError
from anytime.fitted import Fitted
from anytime.metrics import Trajectories, is_monotone, reach
from anytime.metrics import drop as largest_drop
from anytime.threads import one_thread_for_few

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Control = Literal["sequence", "holm", "bonferroni"]
"""How the probability of any false guarantee is kept: tests in a given order until one fails, or all at stricter levels."""


@dataclass(frozen=True)
class Certificate(Displayed, Fitted, kind="certificate", version=2, oldest=1, renamed={"rule": "text"}):
    """Bounds for one rule that was fixed before these rows were used.

    `drop_bound` and `monotone_bound` each hold with the stated confidence; `joint_drop_bound` and `joint_monotone_bound` hold
    with it simultaneously, the error probability split evenly between them.

    Args:
        text: The rule, as text.
        drop: The drop of the label's probability that counts.
        strict: Whether only drops above `drop` count, not those equal to it.
        confidence: Of the bounds, such as 0.95.
        rows: The number of rows.
        drops: How many of them drop.
        losses: How many go from right to wrong.
        drop_bound: Upper bound on the fraction of future inputs that drop.
        monotone_bound: Lower bound on the fraction of future inputs that never go from right to wrong.
        joint_drop_bound: As `drop_bound`, if both are to hold.
        joint_monotone_bound: As `monotone_bound`, if both are to hold.
    """

    text: str
    drop: float
    strict: bool
    confidence: float
    rows: int
    drops: int
    losses: int
    drop_bound: float
    monotone_bound: float
    joint_drop_bound: float
    joint_monotone_bound: float

    @property
    def rule(self) -> Rule[Any]:
        """The certified rule."""
        return parse_rule(self.text)

    @property
    def sentence(self) -> str:
        """The first guarantee in words, rounded so that it stays true."""
        return f"{self._confidence} at most {rounded_up(self.drop_bound)} of inputs lose {_amount(self)}."

    @property
    def joint_sentence(self) -> str:
        """Both guarantees at once, in one sentence."""
        return (
            f"{self._confidence} at most {rounded_up(self.joint_drop_bound)} of future inputs lose {_amount(self)}, and at "
            f"least {rounded_down(self.joint_monotone_bound)} stay right once right."
        )

    @property
    def sentences(self) -> tuple[str, ...]:
        """All guarantees in words: each by itself, then both at once."""
        return (
            self.sentence,
            f"{self._confidence} at least {rounded_down(self.monotone_bound)} of inputs never go from right to wrong.",
            f"{self._confidence} both hold at once with {rounded_up(self.joint_drop_bound)} and "
            f"{rounded_down(self.joint_monotone_bound)}.",
        )

    def table(self) -> Table:
        """What was observed on the rows, and the bounds."""
        return certificate_table(self)

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """Draw what was observed, and the bounds, with matplotlib (extra `plot`).

        Args:
            ax: Axes to draw into; new ones by default.
        """
        return plot_chart(certificate_chart(self), title=f"{self.text}: inputs that get worse", ax=ax)

    @property
    def _confidence(self) -> str:
        return f"With {_percent(self.confidence)} confidence"


@dataclass(frozen=True)
class ChoiceCertificate(Displayed, Fitted, kind="choice-certificate"):
    """Which of several rules satisfy a bound on drops; all of `certified` do, simultaneously, with the stated confidence.

    Args:
        rules: The tested rules, as text, in the order of the tests.
        drop: The drop of the label's probability that counts.
        strict: Whether only drops above `drop` count.
        at_most: The fraction of inputs that may drop.
        confidence: That every certified rule satisfies the bound.
        control: How the tests were combined.
        rows: The number of rows.
        drops: For each rule, how many of the rows drop.
        p_values: For each rule, the probability of so few drops if the bound were violated.
        passed: For each rule, whether it is certified.
        chosen: The best certified rule as text, or None.
    """

    rules: tuple[str, ...]
    drop: float
    strict: bool
    at_most: float
    confidence: float
    control: str
    rows: int
    drops: tuple[int, ...]
    p_values: tuple[float, ...]
    passed: tuple[bool, ...]
    chosen: str | None

    @property
    def rule(self) -> Rule[Any] | None:
        """The best certified rule, or None."""
        return None if self.chosen is None else parse_rule(self.chosen)

    def table(self) -> Table:
        """One row per tested rule."""
        return choice_table(self)

    @property
    def certified(self) -> tuple[str, ...]:
        """The rules that satisfy the bound, as text."""
        return tuple(text for text, good in zip(self.rules, self.passed, strict=True) if good)

    @property
    def sentence(self) -> str:
        """The guarantee in words, or that there is none."""
        bound = f"at most {_percent(self.at_most)} of inputs lose {_amount(self)}"
        if self.chosen is None:
            return f"None of {len(self.rules)} rules can be certified with {_percent(self.confidence)} confidence: {bound}."
        return (
            f"With {_percent(self.confidence)} confidence {bound}; this accounts for the choice among {len(self.rules)} rules, "
            f"of which {len(self.certified)} are certified."
        )


class DropTally:
    """Counts the rows that drop or go from right to wrong, block by block, for a `Certificate`."""

    def __init__(self, drop: float, *, strict: bool = False) -> None:
        self.drop, self.strict = check_number(drop, "drop", above=0, most=1), strict
        self.rows = self.drops = self.losses = 0

    def add(self, seen: Trajectories) -> None:
        """Count the rows of some trajectories with labels."""
        assert seen.correct is not None
        self.rows += seen.correct.shape[1]
        self.drops += int(reach(largest_drop(seen.label_probability), (self.drop,), strict=self.strict))
        self.losses += int((~is_monotone(seen.correct)).sum())

    def certificate(self, text: str, exits: int, classes: int, confidence: float) -> Certificate:
        """The certificate of the rows counted so far, for the rule with this text."""
        joint = 1 - (1 - check_fraction(confidence, "confidence")) / 2
        return Certificate(
            exits=exits,
            classes=classes,
            text=text,
            drop=self.drop,
            strict=self.strict,
            confidence=float(confidence),
            rows=self.rows,
            drops=self.drops,
            losses=self.losses,
            drop_bound=fraction_bound(self.drops, self.rows, confidence),
            monotone_bound=1 - fraction_bound(self.losses, self.rows, confidence),
            joint_drop_bound=fraction_bound(self.drops, self.rows, joint),
            joint_monotone_bound=1 - fraction_bound(self.losses, self.rows, joint),
        )


@one_thread_for_few
def certify(
    logits: Any,
    labels: Any,
    rule: str | Rule[Any] | Fitted = "product",
    *,
    drop: float = 0.1,
    confidence: float = 0.95,
    strict: bool = False,
    probabilities: bool = False,
) -> Certificate:
    """Bound the fraction of future inputs that get worse between exits, for a rule fixed beforehand.

    Args:
        logits: `(exits, rows, classes)`, rows that neither the network nor the rule was fitted on.
        labels: `(rows,)`.
        rule: A rule, its text, or a fitted rule. A `TunedRule` knows the rows it was tuned on: a few of them are left out, one
            percent or more is an error.
        drop: Count inputs whose label loses this much probability between any earlier and any later exit.
        confidence: The probability, over the sample of rows, that the bound is true.
        strict: Count drops above `drop`, as the paper's released code does, not at or above it.
        probabilities: Whether `logits` are probabilities (or their logarithms); otherwise such input is refused.

    Example:
        >>> from anytime import samples
        >>> file = samples.cifar100_msdnet()
        >>> print(certify(file.logits[:], file.labels, "product").sentence)
        With 95 % confidence at most 0.30 % of inputs lose 0.1 or more of the true class's probability.
    """
    rows, known = check_rows(logits, labels, probabilities=probabilities)
    text, built = _named(rule, rows)
    check_fraction(confidence, "confidence")
    tally = _count(built, *_unseen_rows([rule], rows, known), drop, strict)
    return tally.certificate(text, rows.shape[0], rows.shape[2], confidence)


@one_thread_for_few
def certify_choice(
    logits: Any,
    labels: Any,
    rules: Sequence[str | Rule[Any] | Fitted],
    *,
    drop: float = 0.1,
    at_most: float = 0.01,
    confidence: float = 0.95,
    control: Control = "sequence",
    scores: Sequence[float] | None = None,
    strict: bool = False,
) -> ChoiceCertificate:
    """Find the rules of a family for which "at most this fraction of inputs drop" is guaranteed, and the best of them.

    Each rule has a p-value: the probability of so few drops among these rows if more than `at_most` of all inputs dropped. With
    `sequence` the rules are tested at the full level in the given order until one fails: put the safest first, as other rows
    suggest. With `holm` or `bonferroni` the order does not matter and the tests are stricter.

    Args:
        logits: `(exits, rows, classes)`, rows on which neither the rules were fitted nor their order was found.
        labels: `(rows,)`.
        rules: The family.
        drop: The drop of the label's probability that counts.
        at_most: The fraction of inputs that may drop.
        confidence: That all certified rules satisfy the bound.
        control: `sequence`, `holm` or `bonferroni`.
        scores: One number per rule from other rows, lower is better: chooses among the certified rules. By default the last.
        strict: Count drops above `drop`, not at or above it.
    """
    rows, known = check_rows(logits, labels)
    check_fraction(at_most, "at_most")
    check_fraction(confidence, "confidence")
    check_choice(control, "control", get_args(Control))
    family = [_named(one, rows) for one in rules]
    if not family or (scores is not None and len(scores) != len(family)):
        raise OptionError(
            f"got {len(family)} rules" + ("" if scores is None else f" and {len(scores)} scores"),
            expected="at least one rule, and one score per rule or none at all",
            fix="pass the rules as a list, and scores in the same order",
        )
    rows, known = _unseen_rows(rules, rows, known)
    drops = tuple(_count(built, rows, known, drop, strict).drops for _, built in family)
    p_values = tuple(p_value(found, rows.shape[1], at_most) for found in drops)
    passed = _rejected(p_values, 1 - confidence, control)
    good = [index for index, one in enumerate(passed) if one]
    best = min(good, key=lambda index: -index if scores is None else scores[index], default=None)
    return ChoiceCertificate(
        exits=rows.shape[0],
        classes=rows.shape[2],
        rules=tuple(text for text, _ in family),
        drop=float(drop),
        strict=strict,
        at_most=float(at_most),
        confidence=float(confidence),
        control=control,
        rows=rows.shape[1],
        drops=drops,
        p_values=p_values,
        passed=passed,
        chosen=None if best is None else family[best][0],
    )


def fraction_bound(count: int, rows: int, confidence: float) -> float:
    """Upper confidence bound on a proportion, from `count` successes among `rows` (Clopper–Pearson, one-sided).

    >>> round(fraction_bound(0, 299, 0.95), 5)
    0.00997
    """
    from scipy.stats import beta

    return 1.0 if count >= rows else float(beta.ppf(confidence, count + 1, rows - count))


def p_value(count: int, rows: int, rate: float) -> float:
    """The probability of at most `count` successes among `rows` at this rate: a p-value of "the rate is higher"."""
    from scipy.stats import binom

    return float(binom.cdf(count, rows, rate))


def _rejected(p_values: Sequence[float], error: float, control: Control) -> tuple[bool, ...]:
    """Which null hypotheses are rejected, so that the probability of any false rejection is at most `error`."""
    total = len(p_values)
    if control == "bonferroni":
        return tuple(p <= error / total for p in p_values)
    if control == "sequence":
        order, limits = list(range(total)), [error] * total
    else:
        order, limits = sorted(range(total), key=p_values.__getitem__), [error / (total - step) for step in range(total)]
    passed = [False] * total
    for index, limit in zip(order, limits, strict=True):
        if p_values[index] > limit:
            break
        passed[index] = True
    return tuple(passed)


def _count(rule: Rule[Any], logits: Tensor, labels: Tensor, drop: float, strict: bool) -> DropTally:
    tally = DropTally(drop, strict=strict)
    for seen in follow_blocks(rule, logits, labels):
        tally.add(seen)
    return tally


def _unseen_rows(rules: Sequence[Any], rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that no tuned rule was tuned on; a few are left out, more are refused."""
    tuned = [one for one in rules if isinstance(one, TunedRule)]
    if not tuned:
        return rows, labels
    prints = fingerprints(rows)
    new = reduce(and_, (one.unseen(prints, purpose="the certificate") for one in tuned))
    return rows[:, new], labels[new]


def _named(given: Any, rows: Tensor) -> tuple[str, Rule[Any]]:
    """The text of a rule, and the rule."""
    rule = as_rule(given, exits=rows.shape[0], classes=rows.shape[2])
    text = given.text if isinstance(given, TunedRule) else given.strip() if isinstance(given, str) else name_of(rule)
    return text, rule


def check_rows(logits: Any, labels: Any, *, probabilities: bool = False) -> tuple[Tensor, Tensor]:
    """Logits, or probabilities if that is stated, and their labels, at least one row."""
    rows, known = check_labelled(logits, labels)
    if probabilities:
        return check_probabilities(rows), known
    check_scale(rows)
    return rows, known


def _amount(bound: Certificate | ChoiceCertificate) -> str:
    amount = f"more than {bound.drop:g}" if bound.strict else f"{bound.drop:g} or more"
    return f"{amount} of the true class's probability"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.6g} %"

"""Certificates: what can be promised about inputs nobody has seen yet, from held-out rows.

`certify` bounds, for one rule fixed beforehand, the share of future inputs that get worse on the way. A rule that was picked
because it looked good is different: among many, some look good by luck. `certify_choice` tests a whole family of rules so that
the promise holds after the choice too (Learn then Test). Both rest on the exact binomial distribution and on one assumption:
future inputs come from the same source as these rows, independently, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, Literal, Self, get_args

from torch import Tensor

from anytime.calibrate.tuning.tuned import TunedRule
from anytime.checks import (
    check_choice,
    check_fraction,
    check_labels,
    check_logits,
    check_number,
    check_probabilities,
    check_scale,
    fingerprints,
)
from anytime.combine import Rule, parse_rule
from anytime.combine.named import name_of
from anytime.errors import LabelError, OptionError
from anytime.fitted import Fitted
from anytime.metrics import Trajectories, follow, is_monotone, reach
from anytime.metrics import drop as largest_drop

Control = Literal["sequence", "holm", "bonferroni"]
"""How the chance of a false promise among many is kept: tests in a given order until one fails, or all at stricter levels."""

_BLOCK = 1 << 17
"""Numbers an exit that are combined at once, so that they stay in the cache."""


@dataclass(frozen=True)
class Certificate(Fitted, kind="certificate"):
    """Bounds for one rule that was fixed before these rows were looked at.

    `drop_bound` and `monotone_bound` hold with the stated confidence each by itself; `joint_drop_bound` and
    `joint_monotone_bound` hold with it both at once, the chance of error split evenly between them.

    Args:
        exits: How many exits.
        classes: How many classes.
        rule: The rule, as text.
        drop: How much of the label's probability an input may not lose.
        strict: Whether only losses above `drop` count, not those that equal it.
        confidence: How sure the bounds are, such as 0.95.
        rows: How many rows they are from.
        drops: How many of them lose so much.
        losses: How many go from right to wrong.
        drop_bound: The share of future inputs that lose so much is at most this.
        monotone_bound: The share of future inputs that never go from right to wrong is at least this.
        joint_drop_bound: As `drop_bound`, for a promise of both.
        joint_monotone_bound: As `monotone_bound`, for a promise of both.
    """

    rule: str
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

    @classmethod
    def from_counts(cls, *, rows: int, drops: int, losses: int, confidence: float, **fixed: Any) -> Self:
        """The certificate that counts give; `fixed` are the fields that do not depend on them."""
        half = 1 - (1 - confidence) / 2  # the chance of error is shared by two bounds that are to hold at once
        return cls(
            **fixed,
            confidence=confidence,
            rows=rows,
            drops=drops,
            losses=losses,
            drop_bound=share_bound(drops, rows, confidence),
            monotone_bound=1 - share_bound(losses, rows, confidence),
            joint_drop_bound=share_bound(drops, rows, half),
            joint_monotone_bound=1 - share_bound(losses, rows, half),
        )

    @property
    def sentence(self) -> str:
        """The first promise in words, rounded so that it stays true."""
        return (
            f"With {_percent(self.confidence)} confidence at most {rounded_up(self.drop_bound)} of inputs lose {_amount(self)}."
        )

    @property
    def joint_sentence(self) -> str:
        """Both promises at once, in one sentence."""
        return (
            f"With {_percent(self.confidence)} confidence at most {rounded_up(self.joint_drop_bound)} of future inputs lose "
            f"{_amount(self)}, and at least {rounded_down(self.joint_monotone_bound)} stay right once right."
        )

    @property
    def sentences(self) -> tuple[str, ...]:
        """All promises in words: each by itself, then both at once."""
        sure = f"With {_percent(self.confidence)} confidence"
        return (
            self.sentence,
            f"{sure} at least {rounded_down(self.monotone_bound)} of inputs never go from right to wrong.",
            f"{sure} both at once hold with {rounded_up(self.joint_drop_bound)} and {rounded_down(self.joint_monotone_bound)}.",
        )


@dataclass(frozen=True)
class ChoiceCertificate(Fitted, kind="choice certificate"):
    """Which of several rules keep a wish, tested so that all of `certified` do at once with the stated confidence.

    Args:
        exits: How many exits.
        classes: How many classes.
        rules: The rules tested, as text, in the order of the tests.
        drop: How much of the label's probability an input may not lose.
        strict: Whether only losses above `drop` count.
        at_most: The share of inputs that may.
        confidence: How sure it is that every certified rule keeps the wish.
        control: How the tests were put together.
        rows: How many rows they are from.
        drops: For each rule, how many of the rows lose so much.
        p_values: For each rule, the chance of so few if the wish were not kept.
        passed: For each rule, whether it is certified.
        chosen: The best certified rule as text, or None where there is none.
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
    def certified(self) -> tuple[str, ...]:
        """The rules that keep the wish, as text."""
        return tuple(text for text, good in zip(self.rules, self.passed, strict=True) if good)

    @property
    def sentence(self) -> str:
        """The promise in words, or that there is none."""
        if self.chosen is None:
            return (
                f"None of {len(self.rules)} rules can be promised, with {_percent(self.confidence)} confidence, to let at most "
                f"{_percent(self.at_most)} of inputs lose {_amount(self)}."
            )
        return (
            f"With {_percent(self.confidence)} confidence at most {_percent(self.at_most)} of inputs lose {_amount(self)}; "
            f"this counts that the rule was chosen from {len(self.rules)}, of which {len(self.certified)} can be promised."
        )


def certify(
    logits: Any,
    labels: Any,
    rule: str | Rule[Any] | TunedRule = "product",
    *,
    drop: float = 0.1,
    confidence: float = 0.95,
    strict: bool = False,
    probabilities: bool = False,
) -> Certificate:
    """Bound the share of future inputs that get worse on the way, for a rule fixed beforehand.

    Args:
        logits: `(exits, rows, classes)`, rows that neither the network nor the rule was fitted on.
        labels: `(rows,)`.
        rule: A rule, its text, or a tuned rule. It knows the rows it was tuned on: a few are left out, one in a
            hundred or more are refused.
        drop: A loss of so much of the label's probability between any earlier and any later exit counts.
        confidence: The share of sets of rows for which the bound would be true.
        strict: Count losses above `drop`, as the paper's released code does, not at or above it.
        probabilities: Whether `logits` are probabilities (or their logarithms); otherwise such input is refused.

    Example:
        >>> from anytime import samples
        >>> file = samples.cifar100_msdnet()
        >>> print(certify(file.logits[:], file.labels, "product").sentence)
        With 95 % confidence at most 0.30 % of inputs lose 0.1 or more of the true class's probability.
    """
    rows, known = check_rows(logits, labels, probabilities=probabilities)
    rows, known = _unseen_rows([rule], rows, known)
    text, built = _fixed(rule)
    check_number(drop, "drop", above=0, most=1)
    check_fraction(confidence, "confidence")
    count = rows.shape[1]
    drops, losses = _count(built, rows, known, drop, strict)
    return Certificate.from_counts(
        exits=rows.shape[0],
        classes=rows.shape[2],
        rule=text,
        drop=float(drop),
        strict=strict,
        confidence=float(confidence),
        rows=count,
        drops=drops,
        losses=losses,
    )


def certify_choice(
    logits: Any,
    labels: Any,
    rules: Sequence[str | Rule[Any]],
    *,
    drop: float = 0.1,
    at_most: float = 0.01,
    confidence: float = 0.95,
    control: Control = "sequence",
    scores: Sequence[float] | None = None,
    strict: bool = False,
) -> ChoiceCertificate:
    """Find the rules of a family for which "at most so many inputs drop" can be promised, and the best of them.

    Each rule has a p-value: if more than `at_most` of all inputs dropped, so few drops among these rows would have at most
    that chance. With `sequence` the rules are tested at the full level, in the order given, until one fails: give the
    safest first, as other rows tell. With `holm` or `bonferroni` the order is free and the tests are stricter.

    Args:
        logits: `(exits, rows, classes)`, rows on which neither the rules were fitted nor their order was found.
        labels: `(rows,)`.
        rules: The family.
        drop: A loss of so much of the label's probability counts.
        at_most: The share of inputs that may lose so much.
        confidence: How sure it should be that all certified rules keep the wish.
        control: `sequence`, `holm` or `bonferroni`.
        scores: One number a rule, less is better, from other rows: picks among the certified. The last certified one without.
        strict: Count losses above `drop`, not at or above it.
    """
    rows, known = check_rows(logits, labels)
    check_number(drop, "drop", above=0, most=1)
    check_fraction(at_most, "at_most")
    check_fraction(confidence, "confidence")
    check_choice(control, "control", get_args(Control))
    rows, known = _unseen_rows(rules, rows, known)
    family = [_fixed(one) for one in rules]
    if not family or (scores is not None and len(scores) != len(family)):
        given = "no rules" if not family else f"{len(scores or ())} scores for {len(family)} rules"
        raise OptionError(given, expected="at least one rule, and a score for each or none at all", fix="check both lists")
    count = rows.shape[1]
    drops = tuple(_count(built, rows, known, drop, strict)[0] for _, built in family)
    chances = tuple(p_value(found, count, at_most) for found in drops)
    passed = _rejected(chances, 1 - confidence, control)
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
        rows=count,
        drops=drops,
        p_values=chances,
        passed=passed,
        chosen=None if best is None else family[best][0],
    )


def share_bound(count: int, rows: int, confidence: float) -> float:
    """An upper bound on a share, from `count` hits among `rows` (Clopper and Pearson, one-sided).

    It is the share for which so few hits have a chance of just 1 - `confidence`.

    >>> round(share_bound(0, 299, 0.95), 5)
    0.00997
    """
    from scipy.stats import beta

    return 1.0 if count >= rows else float(beta.ppf(confidence, count + 1, rows - count))


def p_value(count: int, rows: int, share: float) -> float:
    """The chance of at most `count` hits among `rows` if each had the chance `share`: small speaks against more than that."""
    from scipy.stats import binom

    return float(binom.cdf(count, rows, share))


def follow_blocks(rule: Rule[Any], logits: Tensor, labels: Tensor) -> Iterator[Trajectories]:
    """The trajectories of checked logits under a rule, some rows at a time."""
    step = max(1, _BLOCK // logits.shape[2])
    for first in range(0, logits.shape[1], step):
        part = slice(first, first + step)
        yield follow(rule.combine(logits[:, part]), labels[part])


def _rejected(chances: Sequence[float], error: float, control: Control) -> tuple[bool, ...]:
    """Which tests are passed, so that the chance of any false one among them is at most `error`."""
    total = len(chances)
    if control == "bonferroni":
        return tuple(chance <= error / total for chance in chances)
    if control == "sequence":
        order, limits = list(range(total)), [error] * total
    else:
        order, limits = sorted(range(total), key=chances.__getitem__), [error / (total - step) for step in range(total)]
    passed = [False] * total
    for index, limit in zip(order, limits, strict=True):
        if chances[index] > limit:
            break
        passed[index] = True
    return tuple(passed)


def _count(rule: Rule[Any], logits: Tensor, labels: Tensor, drop: float, strict: bool) -> tuple[int, int]:
    """How many rows lose `drop` of the label's probability, and how many go from right to wrong."""
    drops = losses = 0
    for seen in follow_blocks(rule, logits, labels):
        assert seen.correct is not None
        drops += int(reach(largest_drop(seen.label_probability), (drop,), strict=strict))
        losses += int((~is_monotone(seen.correct)).sum())
    return drops, losses


def _unseen_rows(rules: Sequence[str | Rule[Any] | TunedRule], rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The rows that no tuned rule was tuned on; a few are left out, more are refused."""
    tuned = [one for one in rules if isinstance(one, TunedRule)]
    if not tuned:
        return rows, labels
    for one in tuned:
        one.check_fits(rows.shape[0], rows.shape[2])
    prints = fingerprints(rows)
    new = reduce(and_, (one.unseen(prints, purpose="the certificate") for one in tuned))
    return rows[:, new], labels[new]


def _fixed(given: str | Rule[Any] | TunedRule) -> tuple[str, Rule[Any]]:
    """The text of a rule, and the rule."""
    if isinstance(given, TunedRule):
        return given.text, given.rule
    if isinstance(given, str):
        return given.strip(), parse_rule(given)
    if not isinstance(given, Rule):
        raise OptionError(f"the rule is {given!r}", expected="a rule, such as anytime.Product()", fix="create it: Product()")
    return name_of(given), given


def check_rows(logits: Any, labels: Any, *, probabilities: bool = False) -> tuple[Tensor, Tensor]:
    """Logits, or probabilities if so said, and their labels, at least one row of them."""
    rows = check_logits(logits)
    if probabilities:
        rows = check_probabilities(rows)
    else:
        check_scale(rows)
    known = check_labels(labels, batch=rows.shape[1], classes=rows.shape[2], device=rows.device)
    if rows.shape[1] == 0:
        raise LabelError("there are no rows", expected="rows to count on", fix="give logits with labels")
    return rows, known


def _amount(promise: Certificate | ChoiceCertificate) -> str:
    amount = f"more than {promise.drop:g}" if promise.strict else f"{promise.drop:g} or more"
    return f"{amount} of the true class's probability"


def _percent(share: float) -> str:
    return f"{100 * share:.6g} %"


def rounded_up(share: float) -> str:
    """A percentage rounded up: an upper bound stays one.

    >>> rounded_up(0.003101), rounded_up(0.1371)
    ('0.32 %', '13.8 %')
    """
    digits = 2 if share < 0.01 else 1
    # What is exact but for the last bits of a float is not rounded up a whole step.
    return f"{math.ceil(100 * share * 10**digits - 1e-9) / 10**digits:.{digits}f} %"


def rounded_down(share: float) -> str:
    """A percentage rounded down.

    >>> rounded_down(0.8608), rounded_down(0.99999)
    ('86.0 %', '99.99 %')
    """
    digits = 2 if share > 0.99 else 1
    return f"{math.floor(100 * share * 10**digits + 1e-9) / 10**digits:.{digits}f} %"

"""What can be promised: all that is fitted on calibration rows, measured on test rows that no fit has seen.

Half of the calibration rows, drawn by lot, fit the temperatures of each rule and the powers of the fitted product. The
others, which these rules have not seen either, give the quantiles of the prediction sets and the confidences to stop at. All
rules are then fixed, so every test row counts for their certificates. Only the rows to fit on are held in memory; of the
others, read in blocks, no more than a few numbers an exit are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytime.calibrate import Certificate, PowersFit, Temperature, TunedRule, fit_powers, fit_temperature
from anytime.checks import check_costs, check_fraction, check_number, check_seed
from anytime.combine import Caching, Rule, parse_rule
from anytime.combine.named import name_of
from anytime.conformal import Raps
from anytime.errors import LabelError, OptionError
from anytime.evaluation.blocks import (
    Combine,
    Followed,
    MapInOrder,
    Rows,
    Split,
    block_size,
    chunks,
    follow_chunk,
    set_thresholds,
    uniforms,
    workers,
)
from anytime.evaluation.held_out import HeldOut, hold_out
from anytime.evaluation.measure import DEFAULT_RULES, Evaluation, open_rows
from anytime.metrics import Summary, is_monotone, reach
from anytime.metrics import drop as largest_drop
from anytime.policy import BudgetCurve, exit_shares
from anytime.policy.budget import first_reached, thresholds_of

FITTED_PRODUCT, SCALED_CACHING = "fitted product", "scaled caching"
SET_FIGURES = ("set_size", "set_coverage", "set_size_rise_percent")
_SHOWN = ("ece", "nll", "label_drop_percent", "reliability")
_QS = tuple(point / 20 for point in range(1, 40))
"""How the inputs are spread over the exits along a budget curve, as in the MSDNet papers."""


@dataclass(frozen=True)
class Guarantee:
    """What was fitted for one rule, and what it comes to on the test rows.

    Attributes:
        rule: The rule.
        fitted: Whether the rule itself was fitted on the calibration rows.
        temperature: Its temperatures. None for a fitted rule, which needs none, and for a rule that at some exit gives
            probability 0 to the label of every row, which no temperature can mend.
        before: Its figures on the test rows, under the names of `anytime evaluate --json`.
        after: The same at its temperatures, without sets, or None.
        certificate: Bounds on what future inputs lose under it.
        budget: Accuracy for mean cost where inputs stop by themselves.
    """

    rule: Rule[Any]
    fitted: bool
    temperature: Temperature | None
    before: dict[str, Any]
    after: dict[str, Any] | None
    certificate: Certificate
    budget: BudgetCurve

    def to_json(self) -> dict[str, Any]:
        """A plain document."""
        known, bounds, budget = self.temperature, asdict(self.certificate), asdict(self.budget)
        for name in ("exits", "classes", "rule"):
            del bounds[name]
        del budget["log_odds"]  # infinite where nobody stops, which JSON cannot say
        return {
            "rule": repr(self.rule),
            "fitted": self.fitted,
            "temperature": None if known is None else list(known.temperatures),
            "temperature_at_bound": None if known is None else list(known.at_bound),
            "before": {name: self.before[name] for name in _SHOWN},
            "after": None if self.after is None else {name: self.after[name] for name in _SHOWN},
            **{name: self.before[name] for name in SET_FIGURES},
            "certificate": {**bounds, "sentences": list(self.certificate.sentences)},
            "accuracy": self.before["accuracy"],
            "budget": budget,
        }


@dataclass(frozen=True)
class Guarantees:
    """What `measure_guarantees` found. `to_json` gives the key `calibration` of `anytime evaluate --calibration FILE --json`.

    Attributes:
        exits, samples, classes: The size of the test data.
        fitting_rows: How many calibration rows fitted temperatures and powers.
        calibrating_rows: How many others gave the quantiles of the sets and the confidences to stop at.
        dropped_rows: How many were left out, as they are among the test rows.
        costs: Cumulative cost of each exit; 1, 2, 3, … if none were given.
        costs_given: Whether they were.
        drop, strict, confidence: What the certificates are about: a loss of so much probability, or of more, and how sure.
        sets: The settings of the prediction sets, or None.
        seed: Of all draws.
        product: The fitted product.
        rules: What was found for each rule; those that were fitted come last.
    """

    exits: int
    samples: int
    classes: int
    fitting_rows: int
    calibrating_rows: int
    dropped_rows: int
    costs: tuple[float, ...]
    costs_given: bool
    drop: float
    strict: bool
    confidence: float
    sets: Raps | None
    seed: int
    product: PowersFit
    rules: dict[str, Guarantee]

    def to_json(self) -> dict[str, Any]:
        """A plain document."""
        numbers = ("fitting_rows", "calibrating_rows", "dropped_rows", "drop", "strict", "confidence", "seed")
        powers = {"past": list(self.product.past), "now": list(self.product.now), "penalty": self.product.penalty}
        return {
            **{name: getattr(self, name) for name in numbers},
            "costs": list(self.costs),
            "fitted_product": powers,
            "rules": {name: found.to_json() for name, found in self.rules.items()},
        }

    def put_sets(self, evaluation: Evaluation) -> Evaluation:
        """An evaluation of the same test rows, with these prediction sets in place of those it calibrated by itself."""
        rules = {
            name: {**figures, **{key: self.rules[name].before[key] for key in SET_FIGURES}} if name in self.rules else figures
            for name, figures in evaluation.rules.items()
        }
        sets = None if self.sets is None else {**asdict(self.sets), "calibration_rows": self.calibrating_rows}
        return replace(evaluation, rules=rules, settings={**evaluation.settings, "sets": sets})


def measure_guarantees(
    test: Any,
    calibration: Any,
    *,
    rules: Sequence[str | Rule[Any]] | Mapping[str, Rule[Any] | TunedRule] = DEFAULT_RULES,
    costs: Sequence[float] | None = None,
    drop: float = 0.1,
    confidence: float = 0.95,
    probabilities: bool = False,
    strict: bool = False,
    sets: Raps | None = Raps(),  # noqa: B008 - frozen
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Guarantees:
    """Fit all that can be fitted on calibration rows, and measure on test rows what it is worth.

    The rules given are joined by the fitted product and, where `Caching()` is among them, by caching of scaled exits.

    Args:
        test: A file's path, what `open_logits` gives, or a pair of logits `(exits, samples, classes)` and labels.
        calibration: The same for other rows of the same model, held out from its training.
        rules: Rules by name or as objects, or a mapping from names to rules. A tuned rule must have seen none of the rows.
        costs: Cumulative cost up to each exit, for the budget curves.
        drop: The loss of the label's probability that the certificates are about.
        confidence: How sure they are, each by itself.
        probabilities: Whether logits are probabilities (or their logarithms); otherwise such input is refused.
        strict: Count drops above a threshold rather than at or above it.
        sets: Settings of the prediction sets; None for none.
        seed: For the split of the calibration rows and the randomised sets.
        progress: Called with the test rows done and the test rows in all.

    Example:
        >>> from anytime import samples
        >>> file = samples.cifar100_msdnet()
        >>> one, other = ((file.logits[:, rows], file.labels[rows]) for rows in (slice(500), slice(500, 1000)))
        >>> list(measure_guarantees(one, other).rules)
        ['latest', 'caching', 'product', 'scaled caching', 'fitted product']
    """
    check_number(drop, "drop", above=0, most=1)
    check_fraction(confidence, "confidence")
    check_seed(seed)
    rows, held_rows = (_labelled(given, probabilities, what) for given, what in ((test, "test"), (calibration, "calibration")))
    exits, samples, classes = rows.logits.shape
    price = torch.arange(1.0, exits + 1, dtype=torch.float64) if costs is None else check_costs(costs, exits=exits)
    named = _named(rules)
    held = hold_out(held_rows, rows, seed=seed)
    plain = {name: _unseen(each, held_rows, rows) for name, each in named.items()}
    product, temperatures, fitted = _fit(plain, held)
    every = {**plain, **fitted}
    before: dict[str, Combine] = {name: each.combine for name, each in every.items()}
    after: dict[str, Combine] = {name: each.rule().combine for name, each in temperatures.items() if each is not None}
    block = block_size(exits, classes)
    parts = chunks(samples, block, exits * classes)
    tallies = {name: _Tally(price, drop, strict) for name in every}
    scaled = {name: Summary(price, strict=strict) for name in after}
    with workers(len(parts)) as map_in_order:
        limits = {} if sets is None else _set_limits(held, before, sets, seed, block, map_in_order)
        stops = {name: _Stops(odds) for name, odds in _log_odds(held, before, block, map_in_order).items()}

        def follow_both(chunk: slice, uniform: Tensor) -> tuple[dict[str, Followed], dict[str, Followed]]:
            follow = partial(follow_chunk, rows, chunk=chunk, uniform=uniform, block=block)
            plainly = follow(combiners=before, sets=sets, thresholds=limits, odds=True)
            return plainly, follow(combiners=after, sets=None, thresholds={})

        found = map_in_order(follow_both, parts, uniforms(parts, exits, [seed, 2]))
        for chunk, (plainly, at_temperature) in zip(parts, found, strict=True):
            for name, each in plainly.items():
                tallies[name].add(each)
                stops[name].add(each)
            for name, each in at_temperature.items():
                scaled[name].add(each.seen)
            if progress is not None:
                progress(chunk.stop, samples)
    return Guarantees(
        exits=exits,
        samples=samples,
        classes=classes,
        fitting_rows=len(held.fitting),
        calibrating_rows=len(held.calibrating),
        dropped_rows=held.dropped,
        costs=tuple(price.tolist()),
        costs_given=costs is not None,
        drop=float(drop),
        strict=strict,
        confidence=float(confidence),
        sets=sets,
        seed=seed,
        product=product,
        rules={
            name: Guarantee(
                rule=each,
                fitted=name in fitted,
                temperature=temperatures.get(name),
                before=tallies[name].summary.figures(),
                after=scaled[name].figures() if name in scaled else None,
                certificate=tallies[name].certificate(name_of(each), classes, confidence),
                budget=stops[name].curve(price),
            )
            for name, each in every.items()
        },
    )


class _Tally:
    """The figures of a rule on the test rows seen so far, and what its certificate counts."""

    def __init__(self, costs: Tensor, drop: float, strict: bool) -> None:
        self.summary = Summary(costs, strict=strict)
        self.drop, self.strict = drop, strict
        self.rows = self.drops = self.losses = 0

    def add(self, found: Followed) -> None:
        seen = found.seen
        assert seen.correct is not None  # test rows have labels
        self.summary.add(seen)
        if found.size is not None:
            self.summary.add_sets(found.size, found.covered)
        self.rows += seen.correct.shape[1]
        self.drops += int(reach(largest_drop(seen.label_probability), (self.drop,), strict=self.strict))
        self.losses += int((~is_monotone(seen.correct)).sum())

    def certificate(self, text: str, classes: int, confidence: float) -> Certificate:
        return Certificate.from_counts(
            exits=len(self.summary.costs),
            classes=classes,
            rule=text,
            drop=float(self.drop),
            strict=self.strict,
            confidence=float(confidence),
            rows=self.rows,
            drops=self.drops,
            losses=self.losses,
        )


class _Stops:
    """Where the test rows seen so far stop, and whether they are right there, for each of some ways to spread them.

    Args:
        odds: The confidences of the calibrating rows at each exit, `(exits, rows)`, as log-odds: they give the thresholds.
    """

    def __init__(self, odds: Tensor) -> None:
        self.limits = tuple(thresholds_of(odds, exit_shares(q, len(odds))) for q in _QS)
        self.stopped = torch.zeros(len(_QS), len(odds), dtype=torch.float64)
        self.right = torch.zeros(len(_QS), dtype=torch.float64)

    def add(self, found: Followed) -> None:
        assert found.seen.correct is not None  # test rows have labels
        assert found.odds is not None
        odds = found.odds.double()  # as anytime.policy compares it
        for index, limit in enumerate(self.limits):
            exit = first_reached(odds, limit)
            self.stopped[index] += exit.bincount(minlength=len(odds))
            self.right[index] += found.seen.correct.gather(0, exit[None]).sum()

    def curve(self, costs: Tensor) -> BudgetCurve:
        rows = self.stopped.sum(1)
        shares = self.stopped / rows[:, None]
        return BudgetCurve(
            q=_QS,
            cost=tuple((shares @ costs).tolist()),
            accuracy=tuple((self.right / rows).tolist()),
            shares=tuple(tuple(each) for each in shares.tolist()),
            log_odds=self.limits,
        )


def _labelled(given: Any, probabilities: bool, what: str) -> Rows:
    logits, labels = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    rows = open_rows(logits, labels, probabilities)
    if rows.labels is None:
        path = getattr(given, "path", given if isinstance(given, str | Path) else None)
        raise LabelError(
            f"the {what} rows{'' if path is None else f' in {path}'} have no labels",
            expected="labels for both: what is promised is about them",
            fix="save both: numpy.savez('logits.npz', logits=logits, labels=labels)",
        )
    return rows


def _named(rules: Sequence[str | Rule[Any]] | Mapping[str, Rule[Any] | TunedRule]) -> dict[str, Rule[Any] | TunedRule]:
    named: dict[str, Any] = dict(rules) if isinstance(rules, Mapping) else {}
    if not isinstance(rules, Mapping):
        for given in [rules] if isinstance(rules, str) else rules:
            named[given.strip() if isinstance(given, str) else name_of(given)] = (
                parse_rule(given) if isinstance(given, str) else given
            )
    if not named or {FITTED_PRODUCT, SCALED_CACHING} & set(named):
        raise OptionError(
            f"the rules are {', '.join(named) or 'none'}",
            expected=f"at least one; {FITTED_PRODUCT!r} and {SCALED_CACHING!r} are made here",
            fix=f"the default is {', '.join(DEFAULT_RULES)}",
        )
    for name, each in named.items():
        if not isinstance(each, Rule | TunedRule):
            raise OptionError(f"rule {name!r} is {each!r}", expected="a rule, such as anytime.Product()", fix="create it first")
    return named


def _unseen(given: Rule[Any] | TunedRule, *rows: Rows) -> Rule[Any]:
    """The rule; a tuned one refuses logits of another model and rows that it was tuned on."""
    if isinstance(given, Rule):
        return given
    for each, purpose in zip(rows, ("the calibration", "the test"), strict=True):
        exits, _, classes = each.logits.shape
        given.check_fits(exits, classes)
        given.unseen(each.fingerprints(), purpose=purpose)
    return given.rule


def _fit(
    rules: Mapping[str, Rule[Any]], held: HeldOut
) -> tuple[PowersFit, dict[str, Temperature | None], dict[str, Rule[Any]]]:
    """The fitted product, the temperatures of each rule, and the rules that come of both."""
    logits, labels = held.rows.block(held.fitting, 0), held.rows.labels_of(held.fitting)
    temperatures = {name: _temperature(logits, labels, each) for name, each in rules.items()}
    cached = [found.rule() for name, found in temperatures.items() if found is not None and rules[name] == Caching()]
    fitted: dict[str, Rule[Any]] = {SCALED_CACHING: cached[0]} if cached else {}
    product = fit_powers(logits, labels)
    fitted[FITTED_PRODUCT] = product.rule
    return product, temperatures, fitted


def _temperature(logits: Tensor, labels: Tensor | None, rule: Rule[Any]) -> Temperature | None:
    try:
        return fit_temperature(logits, labels, rule)
    except LabelError:  # every label is outside the support at some exit
        return None


def _set_limits(
    held: HeldOut, combiners: Mapping[str, Combine], sets: Raps, seed: int, block: int, map_in_order: MapInOrder
) -> dict[str, Tensor]:
    chosen = torch.zeros(held.rows.logits.shape[1], dtype=torch.bool)
    chosen[held.calibrating] = True
    return set_thresholds(held.rows, combiners, sets, Split(held.calibrating, chosen, seed), block, map_in_order)


def _log_odds(held: HeldOut, combiners: Mapping[str, Combine], block: int, map_in_order: MapInOrder) -> dict[str, Tensor]:
    """How sure each rule is of the calibrating rows at each exit, `(exits, rows)`, as log-odds."""

    @torch.inference_mode()
    def sure(chosen: Tensor) -> dict[str, Tensor]:
        logits = held.rows.block(chosen, int(chosen[0]))
        return {name: combine(logits).log_odds.double().cpu() for name, combine in combiners.items()}

    parts = list(map_in_order(sure, torch.split(held.calibrating, block)))
    return {name: torch.cat([part[name] for part in parts], 1) for name in combiners}

"""Guarantees: everything that is fitted on calibration rows, measured on test rows that no fit has seen.

A random half of the calibration rows fits the temperatures of each rule and the fitted product. The other half, which these
rules have not seen either, gives the quantiles of the prediction sets and the thresholds of early stopping. All rules are
then fixed, so every test row counts for their certificates.

Every calibration row and every test row is read once. Only the rows to fit on are held in memory; the others are read in
blocks. Data sets contain a few duplicates: if calibration rows turn out to be among the test rows, they are left out and
everything is computed again; from 1 % on they are refused (`OverlapError`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.calibrate import Certificate, DropTally, FittedProduct, Temperature, TunedRule, fit_product, fit_temperature
from anytime.checks import check_fraction, check_number, check_seed, check_shared, exit_costs, fingerprints
from anytime.combine import Caching, Rule
from anytime.combine.named import DEFAULT_RULES, name_of, name_rules, plain_rules
from anytime.conformal import Raps
from anytime.errors import LabelError, OptionError, ShapeError
from anytime.evaluation.blocks import BlockTask, Chunk, LogitRows, calibrate_rows
from anytime.evaluation.engines import Engine, choose_path
from anytime.evaluation.measure import Evaluation, Progress, Setup
from anytime.evaluation.opening import open_rows
from anytime.evaluation.threads import workers
from anytime.metrics import RuleMetrics
from anytime.policy import BudgetCurve, BudgetTally

FITTED_PRODUCT, SCALED_CACHING = "fitted product", "scaled caching"
FITTING_ROWS = 5000
FITTING_NUMBERS = 1 << 26
"""The most logits to fit on, a quarter of a gigabyte: these are held in memory."""
_BEFORE_AFTER = ("ece", "nll", "label_drop_percent", "reliability")
_SETS = ("set_size", "set_coverage", "set_size_rise_percent")


@dataclass(frozen=True)
class Guarantee:
    """What was fitted for one rule, and how it does on the test rows.

    Attributes:
        rule: The rule.
        fitted: Whether the rule itself was fitted on the calibration rows.
        temperature: Its temperatures. None for a fitted rule, which needs none, and for a rule that at some exit gives
            probability 0 to the label of every row, which no temperature can change.
        before: Its metrics on the test rows.
        after: Its metrics at its temperatures, without prediction sets, or None.
        certificate: Bounds on how many future inputs get worse under it.
        budget: Accuracy over mean cost with early stopping.
    """

    rule: Rule[Any]
    fitted: bool
    temperature: Temperature | None
    before: RuleMetrics
    after: RuleMetrics | None
    certificate: Certificate
    budget: BudgetCurve

    def to_json(self) -> dict[str, Any]:
        """A plain document."""
        known, bounds, before = self.temperature, asdict(self.certificate), self.before.to_json()
        after = None if self.after is None else self.after.to_json()
        for name in ("exits", "classes", "text"):
            del bounds[name]
        return {
            "rule": repr(self.rule),
            "fitted": self.fitted,
            "temperature": None if known is None else list(known.temperatures),
            "temperature_at_bound": None if known is None else list(known.at_bound),
            "before": {name: before[name] for name in _BEFORE_AFTER},
            "after": None if after is None else {name: after[name] for name in _BEFORE_AFTER},
            **{name: before[name] for name in _SETS},
            "certificate": {**bounds, "sentences": list(self.certificate.sentences)},
            "accuracy": before["accuracy"],
            "budget": self.budget.to_json(),
        }


@dataclass(frozen=True)
class Guarantees:
    """The result of `measure_guarantees`. `to_json` gives the key `calibration` of `anytime evaluate --calibration --json`.

    Attributes:
        evaluation: The evaluation of the test rows under all rules, those that were fitted last.
        fitting_rows: How many calibration rows fitted temperatures and the product.
        calibrating_rows: How many others gave the quantiles of the sets and the thresholds of early stopping.
        dropped_rows: How many were left out because they are among the test rows.
        drop, strict, confidence: The settings of the certificates.
        sets: The settings of the prediction sets, or None.
        seed: The seed of all random splits and samples.
        product: The fitted product.
        rules: The guarantees of each rule.
    """

    evaluation: Evaluation
    fitting_rows: int
    calibrating_rows: int
    dropped_rows: int
    drop: float
    strict: bool
    confidence: float
    sets: Raps | None
    seed: int
    product: FittedProduct
    rules: dict[str, Guarantee]

    def to_json(self) -> dict[str, Any]:
        """A plain document."""
        numbers = ("fitting_rows", "calibrating_rows", "dropped_rows", "drop", "strict", "confidence", "seed")
        powers = {"past": list(self.product.past), "now": list(self.product.now), "penalty": self.product.penalty}
        return {
            **{name: getattr(self, name) for name in numbers},
            "costs": list(self.evaluation.costs),
            "fitted_product": powers,
            "rules": {name: found.to_json() for name, found in self.rules.items()},
        }


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
    engine: Engine = "auto",
) -> Guarantees:
    """Fit everything that can be fitted on calibration rows, and measure it on test rows.

    The fitted product is added to the rules given and, if `Caching()` is one of them, caching of scaled exits.

    Args:
        test: The path of a file, the result of `open_logits`, or a pair of logits `(exits, samples, classes)` and labels.
        calibration: The same for other rows of the same model, held out from its training.
        rules: Rules by name or as objects, or a mapping from names to rules. A tuned rule must have seen none of the rows.
        costs: Cumulative cost up to each exit, for the budget curves.
        drop: The loss of the label's probability that the certificates bound.
        confidence: The confidence of each certificate.
        probabilities: Whether logits are probabilities (or their logarithms); otherwise such input is refused.
        strict: Count drops above a threshold rather than at or above it.
        sets: Settings of the prediction sets; None for none.
        seed: For the split of the calibration rows, the randomised sets and the sample of inputs.
        progress: Called with the number of test rows done and the total.
        engine: As for `evaluate`.

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
    rows, held = (_labelled(given, probabilities, what) for given, what in ((test, "test"), (calibration, "calibration")))
    (exits, _, classes), (held_exits, held_samples, held_classes) = rows.logits.shape, held.logits.shape
    if (held_exits, held_classes) != (exits, classes):
        raise ShapeError(
            f"the calibration rows have {held_exits} exits and {held_classes} classes",
            expected=f"{exits} exits and {classes} classes, like the test rows",
            fix="compute both logits with the same model",
        )
    named = name_rules(rules)
    plain = plain_rules(named, exits, classes)
    for name, each in plain.items():
        if name in (FITTED_PRODUCT, SCALED_CACHING) or not isinstance(each, Rule):
            raise OptionError(
                f"rule {name!r} is {each!r}",
                expected=f"a rule, named neither {FITTED_PRODUCT!r} nor {SCALED_CACHING!r}",
                fix="pass rules such as anytime.Product(), under other names",
            )
    setup = Setup(exit_costs(costs, exits), costs is not None, strict, seed, labelled=True)

    def attempt(kept: Tensor) -> tuple[Guarantees, Tensor]:
        return _measure(
            setup,
            rows,
            held,
            kept,
            named,
            plain,
            sets=sets,
            drop=float(drop),
            confidence=float(confidence),
            engine=engine,
            progress=progress,
        )

    found, shared = attempt(torch.arange(held_samples))
    if shared.any():
        found, _ = attempt((~shared).nonzero()[:, 0])
    rows.check()
    held.check()
    return found


def _measure(
    setup: Setup,
    rows: LogitRows,
    held: LogitRows,
    kept: Tensor,
    named: Mapping[str, Any],
    plain: Mapping[str, Rule[Any]],
    *,
    sets: Raps | None,
    drop: float,
    confidence: float,
    engine: Engine,
    progress: Progress | None,
) -> tuple[Guarantees, Tensor]:
    """The guarantees from the calibration rows `kept`, and which of all calibration rows are among the test rows."""
    exits, _, classes = held.logits.shape
    fitting, calibrating = _split(kept, exits * classes, setup.seed)
    logits, labels = held.block(fitting, 0), held.labels_of(fitting)
    product, temperatures, fitted = _fit(plain, logits, labels)
    every = {**plain, **fitted}
    combiners = {name: each.combine for name, each in every.items()}
    scaled = {("scaled", name): each.rule.combine for name, each in temperatures.items() if each is not None}
    request = BlockTask(combiners, log_odds=every, fingerprints=True)
    request = replace(request, path=choose_path(engine, rows, request))
    tuned = {name: each for name, each in named.items() if isinstance(each, TunedRule)}
    seen = dict.fromkeys(tuned, 0)
    samples = rows.logits.shape[1]
    with workers(len(setup.chunks(samples, exits, classes, "compiled"))) as map_in_order:
        thresholds, log_odds, calibration_prints = calibrate_rows(
            held, request, sets, calibrating, seed=setup.seed, block=setup.block(exits, classes), map_in_order=map_in_order
        )
        held_prints = torch.cat((fingerprints(logits), calibration_prints))
        for each in tuned.values():
            each.unseen(held_prints, purpose="the calibration")
        among = torch.zeros(len(held_prints), dtype=torch.bool)
        budgets = {name: BudgetTally(log_odds[name]) for name in every}
        drops = {name: DropTally(drop, strict=setup.strict) for name in every}

        def add(chunk: Chunk) -> None:
            among.logical_or_(torch.isin(held_prints, chunk.fingerprints))
            for name, rule in tuned.items():
                seen[name] += int(torch.isin(chunk.fingerprints, rule.seen).sum())
            for name in every:
                found = chunk.rules[name]
                assert found.seen.correct is not None  # test rows have labels
                assert found.log_odds is not None
                budgets[name].add(found.log_odds, found.seen.correct)
                drops[name].add(found.seen)

        request = replace(request, combiners={**combiners, **scaled}, sets=thresholds)
        sums = setup.measure(rows, request, list(every), map_in_order, add, sample=setup.sample(samples), progress=progress)
    evaluation, metrics = setup.evaluation(sums, rows, request, list(every))
    for name, rule in tuned.items():
        rule.check_unseen(seen[name], samples, purpose="the test")
    check_shared(int(among.sum()), len(among), names=("calibration rows", "the test rows"))
    shared = torch.zeros(held.logits.shape[1], dtype=torch.bool)
    shared[torch.cat((fitting, calibrating))[among]] = True
    guarantees = Guarantees(
        evaluation=evaluation,
        fitting_rows=len(fitting),
        calibrating_rows=len(calibrating),
        dropped_rows=len(shared) - len(kept),
        drop=drop,
        strict=setup.strict,
        confidence=confidence,
        sets=sets,
        seed=setup.seed,
        product=product,
        rules={
            name: Guarantee(
                rule=each,
                fitted=name in fitted,
                temperature=temperatures.get(name),
                before=metrics[name],
                after=metrics.get(("scaled", name)),
                certificate=drops[name].certificate(name_of(each), exits, classes, confidence),
                budget=budgets[name].curve(setup.costs),
            )
            for name, each in every.items()
        },
    )
    return guarantees, shared


def _labelled(given: Any, probabilities: bool, what: str) -> LogitRows:
    logits, labels = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    rows = open_rows(logits, labels, probabilities)
    if rows.labels is None:
        path = getattr(given, "path", given if isinstance(given, str | Path) else None)
        raise LabelError(
            f"the {what} rows{'' if path is None else f' in {path}'} have no labels",
            expected="labels for both test and calibration rows: the guarantees are about them",
            fix="save both: numpy.savez('logits.npz', logits=logits, labels=labels)",
        )
    return rows


def _split(kept: Tensor, row_numbers: int, seed: int) -> tuple[Tensor, Tensor]:
    """A random half of the rows, at most `FITTING_ROWS`, to fit on, and the others; both in order."""
    if len(kept) < 2:
        raise ShapeError(
            f"{len(kept)} calibration rows", expected="at least two, better a thousand", fix="hold out more rows of the data"
        )
    order = kept[torch.from_numpy(np.random.default_rng([seed, 4]).permutation(len(kept)))]
    count = max(1, min(len(kept) // 2, FITTING_ROWS, FITTING_NUMBERS // row_numbers))
    return order[:count].sort().values, order[count:].sort().values


def _fit(
    rules: Mapping[str, Rule[Any]], logits: Tensor, labels: Tensor | None
) -> tuple[FittedProduct, dict[str, Temperature | None], dict[str, Rule[Any]]]:
    """The fitted product, the temperatures of each rule, and the rules that are made of both."""
    temperatures = {name: _temperature(logits, labels, each) for name, each in rules.items()}
    cached = [found.rule for name, found in temperatures.items() if found is not None and rules[name] == Caching()]
    fitted: dict[str, Rule[Any]] = {SCALED_CACHING: cached[0]} if cached else {}
    product = fit_product(logits, labels)
    fitted[FITTED_PRODUCT] = product.rule
    return product, temperatures, fitted


def _temperature(logits: Tensor, labels: Tensor | None, rule: Rule[Any]) -> Temperature | None:
    try:
        return fit_temperature(logits, labels, rule)
    except LabelError:  # every label is outside the support at some exit
        return None

"""`anytime conformal CALIBRATION TEST`: prediction sets fitted on one file of logits and measured on another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anytime.cli.options import Flag, print_json
from anytime.errors import OptionError
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from torch import Tensor

    from anytime.conformal import ConformalSets, NestedSets, SetMetrics

Variant = Literal["paper", "original", "aps", "nested"]


def conformal(
    calibration: Path,
    test: Path,
    /,
    *,
    alpha: float = 0.05,
    rule: str | None = None,
    variant: Variant = "paper",
    simultaneous: Flag = False,
    shared: Flag = False,
    out: Path | None = None,
    json: Flag = False,
    seed: int = 0,
) -> int:
    """Fit prediction sets on one file of logits and measure size, coverage, rises and nestedness on another.

    Args:
        calibration: `.npz` or `.safetensors` with `logits` (exits, samples, classes) and `labels`, held out from training.
        test: The same for other rows.
        alpha: Fraction of labels that the sets may miss.
        rule: The rule that the sets are fitted for, such as `caching`, `product(softplus, weights=ones)` or the file of a
            fitted rule; default `product`.
        variant: RAPS as in the paper's code; the original with temperature, λ and k_reg chosen on 30 % of CALIBRATION; APS,
            without penalty; or sets that are nested over the exits, which need no rule.
        simultaneous: Calibrate all exits together, so that the label is in the sets of all exits, and intersect the sets.
        shared: Use one random number per input for all exits instead of one per exit.
        out: File for the fitted sets.
        json: Print one JSON document instead of the table.
        seed: Of the tuning split and all random numbers.
    """
    from anytime.artifacts import json_text, write_text
    from anytime.cli.logits import leave_out_shared, refuse_same_file
    from anytime.cli.rules import rule_from
    from anytime.conformal import fit_nested_sets, measure_sets
    from anytime.evaluation import open_logits
    from anytime.fitted import check_saving

    given = {"--rule": rule is not None, "--simultaneous": simultaneous, "--shared": shared}
    if variant == "nested" and any(given.values()):
        extra = " and ".join(name for name, present in given.items() if present)
        raise OptionError(
            f"--variant nested with {extra}",
            expected="--variant nested alone: nested sets use the logits, not a rule, and already cover all exits together",
            fix=f"drop {extra}",
        )
    if out is not None:
        check_saving(out, "conformal-sets", "nested-sets", inputs=(calibration, test))
    fit_rows, test_rows = _read(calibration), _read(test)
    refuse_same_file(calibration, fit_rows[1], test, test_rows[1])
    fit_rows = leave_out_shared(fit_rows, test_rows, calibration.name)
    fitted: ConformalSets | NestedSets
    if variant == "nested":
        fitted = fit_nested_sets(*fit_rows, alpha=alpha, seed=seed)
    else:
        known = rule_from(rule or "product", open_logits(calibration), purpose="calibration")
        fitted = _fit(variant, *fit_rows, alpha, known, simultaneous=simultaneous, shared=shared, seed=seed)
    logits, labels = test_rows
    fitted.check_fits(logits.shape[0], logits.shape[2])
    metrics = measure_sets(_members(fitted, logits, seed), labels)
    if out is not None:
        write_text(out, json_text(fitted.document()))
        print(f"sets: {out}", file=sys.stderr)
    if json:
        print_json(_document(fitted, metrics, variant, seed, len(labels)))
    else:
        what = "nested sets" if variant == "nested" else f"{variant} sets of {rule or 'product'}"
        _print(fitted, metrics, what, len(labels))
    return 0


def _read(path: Path) -> tuple[Tensor, Tensor]:
    from anytime.checks import check_labelled, check_scale
    from anytime.cli.logits import labels_of
    from anytime.evaluation import open_logits

    source = open_logits(path)
    logits, labels = check_labelled(source.logits[...], labels_of(source, option=None))
    check_scale(logits[:, :2048])
    return logits, labels


def _fit(
    variant: Variant, logits: Tensor, labels: Tensor, alpha: float, rule: Any, *, simultaneous: bool, shared: bool, seed: int
) -> ConformalSets:
    from anytime.calibrate import fit_temperature
    from anytime.conformal import Raps, fit_conformal_sets, tuning_split

    used, tune = rule, variant == "original"
    raps = Raps(alpha, lam_reg=0.0) if variant == "aps" else Raps(alpha)
    if tune:
        # The rows that choose λ and k_reg also fit the temperature: those of the quantile must be unseen.
        chosen, _ = tuning_split(len(labels), seed)
        used = fit_temperature(logits[:, chosen], labels[chosen], used).rule
        raps = Raps(alpha, variant="original")
    return fit_conformal_sets(
        logits, labels, rule=used, raps=raps, tune=tune, simultaneous=simultaneous, shared=shared, seed=seed
    )


def _members(fitted: ConformalSets | NestedSets, logits: Tensor, seed: int) -> Tensor:
    from anytime.conformal import NestedSets, running_intersection

    if isinstance(fitted, NestedSets):
        return fitted(logits, seed=seed).members
    assert fitted.rule is not None  # fitted here, for a rule
    members = fitted.sets(fitted.rule(logits).log_probs, seed=seed)
    return running_intersection(members) if fitted.simultaneous else members


def _document(
    fitted: ConformalSets | NestedSets, metrics: SetMetrics, variant: Variant, seed: int, rows: int
) -> dict[str, Any]:
    from dataclasses import asdict

    head = {"exits": fitted.exits, "classes": fitted.classes, "calibration_rows": fitted.rows, "samples": rows}
    names = {"alpha": "alpha", "rule": "text", "simultaneous": "simultaneous", "shared": "shared"}
    settings = {name: getattr(fitted, field, None) for name, field in names.items()}
    return {**head, "variant": variant, **settings, "seed": seed, **asdict(metrics)}


def _print(fitted: ConformalSets | NestedSets, metrics: SetMetrics, what: str, rows: int) -> None:
    from anytime.cli.console import print_line, print_table
    from anytime.conformal import NestedSets

    goal = f"{100 * (1 - fitted.alpha):g} %"
    percents = (metrics.coverage, metrics.simultaneous_coverage, metrics.empty)
    cells = [
        (str(exit), f"{size:.2f}", *(f"{100 * values[exit - 1]:.2f}" for values in percents), f"{nested:.3f}")
        for exit, (size, nested) in enumerate(zip(metrics.size, metrics.nestedness, strict=True), 1)
    ]
    title = f"{what}: fitted on {fitted.rows:,} rows for {goal}, measured on {rows:,}"
    print_table(("exit", "size", "coverage %", "in all so far %", "empty %", "nestedness"), cells, title=title)
    rises = ", ".join(f"{percent:.2f} % by ≥ {limit}" for limit, percent in metrics.size_rise_percent.items())
    print_line(f"sets that grow: {rises}")
    if isinstance(fitted, NestedSets) and not fitted.reached:
        print_line(f"no thresholds reach {goal} on the fitting rows: {100 * fitted.coverage[-1]:.2f} %")

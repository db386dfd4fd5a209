"""`anytime conformal CALIBRATION TEST`: prediction sets fitted on one file of logits and measured on another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from anytime.errors import FormatError, OptionError
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from torch import Tensor

    from anytime.conformal import ConformalSets, NestedSets, SetMetrics

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
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
    """Fit prediction sets on one file of logits and measure size, coverage, rise and nestedness on another.

    Args:
        calibration: `.npz` or `.safetensors` with `logits` (exits, samples, classes) and `labels`, held out from training.
        test: The same with other rows.
        alpha: Share of labels that the sets may miss.
        rule: The rule whose answers get sets, such as `caching` or `product(softplus, weights=ones)`; without it, `product`.
        variant: RAPS as in the paper's code; the original with temperature, λ and k_reg chosen on 30 % of CALIBRATION; APS,
            without penalty; or sets that are nested over the exits, which read the logits and need no rule.
        simultaneous: Calibrate all exits together, so that labels are in the sets of all exits at once, and intersect the sets.
        shared: Use one draw an input for all exits instead of fresh ones.
        out: File for the fitted sets.
        json: Print one JSON document instead of the table.
        seed: Of the tuning split and all draws.
    """
    from anytime.cli.overlap import leave_out_shared, refuse_same_file
    from anytime.conformal import fit_nested_sets, measure_sets
    from anytime.fitted import check_saving

    given = {"--rule": rule is not None, "--simultaneous": simultaneous, "--shared": shared}
    if variant == "nested" and any(given.values()):
        raise OptionError(
            f"--variant nested came with {', '.join(name for name, came in given.items() if came)}",
            expected="neither: nested sets read the logits, draw at every exit and are about all exits as they are",
            fix="leave it out",
        )
    if out is not None:
        check_saving(out, "nested-sets" if variant == "nested" else "conformal-sets", inputs=(calibration, test))
    fit_rows, test_rows = _read(calibration), _read(test)
    refuse_same_file(calibration, fit_rows[1], test, test_rows[1])
    fit_rows = leave_out_shared(fit_rows, test_rows, calibration.name)
    fitted: ConformalSets | NestedSets
    if variant == "nested":
        fitted = fit_nested_sets(*fit_rows, alpha=alpha, seed=seed)
    else:
        fitted = _fit(variant, *fit_rows, alpha, rule or "product", simultaneous=simultaneous, shared=shared, seed=seed)
    logits, labels = test_rows
    fitted.check_fits(logits.shape[0], logits.shape[2])
    figures = measure_sets(_members(fitted, logits, seed), labels)
    if out is not None:
        print(f"sets: {fitted.save(out)}", file=sys.stderr)
    if json:
        import json as writer

        print(writer.dumps(_document(fitted, figures, variant, seed, len(labels)), allow_nan=False))
    else:
        what = "nested sets" if variant == "nested" else f"{variant} sets of {rule or 'product'}"
        _print_table(fitted, figures, what, len(labels))
    return 0


def _read(path: Path) -> tuple[Tensor, Tensor]:
    from anytime.checks import check_labels, check_logits, check_scale
    from anytime.evaluation import open_logits

    file = open_logits(path)
    if file.labels is None:
        raise FormatError(
            f"{path} has no 'labels'",
            expected="'logits' and 'labels': coverage is about labels",
            fix="save both: numpy.savez('logits.npz', logits=logits, labels=labels)",
            path=path,
        )
    logits = check_logits(file.logits[:] if file.logits.ndim == 3 else file.logits[...])
    check_scale(logits[:, :2048])
    return logits, check_labels(file.labels, batch=logits.shape[1], classes=logits.shape[2])


def _fit(
    variant: Variant, logits: Tensor, labels: Tensor, alpha: float, rule: str, *, simultaneous: bool, shared: bool, seed: int
) -> ConformalSets:
    from anytime.calibrate import fit_temperature
    from anytime.combine import parse_rule
    from anytime.conformal import Raps, fit_conformal_sets, tuning_split

    known, tune = parse_rule(rule), variant == "original"
    raps = Raps(alpha)
    if variant == "aps":
        raps = Raps(alpha, lam_reg=0.0)
    if variant == "original":
        # The rows that choose λ and k_reg fit the temperature too: those of the quantile must not have been seen.
        chosen, _ = tuning_split(len(labels), seed)
        known = fit_temperature(logits[:, chosen], labels[chosen], known).rule
        raps = Raps(alpha, variant="original")
    return fit_conformal_sets(
        logits, labels, rule=known, raps=raps, tune=tune, simultaneous=simultaneous, shared=shared, seed=seed
    )


def _members(fitted: ConformalSets | NestedSets, logits: Tensor, seed: int) -> Tensor:
    from anytime.conformal import NestedSets, running_intersection

    if isinstance(fitted, NestedSets):
        return fitted(logits, seed=seed).members
    assert fitted.rule is not None  # fitted here, for a rule
    members = fitted.sets(fitted.rule(logits).log_probs, seed=seed)
    return running_intersection(members) if fitted.simultaneous else members


def _document(
    fitted: ConformalSets | NestedSets, figures: SetMetrics, variant: Variant, seed: int, rows: int
) -> dict[str, Any]:
    from dataclasses import asdict

    head = {"exits": fitted.exits, "classes": fitted.classes, "calibration_rows": fitted.rows, "samples": rows}
    names = {"alpha": "alpha", "rule": "text", "simultaneous": "simultaneous", "shared": "shared"}
    settings = {name: getattr(fitted, field, None) for name, field in names.items()}
    return {**head, "variant": variant, **settings, "seed": seed, **asdict(figures)}


def _print_table(fitted: ConformalSets | NestedSets, figures: SetMetrics, what: str, rows: int) -> None:
    from rich.table import Table

    from anytime.cli.console import make_console
    from anytime.conformal import NestedSets

    asked = f"{100 * (1 - fitted.alpha):g} %"
    table = Table(title=f"{what}: {fitted.rows:,} rows for {asked}, measured on {rows:,}", title_justify="left")
    for name in ("exit", "size", "coverage %", "in all so far %", "empty %", "nestedness"):
        table.add_column(name, justify="right")
    columns = zip(figures.size, figures.coverage, figures.simultaneous_coverage, figures.empty, figures.nestedness, strict=True)
    for exit, (size, coverage, all_so_far, empty, nested) in enumerate(columns, 1):
        shares = (f"{100 * share:.2f}" for share in (coverage, all_so_far, empty))
        table.add_row(str(exit), f"{size:.2f}", *shares, f"{nested:.3f}")
    console = make_console()
    console.print(table)
    rises = ", ".join(f"{share:.2f} % by ≥ {limit}" for limit, share in figures.size_rise_percent.items())
    console.print(f"sets that grow: {rises}", soft_wrap=True)
    if isinstance(fitted, NestedSets) and not fitted.reached:
        console.print(f"no thresholds reach {asked} on the rows to fit: {100 * fitted.coverage[-1]:.2f} %", soft_wrap=True)

"""`anytime evaluate FILE`: the paper's figures for saved logits, as a table, JSON or a folder with a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from anytime.errors import OptionError
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytime.evaluation import Evaluation, Guarantee, Guarantees

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]


def evaluate(
    file: Path,
    /,
    *,
    labels: Path | None = None,
    calibration: Path | None = None,
    rules: str = "latest,caching,product",
    costs: str | None = None,
    out: Path | None = None,
    json: Flag = False,
    probabilities: Flag = False,
    strict: Flag = False,
    sets: Literal["paper", "original", "none"] = "paper",
    seed: int = 0,
) -> int:
    """Measure how anytime a model is, from the logits of its exits.

    Args:
        file: `.npz` or `.safetensors` with `logits` (exits, samples, classes) and `labels`, or `.npy` with logits.
        labels: A file with the labels, if they are not in FILE.
        calibration: A file with `logits` and `labels` of other rows, held out from training: temperatures, the fitted product,
            prediction sets and thresholds of stopping are fitted on them, and all inputs of FILE show what they are worth.
        rules: Rules to compare, such as `latest,product,product(softplus, weights=ones)`, or the rule.json of a tuning.
        costs: Cumulative cost up to each exit, such as `15.1,25.5,37.1`.
        out: Folder for config.yaml, metrics.json, per_exit.csv, report.html and environment.json.
        json: Print one JSON document instead of the table.
        probabilities: FILE holds probabilities (or their logarithms), not logits.
        strict: Count drops above a threshold, as the paper's released code does, not at or above it.
        sets: Prediction sets as in the paper's released code, as in the original RAPS, or none.
        seed: For the calibration split, the randomised sets and the sample of inputs.
    """
    from anytime.cli.overlap import refuse_same_file
    from anytime.cli.progress import rows_bar
    from anytime.cli.rules import rule_files, rules_from
    from anytime.conformal import Raps
    from anytime.evaluation import evaluate as measure
    from anytime.evaluation import measure_guarantees, open_logits
    from anytime.outputs import check_folder

    if out is not None:
        check_folder(out, kind="evaluate", inputs=(file, labels, calibration, *rule_files(rules)))
    source = open_logits(file, labels)
    named: dict[str, Any] = dict(rules_from(rules, source))
    options: dict[str, Any] = {
        "costs": None if costs is None else numbers(costs, "costs"),
        "probabilities": probabilities,
        "strict": strict,
        "seed": seed,
    }
    raps = None if sets == "none" else Raps(variant=sets)
    guaranteed = None
    if calibration is not None:
        held_out = open_logits(calibration)
        # Equal logits are found when the rows are read, in blocks; a few of them may be.
        refuse_same_file(held_out.path, held_out.labels, source.path, source.labels)
        with rows_bar("fitting and measuring") as progress:
            guaranteed = measure_guarantees(source, held_out, rules=named, sets=raps, progress=progress, **options)
        found = guaranteed.evaluation
    else:
        with rows_bar("evaluating") as progress:
            found = measure(source, rules=named, sets=raps, progress=progress, **options)
    held = None if calibration is None else calibration.name
    show(found, source=file.name, out=out, json=json, guaranteed=guaranteed, calibration=held)
    return 0


def show(
    found: Evaluation,
    *,
    source: str,
    out: Path | None,
    json: bool,
    title: str | None = None,
    guaranteed: Guarantees | None = None,
    calibration: str | None = None,
    kind: str = "evaluate",
    more: Mapping[str, bytes] | None = None,
) -> None:
    """Write the folder if one is asked for, then print the table or the document."""
    from anytime.cli.table import print_table
    from anytime.report.folder import document, write_folder
    from anytime.report.pages.guarantees import dropped
    from anytime.report.pages.verdict import advice_on_few_classes

    if guaranteed is not None and guaranteed.dropped_rows:
        print(f"anytime: {dropped(guaranteed, str(calibration))}", file=sys.stderr)
    if said := advice_on_few_classes(found):
        print(f"anytime: {said}", file=sys.stderr)
    if out is not None:
        from anytime.cli.doctor import environment

        report = write_folder(
            out,
            found,
            source=source,
            environment=environment(),
            title=title,
            guarantees=guaranteed,
            calibration=calibration,
            kind=kind,
            more=more,
        )
        print(f"report: {report}", file=sys.stderr)
    if json:
        import json as writer

        print(writer.dumps(document(found, guaranteed), allow_nan=False))
    else:
        print_table(found)
        if guaranteed is not None:
            print_guarantees(guaranteed, str(calibration))


def print_guarantees(found: Guarantees, calibration: str) -> None:
    """Print what was fitted and can be guaranteed to stdout, one row a rule."""
    from rich.table import Table

    from anytime.calibrate.certify import rounded_down, rounded_up
    from anytime.cli.console import make_console
    from anytime.report.numbers import fraction
    from anytime.report.pages.guarantees import at_cost

    middle = (found.evaluation.costs[0] + found.evaluation.costs[-1]) / 2
    rows = f"{found.fitting_rows:,} rows to fit, {found.calibrating_rows:,} for sets and thresholds"
    table = Table(title=f"calibrated on {calibration}: {rows}", title_justify="left")
    table.add_column("rule")
    loss = f"{'>' if found.strict else '≥'} {found.drop:g}"
    for name in (
        "ECE → scaled",
        "NLL → scaled",
        f"lose {loss}, at most",
        "stay right, at least",
        f"right for a cost of {middle:g}",
    ):
        table.add_column(name, justify="right")
    for name, each in found.rules.items():
        bounds = rounded_up(each.certificate.joint_drop_bound), rounded_down(each.certificate.joint_monotone_bound)
        table.add_row(name, _change(each, "ece"), _change(each, "nll"), *bounds, fraction(at_cost(each, middle)))
    console = make_console()
    console.print(table)
    console.print(
        f"Both bounds of a rule hold at once with {100 * found.confidence:g} % confidence, each rule by itself. Temperatures "
        "are fitted at each exit; ECE and NLL are means over the exits.",
        soft_wrap=True,
        highlight=False,
    )


def _change(found: Guarantee, key: str) -> str:
    states = [getattr(state, key) for state in (found.before, found.after) if state is not None]
    return " → ".join(f"{sum(state) / len(state):.3f}" for state in states)


def numbers(text: str, name: str) -> list[float]:
    """Numbers from a list with commas.

    >>> numbers("1, 2.5,4e3", "costs")
    [1.0, 2.5, 4000.0]
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(
            f"--{name} is {text!r}", expected="numbers with commas between, such as 15.1,25.5,37.1", fix="leave other signs out"
        ) from None

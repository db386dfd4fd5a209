"""`anytime evaluate FILE`: the metrics of saved logits, as a table, as JSON, or as a folder with a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anytime.cli.options import Flag, numbers, print_json
from anytime.errors import OptionError
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytime.evaluation import Evaluation, Guarantee, Guarantees


def evaluate(
    file: Path,
    /,
    *more: Path,
    labels: Path | None = None,
    calibration: Path | None = None,
    rules: str = "latest,caching,product",
    costs: str | None = None,
    out: Path | None = None,
    json: Flag = False,
    probabilities: Flag = False,
    strict: Flag = False,
    sets: Literal["paper", "original", "none"] = "paper",
    class_dim: int | None = None,
    ignore_index: int | None = None,
    seed: int = 0,
    engine: Literal["auto", "plain", "compiled"] = "auto",
    processes: int | None = None,
) -> int:
    """Measure how anytime a model is, from the logits of its exits.

    Args:
        file: `.npz` or `.safetensors` with `logits` (exits, samples, classes) and `labels`, or `.npy` with logits; `.parquet`,
            `.arrow` or `.feather` with a list of lists per row; a folder or a glob of such files, whose rows all count; or the
            folder of a training run or of a published run, whose test logits are used.
        more: Further files, folders or globs.
        labels: A file with the labels, if FILE has none; of several files a folder or a glob with one for each.
        calibration: A file with `logits` and `labels` of other rows, held out from training: temperatures, the fitted product,
            prediction sets and stopping thresholds are fitted on them and measured on FILE.
        rules: Rules to compare, such as `latest,product,product(softplus, weights=ones)`, or the rule.json of a tuning.
        costs: Cumulative cost up to each exit, such as `15.1,25.5,37.1`.
        out: Folder for config.yaml, metrics.json, per_exit.csv, report.html and environment.json.
        json: Print one JSON document instead of the table.
        probabilities: FILE has probabilities (or their logarithms), not logits.
        strict: Count drops above a threshold, as the paper's released code does, not at or above it.
        sets: Prediction sets as in the paper's released code, as in the original RAPS, or none.
        class_dim: For logits of pixels or tokens, the dimension of the classes: 2 for (exits, samples, classes, height, width).
        ignore_index: The label of positions to leave out, such as 255.
        seed: For the calibration split, the randomised sets and the sample of inputs.
        engine: Compiled code, PyTorch (plain), or compiled code where it saves time (auto).
        processes: How many processes read files; by default one per core if the files are large. With --out, sums of what is
            done are kept in OUT.partial, and the same command continues after an interruption.
    """
    from anytime.cli.console import progress_bar
    from anytime.cli.logits import logits_files, refuse_same_file
    from anytime.cli.rules import rule_files, rules_from
    from anytime.conformal import Raps
    from anytime.evaluation import evaluate as measure
    from anytime.evaluation import measure_guarantees, open_logits
    from anytime.outputs import check_folder

    if class_dim is not None and calibration is not None:
        raise OptionError(
            f"--class-dim {class_dim} with --calibration",
            expected="one of them: certificates need rows that are independent, and the positions of an input are not",
            fix="omit --calibration; temperatures for positions come from anytime.fit_temperature(..., class_dim=2)",
        )
    files = logits_files((file, *more))
    if calibration is not None and len(files) > 1:
        raise OptionError(
            f"--calibration with {len(files)} files",
            expected="one file of test rows, on which the guarantees are measured",
            fix="save the test rows as one file, or omit --calibration",
        )
    if out is not None:
        check_folder(out, kind="evaluate", inputs=(*files, labels, calibration, *rule_files(rules)))
    options: dict[str, Any] = {
        "costs": None if costs is None else numbers(costs, "costs"),
        "probabilities": probabilities,
        "strict": strict,
        "sets": None if sets == "none" else Raps(variant=sets),
        "seed": seed,
        "engine": engine,
    }
    guaranteed = None
    if calibration is None:
        if class_dim is None and ignore_index is None:
            options |= {"processes": processes, "work": None if out is None else f"{out.resolve()}.partial"}
        tuned = open_logits(files[0], labels) if len(files) == 1 and rule_files(rules) else None
        with progress_bar("evaluating") as progress:
            options |= {"rules": dict(rules_from(rules, tuned)), "progress": progress}
            found = measure(files, labels, class_dim=class_dim, ignore_index=ignore_index, **options)
    else:
        source, held_out = open_logits(files[0], labels), open_logits(calibration)
        # Equal logits are detected block by block while the rows are read.
        refuse_same_file(held_out.path, held_out.labels, source.path, source.labels)
        with progress_bar("fitting and measuring") as progress:
            named = dict(rules_from(rules, source))
            guaranteed = measure_guarantees(source, held_out, rules=named, progress=progress, **options)
        found = guaranteed.evaluation
    held = None if calibration is None else calibration.name
    name = files[0].name if len(files) == 1 else f"{len(files)} files"
    show(found, source=name, out=out, json=json, guaranteed=guaranteed, calibration=held)
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
    """Write the folder if there is one, then print the table or the document."""
    from anytime.cli.console import show_table
    from anytime.report.folder import document, write_folder
    from anytime.report.pages.guarantees import dropped
    from anytime.report.pages.verdict import advice_on_few_classes, verdict

    if guaranteed is not None and guaranteed.dropped_rows:
        print(f"anytime: {dropped(guaranteed, str(calibration))}", file=sys.stderr)
    if advice := advice_on_few_classes(found):
        print(f"anytime: {advice}", file=sys.stderr)
    if out is not None:
        from anytime.installed import environment

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
        print_json(document(found, guaranteed))
    else:
        show_table(found.table())
        print(f"\n{verdict(found).sentences[0]}")
        if guaranteed is not None:
            print_guarantees(guaranteed, str(calibration))


def print_guarantees(found: Guarantees, calibration: str) -> None:
    """Print what was fitted and is guaranteed to stdout, one row per rule."""
    from anytime.cli.console import print_line, print_table
    from anytime.display.numbers import fraction, rounded_down, rounded_up
    from anytime.report.pages.guarantees import at_cost

    middle = (found.evaluation.costs[0] + found.evaluation.costs[-1]) / 2
    rows = []
    for name, each in found.rules.items():
        bounds = rounded_up(each.certificate.joint_drop_bound), rounded_down(each.certificate.joint_monotone_bound)
        rows.append((name, _change(each, "ece"), _change(each, "nll"), *bounds, fraction(at_cost(each, middle))))
    drop = f"{'>' if found.strict else '≥'} {found.drop:g}"
    print_table(
        (
            "rule",
            "ECE → scaled",
            "NLL → scaled",
            f"drop {drop}, at most",
            "stay correct, at least",
            f"correct at a cost of {middle:g}",
        ),
        rows,
        title=f"calibrated on {calibration}: {found.fitting_rows:,} rows for fitting, {found.calibrating_rows:,} for sets and "
        "thresholds",
    )
    print_line(
        f"The two bounds of a rule hold jointly with {100 * found.confidence:g} % confidence, for each rule separately. "
        "Temperatures are fitted per exit; ECE and NLL are means over the exits."
    )


def _change(found: Guarantee, key: str) -> str:
    states = [getattr(state, key) for state in (found.before, found.after) if state is not None]
    return " → ".join(f"{sum(state) / len(state):.3f}" for state in states)

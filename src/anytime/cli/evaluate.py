"""`anytime evaluate FILE`: the paper's figures for saved logits, as a table, JSON or a folder with a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from anytime.errors import OptionError

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]


def evaluate(
    file: Path,
    /,
    *,
    labels: Path | None = None,
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
        rules: Rules to compare, such as `latest,product,product(softplus, weights=ones)`.
        costs: Cumulative cost up to each exit, such as `15.1,25.5,37.1`.
        out: Folder for config.yaml, metrics.json, per_exit.csv, report.html and environment.json.
        json: Print one JSON document instead of the table.
        probabilities: FILE holds probabilities (or their logarithms), not logits.
        strict: Count drops above a threshold, as the paper's released code does, not at or above it.
        sets: Prediction sets as in the paper's released code, as in the original RAPS, or none.
        seed: For the calibration split, the randomised sets and the sample of inputs.
    """
    from anytime.cli.progress import rows_bar
    from anytime.combine.named import rules_in
    from anytime.conformal import Raps
    from anytime.evaluation import evaluate as measure
    from anytime.evaluation import open_logits

    source = open_logits(file, labels)
    with rows_bar("evaluating") as progress:
        found = measure(
            source,
            rules=rules_in(rules),
            costs=None if costs is None else numbers(costs, "costs"),
            probabilities=probabilities,
            strict=strict,
            sets=None if sets == "none" else Raps(variant=sets),
            seed=seed,
            progress=progress,
        )
    show(found, source=file.name, out=out, json=json)
    return 0


def show(found: Evaluation, *, source: str, out: Path | None, json: bool, title: str | None = None) -> None:
    """Write the folder if one is asked for, then print the table or the document."""
    from anytime.cli.table import print_table

    if out is not None:
        from anytime.cli.doctor import environment
        from anytime.report import write_folder

        report = write_folder(out, found, source=source, environment=environment(), title=title)
        print(f"report: {report}", file=sys.stderr)
    if json:
        import json as writer

        print(writer.dumps(found.to_json(), allow_nan=False))
    else:
        print_table(found)


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

"""The folder of a run: `config.yaml metrics.json per_exit.csv report.html environment.json`, written as one."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytime.artifacts import json_text, write_bundle
from anytime.report.pages.measures import MEASURES
from anytime.report.pages.page import render
from anytime.safe_text import csv_cell

if TYPE_CHECKING:
    from anytime.evaluation import Evaluation, Guarantees

_VERSIONS = ("torch", "numpy")
FITTED = "fitted-product.json"


def write_folder(
    folder: str | Path,
    evaluation: Evaluation,
    *,
    source: str,
    environment: Mapping[str, Any],
    title: str | None = None,
    guarantees: Guarantees | None = None,
    calibration: str | None = None,
    kind: str = "evaluate",
    more: Mapping[str, bytes] | None = None,
) -> Path:
    """Write everything an evaluation has to say into a folder.

    Args:
        folder: Where; made if it is not there.
        evaluation: What was measured.
        source: The name of the file with the logits.
        environment: What it was measured with, as `anytime doctor` finds it.
        title: The title of the report; the source without its ending if left out.
        guarantees: What was fitted on calibration rows and measured on the same inputs; the fitted product is saved with it.
        calibration: The name of the file with the calibration rows.
        kind: Which command writes it: a later call replaces the folder of the same one only.
        more: Further files, by name.

    Returns:
        The path of the report.
    """
    page = render(
        evaluation,
        title=title or Path(source).stem,
        source=source,
        versions=_versions(environment),
        guarantees=guarantees,
        calibration=calibration or "the calibration rows",
    )
    files = {
        "config.yaml": config(evaluation, source, calibration),
        "metrics.json": json_text(document(evaluation, guarantees)),
        "per_exit.csv": per_exit(evaluation),
        "report.html": page,
        "environment.json": json_text(environment),
    }
    if guarantees is not None:
        files[FITTED] = json_text(guarantees.product.document())
    # The name of a file may hold bytes that are not UTF-8: people read a question mark there.
    written = {name: text.encode(errors="replace") for name, text in files.items()}
    write_bundle(folder, {**written, **(more or {})}, kind=kind)
    return Path(folder) / "report.html"


def document(evaluation: Evaluation, guarantees: Guarantees | None = None) -> dict[str, Any]:
    """What `anytime evaluate --json` prints."""
    found = evaluation.to_json()
    return found if guarantees is None else {**found, "calibration": guarantees.to_json()}


def config(evaluation: Evaluation, source: str, calibration: str | None = None) -> str:
    """What would make the same evaluation again, as YAML."""
    import yaml

    costs = list(evaluation.costs) if evaluation.costs_given else None
    files = {"file": source} if calibration is None else {"file": source, "calibration": calibration}
    text: str = yaml.safe_dump({**files, "costs": costs, **evaluation.settings}, sort_keys=False, allow_unicode=True)
    return text


def per_exit(evaluation: Evaluation) -> str:
    """A row for each rule and exit, a column for each measure; empty where there is no value."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["rule", "exit", "cost", *MEASURES])
    for rule, metrics in evaluation.rules.items():
        columns = [measure.values(metrics) or ("",) * evaluation.exits for measure in MEASURES.values()]
        for exit, cost in enumerate(evaluation.costs):
            writer.writerow([csv_cell(rule), exit + 1, cost, *(column[exit] for column in columns)])
    return out.getvalue()


def _versions(environment: Mapping[str, Any]) -> dict[str, str]:
    packages = environment.get("packages") or {}
    found = {"python": environment.get("python"), **{name: packages.get(name) for name in _VERSIONS}}
    return {name: str(version) for name, version in found.items() if version}

"""The folder of a run: `config.yaml metrics.json per_exit.csv report.html environment.json`, written atomically."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytime.artifacts import json_text, write_bundle
from anytime.errors import DtypeError, OptionError
from anytime.evaluation.measures import MEASURES
from anytime.installed import environment
from anytime.outputs import check_folder
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
    """Write an evaluation into a folder and return the path of the report.

    Args:
        folder: The folder; created if it does not exist.
        evaluation: The evaluation.
        source: The name of the file with the logits.
        environment: Hardware and versions, as `anytime doctor` reports them.
        title: The title of the report; by default the source without its suffix.
        guarantees: The guarantees for the same inputs; their fitted product is saved too.
        calibration: The name of the file with the calibration rows.
        kind: The command that writes the folder: only the same command may replace it later.
        more: Further files, by name.
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
    # A file name may contain bytes that are not UTF-8: they become question marks.
    written = {name: text.encode(errors="replace") for name, text in files.items()}
    write_bundle(folder, {**written, **(more or {})}, kind=kind)
    return Path(folder) / "report.html"


def write_report(found: Evaluation | Guarantees, folder: str | Path, *, title: str = "Evaluation") -> Path:
    """Write the report of an evaluation into a folder, as `anytime evaluate --out` does, and return the path of `report.html`.

    Args:
        found: The result of `evaluate` or of `measure_guarantees`.
        folder: The folder; created if it does not exist. Only an earlier report in it is replaced.
        title: The title of the report, such as the model's name.

    Example:
        >>> import tempfile, anytime
        >>> found = anytime.evaluate(anytime.samples.cifar100_msdnet(), rules=["latest", "product"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sorted(path.name for path in anytime.write_report(found, f"{folder}/report").parent.iterdir())
        ['config.yaml', 'environment.json', 'manifest.json', 'metrics.json', 'per_exit.csv', 'report.html']
    """
    from anytime.evaluation import Evaluation, Guarantees

    if not isinstance(found, Evaluation | Guarantees):
        raise DtypeError(
            f"found is a {type(found).__name__}",
            expected="the result of anytime.evaluate or of anytime.evaluation.measure_guarantees",
            fix="evaluate the logits first: anytime.write_report(anytime.evaluate(logits, labels), 'report')",
        )
    if not isinstance(folder, str | Path):
        raise OptionError(f"folder is {folder!r}", expected="a path", fix="pass the folder of the report, such as 'report'")
    check_folder(folder, kind="evaluate")
    guarantees = found if isinstance(found, Guarantees) else None
    evaluation = found.evaluation if isinstance(found, Guarantees) else found
    return write_folder(
        folder, evaluation, source="logits in memory", environment=environment(), title=title, guarantees=guarantees
    )


def document(evaluation: Evaluation, guarantees: Guarantees | None = None) -> dict[str, Any]:
    """The document that `anytime evaluate --json` prints."""
    found = evaluation.to_json()
    return found if guarantees is None else {**found, "calibration": guarantees.to_json()}


def config(evaluation: Evaluation, source: str, calibration: str | None = None) -> str:
    """The settings that reproduce the evaluation, as YAML."""
    import yaml

    costs = list(evaluation.costs) if evaluation.costs_given else None
    files = {"file": source} if calibration is None else {"file": source, "calibration": calibration}
    text: str = yaml.safe_dump({**files, "costs": costs, **evaluation.settings}, sort_keys=False, allow_unicode=True)
    return text


def per_exit(evaluation: Evaluation) -> str:
    """One row per rule and exit, one column per metric, as CSV; cells without a value are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    measures = {name: each for name, each in MEASURES.items() if evaluation.positions is not None or not each.dense}
    writer.writerow(["rule", "exit", "cost", *measures])
    for rule, metrics in evaluation.rules.items():
        columns = [measure.values(metrics) or ("",) * evaluation.exits for measure in measures.values()]
        for exit, cost in enumerate(evaluation.costs):
            writer.writerow([csv_cell(rule), exit + 1, cost, *(column[exit] for column in columns)])
    return out.getvalue()


def _versions(environment: Mapping[str, Any]) -> dict[str, str]:
    packages = environment.get("packages") or {}
    found = {"python": environment.get("python"), **{name: packages.get(name) for name in _VERSIONS}}
    return {name: str(version) for name, version in found.items() if version}

"""`anytime tune FILE`: what the rules reach on a model, as a table and a chart, and the best one for an objective."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anytime.cli.options import Flag, print_json
from anytime.errors import OptionError
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytime.calibrate import Candidate, ChoiceCertificate, Frontier, TunedRule

CERTIFYING = 1 / 3
"""Fraction of the rows that certify the choice."""


def tune(
    file: Path,
    /,
    *,
    labels: Path | None = None,
    least: Literal["ece", "nll", "error"] = "ece",
    drop: float = 0.1,
    at_most: float = 0.01,
    accuracy: float | None = None,
    certify_confidence: float | None = None,
    control: Literal["sequence", "holm", "bonferroni"] = "sequence",
    out: Path | None = None,
    all: Flag = False,
    json: Flag = False,
    strict: Flag = False,
    seed: int = 0,
) -> int:
    """Search the rules on held-out rows and choose one: the lowest value of a metric among rules with few drops.

    Args:
        file: `.npz` or `.safetensors` with `logits` (exits, samples, classes) and `labels`, or `.npy` with logits.
        labels: A file with the labels, if FILE has none.
        least: The metric to minimise, a mean over the exits; error is 1 - accuracy.
        drop: Size of the drop in the true class's probability that counts.
        at_most: Largest fraction of inputs that may drop by that much.
        accuracy: Lowest mean accuracy; by default 0.01 below that of the network without a rule.
        certify_confidence: Hold out a third of the rows and certify, with this confidence, that future inputs keep the bound.
        control: How the certificate corrects for the choice among several rules.
        out: Folder for rule.json, frontier.json and frontier.html.
        all: Show the whole Pareto set, not only the best trade-offs between drops and the metric.
        json: Print one JSON document instead of the table.
        strict: Count drops above the threshold, not at or above it.
        seed: Of the splits.
    """
    import torch

    from anytime.calibrate import tune as search
    from anytime.checks import check_labelled, check_number, check_scale, check_seed, fingerprints
    from anytime.cli.console import progress_bar
    from anytime.cli.logits import labels_of
    from anytime.evaluation import open_logits
    from anytime.outputs import check_folder

    check_seed(seed)
    check_number(at_most, "--at-most", most=1, fix="pass a fraction: 1 % is 0.01")
    if out is not None:
        check_folder(out, kind="tune", inputs=(file, labels))
    source = open_logits(file, labels)
    given = labels_of(source)  # before the logits, which may be large
    logits, known = check_labelled(source.logits[:], given)  # in the order of the file, for errors that name a row
    check_scale(logits)
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))
    kept = 0 if certify_confidence is None else round(CERTIFYING * len(known))
    certifying, rows = order[:kept], order[kept:]
    if kept:  # copies of one input stay on one side
        prints = fingerprints(logits)
        certifying = certifying[~torch.isin(prints[certifying], prints[rows])]
    drops = tuple(dict.fromkeys((drop, 0.05)))
    with progress_bar("tuning", "rules") as progress:
        found = search(logits[:, rows], known[rows], drops=drops, strict=strict, seed=seed, progress=progress)
    floor = None if accuracy is None else {"accuracy": accuracy}
    trades = found.chain(least=least, at_least=floor)
    chosen, certificate, problem = None, None, "no rule can be certified: loosen the bound, or give more rows"
    if certify_confidence is None:
        try:
            chosen = found.choose(least=least, at_most={f"drop_{drop:g}": at_most}, at_least=floor)
        except OptionError as error:  # constraints that no rule meets; the table is shown all the same
            problem = str(error)
    else:
        chosen, certificate = found.choose_certified(
            logits[:, certifying],
            known[certifying],
            least=least,
            at_most=at_most,
            at_least=floor,
            confidence=certify_confidence,
            control=control,
        )
    if out is not None:
        print(f"chart: {write(out, found, chosen, certificate, source=file.name)}", file=sys.stderr)
    if json:
        print_json(document(found, chosen, certificate))
    else:
        print_frontier(found, found.pareto if all else trades, chosen)
        print(found.recommend(chosen))
        pareto = f"{len(found.pareto)} of {len(found.names)} rules are in the Pareto set."
        print(certificate.sentence if certificate else pareto)
    if chosen is None:
        print(f"anytime: {problem}", file=sys.stderr)
    return 0 if chosen is not None else 1


def write(
    folder: Path, found: Frontier, chosen: TunedRule | None, certificate: ChoiceCertificate | None, *, source: str
) -> Path:
    """Write the bundle, in place of an earlier one; returns the path of the chart."""
    from anytime.artifacts import json_text, write_bundle
    from anytime.report.pages.frontier import render_frontier

    page = render_frontier(found, source=source, chosen=chosen, certificate=certificate, title=Path(source).stem)
    fitted = {"rule.json": chosen, "certificate.json": certificate, "frontier.json": found}
    files = {name: json_text(one.document()).encode() for name, one in fitted.items() if one is not None}
    write_bundle(folder, {**files, "frontier.html": page.encode(errors="replace")}, kind="tune")
    return folder / "frontier.html"


def document(found: Frontier, chosen: TunedRule | None, certificate: ChoiceCertificate | None) -> dict[str, Any]:
    """What `--json` prints."""
    from dataclasses import asdict

    from anytime.calibrate.tuning.frontier import REFERENCES

    rule = None
    if chosen is not None:
        rule = {"name": chosen.name, "rule": chosen.text, "objective": chosen.objective, **chosen.metrics}
    rows = {
        "fitting": found.fitting_rows,
        "choosing": found.choosing_rows,
        "certifying": certificate.rows if certificate else 0,
    }
    return {
        "exits": found.exits,
        "classes": found.classes,
        "rows": rows,
        "chosen": rule,
        "recommendation": found.recommend(chosen),
        "references": {one.name: dict(one.metrics) for one in found.candidates if one.name in REFERENCES},
        "certificate": None if certificate is None else {**asdict(certificate), "sentence": certificate.sentence},
        "pareto": found.records(),
    }


def print_frontier(found: Frontier, shown: Sequence[Candidate], chosen: TunedRule | None) -> None:
    """Print one row per rule to stdout, the reference rules last."""
    from anytime.calibrate.tuning.frontier import REFERENCES
    from anytime.cli.console import print_table

    known = {one.name: one for one in found.candidates}
    names = [one.name for one in shown]
    extra = [name for name in (chosen.name if chosen else "", *REFERENCES) if name in known and name not in names]
    rows = []
    for name in (*names, *dict.fromkeys(extra)):
        metrics = known[name].metrics
        drops = (f"{100 * metrics[f'drop_{limit:g}']:.2f}" for limit in found.drops)
        mark = " ← chosen" if chosen is not None and name == chosen.name else ""
        rows.append(
            (f"{name}{mark}", f"{100 * metrics['accuracy']:.2f}", *drops, f"{metrics['ece']:.3f}", f"{metrics['nll']:.3f}")
        )
    sign = ">" if found.strict else "≥"
    measured = f"fitted on {found.fitting_rows:,} rows, measured on {found.choosing_rows:,} others"
    print_table(
        ("rule", "accuracy %", *(f"drops by {sign} {limit:g}, %" for limit in found.drops), "ECE", "NLL"),
        rows,
        title=f"{found.exits} exits, {found.classes} classes; {measured}",
        section=len(names),
    )

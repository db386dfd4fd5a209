"""`anytime tune FILE`: what the rules can reach on a model, as a table and a picture, and the one that fits a wish."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from anytime.cli.certify import labels_of
from anytime.errors import OptionError
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytime.calibrate import Candidate, ChoiceCertificate, Frontier, TunedRule

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
CERTIFYING = 1 / 3


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
    """Search the rules on held-out rows and choose one: the least of a figure with few inputs that drop.

    Args:
        file: `.npz` or `.safetensors` with `logits` (exits, samples, classes) and `labels`, or `.npy` with logits.
        labels: A file with the labels, if they are not in FILE.
        least: The figure to have the least of, a mean over the exits; error is 1 - accuracy.
        drop: A loss of so much of the true class's probability counts.
        at_most: The share of inputs that may lose so much.
        accuracy: The least mean accuracy; by default 0.01 less than that of the network as it is.
        certify_confidence: Keep a third of the rows back and promise, with this confidence, that future inputs keep the bound.
        control: How the promise allows for the choice.
        out: Folder for rule.json, frontier.json and frontier.html.
        all: Show the whole Pareto set, not only the best trades between drops and the figure.
        json: Print one JSON document instead of the table.
        strict: Count losses above the threshold, not at or above it.
        seed: Of the splits.
    """
    import torch

    from anytime.calibrate import tune as search
    from anytime.calibrate.certify import check_rows
    from anytime.checks import check_seed, fingerprints
    from anytime.cli.progress import rows_bar
    from anytime.evaluation import open_logits
    from anytime.outputs import check_folder

    check_seed(seed)
    if out is not None:
        check_folder(out, kind="tune", inputs=(file, labels))
    source = open_logits(file, labels)
    if not at_most <= 1:
        raise OptionError(f"--at-most is {at_most:g}", expected="a share, at most 1", fix="1 % is 0.01")
    given = labels_of(source)  # before the logits, which may be large
    logits, known = check_rows(source.logits[:], given)  # in the file's order, for errors that name a row
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))
    kept = 0 if certify_confidence is None else round(CERTIFYING * len(known))
    back, rows = order[:kept], order[kept:]
    if kept:  # a data set may hold an input twice: its copies stay on one side
        prints = fingerprints(logits)
        back = back[~torch.isin(prints[back], prints[rows])]
    drops = tuple(dict.fromkeys((drop, 0.05)))
    with rows_bar("tuning", "rules") as progress:
        found = search(logits[:, rows], known[rows], drops=drops, strict=strict, seed=seed, progress=progress)
    floor = None if accuracy is None else {"accuracy": accuracy}
    trades = found.chain(least=least, at_least=floor)
    chosen, promise, sorry = None, None, "no rule can be promised: loosen the bound, or give more rows"
    if certify_confidence is None:
        try:
            chosen = found.choose(least=least, at_most={f"drop_{drop:g}": at_most}, at_least=floor)
        except OptionError as error:  # a wish that cannot be met; the table is shown all the same
            sorry = str(error)
    else:
        chosen, promise = found.choose_certified(
            logits[:, back],
            known[back],
            least=least,
            at_most=at_most,
            at_least=floor,
            confidence=certify_confidence,
            control=control,
        )
    if out is not None:
        print(f"picture: {write(out, found, chosen, promise, source=file.name)}", file=sys.stderr)
    if json:
        import json as writer

        print(writer.dumps(document(found, chosen, promise), allow_nan=False))
    else:
        print_frontier(found, found.pareto if all else trades, chosen)
        print(found.recommend(chosen))
        print(promise.sentence if promise else f"{len(found.pareto)} of {len(found.names)} rules are in the Pareto set.")
    if chosen is None:
        print(f"anytime: {sorry}", file=sys.stderr)
    return 0 if chosen is not None else 1


def write(folder: Path, found: Frontier, chosen: TunedRule | None, promise: ChoiceCertificate | None, *, source: str) -> Path:
    """Write the bundle, in place of an earlier one; gives the path of the picture."""
    from anytime.artifacts import json_text, write_bundle
    from anytime.report.pages.frontier import render_frontier

    page = render_frontier(found, source=source, chosen=chosen, certificate=promise, title=Path(source).stem)
    fitted = {"rule.json": chosen, "certificate.json": promise, "frontier.json": found}
    files = {name: json_text(one.document()).encode() for name, one in fitted.items() if one is not None}
    write_bundle(folder, {**files, "frontier.html": page.encode(errors="replace")}, kind="tune")
    return folder / "frontier.html"


def document(found: Frontier, chosen: TunedRule | None, promise: ChoiceCertificate | None) -> dict[str, Any]:
    """What `--json` prints."""
    from dataclasses import asdict

    from anytime.calibrate.tuning.frontier import REFERENCES

    rule = (
        None if chosen is None else {"name": chosen.name, "rule": chosen.text, "objective": chosen.objective, **chosen.metrics}
    )
    return {
        "exits": found.exits,
        "classes": found.classes,
        "rows": {"fitting": found.fitting_rows, "choosing": found.choosing_rows, "certifying": promise.rows if promise else 0},
        "chosen": rule,
        "recommendation": found.recommend(chosen),
        "references": {one.name: dict(one.metrics) for one in found.candidates if one.name in REFERENCES},
        "certificate": None if promise is None else {**asdict(promise), "sentence": promise.sentence},
        "pareto": found.table(),
    }


def print_frontier(found: Frontier, shown: Sequence[Candidate], chosen: TunedRule | None) -> None:
    """Print one row a rule to stdout, the well-known ones last."""
    from rich.table import Table

    from anytime.calibrate.tuning.frontier import REFERENCES
    from anytime.cli.console import make_console

    known = {one.name: one for one in found.candidates}
    sign = ">" if found.strict else "≥"
    rows = f"fitted on {found.fitting_rows:,} rows, measured on {found.choosing_rows:,} others"
    table = Table(title=f"{found.exits} exits, {found.classes} classes; {rows}", title_justify="left")
    table.add_column("rule", overflow="fold")
    for name in ("accuracy %", *(f"drops {sign}{limit:g} %" for limit in found.drops), "ECE", "NLL"):
        table.add_column(name, justify="right")
    names = [one.name for one in shown]
    extra = [name for name in (chosen.name if chosen else "", *REFERENCES) if name in known and name not in names]
    for index, name in enumerate((*names, *dict.fromkeys(extra))):
        figures = known[name].metrics
        drops = (f"{100 * figures[f'drop_{limit:g}']:.2f}" for limit in found.drops)
        mark = " ← chosen" if chosen is not None and name == chosen.name else ""
        cells = (f"{100 * figures['accuracy']:.2f}", *drops, f"{figures['ece']:.3f}", f"{figures['nll']:.3f}")
        table.add_row(f"{name}{mark}", *cells, end_section=index == len(names) - 1)
    make_console().print(table)

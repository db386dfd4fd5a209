"""`anytime certify FILE`: what can be promised about future inputs, from the logits of held-out ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from anytime.errors import LabelError
from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from torch import Tensor

    from anytime.evaluation import LogitsFile

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]


def certify(
    file: Path,
    /,
    *,
    labels: Path | None = None,
    rule: str = "product",
    drop: float = 0.1,
    confidence: float = 0.95,
    strict: Flag = False,
    probabilities: Flag = False,
    json: Flag = False,
    out: Path | None = None,
) -> int:
    """Bound the share of future inputs that lose probability of the true class on the way.

    The rule must be fixed before these rows are looked at; for one chosen by tuning, see `anytime tune --certify-confidence`.

    Args:
        file: `.npz` or `.safetensors` with `logits` (exits, samples, classes) and `labels`, or `.npy` with logits.
        labels: A file with the labels, if they are not in FILE.
        rule: A rule such as `product(softplus)`, or a rule.json that `anytime tune` wrote.
        drop: A loss of so much probability counts.
        confidence: How sure the bounds should be.
        strict: Count losses above the threshold, not at or above it.
        probabilities: FILE holds probabilities (or their logarithms), not logits.
        json: Print one JSON document instead of sentences.
        out: File for the certificate.
    """
    from dataclasses import asdict

    from anytime.calibrate import certify as find
    from anytime.cli.rules import rule_files, rule_from
    from anytime.evaluation import open_logits
    from anytime.fitted import check_saving

    if out is not None:
        check_saving(out, "certificate", inputs=(file, labels, *rule_files(rule)))
    source = open_logits(file, labels)
    known = labels_of(source)
    found = find(
        source.logits[:],
        known,
        rule_from(rule, source),
        drop=drop,
        confidence=confidence,
        strict=strict,
        probabilities=probabilities,
    )
    if out is not None:
        print(f"certificate: {found.save(out)}", file=sys.stderr)
    if json:
        import json as writer

        document = asdict(found)
        document["rule"] = document.pop("text")
        print(writer.dumps({**document, "sentences": found.sentences}, allow_nan=False))
    else:
        print(f"{found.text}, from {found.rows:,} rows, of which {found.drops:,} drop and {found.losses:,} turn wrong:")
        print("\n".join(found.sentences))
        print("This is about future inputs from the same source as these rows.", file=sys.stderr)
    return 0


def labels_of(source: LogitsFile) -> Tensor:
    """The labels, or an error that says how to give them."""
    if source.labels is None:
        raise LabelError(
            f"{source.path} has no labels",
            expected="labels, to follow the probability of the true class",
            fix="give them with --labels FILE",
        )
    return source.labels

"""`anytime certify FILE`: a guarantee about future inputs, from the logits of held-out ones."""

from __future__ import annotations

import sys
from pathlib import Path

from anytime.cli.options import Flag, print_json
from anytime.safe_text import print_safely as print


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
    """Bound the fraction of future inputs whose true class loses probability at a later exit.

    Fix the rule before looking at these rows; for one chosen by tuning, see `anytime tune --certify-confidence`.

    Args:
        file: `.npz` or `.safetensors` with `logits` (exits, samples, classes) and `labels`, or `.npy` with logits.
        labels: A file with the labels, if FILE has none.
        rule: A rule such as `product(softplus)`, or a rule.json that `anytime tune` wrote.
        drop: Size of the drop in probability.
        confidence: Confidence level of the bounds.
        strict: Count drops above the threshold, not at or above it.
        probabilities: FILE has probabilities (or their logarithms), not logits.
        json: Print one JSON document instead of sentences.
        out: File for the certificate.
    """
    from dataclasses import asdict

    from anytime.calibrate import certify as find
    from anytime.cli.logits import labels_of
    from anytime.cli.rules import rule_files, rule_from
    from anytime.evaluation import open_logits
    from anytime.fitted import check_saving

    if out is not None:
        check_saving(out, "certificate", inputs=(file, labels, *rule_files(rule)))
    source = open_logits(file, labels)
    known, used = labels_of(source), rule_from(rule, source)
    found = find(source.logits[:], known, used, drop=drop, confidence=confidence, strict=strict, probabilities=probabilities)
    if out is not None:
        print(f"certificate: {found.save(out)}", file=sys.stderr)
    if json:
        document = asdict(found)
        document["rule"] = document.pop("text")
        print_json({**document, "sentences": found.sentences})
    else:
        print(f"{found.text}, from {found.rows:,} rows: {found.drops:,} drop and {found.losses:,} become wrong.")
        print("\n".join(found.sentences))
        print("This holds for future inputs from the same distribution as these rows.", file=sys.stderr)
    return 0

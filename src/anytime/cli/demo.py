"""`anytime demo`: train, evaluate and write a report in one command, on data that ships with scikit-learn."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from anytime.train.digits import DigitsRun


def demo(*, out: Path = Path("anytime-demo"), seed: int = 0) -> int:
    """Train a small network with exits on handwritten digits, compare the rules, write a report.

    Args:
        out: Folder for the report, the metrics and the logits.
        seed: Of the training.
    """
    import torch

    from anytime.cli.evaluate import show
    from anytime.evaluation import evaluate
    from anytime.outputs import check_folder
    from anytime.report import verdict
    from anytime.train.digits import NETWORK, train_digits

    check_folder(out, kind="demo")
    # One thread is hardly slower here, and several are much slower on a busy machine.
    torch.set_num_threads(1)
    print(f"Training a network with {NETWORK.exits} exits on handwritten digits ...", file=sys.stderr)
    run = train_digits(seed=seed)
    print(f"Trained on {run.trained_on} images; evaluating on {len(run.labels):,} others ...", file=sys.stderr)
    found = evaluate(run.logits, run.labels, costs=run.costs, seed=seed)
    logits = out / "logits.npz"
    more = {logits.name: packed(run)}
    show(found, source=logits.name, out=out, json=False, title="Handwritten digits", kind="demo", more=more)
    summary = verdict(found)
    print(f"\n{summary.question} {summary.headline}\n{summary.sentences[0]}")
    # `make demo` runs a command that is not on the path.
    command = "anytime" if shutil.which("anytime") else sys.argv[0]
    print(f"\nOpen {out / 'report.html'} in a browser. Then try:", file=sys.stderr)
    print(f"  {command} evaluate {logits} --rules 'latest,product,product(clipped(2)),mixture'", file=sys.stderr)
    print(f"  {command} evaluate YOUR_LOGITS.npz --out report", file=sys.stderr)
    return 0


def packed(run: DigitsRun) -> bytes:
    """The logits and labels as an `.npz` that `anytime evaluate` reads."""
    import io

    import numpy as np

    data = io.BytesIO()
    np.savez(data, logits=run.logits.numpy(), labels=run.labels.numpy())
    return data.getvalue()

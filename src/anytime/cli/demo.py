"""`anytime demo`: what the rules do on recorded logits, then train, evaluate and report on digits; and a page to see it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from anytime.safe_text import print_safely as print

if TYPE_CHECKING:
    from anytime.train.digits import DigitsRun


def demo(*, out: Path = Path("anytime-demo"), page: Path | None = None, seed: int = 0) -> int:
    """Compare the rules on recorded logits of CIFAR-100, then train a small network on handwritten digits and write a report.

    Args:
        out: Folder for the report, the metrics and the logits.
        page: One HTML file that shows networks think, with recorded answers; by default page.html in the folder.
        seed: Of the training.
    """
    import torch

    from anytime.checks import check_seed
    from anytime.cli.console import show_table
    from anytime.cli.evaluate import show
    from anytime.evaluation import evaluate
    from anytime.outputs import check_file, check_folder
    from anytime.page import is_page, make_page, write_page
    from anytime.report import verdict
    from anytime.samples import cifar100_msdnet
    from anytime.train.digits import NETWORK, train_digits

    check_seed(seed)
    check_folder(out, kind="demo")
    if page is not None:
        check_file(page, ours=is_page)
    # One thread is hardly slower here, and several are much slower on a busy machine.
    torch.set_num_threads(1)
    print("Evaluating logits of an MSDNet on 1,000 test images of CIFAR-100, which come with the package ...", file=sys.stderr)
    recorded = evaluate(cifar100_msdnet(), seed=seed)
    show_table(recorded.table())
    print(f"\n{verdict(recorded).sentences[0]}\n")
    print(f"Training a network with {NETWORK.exits} exits on handwritten digits ...", file=sys.stderr)
    run = train_digits(seed=seed)
    print(f"Trained on {run.trained_on} images; evaluating on {len(run.labels):,} others ...", file=sys.stderr)
    found = evaluate(run.logits, run.labels, costs=run.costs, seed=seed)
    logits = out / "logits.npz"
    more = {logits.name: packed(run)}
    if page is None:
        more["page.html"] = make_page(report="report.html").encode()
    show(found, source=logits.name, out=out, json=False, title="Handwritten digits", kind="demo", more=more)
    summary = verdict(found)
    print(f"\n{summary.question} {summary.headline}\n{summary.sentences[0]}")
    if page is not None:
        write_page(page, report=out / "report.html")
    # `make demo` runs a command that is not on the path.
    command = "anytime" if shutil.which("anytime") else sys.argv[0]
    print(f"\nOpen {out / 'report.html'} in a browser. Then try:", file=sys.stderr)
    print(f"  {command} evaluate {logits} --rules 'latest,product,product(clipped(2)),mixture'", file=sys.stderr)
    print(f"  {command} evaluate YOUR_LOGITS.npz --out report", file=sys.stderr)
    print(f"  {command} serve    # and see a network think, live, at http://127.0.0.1:8000/", file=sys.stderr)
    print(f"See networks think: open {page or out / 'page.html'} in a browser.")
    return 0


def packed(run: DigitsRun) -> bytes:
    """The logits and labels as an `.npz` that `anytime evaluate` reads."""
    import io

    import numpy as np

    data = io.BytesIO()
    np.savez(data, logits=run.logits.numpy(), labels=run.labels.numpy())
    return data.getvalue()

"""The tables of docs/policies.md and docs/certificates.md: `python benchmarks/guarantees.py LOGITS.npz`.

Budgets: accuracy at the mean cost of a fixed exit, with all inputs there, or stopping by thresholds from the other half of
the rows. Tuning: on the first 3,000 rows (or three fifths), measured on the others.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

import anytime
from anytime.calibrate import tune
from anytime.policy import budget_curve

COSTS = (15.14, 25.51, 37.10, 46.33, 57.34, 66.96, 75.94)
"""Million multiply-accumulates up to each exit of the CIFAR MSDNet."""
RULES = ("latest", "caching", "product")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file = anytime.open_logits(parser.parse_args().file)
    assert file.labels is not None
    logits, labels = torch.as_tensor(np.asarray(file.logits[:])).float(), file.labels
    first, second = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).chunk(2)
    for name in RULES:
        held, answers = (anytime.parse_rule(name)(logits[:, rows]) for rows in (first, second))
        curve = budget_curve(held, answers, labels[second], costs=COSTS)
        order = np.argsort(curve.cost)
        stopping = np.interp(COSTS, np.asarray(curve.cost)[order], np.asarray(curve.accuracy)[order])
        fixed = (answers.labels == labels[second]).double().mean(-1)
        print(name, *(f"exit {exit + 1}: {fixed[exit]:.3f}, {stopping[exit]:.3f};" for exit in (1, 2, 3)))
    cut = 3 * len(labels) // 5
    frontier = tune(logits[:, :cut], labels[:cut])
    for one in frontier.measure(logits[:, cut:], labels[cut:]):
        known = ("latest", "caching", "caching at T", "product", "product at T")
        if one.name in known or one.name.startswith(("fitted product", "holding product")):
            found = one.metrics
            print(f"{one.name}: accuracy {100 * found['accuracy']:.1f} %, drops {100 * found['drop_0.1']:.2f} %,", end=" ")
            print(f"ECE {found['ece']:.3f}, NLL {found['nll']:.2f}")


if __name__ == "__main__":
    main()

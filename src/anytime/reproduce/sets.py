"""Prediction sets over many random calibration splits of the rows whose logits were kept.

The last few percent of labels decide the size of a set, so a single split of a few thousand rows says little about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from anytime.conformal import Raps, rank_of, sort_rows
from anytime.metrics import reach, rise
from anytime.metrics.monotonicity import SIZE_RISES
from anytime.reproduce.finding import over_seeds
from anytime.reproduce.group import RULES, SET_SIZE, Group
from anytime.reproduce.runs import Run

SPLITS, CALIBRATING = 20, 2000
"""Random splits per seed; and the rows that calibrate, as many as in the paper, or half of all where fewer were kept."""
SPLIT_WORDS = (
    f"{SPLITS} random splits of each, of which {CALIBRATING:,} rows calibrate, as in the paper, or half where fewer were kept"
)
RELEASED = Raps(quantile="corrected")
"""As the paper's released code computes them."""


@dataclass(frozen=True)
class SplitSets:
    """The sets of one run under one rule, after one random split.

    Attributes:
        size: Mean size per exit.
        coverage: Fraction of labels covered, per exit.
        rises: Percent of rows whose set grows by at least each of `SIZE_RISES`.
        alike: Percent of sets within one class of the most frequent size of their exit.
    """

    size: tuple[float, ...]
    coverage: tuple[float, ...]
    rises: dict[str, float]
    alike: float


def random_sets(log_probs: Tensor, labels: Tensor, splits: int = SPLITS) -> list[SplitSets]:
    """Prediction sets from log-probabilities `(exits, rows, classes)`, for `splits` random calibration splits."""
    ascending = sort_rows(log_probs)
    rank, (exits, rows) = rank_of(log_probs, ascending, labels), log_probs.shape[:2]
    cut = min(CALIBRATING, rows // 2)
    found = []
    for split in range(splits):
        generator = np.random.default_rng(split)
        order, uniform = torch.from_numpy(generator.permutation(rows)), torch.from_numpy(generator.random((exits, rows)))
        held, rest = order[:cut], order[cut:]
        limit = RELEASED.threshold(RELEASED.label_score(ascending[:, held], rank[:, held], uniform[:, held]))
        size = RELEASED.size(ascending[:, rest], limit, uniform[:, rest])
        counts = reach(rise(size), SIZE_RISES)
        found.append(
            SplitSets(
                tuple(size.double().mean(1).tolist()),
                tuple((rank[:, rest] < size).double().mean(1).tolist()),
                {f"{by}": 100 * int(count) / len(rest) for by, count in zip(SIZE_RISES, counts, strict=True)},
                100 * float(((size - size.mode(1, keepdim=True).values).abs() <= 1).double().mean()),
            )
        )
    return found


def with_random_sets(runs: Sequence[Run], splits: int = SPLITS) -> tuple[Group, dict[str, list[list[SplitSets]]]]:
    """The published metrics with the sets of random splits in place of one: a group with one entry per seed and split.

    Also returns the sets, by rule, run and split.
    """
    published = Group.published(runs)
    found = {
        rule: [random_sets(combine(logits).log_probs, labels, splits) for logits, labels in (run.logits() for run in runs)]
        for rule, combine in RULES.items()
    }
    metrics = {
        rule: [
            replace(base, set_size=sets.size, set_coverage=sets.coverage, set_size_rise_percent=sets.rises)
            for base, every in zip(published.metrics[rule], seeds, strict=True)
            for sets in every
        ]
        for rule, seeds in found.items()
    }
    every = tuple(run for run in runs for _ in range(splits))
    return Group(every, metrics, kept=True), found


def size_rows(found: dict[str, list[list[SplitSets]]]) -> list[tuple[str, ...]]:
    """Table rows: the mean size at the first and last exit, its deviation over splits of one seed, and over seeds."""
    rows: list[tuple[str, ...]] = []
    for rule, seeds in found.items():
        for exit, name in ((0, "first"), (-1, "last")):
            sizes = [over_seeds([sets.size[exit] for sets in splits]) for splits in seeds]
            between = over_seeds([size.mean for size in sizes])
            within = sum(size.deviation or 0.0 for size in sizes) / len(sizes)
            across = "–" if between.deviation is None else f"{between.deviation:.2f}"
            rows.append((rule, name, f"{between.mean:.2f} {SET_SIZE.axis}", f"{within:.2f}", across))
    return rows


SIZE_HEADINGS = ("rule", "exit", "mean size", "deviation over splits", "deviation of the seeds' means")

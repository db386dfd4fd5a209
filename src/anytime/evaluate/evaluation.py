"""Evaluation: every figure of the paper for logits, rule by rule, in blocks that fit the cache.

The data is read twice, at most: the calibration rows of the prediction sets first, then everything. Memory does not grow
with the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.checks import as_tensor, check_costs, check_labels, check_logits, check_probabilities, check_scale
from anytime.combine import Prediction, Rule, rule
from anytime.combine.named import name_of
from anytime.conformal import Raps, rank_of, sort_rows
from anytime.errors import OptionError, ShapeError
from anytime.evaluate.source import LogitsFile, open_logits
from anytime.metrics import Summary, Trajectories, drop, follow
from anytime.metrics.calibration import ECE_BINS, NLL_FLOOR, ORACLE_FRACTION

DEFAULT_RULES = ("latest", "caching", "product")
EXAMPLES = 200
WORST = 20
_CACHE_BYTES = 1 << 20
_CHUNK_BYTES = 32 << 20

Progress = Callable[[int, int], None]
Combine = Callable[[Tensor], Prediction]


@dataclass(frozen=True)
class Example:
    """One input, followed over the exits under each rule.

    Attributes:
        row: Its row in the data.
        label: Its class, or None without labels.
        final: Each rule's answer at the last exit.
        answers: Each rule's answer at every exit.
        probability: The label's probability at every exit, or the final answer's without labels.
        drop: The largest decrease of that probability.
    """

    row: int
    label: int | None
    final: dict[str, int]
    answers: dict[str, list[int]]
    probability: dict[str, list[float]]
    drop: dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found. `to_json` gives the document of `anytime evaluate --json`.

    Attributes:
        exits, samples, classes: The size of the data.
        labelled: Whether there were labels.
        rules: The figures of each rule, under fixed names.
        costs: Cumulative cost of each exit; 1, 2, 3, … if none were given.
        costs_given: Whether they were.
        settings: How it was measured.
        examples: A random sample of inputs.
        worst: The inputs that lose most under the first rule.
    """

    exits: int
    samples: int
    classes: int
    labelled: bool
    rules: dict[str, dict[str, Any]]
    costs: tuple[float, ...]
    costs_given: bool
    settings: dict[str, Any]
    examples: list[Example] = field(default_factory=list, repr=False)
    worst: list[Example] = field(default_factory=list, repr=False)

    def to_json(self) -> dict[str, Any]:
        """A plain document, without the sample of inputs."""
        document = asdict(self)
        del document["examples"]
        return document


@dataclass(frozen=True)
class _Data:
    logits: Tensor
    labels: Tensor | None
    probabilities: bool

    def block(self, rows: slice | Tensor, first_row: int) -> Tensor:
        block = check_logits(self.logits[:, rows], first_row=first_row)
        return check_probabilities(block) if self.probabilities else block

    def labels_of(self, rows: slice | Tensor) -> Tensor | None:
        return None if self.labels is None else self.labels[rows]


def evaluate(
    logits: Any,
    labels: Any = None,
    *,
    rules: Sequence[str | Rule[Any]] | Mapping[str, Any] = DEFAULT_RULES,
    costs: Sequence[float] | None = None,
    probabilities: bool = False,
    strict: bool = False,
    sets: Raps | None = Raps(),  # noqa: B008 - frozen
    seed: int = 0,
    block_rows: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure how anytime a model is, from the logits of its exits.

    Args:
        logits: `(exits, samples, classes)`, a tensor, an array (mapped ones too) or a file's path.
        labels: `(samples,)` class indices, or a file's path; without them, what needs none is measured.
        rules: Rules by name or as objects, or a mapping from names to anything that can be called on logits.
        costs: Cumulative cost up to each exit (FLOPs, milliseconds), for consistency and diminishing returns.
        probabilities: Whether `logits` are probabilities (or their logarithms); otherwise such input is refused.
        strict: Count drops above a threshold (released code) rather than at or above it (paper).
        sets: Settings of the prediction sets; None for none.
        seed: For the calibration split, the randomised sets and the sample of inputs.
        block_rows: Rows a block; by default what fits the cache. Results do not depend on it.
        progress: Called with the rows done and the rows in all.

    Example:
        >>> found = evaluate(torch.randn(3, 50, 10), torch.randint(0, 10, (50,)))
        >>> sorted(found.rules)
        ['caching', 'latest', 'product']
    """
    data = _open(logits, labels, probabilities)
    exits, samples, classes = data.logits.shape
    combiners = _combiners(rules)
    limits = torch.arange(1.0, exits + 1, dtype=torch.float64) if costs is None else check_costs(costs, exits=exits)
    if block_rows is not None and block_rows < 1:
        raise OptionError(f"block_rows is {block_rows}", expected="at least 1", fix="leave it out")
    rows_a_block = block_rows or max(1, _CACHE_BYTES // (4 * exits * classes))
    split = _Split.draw(samples, sets, seed, labelled=data.labels is not None)
    thresholds = _thresholds(data, combiners, sets, split, rows_a_block) if sets and split.calibration.numel() else {}

    summaries = {name: Summary(limits, labelled=data.labels is not None, strict=strict) for name in combiners}
    worst = _Worst(WORST)
    uniforms = np.random.default_rng([seed, 2])
    for chunk in _chunks(samples, exits * classes, rows_a_block):
        uniform = torch.from_numpy(uniforms.random((chunk.stop - chunk.start, exits), dtype=np.float32)).T
        for name, (seen, size, covered) in _follow(data, combiners, chunk, rows_a_block, sets, thresholds, uniform).items():
            summaries[name].add(seen)
            if size is not None:
                test = ~split.is_calibration[chunk]
                summaries[name].add_sets(size[:, test], None if covered is None else covered[:, test])
            if name == next(iter(combiners)):
                worst.add(drop(seen.final if seen.label is None else seen.label_probability), chunk.start)
        if progress is not None:
            progress(chunk.stop, samples)

    sample = torch.from_numpy(np.random.default_rng([seed, 3]).permutation(samples)[:EXAMPLES].copy())
    return Evaluation(
        exits=exits,
        samples=samples,
        classes=classes,
        labelled=data.labels is not None,
        rules={name: summary.figures() for name, summary in summaries.items()},
        costs=tuple(limits.tolist()),
        costs_given=costs is not None,
        settings=_settings(combiners, sets, split, strict, probabilities),
        examples=_examples(data, combiners, sample),
        worst=_examples(data, combiners, worst.rows()),
    )


def _open(logits: Any, labels: Any, probabilities: bool) -> _Data:
    if isinstance(logits, str | Path):
        logits = open_logits(logits, labels if isinstance(labels, str | Path) else None)
    if isinstance(logits, LogitsFile):
        if labels is None or isinstance(labels, str | Path):
            labels = logits.labels
        logits = logits.logits
    values = as_tensor(logits, "logits")
    check_logits(values[:, :0] if values.ndim == 3 else values)  # rank and element type, without reading the data
    exits, samples, classes = values.shape
    if exits < 2 or classes < 2 or samples < 1:
        what = "one exit" if exits < 2 else "one class" if classes < 2 else "no samples"
        raise ShapeError(
            f"logits of shape {tuple(values.shape)}: {what}",
            expected="shape (exits, samples, classes) with at least two exits, one sample and two classes",
            fix="a model with one exit has nothing to compare; check the order of the dimensions",
        )
    known = None if labels is None else check_labels(labels, batch=samples, classes=classes, device=values.device)
    data = _Data(values, known, probabilities)
    if not probabilities:
        check_scale(data.block(slice(0, 2048), 0))
    return data


def _combiners(rules: Sequence[str | Rule[Any]] | Mapping[str, Any]) -> dict[str, Combine]:
    if isinstance(rules, str):
        rules = [rules]
    if isinstance(rules, Mapping):
        named = dict(rules)
    else:
        named = {}
        for given in rules:
            made = rule(given) if isinstance(given, str) else given
            name = given.strip() if isinstance(given, str) else name_of(given)
            if name in named:
                raise OptionError(f"rule {name!r} is named twice", expected="each rule once", fix="leave one out")
            named[name] = made
    if not named:
        raise OptionError("no rules", expected="at least one rule", fix=f"the default is {', '.join(DEFAULT_RULES)}")
    for name, known in named.items():
        if not callable(known) or isinstance(known, type):
            raise OptionError(
                f"rule {name!r} is {known!r}", expected="a rule, such as anytime.Product()", fix="create it: Product()"
            )
    # Blocks are checked once, not once a rule.
    return {name: known.combine if isinstance(known, Rule) else known for name, known in named.items()}


@dataclass(frozen=True)
class _Split:
    """Which rows calibrate the prediction sets (a fifth, by lot); none if they would be too few."""

    calibration: Tensor
    is_calibration: Tensor
    seed: int

    @staticmethod
    def draw(samples: int, sets: Raps | None, seed: int, *, labelled: bool) -> _Split:
        chosen = samples // 5
        if sets is None or not labelled or chosen < math.ceil(1 / sets.alpha) - 1:
            chosen = 0
        rows = np.sort(np.random.default_rng([seed, 0]).permutation(samples)[:chosen])
        mask = torch.zeros(samples, dtype=torch.bool)
        mask[torch.from_numpy(rows)] = True
        return _Split(torch.from_numpy(rows), mask, seed)


def _thresholds(data: _Data, combiners: Mapping[str, Combine], sets: Raps, split: _Split, block: int) -> dict[str, Tensor]:
    uniforms = np.random.default_rng([split.seed, 1])
    scores: dict[str, list[Tensor]] = {name: [] for name in combiners}
    for start in range(0, split.calibration.numel(), block):
        rows = split.calibration[start : start + block]
        logits, labels = data.block(rows, int(rows[0])), data.labels_of(rows)
        assert labels is not None
        uniform = torch.from_numpy(uniforms.random((len(rows), len(logits)), dtype=np.float32)).T.to(logits.device)
        for name, combine in combiners.items():
            log_probs = combine(logits).log_probs
            ascending = sort_rows(log_probs)
            scores[name].append(sets.label_score(ascending, rank_of(log_probs, ascending, labels), uniform))
    return {name: sets.threshold(torch.cat(parts, 1)) for name, parts in scores.items()}


Followed = tuple[Trajectories, Tensor | None, Tensor | None]


def _follow(
    data: _Data,
    combiners: Mapping[str, Combine],
    chunk: slice,
    block: int,
    sets: Raps | None,
    thresholds: Mapping[str, Tensor],
    uniform: Tensor,
) -> dict[str, Followed]:
    """Trajectories, set sizes and whether the sets hold the label, for the rows of a chunk, under each rule."""
    parts: dict[str, list[Followed]] = {name: [] for name in combiners}
    for start in range(chunk.start, chunk.stop, block):
        rows = slice(start, min(start + block, chunk.stop))
        logits, labels = data.block(rows, start), data.labels_of(rows)
        draws = uniform[:, rows.start - chunk.start : rows.stop - chunk.start].to(logits.device)
        for name, combine in combiners.items():
            prediction = combine(logits)
            size = covered = None
            if sets is not None and name in thresholds:
                assert labels is not None
                ascending = sort_rows(prediction.log_probs)
                size = sets.size(ascending, thresholds[name], draws)
                covered = rank_of(prediction.log_probs, ascending, labels) < size
            parts[name].append((follow(prediction, labels), size, covered))
    return {name: _join(followed) for name, followed in parts.items()}


def _join(parts: list[Followed]) -> Followed:
    seen, sizes, covered = zip(*parts, strict=True)
    return (
        Trajectories.join(list(seen)),
        None if sizes[0] is None else torch.cat(sizes, 1),
        None if covered[0] is None else torch.cat(covered, 1),
    )


def _chunks(samples: int, row_values: int, block: int) -> Iterator[slice]:
    rows = max(block, min(1 << 16, _CHUNK_BYTES // (4 * row_values)))
    rows -= rows % block  # whole blocks
    for start in range(0, samples, rows):
        yield slice(start, min(start + rows, samples))


class _Worst:
    """The rows with the largest values so far; among equals the earlier rows."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.best: list[tuple[float, int]] = []

    def add(self, values: Tensor, first_row: int) -> None:
        found = values.double().topk(min(self.keep, len(values)))
        new = [(-value, first_row + row) for value, row in zip(found.values.tolist(), found.indices.tolist(), strict=True)]
        self.best = sorted([*self.best, *new])[: self.keep]

    def rows(self) -> Tensor:
        return torch.tensor([row for value, row in self.best if value < 0], dtype=torch.long)


def _examples(data: _Data, combiners: Mapping[str, Combine], rows: Tensor) -> list[Example]:
    if rows.numel() == 0:
        return []
    logits, labels = data.block(rows, 0), data.labels_of(rows)
    seen = {name: follow(combine(logits), labels) for name, combine in combiners.items()}
    curves = {name: each.final if each.label is None else each.label_probability for name, each in seen.items()}
    drops = {name: drop(curve) for name, curve in curves.items()}
    return [
        Example(
            row=row,
            label=None if labels is None else int(labels[column]),
            final={name: int(each.answer[-1, column]) for name, each in seen.items()},
            answers={name: each.answer[:, column].tolist() for name, each in seen.items()},
            probability={name: curve[:, column].tolist() for name, curve in curves.items()},
            drop={name: float(values[column]) for name, values in drops.items()},
        )
        for column, row in enumerate(rows.tolist())
    ]


def _settings(
    combiners: Mapping[str, Combine], sets: Raps | None, split: _Split, strict: bool, probabilities: bool
) -> dict[str, Any]:
    rows = split.calibration.numel()
    return {
        "rules": list(combiners),
        "drops_counted": "above the threshold" if strict else "at or above the threshold",
        "probabilities": probabilities,
        "ece_bins": ECE_BINS,
        "nll_floor": NLL_FLOOR,
        "oracle_fraction": ORACLE_FRACTION,
        "sets": {**asdict(sets), "calibration_rows": rows} if sets is not None and rows else None,
        "seed": split.seed,
    }

"""Evaluation: every figure of the paper for logits, rule by rule, in blocks that fit the cache.

The data is read twice, at most: the calibration rows of the prediction sets first, then everything. Memory does not grow
with the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.checks import as_tensor, check_costs, check_count, check_labels, check_logits, check_scale, check_seed
from anytime.combine import Rule, parse_rule
from anytime.combine.advice import Answers, warn_of_few_classes
from anytime.combine.named import name_of
from anytime.conformal import Raps
from anytime.errors import OptionError, ShapeError
from anytime.evaluation.blocks import Combine, Rows, Split, block_size, chunks, follow_chunk, set_thresholds, uniforms, workers
from anytime.evaluation.examples import Example, Worst, examples
from anytime.evaluation.source import LogitsFile, Mapped, open_logits
from anytime.metrics import Summary, drop
from anytime.metrics.calibration import ECE_BINS, NLL_FLOOR, ORACLE_FRACTION

DEFAULT_RULES = ("latest", "caching", "product")
EXAMPLES = 200
WORST = 20

Progress = Callable[[int, int], None]


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
        costs: Cumulative cost up to each exit (MACs, milliseconds), for consistency and diminishing returns.
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
    check_seed(seed)
    rows = open_rows(logits, labels, probabilities)
    exits, samples, classes = rows.logits.shape
    named = _named(rules)
    # Blocks are checked once, not once a rule.
    combiners: dict[str, Combine] = {name: each.combine if isinstance(each, Rule) else each for name, each in named.items()}
    limits = torch.arange(1.0, exits + 1, dtype=torch.float64) if costs is None else check_costs(costs, exits=exits)
    if block_rows is not None:
        check_count(block_rows, "block_rows")
    block = block_rows or block_size(exits, classes)
    split = Split.draw(samples, sets, seed, labelled=rows.labels is not None)
    summaries = {name: Summary(limits, labelled=rows.labels is not None, strict=strict) for name in combiners}
    worst = Worst(WORST)
    parts = chunks(samples, block, exits * classes)
    with workers(len(parts)) as map_in_order:
        calibrated = sets is not None and split.calibration.numel() > 0
        thresholds = set_thresholds(rows, combiners, sets, split, block, map_in_order) if sets and calibrated else {}
        work = partial(follow_chunk, rows, combiners, block, sets, thresholds)
        for chunk, found in zip(parts, map_in_order(work, parts, uniforms(parts, exits, [seed, 2])), strict=True):
            for name, each in found.items():
                summaries[name].add(each.seen)
                if each.size is not None and each.covered is not None:
                    test = ~split.is_calibration[chunk]
                    summaries[name].add_sets(each.size[:, test], each.covered[:, test])
            first = next(iter(found.values())).seen
            worst.add(drop(first.final if first.label is None else first.label_probability), chunk.start)
            if progress is not None:
                progress(chunk.stop, samples)
        sample = torch.from_numpy(np.random.default_rng([seed, 3]).permutation(samples)[:EXAMPLES].copy())
        figures = {name: summary.figures() for name, summary in summaries.items()}
        if len(named) == 1:  # beside others a rule's figures speak for themselves
            (name, alone), *_ = named.items()
            warn_of_few_classes(alone, classes, _own(figures[name]))
        return Evaluation(
            exits=exits,
            samples=samples,
            classes=classes,
            labelled=rows.labels is not None,
            rules=figures,
            costs=tuple(limits.tolist()),
            costs_given=costs is not None,
            settings=_settings(combiners, sets if calibrated else None, split, strict, probabilities),
            examples=examples(rows, combiners, sample),
            worst=examples(rows, combiners, worst.rows()),
        )


def open_rows(logits: Any, labels: Any, probabilities: bool) -> Rows:
    """Logits and labels in any form that `evaluate` takes, checked."""
    if isinstance(logits, str | Path):
        logits = open_logits(logits, labels if isinstance(labels, str | Path) else None)
    if isinstance(logits, LogitsFile):
        if labels is None or isinstance(labels, str | Path):
            labels = logits.labels
        logits = logits.logits
    values = _readable(logits)
    check_logits(values[:, :0] if values.ndim == 3 else values[...])  # rank and element type, without reading the data
    exits, samples, classes = values.shape
    if exits < 2 or classes < 2 or samples < 1:
        what = "one exit" if exits < 2 else "one class" if classes < 2 else "no samples"
        raise ShapeError(
            f"logits of shape {tuple(values.shape)}: {what}",
            expected="shape (exits, samples, classes) with at least two exits, one sample and two classes",
            fix="a model with one exit has nothing to compare; check the order of the dimensions",
        )
    device = values.device if isinstance(values, Tensor) else None
    known = None if labels is None else check_labels(labels, batch=samples, classes=classes, device=device)
    rows = Rows(values, known, probabilities)
    if not probabilities:
        check_scale(rows.block(slice(0, 2048), 0))  # whatever the rules are: these are to be compared as logits
    return rows


def _readable(logits: Any) -> Tensor | Mapped:
    if isinstance(logits, Mapped):
        return logits
    if isinstance(logits, np.ndarray):  # perhaps mapped, perhaps larger than memory
        return Mapped(logits)
    return as_tensor(logits, "logits").detach()


def _named(rules: Sequence[str | Rule[Any]] | Mapping[str, Any]) -> dict[str, Any]:
    """The rules by name, checked."""
    if isinstance(rules, str | Rule):
        rules = [rules]
    named: dict[str, Any] = dict(rules) if isinstance(rules, Mapping) else {}
    if not isinstance(rules, Mapping):
        for given in rules:
            name = given.strip() if isinstance(given, str) else name_of(given)
            if name in named:
                raise OptionError(f"rule {name!r} is named twice", expected="each rule once", fix="leave one out")
            named[name] = parse_rule(given) if isinstance(given, str) else given
    if not named:
        raise OptionError("no rules", expected="at least one rule", fix=f"the default is {', '.join(DEFAULT_RULES)}")
    for name, known in named.items():
        if not callable(known) or isinstance(known, type):
            raise OptionError(
                f"rule {name!r} is {known!r}", expected="a rule, such as anytime.Product()", fix="create it: Product()"
            )
    return named


def _own(figures: Mapping[str, Any]) -> Answers | None:
    """What a rule does on these rows, for a word of advice; None without labels."""
    if figures["accuracy"] is None:
        return None
    accuracy, ece = (sum(figures[name]) / len(figures[name]) for name in ("accuracy", "ece"))
    falls, deep = (figures["label_drop_percent"][by] for by in ("0.1", "0.5"))
    return Answers(100 * accuracy, falls, deep, figures["collapsed_percent"][-1], ece)


def _settings(
    combiners: Mapping[str, Combine], sets: Raps | None, split: Split, strict: bool, probabilities: bool
) -> dict[str, Any]:
    return {
        "rules": list(combiners),
        "drops_counted": "above the threshold" if strict else "at or above the threshold",
        "probabilities": probabilities,
        "ece_bins": ECE_BINS,
        "nll_floor": NLL_FLOOR,
        "oracle_fraction": ORACLE_FRACTION,
        "sets": None if sets is None else {**asdict(sets), "calibration_rows": split.calibration.numel()},
        "seed": split.seed,
    }

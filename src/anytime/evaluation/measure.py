"""Evaluation: the metrics of every rule from logits, in blocks that fit the cache.

All rows are read once. If there are labels and no other calibration rows, a fifth of them is read before that, to calibrate
the prediction sets. Memory does not grow with the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.calibrate import TunedRule, as_rule
from anytime.checks import as_tensor, check_costs, check_count, check_labels, check_logits, check_scale, check_seed
from anytime.combine import Rule, parse_rule
from anytime.combine.advice import Answers, warn_of_few_classes
from anytime.combine.named import name_of
from anytime.conformal import Raps
from anytime.errors import OptionError, ShapeError
from anytime.evaluation.blocks import (
    BlockTask,
    Chunk,
    Combine,
    LogitRows,
    MapInOrder,
    block_size,
    calibrate_rows,
    chunks,
    follow_chunk,
    uniforms,
    workers,
)
from anytime.evaluation.compiled import Engine, use_compiled
from anytime.evaluation.examples import Example, ExampleCollector
from anytime.evaluation.source import LogitsFile, Mapped, open_logits
from anytime.fitted import Fitted
from anytime.metrics import RuleMetrics, Summary
from anytime.metrics.calibration import ECE_BINS, NLL_FLOOR, ORACLE_FRACTION

DEFAULT_RULES = ("latest", "caching", "product")
EXAMPLES = 200
WORST = 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`. `to_json` gives the document of `anytime evaluate --json`.

    Attributes:
        exits, samples, classes: The size of the data.
        labelled: Whether there were labels.
        rules: The metrics of each rule.
        costs: Cumulative cost of each exit; 1, 2, 3, … if none were given.
        costs_given: Whether costs were given.
        settings: How it was measured.
        examples: A random sample of inputs.
        worst: The inputs that lose most under the first rule.
    """

    exits: int
    samples: int
    classes: int
    labelled: bool
    rules: dict[str, RuleMetrics]
    costs: tuple[float, ...]
    costs_given: bool
    settings: dict[str, Any]
    examples: list[Example] = field(default_factory=list, repr=False)
    worst: list[Example] = field(default_factory=list, repr=False)

    def to_json(self) -> dict[str, Any]:
        """A plain document, without the sample of inputs."""
        document = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "examples"}
        rules = {name: found.to_json() for name, found in self.rules.items()}
        return {**document, "rules": rules, "costs": list(self.costs), "worst": [asdict(example) for example in self.worst]}


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
    engine: Engine = "auto",
) -> Evaluation:
    """Compute the metrics of each rule from the logits of all exits.

    Args:
        logits: `(exits, samples, classes)` as a tensor or an array (also memory-mapped), or the path of a file.
        labels: `(samples,)` class indices, or the path of a file. Without labels, only metrics that need none are computed.
        rules: Rules by name, as objects or as fitted objects, or a mapping from names to these or to other callables.
        costs: Cumulative cost up to each exit (MACs, milliseconds), for consistency and diminishing returns.
        probabilities: Whether `logits` are probabilities (or their logarithms); otherwise such input is refused.
        strict: Count drops above a threshold (released code) rather than at or above it (paper).
        sets: Settings of the prediction sets; None for none.
        seed: For the calibration split, the randomised sets and the sample of inputs.
        block_rows: Rows per block; by default as many as fit the cache. Results do not depend on it.
        progress: Called with the number of rows done and the total.
        engine: `compiled` for compiled code (extra `fast`), `plain` for PyTorch, `auto` for compiled code where it saves time:
            for large logits on the CPU, if numba is installed. Both give the same numbers up to rounding.

    Example:
        >>> found = evaluate(torch.randn(3, 50, 10), torch.randint(0, 10, (50,)))
        >>> sorted(found.rules)
        ['caching', 'latest', 'product']
    """
    check_seed(seed)
    rows = open_rows(logits, labels, probabilities)
    exits, samples, classes = rows.logits.shape
    named = name_rules(rules)
    plain = plain_rules(named, exits, classes)
    setup = Setup(rows, exit_costs(costs, exits), costs is not None, strict, seed, progress, block_rows)
    # Blocks are checked once, not once per rule.
    combiners: dict[str, Combine] = {name: each.combine if isinstance(each, Rule) else each for name, each in plain.items()}
    request = BlockTask(combiners, fingerprints=any(isinstance(each, TunedRule) for each in named.values()))
    request = replace(request, compiled=use_compiled(engine, rows, request))
    prints: list[Tensor] = []
    with setup.workers() as map_in_order:
        chosen = _calibration_rows(samples, seed)
        if sets is not None and rows.labels is not None and len(chosen):
            calibrated, *_ = calibrate_rows(
                rows,
                replace(request, fingerprints=False),
                sets,
                chosen,
                seed=seed,
                block=setup.block,
                map_in_order=map_in_order,
            )
            used = torch.zeros(samples, dtype=torch.bool).index_fill_(0, chosen, True)
            request = replace(request, sets=None if calibrated is None else replace(calibrated, used=used))
        found, _ = setup.measure(request, list(combiners), map_in_order, lambda chunk: prints.append(chunk.fingerprints))
    check_unseen(named, torch.cat(prints), purpose="the test")
    if len(named) == 1:  # among several rules, the metrics themselves show it
        (name, alone), *_ = plain.items()
        warn_of_few_classes(alone, classes, _answers(found.rules[name]))
    return found


@dataclass(frozen=True)
class Setup:
    """The rows of an evaluation and how to measure them."""

    rows: LogitRows
    costs: Tensor
    costs_given: bool
    strict: bool
    seed: int
    progress: Progress | None = None
    block_rows: int | None = None

    @property
    def block(self) -> int:
        """How many rows a block has."""
        exits, _, classes = self.rows.logits.shape
        return block_size(exits, classes) if self.block_rows is None else check_count(self.block_rows, "block_rows")

    def chunks(self, *, compiled: bool) -> list[slice]:
        """All rows in chunks, for compiled code or not."""
        exits, samples, classes = self.rows.logits.shape
        return chunks(samples, self.block, exits * classes, compiled=compiled)

    def workers(self) -> AbstractContextManager[MapInOrder]:
        """Threads for one chunk each."""
        return workers(len(self.chunks(compiled=True)))

    def measure(
        self, request: BlockTask, shown: Sequence[str], map_in_order: MapInOrder, on_chunk: Callable[[Chunk], None]
    ) -> tuple[Evaluation, dict[Any, RuleMetrics]]:
        """Read all rows once: the evaluation of the rules `shown`, and the metrics of all rules.

        Args:
            request: What to compute.
            shown: The rules of the evaluation; the first decides which inputs are the worst.
            map_in_order: See `workers`.
            on_chunk: Called with every chunk, in order.
        """
        exits, samples, classes = self.rows.logits.shape
        labels, sets = self.rows.labels, request.sets
        summaries = {name: Summary(self.costs, labelled=labels is not None, strict=self.strict) for name in request.combiners}
        examples = ExampleCollector(np.random.default_rng([self.seed, 3]).permutation(samples)[:EXAMPLES].tolist(), WORST)
        parts = self.chunks(compiled=request.compiled)
        draws = uniforms((part.stop - part.start for part in parts), exits, [self.seed, 2])
        for chunk in map_in_order(partial(follow_chunk, self.rows, request, self.block), parts, draws):
            for name, each in chunk.rules.items():
                summaries[name].add(each.seen)
                if sets is not None and each.size is not None and each.covered is not None:
                    kept = slice(None) if sets.used is None else ~sets.used[chunk.rows]
                    summaries[name].add_sets(each.size[:, kept], each.covered[:, kept])
            examples.add({name: chunk.rules[name] for name in shown}, labels, chunk.rows.start)
            on_chunk(chunk)
            if self.progress is not None:
                self.progress(chunk.rows.stop, samples)
        metrics = {name: summary.metrics() for name, summary in summaries.items()}
        evaluation = Evaluation(
            exits=exits,
            samples=samples,
            classes=classes,
            labelled=labels is not None,
            rules={name: metrics[name] for name in shown},
            costs=tuple(self.costs.tolist()),
            costs_given=self.costs_given,
            settings={
                "rules": list(shown),
                "drops_counted": "above the threshold" if self.strict else "at or above the threshold",
                "probabilities": self.rows.probabilities,
                "ece_bins": ECE_BINS,
                "nll_floor": NLL_FLOOR,
                "oracle_fraction": ORACLE_FRACTION,
                "sets": None if sets is None else {**asdict(sets.raps), "calibration_rows": sets.calibration_rows},
                "seed": self.seed,
                "engine": "compiled" if request.compiled else "plain",
            },
            examples=examples.sample,
            worst=examples.worst,
        )
        return evaluation, metrics


def open_rows(logits: Any, labels: Any, probabilities: bool) -> LogitRows:
    """Open and check logits and labels in any form that `evaluate` takes."""
    if isinstance(logits, str | Path):
        logits = open_logits(logits, labels if isinstance(labels, str | Path) else None)
    if isinstance(logits, LogitsFile):
        if labels is None or isinstance(labels, str | Path):
            labels = logits.labels
        logits = logits.logits
    if isinstance(logits, np.ndarray):  # possibly mapped, possibly larger than memory
        logits = Mapped(logits)
    values = logits if isinstance(logits, Mapped) else as_tensor(logits, "logits").detach()
    check_logits(values[:, :0] if values.ndim == 3 else values[...])  # rank and element type, without reading the data
    exits, samples, classes = values.shape
    if exits < 2 or classes < 2 or samples < 1:
        what = "one exit" if exits < 2 else "one class" if classes < 2 else "no samples"
        raise ShapeError(
            f"logits of shape {tuple(values.shape)}: {what}",
            expected="shape (exits, samples, classes) with at least two exits, one sample and two classes",
            fix="reorder the dimensions with numpy.transpose; a model with a single exit has nothing to compare",
        )
    device = values.device if isinstance(values, Tensor) else None
    known = None if labels is None else check_labels(labels, batch=samples, classes=classes, device=device)
    rows = LogitRows(values, known, probabilities)
    if not probabilities:
        check_scale(rows.block(slice(0, 2048), 0))
    return rows


def exit_costs(costs: Sequence[float] | None, exits: int) -> Tensor:
    """Cumulative cost per exit, `(exits,)`: as given, or 1, 2, 3, …."""
    return torch.arange(1.0, exits + 1, dtype=torch.float64) if costs is None else check_costs(costs, exits=exits)


def name_rules(rules: Any) -> dict[str, Any]:
    """The rules by name, with texts parsed."""
    if isinstance(rules, Mapping):
        named = {name: parse_rule(each) if isinstance(each, str) else each for name, each in rules.items()}
    else:
        named = {}
        for given in [rules] if isinstance(rules, str | Rule | Fitted) else rules:
            name = given.strip() if isinstance(given, str) else name_of(as_rule(given))
            if name in named:
                raise OptionError(f"rule {name!r} is given twice", expected="each rule once", fix=f"remove one {name!r}")
            named[name] = parse_rule(given) if isinstance(given, str) else given
    if not named:
        raise OptionError("no rules", expected="at least one rule", fix="pass at least one, such as rules=['product']")
    return named


def plain_rules(named: Mapping[str, Any], exits: int, classes: int) -> dict[str, Any]:
    """The rules themselves: of a fitted object its rule, after checking that it was fitted for these exits and classes."""
    plain = {}
    for name, given in named.items():
        if isinstance(given, type) or not (callable(given) or isinstance(given, Fitted)):
            raise OptionError(
                f"rule {name!r} is {given!r}", expected="a rule, such as anytime.Product()", fix="create it: anytime.Product()"
            )
        plain[name] = as_rule(given, exits=exits, classes=classes) if isinstance(given, Rule | Fitted) else given
    return plain


def check_unseen(named: Mapping[str, Any], fingerprints: Tensor, *, purpose: str) -> None:
    """Raise `OverlapError` if a tuned rule was tuned on rows with these fingerprints."""
    for given in named.values():
        if isinstance(given, TunedRule):
            given.unseen(fingerprints, purpose=purpose)


def _calibration_rows(samples: int, seed: int) -> Tensor:
    """A random fifth of the rows, in order."""
    return torch.from_numpy(np.sort(np.random.default_rng([seed, 0]).permutation(samples)[: samples // 5]))


def _answers(found: RuleMetrics) -> Answers | None:
    """The metrics that the warning about few classes reports; None without labels."""
    if found.accuracy is None or found.ece is None or found.label_drop_percent is None:
        return None
    accuracy, ece = (sum(values) / len(values) for values in (found.accuracy, found.ece))
    drops = found.label_drop_percent
    return Answers(100 * accuracy, drops["0.1"], drops["0.5"], found.collapsed_percent[-1], ece)

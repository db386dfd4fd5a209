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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from anytime.calibrate import TunedRule
from anytime.checks import as_tensor, check_choice, check_count, check_labels, check_logits, check_scale, check_seed, exit_costs
from anytime.combine import Rule
from anytime.combine.advice import Answers, warn_of_few_classes
from anytime.combine.dense import DenseRows, Layout, block_size, check_ignored, used_positions
from anytime.combine.named import DEFAULT_RULES, name_rules, plain_rules
from anytime.conformal import Raps
from anytime.display.brief import brief
from anytime.display.plot import plot_chart
from anytime.display.table import Displayed, Table
from anytime.errors import OptionError, ShapeError
from anytime.evaluation.blocks import (
    BlockTask,
    Chunk,
    Combine,
    LogitRows,
    MapInOrder,
    calibrate_rows,
    chunks,
    follow_chunk,
    uniforms,
    workers,
)
from anytime.evaluation.compiled import Engine, use_compiled
from anytime.evaluation.examples import Example, ExampleCollector
from anytime.evaluation.figures import figures
from anytime.evaluation.source import CollectedLogits, LogitsFile, Mapped, open_logits
from anytime.evaluation.tables import at_each_exit, overview
from anytime.metrics import RuleMetrics, Summary
from anytime.metrics.calibration import ECE_BINS, NLL_FLOOR, ORACLE_FRACTION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SCALE_BYTES = 64 << 20
"""Logits by which probabilities are told from logits: at most so many bytes, and 2,048 rows."""
EXAMPLES = 200
WORST = 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, repr=False)
class Evaluation(Displayed):
    """The result of `evaluate`. `to_json` gives the document of `anytime evaluate --json`.

    `print(found.table())` shows the most important metrics; `anytime.write_report(found, "folder")` writes all of them.

    Attributes:
        exits, samples, classes: The size of the data; samples are inputs.
        labelled: Whether there were labels.
        rules: The metrics of each rule.
        costs: Cumulative cost of each exit; 1, 2, 3, … if none were given.
        costs_given: Whether costs were given.
        settings: How it was measured.
        examples: A random sample of inputs.
        worst: The inputs that lose most under the first rule.
        rows: Of dense logits, how many positions were used: every metric counts positions. None for plain logits.
        positions: Of dense logits, the positions per input, such as `(height, width)`.
    """

    exits: int
    samples: int
    classes: int
    labelled: bool
    rules: dict[str, RuleMetrics]
    costs: tuple[float, ...]
    costs_given: bool
    settings: dict[str, Any]
    examples: list[Example] = field(default_factory=list)
    worst: list[Example] = field(default_factory=list)
    rows: int | None = None
    positions: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        rows = "" if self.rows is None else f", rows={self.rows}"
        return (
            f"Evaluation(exits={self.exits}, samples={self.samples}{rows}, classes={self.classes}, "
            f"labelled={self.labelled}, rules={brief(tuple(self.rules))})"
        )

    def table(self, rule: str | None = None) -> Table:
        """The metrics to look at first, one column per rule; or with a rule all of its metrics at each exit.

        Args:
            rule: One of `rules`.
        """
        if rule is None:
            return overview(self)
        check_choice(rule, "rule", tuple(self.rules))
        return at_each_exit(self, rule)

    def plot(self, chart: str | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw a chart of the report with matplotlib (extra `plot`).

        Args:
            chart: Such as `accuracy`, `label_drop`, `entropy`, `ece` or `reliability_1`; an unknown name lists all. By default
                the accuracy, or without labels the agreement with the final answer.
            ax: Axes to draw into; new ones by default.
        """
        known = {figure.id: figure for figure in figures(self)}
        name = chart or ("accuracy" if self.labelled else "agreement")
        check_choice(name, "chart", tuple(known))
        return plot_chart(known[name].chart, title=known[name].title, ax=ax)

    def to_json(self) -> dict[str, Any]:
        """A plain document, without the sample of inputs."""
        document = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "examples"}
        if self.positions is None:
            del document["rows"], document["positions"]
        rules = {name: found.to_json() for name, found in self.rules.items()}
        return {**document, "rules": rules, "costs": list(self.costs), "worst": [example.to_json() for example in self.worst]}


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
    class_dim: int | None = None,
    ignore_index: int | None = None,
    progress: Progress | None = None,
    engine: Engine = "auto",
) -> Evaluation:
    """Compute the metrics of each rule from the logits of all exits.

    Args:
        logits: `(exits, samples, classes)` as a tensor or an array (also memory-mapped), or the path of a file. With
            `class_dim`, dense logits such as `(exits, samples, classes, height, width)`: every position is a row.
        labels: `(samples,)` class indices, or the path of a file. Without labels, only metrics that need none are computed.
        rules: Rules by name, as objects or as fitted objects, or a mapping from names to these or to other callables.
        costs: Cumulative cost up to each exit (MACs, milliseconds), for consistency and diminishing returns.
        probabilities: Whether `logits` are probabilities (or their logarithms); otherwise such input is refused.
        strict: Count drops above a threshold (released code) rather than at or above it (paper).
        sets: Settings of the prediction sets; None for none.
        seed: For the calibration split, the randomised sets and the sample of inputs.
        block_rows: Rows per block; by default as many as fit the cache. Results do not depend on it.
        class_dim: The dimension of the classes in dense logits: 2 for segmentation, -1 for `(exits, samples, length, classes)`.
        ignore_index: The label of positions to leave out, such as 255 or -100.
        progress: Called with the number of rows done and the total.
        engine: `compiled` for compiled code (extra `fast`), `plain` for PyTorch, `auto` for compiled code where it saves time:
            for large logits on the CPU, if numba is installed. Both give the same numbers up to rounding.

    Example:
        >>> found = evaluate(torch.randn(3, 50, 10), torch.randint(0, 10, (50,)))
        >>> sorted(found.rules)
        ['caching', 'latest', 'product']
    """
    check_seed(seed)
    rows = open_rows(logits, labels, probabilities, class_dim=class_dim, ignore_index=ignore_index)
    exits, _, classes = rows.logits.shape
    named = name_rules(rules)
    plain = plain_rules(named, exits, classes)
    setup = Setup(rows, exit_costs(costs, exits), costs is not None, strict, seed, progress, block_rows)
    # Blocks are checked once, not once per rule.
    combiners: dict[str, Combine] = {name: each.combine if isinstance(each, Rule) else each for name, each in plain.items()}
    request = BlockTask(combiners, fingerprints=any(isinstance(each, TunedRule) for each in named.values()))
    request = replace(request, compiled=use_compiled(engine, rows, request))
    prints: list[Tensor] = []
    with setup.workers() as map_in_order:
        chosen, used = rows.for_sets(seed)
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
        labels, sets, layout = self.rows.labels, request.sets, self.rows.layout
        summaries = {name: Summary(self.costs, labelled=labels is not None, strict=self.strict) for name in request.combiners}
        examples = ExampleCollector(self.rows.sample(EXAMPLES, self.seed), WORST, self.rows.locate)
        parts = self.chunks(compiled=request.compiled)
        draws = uniforms((part.stop - part.start for part in parts), exits, [self.seed, 2])
        for chunk in map_in_order(partial(follow_chunk, self.rows, request, self.block), parts, draws):
            for name, each in chunk.rules.items():
                summaries[name].add(each.seen)
                if layout is not None and labels is not None:
                    summaries[name].add_classes(each.seen, labels[chunk.rows].cpu(), classes)
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
            samples=samples if layout is None else layout.batch,
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
                **({} if layout is None else {"class_dim": layout.class_dim, "ignore_index": self.rows.ignore_index}),
            },
            examples=examples.sample,
            worst=examples.worst,
            rows=None if layout is None else samples,
            positions=None if layout is None else layout.positions,
        )
        return evaluation, metrics


def open_rows(
    logits: Any, labels: Any, probabilities: bool, *, class_dim: int | None = None, ignore_index: int | None = None
) -> LogitRows:
    """Open and check logits and labels in any form that `evaluate` takes."""
    if isinstance(logits, str | Path):
        logits = open_logits(logits, labels if isinstance(labels, str | Path) else None)
    if isinstance(logits, LogitsFile | CollectedLogits):
        if labels is None or isinstance(labels, str | Path):
            labels = logits.labels
        logits = logits.logits
    if isinstance(logits, np.ndarray):  # possibly mapped, possibly larger than memory
        logits = Mapped(logits)
    values: Tensor | Mapped = logits if isinstance(logits, Mapped) else as_tensor(logits, "logits").detach()
    device = values.device if isinstance(values, Tensor) else None
    check_ignored(class_dim, ignore_index)
    given: Tensor | Mapped | DenseRows = values
    if class_dim is None:
        known = None
        check_logits(values[:, :0] if values.ndim == 3 else values[...])  # rank and element type, without reading the data
    else:
        given, known = _dense_rows(values, labels, class_dim, ignore_index, device)
        check_logits(given[:, :0])
    exits, samples, classes = given.shape
    if exits < 2 or classes < 2 or samples < 1:
        what = "one exit" if exits < 2 else "one class" if classes < 2 else "no samples"
        raise ShapeError(
            f"logits of shape {tuple(values.shape)}: {what}",
            expected="shape (exits, samples, classes) with at least two exits, one sample and two classes",
            fix="reorder the dimensions with numpy.transpose; a model with a single exit has nothing to compare",
        )
    if class_dim is None and labels is not None:
        known = check_labels(labels, batch=samples, classes=classes, device=device)
    rows = LogitRows(given, known, probabilities, ignore_index)
    if not probabilities:
        some = max(1, _SCALE_BYTES // (4 * exits * classes))
        check_scale(rows.block(slice(0, min(2048, some, samples)), 0))
    return rows


def _dense_rows(
    values: Tensor | Mapped, labels: Any, class_dim: int, ignore_index: int | None, device: torch.device | None
) -> tuple[DenseRows, Tensor | None]:
    """Dense logits as rows, without the positions that are not labelled, and the labels of these rows."""
    source = values.array if isinstance(values, Mapped) else values
    read = values.read if isinstance(values, Mapped) else Tensor.contiguous
    if labels is None:
        if ignore_index is not None:
            raise OptionError(
                f"ignore_index is {ignore_index!r}, and there are no labels",
                expected="labels",
                fix="pass labels, or omit ignore_index",
            )
        return DenseRows(source, class_dim, read=read), None
    kept, known = used_positions(labels, Layout.of(tuple(values.shape), class_dim), ignore_index, device)
    return DenseRows(source, class_dim, kept=kept, read=read), known


def check_unseen(named: Mapping[str, Any], fingerprints: Tensor, *, purpose: str) -> None:
    """Raise `OverlapError` if a tuned rule was tuned on rows with these fingerprints."""
    for given in named.values():
        if isinstance(given, TunedRule):
            given.unseen(fingerprints, purpose=purpose)


def _answers(found: RuleMetrics) -> Answers | None:
    """The metrics that the warning about few classes reports; None without labels."""
    if found.accuracy is None or found.ece is None or found.label_drop_percent is None:
        return None
    accuracy, ece = (sum(values) / len(values) for values in (found.accuracy, found.ece))
    drops = found.label_drop_percent
    return Answers(100 * accuracy, drops["0.1"], drops["0.5"], found.collapsed_percent[-1], ece)

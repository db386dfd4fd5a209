"""Evaluation: the metrics of every rule from logits, in blocks that fit the cache.

All rows are read once. If there are labels and no other calibration rows, a fifth of them is read before that, to calibrate
the prediction sets. Memory does not grow with the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from anytime.checks import check_choice, check_count
from anytime.combine.dense import block_size
from anytime.display.brief import brief
from anytime.display.plot import plot_chart
from anytime.display.table import Displayed, Table
from anytime.evaluation.blocks import (
    BlockTask,
    Chunk,
    ComputePath,
    LogitRows,
    chunks,
    follow_chunk,
    some_rows,
    uniforms,
)
from anytime.evaluation.examples import Example, ExampleCollector
from anytime.evaluation.figures import figures
from anytime.evaluation.sums import Sums
from anytime.evaluation.tables import at_each_exit, overview
from anytime.evaluation.threads import MapInOrder
from anytime.metrics import RuleMetrics, Summary
from anytime.metrics.calibration import ECE_BINS, NLL_FLOOR, ORACLE_FRACTION
from anytime.metrics.summary import joined, joint, metrics_of, together

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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


@dataclass(frozen=True)
class Setup:
    """How rows are measured.

    Attributes:
        costs: Cumulative cost of each exit.
        costs_given: Whether they were given.
        strict: Whether drops are counted above a threshold only.
        seed: For randomised sets and samples.
        labelled: Whether there are labels.
        block_rows: Rows per block, or None for as many as fit the cache.
    """

    costs: Tensor
    costs_given: bool
    strict: bool
    seed: int
    labelled: bool
    block_rows: int | None = None

    def block(self, exits: int, classes: int) -> int:
        """How many rows a block has."""
        return block_size(exits, classes) if self.block_rows is None else check_count(self.block_rows, "block_rows")

    def chunks(self, samples: int, exits: int, classes: int, path: ComputePath) -> list[slice]:
        """All rows in chunks, for one way to compute them."""
        return chunks(samples, self.block(exits, classes), exits * classes, path)

    def sample(self, samples: int) -> tuple[int, ...]:
        """The numbers of some random rows to show."""
        return tuple(some_rows(samples, min(EXAMPLES, samples), np.random.default_rng([self.seed, 3])).tolist())

    def identity(self) -> list[Any]:
        """What results depend on."""
        return [self.costs.tolist(), self.strict, self.seed, self.labelled, self.block_rows]

    def empty(self, names: Iterable[Any], sample: Sequence[int], rows: LogitRows | None = None, *, first: int = 0) -> Sums:
        """Sums over no rows; `rows` and `first` are needed to add rows, not to merge."""
        summaries = {name: Summary(self.costs, labelled=self.labelled, strict=self.strict) for name in names}
        locate = _nowhere if rows is None else rows.locate
        return Sums(summaries, ExampleCollector(sample, WORST, locate, first=first, file=None if rows is None else rows.file))

    def measure(
        self,
        rows: LogitRows,
        request: BlockTask,
        shown: Sequence[str],
        map_in_order: MapInOrder,
        on_chunk: Callable[[Chunk], None],
        *,
        sample: Sequence[int],
        first: int = 0,
        progress: Progress | None = None,
    ) -> Sums:
        """Read rows once and add them up.

        Args:
            rows: The rows.
            request: What to compute.
            shown: The rules of the examples; the first decides which inputs are the worst.
            map_in_order: See `workers`.
            on_chunk: Called with every chunk, in order.
            sample: The numbers of the rows to show.
            first: How many rows are before these.
            progress: Called with the number of rows done and the total.
        """
        exits, samples, classes = rows.logits.shape
        labels, sets, layout = rows.labels, request.sets, rows.layout
        sums = self.empty(request.combiners, sample, rows, first=first)
        parts = self.chunks(samples, exits, classes, request.path)
        draws = uniforms((part.stop - part.start for part in parts), exits, [self.seed, 2], first=first)
        for chunk in map_in_order(partial(follow_chunk, rows, request, self.block(exits, classes)), parts, draws):
            seen = {name: each.seen for name, each in chunk.rules.items()}
            device = next(iter(seen.values())).answer.device
            kept = slice(None) if sets is None else sets.kept(chunk.rows, device)
            for names in together(seen):
                with joint([sums.summaries[name] for name in names]) as summary:
                    summary.add(joined([seen[name] for name in names]))
                if sized := [name for name in names if chunk.rules[name].size is not None]:
                    size, covered = (
                        joined([getattr(chunk.rules[name], part) for name in sized]) for part in ("size", "covered")
                    )
                    with joint([sums.summaries[name] for name in sized]) as summary:
                        summary.add_sets(size[..., kept], covered[..., kept])
            if layout is not None and labels is not None:
                for name, each in seen.items():
                    sums.summaries[name].add_classes(each, labels[chunk.rows].to(device), classes)
            sums.examples.add({name: seen[name] for name in shown}, labels, chunk.rows.start)
            if chunk.check is not None:
                chunk.check()
            on_chunk(chunk)
            if progress is not None:
                progress(first + chunk.rows.stop, samples)
        return sums

    def evaluation(
        self, sums: Sums, rows: LogitRows, request: BlockTask, shown: Sequence[str], *, samples: int | None = None
    ) -> tuple[Evaluation, dict[Any, RuleMetrics]]:
        """The evaluation of the rules `shown`, and the metrics of all rules, from the sums over all rows.

        Args:
            sums: The sums.
            rows: The rows, or a part of them.
            request: What was computed.
            shown: The rules of the evaluation.
            samples: How many rows there are in all; by default `rows`.
        """
        exits, here, classes = rows.logits.shape
        samples, layout, sets = here if samples is None else samples, rows.layout, request.sets
        metrics = metrics_of(sums.summaries)
        evaluation = Evaluation(
            exits=exits,
            samples=samples if layout is None else layout.batch,
            classes=classes,
            labelled=self.labelled,
            rules={name: metrics[name] for name in shown},
            costs=tuple(self.costs.tolist()),
            costs_given=self.costs_given,
            settings={
                "rules": list(shown),
                "drops_counted": "above the threshold" if self.strict else "at or above the threshold",
                "probabilities": rows.probabilities,
                "ece_bins": ECE_BINS,
                "nll_floor": NLL_FLOOR,
                "oracle_fraction": ORACLE_FRACTION,
                "sets": None if sets is None else {**asdict(sets.raps), "calibration_rows": sets.calibration_rows},
                "seed": self.seed,
                "engine": request.path,
                **({} if layout is None else {"class_dim": layout.class_dim, "ignore_index": rows.ignore_index}),
            },
            examples=sums.examples.sample,
            worst=sums.examples.worst,
            rows=None if layout is None else samples,
            positions=None if layout is None else layout.positions,
        )
        return evaluation, metrics


def _nowhere(row: int) -> tuple[int, None]:
    return row, None

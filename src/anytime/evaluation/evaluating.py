"""`evaluate`: the metrics of every rule, from logits in memory or in any number of files.

All rows are read once. If there are labels, a random fifth of the rows, at most 131,072, is read before that, to calibrate the
prediction sets. Memory does not grow with the number of rows of files; the labels of a part are held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytime.calibrate import TunedRule
from anytime.checks import check_count, check_seed, exit_costs
from anytime.combine import Rule
from anytime.combine.advice import Answers, warn_of_few_classes
from anytime.combine.named import DEFAULT_RULES, name_rules, plain_rules
from anytime.conformal import Raps
from anytime.errors import LabelError, OptionError, OverlapError
from anytime.evaluation.blocks import (
    BlockTask,
    Combine,
    LogitRows,
    SetThresholds,
    rows_for_sets,
    rows_within,
    set_thresholds,
)
from anytime.evaluation.engines import Engine, choose_path
from anytime.evaluation.files import cut, forget, paths_of
from anytime.evaluation.measure import Evaluation, Progress, Setup
from anytime.evaluation.opening import open_rows
from anytime.evaluation.processes import on_processes
from anytime.evaluation.shards import Mapper, Part, Results, ScoreTask, SumTask, check_keepable, check_results, run_tasks
from anytime.evaluation.sums import Sums
from anytime.evaluation.threads import workers
from anytime.installed import count_cores
from anytime.metrics import RuleMetrics
from anytime.outputs import lock_run
from anytime.threads import torch_threads

_MANY = 1 << 27
"""Logits from which on several processes save time: each takes seconds to start."""


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
    processes: int | None = 1,
    work: str | Path | None = None,
    mapper: Mapper | None = None,
) -> Evaluation:
    """Compute the metrics of each rule from the logits of all exits.

    Args:
        logits: `(exits, samples, classes)` as a tensor or an array (also memory-mapped), or the path of a file, a folder or a
            glob, or a list of these: all rows of the files count. With `class_dim`, dense logits such as `(exits, samples,
            classes, height, width)`: every position is a row.
        labels: `(samples,)` class indices, or paths as for `logits`, one file for each. Without labels, only metrics that need
            none are computed.
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
        engine: `compiled` for compiled code (extra `fast`), `triton` for a kernel on a GPU, `plain` for PyTorch; `auto` for the
            kernel on a GPU, and for compiled code where it saves time: for large logits on the CPU, if numba is installed. All
            give the same numbers up to rounding.
        processes: How many processes read files; None for one per core if the files are large. Scripts that use several need
            `if __name__ == "__main__":`. The metrics are the same to the last bit.
        work: A folder for the sums of the parts that are done: after an interruption, the same call continues there. It is
            removed at the end.
        mapper: Who computes the parts in place of this process, see `anytime.integrations.ray_data.evaluate_files`.

    Example:
        >>> found = evaluate(torch.randn(3, 50, 10), torch.randint(0, 10, (50,)))
        >>> sorted(found.rules)
        ['caching', 'latest', 'product']
    """
    check_seed(seed)
    with torch_threads(1):
        parts = _parts(logits, labels, probabilities, class_dim, ignore_index)
        _check_used(parts, processes, work, mapper)
        try:
            rows = parts[0].open()
            samples, (exits, _, classes) = sum(part.rows for part in parts), rows.logits.shape
            named = name_rules(rules)
            plain = plain_rules(named, exits, classes)
            # Blocks are checked once, not once per rule.
            combiners: dict[str, Combine] = {
                name: each.combine if isinstance(each, Rule) else each for name, each in plain.items()
            }
            tuned = {name: each for name, each in named.items() if isinstance(each, TunedRule)}
            setup = Setup(exit_costs(costs, exits), costs is not None, strict, seed, rows.labels is not None, block_rows)
            request = BlockTask(combiners, fingerprints=bool(tuned))
            request = replace(request, path=choose_path(engine, rows, request, samples=samples))
            count = 1 if mapper is not None else _processes(processes, parts, samples * exits * classes)
            others = on_processes(count) if count > 1 else nullcontext(mapper)
            threads = max(len(setup.chunks(part.rows, exits, classes, request.path)) for part in parts)
            with _kept(work, plain) as results, workers(threads) as map_in_order, others as mapper:
                run = partial(run_tasks, mapper=mapper, map_in_order=map_in_order, results=results)
                if sets is not None and rows.labels is not None:
                    request = replace(request, sets=_calibrated(parts, rows, setup, request, sets, run))
                sums = _sums(parts, setup, request, samples, {name: each.seen for name, each in tuned.items()}, run, progress)
            for part in parts:
                part.check()
        finally:
            forget()
        for name, each in tuned.items():
            each.check_unseen(sums.seen[name], samples, purpose="the test")
        found, _ = setup.evaluation(sums, rows, request, list(combiners), samples=samples)
    if len(named) == 1:  # among several rules, the metrics themselves show it
        (name, alone), *_ = plain.items()
        warn_of_few_classes(alone, classes, _answers(found.rules[name]))
    return found


@dataclass(frozen=True)
class _Given:
    """Rows that the caller passed, as a part."""

    given: LogitRows
    first: int = 0

    @property
    def rows(self) -> int:
        return self.given.logits.shape[1]

    def open(self) -> LogitRows:
        return self.given

    def check(self) -> None:
        """Raise if they are in a file that has changed."""
        self.given.check()

    def identity(self) -> list[Any]:
        raise NotImplementedError


def _parts(logits: Any, labels: Any, probabilities: bool, class_dim: Any, ignore_index: Any) -> Sequence[Part]:
    files, known = paths_of(logits), None if labels is None else paths_of(labels)
    dense, in_memory = class_dim is not None or ignore_index is not None, labels is not None and known is None
    if files is None or (len(files) == 1 and (dense or in_memory)):
        given = logits if files is None else files[0]
        return [_Given(open_rows(given, labels, probabilities, class_dim=class_dim, ignore_index=ignore_index))]
    if dense:
        raise OptionError(
            f"class_dim with {len(files)} files",
            expected="one file of dense logits",
            fix="evaluate each file on its own, or save one file",
        )
    if in_memory:
        raise LabelError(
            f"labels are a {type(labels).__name__}, and the logits are in {len(files)} files",
            expected="files with labels, one for each",
            fix="save the labels beside the logits: numpy.savez('part.npz', logits=logits, labels=labels)",
        )
    return cut(files, known, probabilities=probabilities)


def _check_used(parts: Sequence[Part], processes: Any, work: Any, mapper: Any) -> None:
    """Refuse options that only files have for logits in memory."""
    if processes is not None:
        check_count(processes, "processes")
    for name, value in (("work", work), ("processes", None if processes == 1 else processes), ("mapper", mapper)):
        if value is not None and isinstance(parts[0], _Given):
            raise OptionError(
                f"{name} is {value!r}, and the logits are not read from files",
                expected="the path of a file, a folder or a glob",
                fix=f"pass paths of plain logits, or omit {name}",
            )


def _processes(given: int | None, parts: Sequence[Part], numbers: int) -> int:
    if given is not None:
        return min(given, len(parts))
    return min(count_cores(), len(parts)) if numbers >= _MANY else 1


@contextmanager
def _kept(work: str | Path | None, plain: Mapping[str, Any]) -> Iterator[Results | None]:
    """The folder of the sums, locked; it is removed if nothing fails."""
    if work is None:
        yield None
        return
    check_keepable(plain)
    place = Path(work)
    check_results(place)
    try:
        with lock_run(place, doing="evaluating"):
            results = Results(place)
            yield results
            results.clear()
    finally:
        with suppress(OSError):
            place.rmdir()  # if nothing is left in it


def _calibrated(
    parts: Sequence[Part], rows: LogitRows, setup: Setup, request: BlockTask, raps: Raps, run: Callable[..., Iterator[Any]]
) -> SetThresholds | None:
    """Prediction sets from the scores of the calibration rows, which are chosen among all parts."""
    chosen, used = rows.for_sets(setup.seed) if isinstance(parts[0], _Given) else _chosen(parts, setup.seed)
    if not len(chosen):
        return None
    tasks, before = [], 0
    for part in parts:
        here = rows_within(chosen, slice(part.first, part.first + part.rows))
        if len(here):
            tasks.append(ScoreTask(part, setup, replace(request, fingerprints=False), raps, here, before))
        before += len(here)
    found = list(run(tasks))
    scores = {name: torch.cat([each[name] for each in found], 1) for name in request.combiners}
    return replace(set_thresholds(raps, scores), used=used)


def _chosen(parts: Sequence[Part], seed: int) -> tuple[Tensor, Tensor]:
    chosen = rows_for_sets(sum(part.rows for part in parts), seed)
    return chosen, chosen


def _sums(
    parts: Sequence[Part],
    setup: Setup,
    request: BlockTask,
    samples: int,
    tuned: Mapping[str, Tensor],
    run: Callable[..., Iterator[Any]],
    progress: Progress | None,
) -> Sums:
    """The sums over all parts, in their order."""
    sample = setup.sample(samples)
    tasks = []
    for part in parts:
        sets, rows = request.sets, slice(part.first, part.first + part.rows)
        if sets is not None and sets.used is not None:
            sets = replace(sets, used=rows_within(sets.used, rows))
        tasks.append(SumTask(part, setup, replace(request, sets=sets), sample, tuned))
    results = run(tasks, progress=progress)
    if len(tasks) == 1:
        (alone,) = results
        assert isinstance(alone, Sums)
        return alone
    total = setup.empty(request.combiners, sample)
    for each in results:
        if copies := [name for name, head in each.heads.items() if head in total.heads.values()]:
            before = next(name for name, head in total.heads.items() if head == each.heads[copies[0]])
            raise OverlapError(
                f"{copies[0]} begins with the same rows as {before}",
                expected="each row once",
                fix="remove one of the files",
            )
        total.merge(each)
    return total


def _answers(found: RuleMetrics) -> Answers | None:
    """The metrics that the warning about few classes reports; None without labels."""
    if found.accuracy is None or found.ece is None or found.label_drop_percent is None:
        return None
    accuracy, ece = (sum(values) / len(values) for values in (found.accuracy, found.ece))
    drops = found.label_drop_percent
    return Answers(100 * accuracy, drops["0.1"], drops["0.5"], found.collapsed_percent[-1], ece)

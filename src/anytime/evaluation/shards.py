"""What is computed of one part of the rows, and by whom: this process, several processes, or a cluster.

A task is one part and everything needed to compute its scores (of the calibration rows) or its sums. Its result depends on
nothing else, and results are added in the order of the parts, so the metrics are the same to the last bit however many
processes ran. With a folder for the results, each is kept there as one file whose name holds the fingerprint of its task and
the checksum of its content: what is missing, damaged or of another task is computed again.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from anytime import __version__
from anytime.artifacts import overwrites, typed_errors, write_bytes
from anytime.combine import Rule
from anytime.conformal import Raps
from anytime.errors import AnytimeError, IntegrityError, OptionError
from anytime.evaluation.blocks import BlockTask, Chunk, LogitRows, score_rows
from anytime.evaluation.engines import choose_path
from anytime.evaluation.measure import Progress, Setup
from anytime.evaluation.sums import Sums, scores_from_bytes, scores_to_bytes
from anytime.evaluation.threads import MapInOrder, workers
from anytime.outputs import LOCK, exists
from anytime.reading import read_file

_SUFFIX = ".sums.safetensors"
_HEAD = 32
"""Rows by which two files with the same rows are found."""

Packed = tuple[int, bool, bytes]
Mapper = Callable[[Callable[[bytes], tuple[bool, bytes]], Sequence[tuple[int, bytes]]], Iterable[Packed]]
"""Applies a function to numbered tasks and yields the number of each with what it returned, in any order."""


class Part(Protocol):
    """Rows that are evaluated as one."""

    @property
    def first(self) -> int:
        """How many rows are before the part."""

    @property
    def rows(self) -> int:
        """The number of rows."""

    def open(self) -> LogitRows:
        """The rows, checked."""

    def check(self) -> None:
        """Raise if they have changed."""

    def identity(self) -> list[Any]:
        """What tells this part from another."""


@dataclass(frozen=True)
class Task:
    """A part and what to compute of it.

    Attributes:
        part: The rows.
        setup: How to measure.
        request: What to compute.
    """

    part: Part
    setup: Setup
    request: BlockTask

    def compute(self, map_in_order: MapInOrder, progress: Progress | None = None) -> Any:
        """The result."""
        rows = self.part.open()
        choose_path(self.request.path, rows, self.request)  # which prepares it in this process
        found = self._compute(rows, map_in_order, progress)
        self.part.check()
        return found

    @property
    def key(self) -> str:
        """A fingerprint of everything that the result depends on."""
        document = [type(self).__name__, __version__, self.part.identity(), self.setup.identity(), *self._identity()]
        rules = {str(name): repr(getattr(combine, "__self__", combine)) for name, combine in self.request.combiners.items()}
        text = json.dumps([document, rules, self.request.path], default=_plain)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @abstractmethod
    def pack(self, found: Any) -> bytes:
        """The result as bytes."""

    @abstractmethod
    def unpack(self, data: bytes, path: str | Path) -> Any:
        """The result from its bytes."""

    @abstractmethod
    def _compute(self, rows: LogitRows, map_in_order: MapInOrder, progress: Progress | None) -> Any: ...

    @abstractmethod
    def _identity(self) -> list[Any]: ...


@dataclass(frozen=True)
class ScoreTask(Task):
    """The scores of the calibration rows in a part.

    Attributes:
        raps: The prediction sets.
        chosen: The calibration rows, counted from the first of the part.
        before: How many calibration rows are before these.
    """

    raps: Raps
    chosen: Tensor
    before: int

    def pack(self, found: Any) -> bytes:
        return scores_to_bytes(found)

    def unpack(self, data: bytes, path: str | Path) -> dict[str, Tensor]:
        return scores_from_bytes(data, self.request.combiners, path)

    def _compute(self, rows: LogitRows, map_in_order: MapInOrder, progress: Progress | None) -> dict[str, Tensor]:
        exits, _, classes = rows.logits.shape
        scores, *_ = score_rows(
            rows,
            self.request,
            self.raps,
            self.chosen,
            seed=self.setup.seed,
            block=self.setup.block(exits, classes),
            map_in_order=map_in_order,
            before=self.before,
        )
        return scores

    def _identity(self) -> list[Any]:
        return [asdict(self.raps), self.before, self.chosen]


@dataclass(frozen=True)
class SumTask(Task):
    """The sums over a part.

    Attributes:
        sample: Rows to show, counted over all parts.
        tuned: Fingerprints of the rows that rules were tuned on, by rule.
    """

    sample: tuple[int, ...]
    tuned: Mapping[str, Tensor]

    def pack(self, found: Any) -> bytes:
        data: bytes = found.to_bytes()
        return data

    def unpack(self, data: bytes, path: str | Path) -> Sums:
        return self.setup.empty(self.request.combiners, self.sample).restore(data, path)

    def _compute(self, rows: LogitRows, map_in_order: MapInOrder, progress: Progress | None) -> Sums:
        seen = dict.fromkeys(self.tuned, 0)

        def count(chunk: Chunk) -> None:
            for name, known in self.tuned.items():
                seen[name] += int(torch.isin(chunk.fingerprints, known).sum())

        shown = list(self.request.combiners)
        sums = self.setup.measure(
            rows, self.request, shown, map_in_order, count, first=self.part.first, sample=self.sample, progress=progress
        )
        sums.seen.update(seen)
        if rows.file is not None and rows.start == 0 and self.part.rows >= _HEAD:
            head = rows.block(slice(0, _HEAD), 0).cpu().double().numpy().tobytes()
            sums.heads[rows.file] = hashlib.sha256(head).hexdigest()
        return sums

    def _identity(self) -> list[Any]:
        sets = self.request.sets
        thresholds = None if sets is None else [asdict(sets.raps), sets.used, {str(n): t for n, t in sets.by_rule.items()}]
        return [self.sample, thresholds, dict(self.tuned)]


class Results:
    """A folder with one file per finished task.

    Args:
        folder: The folder, which is created.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with typed_errors(folder, verb="read"):
            names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        self._known = {name.partition("-")[0]: name for name in names if name.endswith(_SUFFIX)}

    def get(self, key: str) -> bytes | None:
        """The result of a task, or None if there is none, or a damaged one."""
        name = self._known.get(key)
        if name is None:
            return None
        with suppress(AnytimeError):
            data = read_file(self.folder / name)
            if self._name(key, data) == name:
                return data
        return None

    def put(self, key: str, data: bytes) -> None:
        """Keep a result; when this returns, it survives a kill."""
        name, before = self._name(key, data), self._known.get(key)
        write_bytes(self.folder / name, data)
        self._known[key] = name
        if before not in (None, name):
            (self.folder / str(before)).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the results."""
        for path in self.folder.iterdir():
            if path.name.endswith(_SUFFIX):
                path.unlink(missing_ok=True)

    @staticmethod
    def _name(key: str, data: bytes) -> str:
        return f"{key}-{hashlib.sha256(data).hexdigest()[:32]}{_SUFFIX}"


def check_results(folder: Path) -> None:
    """Refuse a folder for results that holds anything else."""
    if not exists(folder):
        return
    if not exists(folder, Path.is_dir):
        raise overwrites(folder, "is a file")
    with typed_errors(folder, verb="read"):
        foreign = sorted(path.name for path in folder.iterdir() if not _is_ours(path.name))
    if foreign:
        raise overwrites(folder, f"holds {foreign[0]!r}, which evaluate did not write")


def _is_ours(name: str) -> bool:
    return name == LOCK or name.endswith(_SUFFIX) or name.startswith(".anytime-file-")


class _Held:
    """Results in memory until they are used."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self._held.pop(key, None)

    def put(self, key: str, data: bytes) -> None:
        self._held[key] = data


def run_tasks(
    tasks: Sequence[Task],
    *,
    mapper: Mapper | None,
    map_in_order: MapInOrder,
    results: Results | None,
    progress: Progress | None = None,
) -> Iterator[Any]:
    """The results of tasks, in their order.

    Args:
        tasks: The tasks.
        mapper: Who computes them; None for this process.
        map_in_order: The threads of this process.
        results: Where they are kept.
        progress: Called with the number of rows done and the total.
    """
    keys = [str(index) if results is None else task.key for index, task in enumerate(tasks)]
    total = sum(task.part.rows for task in tasks)
    inside = None if progress is None else lambda done, _: progress(done, total)
    if mapper is not None:
        yield from _elsewhere(tasks, keys, mapper, _Held() if results is None else results, progress, total)
        return
    for task, key in zip(tasks, keys, strict=True):
        data = None if results is None else results.get(key)
        found = task.compute(map_in_order, inside) if data is None else task.unpack(data, key)
        if results is not None and data is None:
            results.put(key, task.pack(found))
        if progress is not None:
            progress(task.part.first + task.part.rows, total)
        yield found


def _elsewhere(
    tasks: Sequence[Task], keys: Sequence[str], mapper: Mapper, results: Any, progress: Progress | None, total: int
) -> Iterator[Any]:
    missing = {index for index, key in enumerate(keys) if results.get(key) is None}
    arriving = iter(mapper(compute_packed, [(index, _packed(tasks[index])) for index in sorted(missing)]))
    done = total - sum(tasks[index].part.rows for index in missing)
    for index, (task, key) in enumerate(zip(tasks, keys, strict=True)):
        while index in missing:
            if (arrived := next(arriving, None)) is None:
                raise OptionError(
                    f"the mapper returned nothing for {len(missing)} of {len(tasks)} tasks",
                    expected="one result per task, in any order",
                    fix="pass a mapper that yields the result of every task",
                )
            which, worked, answer = arrived
            if not worked:
                raise pickle.loads(answer)
            results.put(keys[which], answer)
            missing.discard(which)
            done += tasks[which].part.rows
            if progress is not None:
                progress(done, total)
        data = results.get(key)
        if data is None:
            raise IntegrityError(
                f"the sums of part {index + 1} of {len(tasks)} have changed while they were added",
                expected="a folder that no other program writes to",
                fix="evaluate again: what is missing is computed",
                path=getattr(results, "folder", key),
            )
        yield task.unpack(data, key)


def compute_packed(packed: bytes) -> tuple[bool, bytes]:
    """Compute a pickled task with one thread: whether that worked, and the result or the pickled error."""
    task: Task = pickle.loads(packed)
    try:
        with workers(1) as map_in_order:
            return True, task.pack(task.compute(map_in_order))
    except AnytimeError as error:
        return False, pickle.dumps(error)


def check_keepable(rules: Mapping[str, Any]) -> None:
    """Refuse rules that have no text by which they are known again."""
    for name, rule in rules.items():
        if not isinstance(rule, Rule):
            raise OptionError(
                f"rule {name!r} is {rule!r}, with a folder for the sums",
                expected="rules of anytime, whose text tells whether sums are of the same rule",
                fix="omit work, or write the rule as a dataclass that derives from anytime.combine.Rule",
            )


def _packed(task: Task) -> bytes:
    try:
        return pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise OptionError(
            f"the rules cannot be sent to other processes ({error})",
            expected="rules of anytime, or functions of a module",
            fix="use processes=1, or define the rule in a module",
        ) from error


def _plain(value: Any) -> Any:
    """A value in the fingerprint of a task."""
    if isinstance(value, Tensor):
        return [str(value.dtype), hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()]
    return repr(value)

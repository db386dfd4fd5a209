"""The logits of all exits over a data set, from any model and loader, in memory or in a file larger than memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anytime.checks import Inputs, check_flag, check_labels, check_logits, count_rows, stack_exits
from anytime.data.loaders import as_batches, digest, read_batch
from anytime.errors import FileError, InputError, LabelError, OptionError, ShapeError, StateError
from anytime.evaluation.source import CollectedLogits, open_logits
from anytime.evaluation.store import LogitsStore, mapped_tensor
from anytime.models.attach.probe import evaluating
from anytime.models.base import ExitModel
from anytime.models.given import run_explained
from anytime.models.outputs import OutputReader, on_device_of, read_outputs
from anytime.outputs import lock_run
from anytime.progress import Progress

_BATCH = 128
"""Rows per batch of a data set."""
_BLOCK_BYTES, _BLOCK_SECONDS = 1 << 25, 10.0
"""Rows are written when there are so many bytes of them, or after this time."""
_SAME = 0.01
"""By how much of the largest logit a batch may differ when it is computed again, possibly on another device."""


def collect_logits(
    model: Any,
    loader: Iterable[Any],
    out: str | Path | None = None,
    *,
    resume: bool = True,
    progress: bool = True,
) -> CollectedLogits:
    """Run a model over a loader and collect the logits of all exits.

    The model runs in eval mode on its own device, without gradients; afterwards it has its modes again. Half-precision logits
    are kept, bfloat16, which files of NumPy lack, becomes float32.

    With `out` the logits are written to disk in blocks, so memory stays bounded, and a folder beside the file (`OUT.partial`)
    keeps what is done: the same call continues there after a kill. The loader must then yield the same batches in the same
    order: `shuffle=False`, or a generator with a fixed seed. The batches that are done are loaded again but not run. The last
    of them is run again, to check that data and model are the same.

    Args:
        model: A model with exits, a module or a plain function that returns a list of logits per exit or a tensor
            `(exits, batch, classes)` (`anytime.models.from_outputs` takes other outputs).
        loader: A DataLoader, a map-style data set, or any iterable of batches: `(x, y)`, `(x,)`, `x`, or a dict with `labels`
            or `label`. `x` is a tensor, or a tuple or dict of tensors.
        out: The file: `.npz` or `.safetensors` with logits and labels, or `.npy` with the logits and `OUT.labels.npy` beside
            it. `anytime evaluate` reads it. Without it everything is kept in memory.
        resume: Whether to continue an interrupted collection; False begins again.
        progress: Whether to show a line with rate and estimate on stderr, if that is a terminal.

    Returns:
        An object with `logits`, `(exits, rows, classes)`, and `labels`, or None; mapped from the file if `out` is given.

    Example:
        >>> from anytime.models import MLP, MLPConfig
        >>> model = MLP(MLPConfig(classes=4, exits=3))
        >>> batches = [(torch.randn(8, 2), torch.arange(8) % 4) for _ in range(5)]
        >>> found = collect_logits(model, batches)
        >>> found.logits.shape, found.labels.shape
        (torch.Size([3, 40, 4]), torch.Size([40]))
    """
    run = exits_of(model)
    batches = as_batches(loader, batch=_BATCH, once=True)
    check_flag(resume, "resume")
    check_flag(progress, "progress")
    sink: _Memory | _File
    sink = _Memory() if out is None else _File(LogitsStore(out), resume=resume)
    with sink, evaluating(model if isinstance(model, nn.Module) else nn.Module()):
        return _collect(run, batches, sink, Progress(_length(batches), step="batch") if progress else None)


def exits_of(model: Any) -> Callable[[Inputs], list[Tensor]]:
    """A function from inputs to the logits of each exit, `(batch, classes)`."""
    if isinstance(model, ExitModel) and not isinstance(model, type):
        return lambda x: list(model.exits(on_device_of(model, x)))
    if not callable(model) or isinstance(model, type):
        raise OptionError(
            f"the model is {f'the class {model.__name__}' if isinstance(model, type) else f'a {type(model).__name__}'}",
            expected="a model with exits, or a module or function that returns the logits of all exits",
            fix="pass the model itself; wrap one with other outputs in anytime.models.from_outputs",
        )
    reader = OutputReader()

    def run(x: Inputs) -> list[Tensor]:
        nonlocal reader
        found = read_outputs(model, on_device_of(model, x), reader)
        reader = reader.after(len(found), count_rows(x))
        return found

    return run


@dataclass
class _Batch:
    """A batch that was run: logits `(exits, rows, classes)` on the CPU, and what tells it from others."""

    number: int
    inputs: Inputs
    logits: Tensor
    labels: Tensor | None

    def without_inputs(self) -> _Batch:
        return replace(self, inputs=())


def _collect(
    run: Callable[[Inputs], list[Tensor]], loader: Iterable[Any], sink: _Memory | _File, line: Progress | None
) -> CollectedLogits:
    rows = 0
    with closing(line) if line is not None else nullcontext():
        for number, (inputs, labels) in enumerate(map(read_batch, loader), 1):
            if number > sink.batches_done:
                sink.add(_run_batch(run, number, inputs, labels, rows))
            elif number == sink.batches_done:
                sink.check_same(_run_batch(run, number, inputs, labels, rows))
            rows += count_rows(inputs)
            if line is not None and number >= sink.batches_done:
                line.show(number, rows)
    return sink.finish()


@torch.no_grad()
def _run_batch(
    run: Callable[[Inputs], list[Tensor]], number: int, inputs: Inputs, labels: Tensor | None, first_row: int
) -> _Batch:
    logits = stack_exits(run_explained(run, inputs), name=f"the logits of batch {number}", dense=True).cpu()
    if logits.ndim > 3:
        raise ShapeError(
            f"the logits of batch {number} have shape {tuple(logits.shape)}",
            expected="(exits, batch, classes); logits of pixels or tokens are not collected",
            fix="add each batch to anytime.metrics.Metrics(class_dim=2), or pass the logits of some inputs to evaluate",
        )
    if logits.shape[1] != count_rows(inputs):
        raise ShapeError(
            f"the model returned {logits.shape[1]} rows for the {count_rows(inputs)} inputs of batch {number}",
            expected="one row per input",
            fix="return logits with the batch first, (batch, classes), at every exit",
        )
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    check_logits(logits, first_row=first_row)
    _, rows, classes = logits.shape
    return _Batch(number, inputs, logits, None if labels is None else check_labels(labels.cpu(), batch=rows, classes=classes))


class _Memory:
    """Keeps all batches in memory."""

    batches_done = 0

    def __init__(self) -> None:
        self._batches: list[_Batch] = []

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def add(self, batch: _Batch) -> None:
        self._batches.append(batch.without_inputs())
        _check_same_kind(self._batches[0], batch)

    def check_same(self, batch: _Batch) -> None:
        """Nothing was done before."""

    def finish(self) -> CollectedLogits:
        if not self._batches:
            raise _empty()
        labels = [batch.labels for batch in self._batches if batch.labels is not None]
        logits = torch.cat([batch.logits for batch in self._batches], 1)
        return CollectedLogits(logits, torch.cat(labels) if labels else None)


class _File:
    """Writes batches to a store in blocks, and continues one."""

    def __init__(self, store: LogitsStore, *, resume: bool) -> None:
        self._store, self._resume = store, resume
        self._waiting: list[_Batch] = []  # the last one with its inputs
        self._first: _Batch | None = None
        self._since = time.monotonic()
        self._checked = False

    def __enter__(self) -> _File:
        self._lock = lock_run(self._store.folder, doing="collecting logits")
        self._lock.__enter__()
        try:
            self._store.resume() if self._resume else self._store.restart()
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        self.batches_done = int(self._store.state.get("batches", 0))
        self._checked = not self.batches_done
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:  # what is computed is kept
                with suppress(FileError):
                    self._write()
        finally:
            self._lock.__exit__(None, None, None)
            self._store.discard_folder()

    def _begin(self, batch: _Batch) -> None:
        if self._first is None:
            if batch.labels is None:
                self._store.check_unlabelled()
            self._first = batch.without_inputs()

    def add(self, batch: _Batch) -> None:
        self._begin(batch)
        assert self._first is not None
        _check_same_kind(self._first, batch)
        self._waiting.append(batch)
        if len(self._waiting) > 1:
            self._waiting[-2] = self._waiting[-2].without_inputs()
        full = sum(each.logits.nbytes for each in self._waiting) >= _BLOCK_BYTES
        if full or time.monotonic() - self._since >= _BLOCK_SECONDS:
            self._write()

    def check_same(self, batch: _Batch) -> None:
        """Compare the last batch that is done with this one: the same inputs, and logits that differ by rounding only."""
        self._begin(batch)
        if digest(batch.inputs, batch.labels) != self._store.state["digest"]:
            raise self._changed(f"other inputs or labels in batch {batch.number} than before the interruption")
        stored, now = self._store.last_rows(batch.logits.shape[1]), batch.logits
        if (stored.shape, stored.dtype) != (now.shape, now.dtype) or float(
            (stored.double() - now.double()).abs().max()
        ) > _SAME * max(1.0, float(stored.abs().max())):
            raise self._changed(f"other logits for batch {batch.number} than before the interruption")
        self._checked = True

    def finish(self) -> CollectedLogits:
        if not self._checked:
            raise self._changed(f"fewer batches than the {self.batches_done} of before the interruption")
        self._write()
        if not self._store.rows:
            raise _empty()
        separate = self._store.state["labelled"] and self._store.labels_path != self._store.path
        self._store.finish()
        found = open_logits(self._store.path, self._store.labels_path if separate else None)
        return CollectedLogits(mapped_tensor(self._store.path, found.logits.array), found.labels, self._store.path)

    def _write(self) -> None:
        self._since = time.monotonic()
        if not self._waiting:
            return
        last, labels = self._waiting[-1], [batch.labels for batch in self._waiting if batch.labels is not None]
        logits, known = torch.cat([batch.logits for batch in self._waiting], 1), torch.cat(labels) if labels else None
        found = digest(last.inputs, last.labels)
        self._waiting = []  # before, as an interruption here leads to another call
        self._store.append(logits, known, batches=last.number, digest=found)

    def _changed(self, got: str) -> StateError:
        return StateError(
            f"{got}, in {self._store.folder}",
            expected="the model and the batches of the interrupted collection, in the same order",
            fix="use shuffle=False and no random augmentation, or begin again with resume=False",
        )


def _check_same_kind(first: _Batch, batch: _Batch) -> None:
    """Refuse a batch that does not go with the first one."""
    (exits, _, classes), (exits_now, _, classes_now) = first.logits.shape, batch.logits.shape
    if (exits, classes) != (exits_now, classes_now) or first.logits.dtype != batch.logits.dtype:
        raise ShapeError(
            f"batch {batch.number} has {exits_now} exits, {classes_now} classes and {batch.logits.dtype}",
            expected=f"{exits}, {classes} and {first.logits.dtype}, as the first batch",
            fix="use a model whose exits, classes and type do not depend on the input",
        )
    if (first.labels is None) != (batch.labels is None):
        raise LabelError(
            f"batch {batch.number} has {'no' if batch.labels is None else 'other than the first'} labels",
            expected="labels in every batch or in none",
            fix="yield (x, y) for every batch, or x alone",
        )


def _empty() -> InputError:
    return InputError(
        "the loader yields no batches",
        expected="at least one batch",
        fix="pass a loader over a data set that is not empty; a generator can be used once only",
    )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # an iterable of unknown length
        return None

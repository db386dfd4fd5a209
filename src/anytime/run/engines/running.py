"""What all engines share: the order of the stages of a run, runs that join and split, and the check of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from anytime.checks import as_float, as_tensor
from anytime.errors import DtypeError, ShapeError, StateError
from anytime.run.engines.base import NOTHING

T = TypeVar("T")


class Running(ABC, Generic[T]):
    """Counts the stages and refuses calls out of order; subclasses do the work.

    Attributes:
        ahead: What may be computed before it is requested; set before each stage for engines that have `queues_ahead`, and
            ignored by others.
        queued: Whether the next stage runs, or has run, before it is requested. Engines that have `queues_ahead` also define
            `ready(seconds)`: whether it ends within so many seconds, which waits no longer than that.
    """

    ahead = NOTHING
    queued = False

    def __init__(self, exits: int, batch: int) -> None:
        self._exits, self._seen, self._batch, self._open = exits, 0, batch, True

    def advance(self) -> T:
        """Run the next stage and return its output: for engines the logits, `(batch, classes)`, float32, on the CPU."""
        if not self._open or self._seen == self._exits:
            raise StateError(
                f"another stage was requested {'after the last one' if self._open else 'after close()'}",
                expected=f"at most {self._exits} stages, before close()",
                fix="start a new run with engine.begin(x)",
            )
        result = self._run(self._seen)
        self._seen += 1
        return result

    def keep(self, rows: Tensor) -> None:
        """Continue with these rows of the batch only, in this order: indices or a mask."""
        indices = check_rows(rows, self._batch)
        if self._open:
            self._select(indices)
        self._batch = len(indices)

    def close(self) -> None:
        """Release all memory; a second call does nothing."""
        if self._open:
            self._open = False
            self._drop()

    @abstractmethod
    def _run(self, exit: int) -> T:
        """Run a stage."""

    @abstractmethod
    def _select(self, rows: Tensor) -> None:
        """Keep rows of the carried tensors."""

    @abstractmethod
    def _drop(self) -> None:
        """Release the carried tensors."""


class Joinable(Running[T]):
    """A run that is all in its carry, so that runs at the same exit can share a batch and part again.

    Attributes:
        kind: Runs of one engine can join if their kinds are equal.
    """

    kind: object = None
    _carry: Sequence[Any]
    """What the next stage reads: tensors or NumPy arrays, all with the batch first."""

    def join(self, others: Sequence[Self]) -> Self:
        """One run with the rows of this one and then of the others, which stay as they are."""
        runs = (self, *others)
        carries = []
        for run in runs:
            with run._moving():
                carries.append(run._carry)
        with self._moving():
            return self._like([join_rows(parts) for parts in zip(*carries, strict=True)], sum(run._batch for run in runs))

    def split(self, sizes: Sequence[int]) -> list[Self]:
        """One run per part of so many rows each, in their order; this one is not used afterwards."""
        parts, begin = [], 0
        with self._moving():
            for size in sizes:
                parts.append(self._like([value[begin : begin + size] for value in self._carry], size))
                begin += size
        return parts

    def _like(self, carry: Sequence[Any], batch: int) -> Self:
        run = copy(self)
        run._carry, run._batch = tuple(carry), batch
        return run

    def _moving(self) -> AbstractContextManager[Any]:
        """Inside, the carry is complete and may be copied."""
        return torch.inference_mode()

    def _select(self, rows: Tensor) -> None:
        with self._moving():
            self._carry = tuple(
                value[rows.numpy() if isinstance(value, np.ndarray) else rows.to(value.device)] for value in self._carry
            )

    def _drop(self) -> None:
        self._carry = ()


def join_rows(parts: Sequence[Any]) -> Any:
    """Rows of several batches as one."""
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat(tuple(parts))


def check_rows(rows: Tensor, batch: int) -> Tensor:
    """Row indices of a batch, from indices or a mask, at least one.

    >>> check_rows(torch.tensor([False, True, True]), batch=3)
    tensor([1, 2])
    """
    indices = as_tensor(rows, "rows").cpu()
    if indices.dtype == torch.bool and indices.shape == (batch,):
        indices = indices.nonzero()[:, 0]
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise DtypeError(
            f"rows is {indices.dtype} of shape {tuple(indices.shape)}",
            expected=f"integer row indices, or a mask of shape ({batch},)",
            fix="use mask.nonzero()[:, 0]",
        )
    if indices.ndim != 1 or len(indices) == 0 or int(indices.min()) < 0 or int(indices.max()) >= batch:
        raise ShapeError(
            f"rows is {indices.tolist()}",
            expected=f"at least one row index from 0 to {batch - 1}",
            fix="close the run if no row is left",
        )
    return indices.long()


def as_answer(logits: Tensor) -> Tensor:
    """Logits as engines return them: float32, on the CPU; anything but floating point is refused."""
    return as_float(logits, "logits").detach().to("cpu", torch.float32)


def device_of(model: object) -> torch.device:
    """The device of a model's first parameter or buffer, else the CPU."""
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            return tensor.device
    return torch.device("cpu")

"""Dense predictions: logits with more dimensions than `(exits, batch, classes)`, such as one row per pixel or token.

A rule is a function of rows. This is the one place that turns dense logits into rows, a block at a time, and answers back into
their shape: `Layout` knows where inputs, positions and classes are, `DenseRows` reads rows as if they were `(exits, rows,
classes)`. Positions that are not labelled can be left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from anytime.checks import INDICES, as_tensor, check_count, check_labelled, check_labels
from anytime.combine.prediction import Prediction, State
from anytime.errors import DeviceError, LabelError, OptionError, ShapeError

_CACHE_BYTES = 2 << 20
_EXAMPLE = "class_dim=2 for (exits, batch, classes, height, width), class_dim=-1 for (exits, batch, length, classes)"
_OF_ONE_EXIT = "class_dim=1 for (batch, classes, height, width), class_dim=-1 for (batch, length, classes)"


@dataclass(frozen=True)
class Layout:
    """Where inputs, positions and classes are in dense logits.

    Attributes:
        batch: The number of inputs.
        positions: The number of positions in each of their dimensions, such as `(height, width)`.
        classes: The number of classes.
        class_dim: The dimension of the classes, counted from the end.

    Example:
        >>> layout = Layout.of((5, 4, 19, 32, 64), 2)
        >>> layout.batch, layout.positions, layout.classes, layout.rows
        (4, (32, 64), 19, 8192)
    """

    batch: int
    positions: tuple[int, ...]
    classes: int
    class_dim: int

    @classmethod
    def of(cls, shape: Sequence[int], class_dim: Any, *, lead: int = 1) -> Self:
        """The layout of logits of this shape.

        Args:
            shape: `(exits, batch, ...)`.
            class_dim: The dimension of the classes, counted from the start or, if negative, from the end.
            lead: The number of dimensions before the batch: 1 for the logits of all exits, 0 for those of one exit.
        """
        first, rank, fix = lead + 1, len(shape), f"pass {_EXAMPLE if lead else _OF_ONE_EXIT}"
        if rank <= first:
            raise ShapeError(
                f"logits have shape {tuple(shape)}: rank {rank}",
                expected=f"at least {first + 1} dimensions: {'exits, ' * lead}batch, classes, and those of the positions",
                fix="omit class_dim for the logits of one exit" if lead == 0 else f"pass logits of all exits: {_EXAMPLE}",
            )
        whole = check_count(class_dim, "class_dim", low=-rank, most=rank - 1, fix=fix)
        dim = whole if whole >= 0 else whole + rank
        if dim < first:
            raise OptionError(
                f"class_dim is {whole}, which is the dimension of the {'exits' if dim < lead else 'batch'} in {tuple(shape)}",
                expected=f"a dimension from {first} to {rank - 1}, or from {first - rank} to -1",
                fix=fix,
            )
        positions = tuple(size for each, size in enumerate(shape) if each >= first and each != dim)
        return cls(shape[lead], positions, shape[dim], dim - rank)

    @property
    def per_input(self) -> int:
        """The number of positions of an input."""
        return math.prod(self.positions)

    @property
    def rows(self) -> int:
        """The number of positions of all inputs."""
        return self.batch * self.per_input

    def flatten(self, values: Any, *, lead: int = 1) -> Any:
        """Some inputs as `(exits, rows, classes)`, or `(rows, classes)` without a leading dimension; a view where possible."""
        moved = values.movedim(self.class_dim, -1) if isinstance(values, Tensor) else np.moveaxis(values, self.class_dim, -1)
        return moved.reshape(*moved.shape[:lead], math.prod(moved.shape[lead:-1]), moved.shape[-1])

    def shaped(self, answers: Prediction) -> Prediction:
        """A prediction for all rows in the shape of the logits, without a copy."""
        lead = answers.labels.shape[:-1]
        size = (*lead, self.batch, *self.positions)
        log_probs = answers.log_probs.reshape(*size, self.classes).movedim(-1, self.class_dim)
        return Prediction(log_probs, answers.fell_back.reshape(size), answers.labels.reshape(size), self.class_dim)

    def rows_of(self, inputs: Tensor) -> Tensor:
        """The rows of some inputs, given by indices or a mask."""
        every = torch.arange(self.rows, device=inputs.device).view(self.batch, self.per_input)
        return every[inputs].flatten()

    def locate(self, row: int) -> tuple[int, tuple[int, ...]]:
        """The input and the position of a row."""
        which, rest = divmod(row, self.per_input)
        return which, tuple(int(each) for each in np.unravel_index(rest, self.positions)) if self.positions else ()

    def place(self, row: int) -> str:
        """A row in words."""
        which, where = self.locate(row)
        return f"input {which}" + (f", position {where if len(where) > 1 else where[0]}" if where else "")


@dataclass(frozen=True)
class DenseState(State):
    """The state of a rule for dense logits: that of its rows, and their layout."""

    inner: State = None  # type: ignore[assignment]  # follows fields with defaults
    layout: Layout = None  # type: ignore[assignment]

    def select(self, rows: Tensor) -> Self:
        """The state of some inputs, by their indices in the batch or by a mask."""
        inner = self.inner.select(self.layout.rows_of(rows))
        kept = len(rows) if rows.dtype != torch.bool else int(rows.sum())
        layout = Layout(kept, self.layout.positions, self.layout.classes, self.layout.class_dim)
        return type(self)(self.exits, self.seen, None, inner, layout)


class DenseRows:
    """Dense logits as rows that are read a block at a time: `rows[:, 10:20]` is `(exits, 10, classes)`, contiguous.

    Args:
        logits: `(exits, batch, ...)`, a tensor or an array, which may be larger than memory.
        class_dim: The dimension of the classes.
        kept: The rows to use, in order; all by default.
        read: Makes a contiguous tensor of a part.
    """

    ndim = 3

    def __init__(
        self, logits: Any, class_dim: Any, *, kept: Tensor | None = None, read: Callable[[Any], Tensor] = Tensor.contiguous
    ) -> None:
        self.layout = Layout.of(tuple(logits.shape), class_dim)
        self.kept = kept
        self._logits, self._read = logits, read

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(exits, rows, classes)`."""
        rows = self.layout.rows if self.kept is None else len(self.kept)
        return self._logits.shape[0], rows, self.layout.classes

    def __getitem__(self, key: tuple[slice, slice | Tensor]) -> Tensor:
        _, rows = key
        size = self.layout.per_input
        if self.kept is not None or isinstance(rows, Tensor):
            picked = rows if self.kept is None else self.kept[rows]
            assert isinstance(picked, Tensor)
            inputs, counts = torch.unique_consecutive(picked // max(size, 1), return_counts=True)
            parts = [
                self._part(slice(which, which + 1), some - which * size)
                for which, some in zip(inputs.tolist(), torch.split(picked, counts.tolist()), strict=True)
            ]
        else:
            start, stop, _ = rows.indices(self.layout.rows)
            parts = [self._part(inputs, positions) for inputs, positions in _whole_inputs(start, stop, size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts or [self._part(slice(0, 0), slice(0, 0))], 1)

    def among(self, inputs: Tensor) -> Tensor:
        """A mask of the rows that are positions of some inputs, given by indices."""
        chosen = torch.zeros(self.layout.batch, dtype=torch.bool).index_fill_(0, inputs, True)
        if self.kept is None:
            return chosen.repeat_interleave(self.layout.per_input)
        return chosen[self.kept.cpu() // self.layout.per_input]

    def blocks(self) -> Iterator[slice]:
        """All rows in parts that fit the cache."""
        exits, rows, classes = self.shape
        step = block_size(exits, classes)
        return (slice(first, min(first + step, rows)) for first in range(0, rows, step))

    def locate(self, row: int) -> tuple[int, tuple[int, ...]]:
        """The input and the position of a row."""
        return self.layout.locate(row if self.kept is None else int(self.kept[row]))

    def place(self, row: int) -> str:
        """A row in words, for an error."""
        return self.layout.place(row if self.kept is None else int(self.kept[row]))

    def _part(self, inputs: slice, positions: slice | Tensor) -> Tensor:
        rows = self.layout.flatten(self._logits[:, inputs])
        picked: Any = positions
        if isinstance(positions, Tensor):
            picked = positions.to(rows.device) if isinstance(rows, Tensor) else positions.numpy()
        return self._read(rows[:, picked])


def block_size(exits: int, classes: int) -> int:
    """How many rows of float32 logits fit the cache."""
    return max(1, _CACHE_BYTES // (4 * exits * classes))


def used_positions(
    labels: Any, layout: Layout, ignore_index: Any, device: torch.device | None, *, any_number: bool = False
) -> tuple[Tensor | None, Tensor]:
    """The rows whose label is not `ignore_index` (None for all), and their labels, `(rows,)`.

    Args:
        labels: `(batch, ...)`, the shape of the logits without exits and classes.
        layout: Of the logits.
        ignore_index: The label of positions to leave out.
        device: Of the logits.
        any_number: Whether all positions may be left out.
    """
    given = as_tensor(labels, "labels", fix=INDICES)
    shape = (layout.batch, *layout.positions)
    if tuple(given.shape) != shape:
        raise ShapeError(
            f"labels have shape {tuple(given.shape)}",
            expected=f"{shape}, one class index per position: the shape of the logits without exits and classes",
            fix=f"use labels.argmax for one-hot labels, or check class_dim: {_EXAMPLE}",
        )
    if device is not None and given.device != device:
        raise DeviceError(
            f"labels are on {given.device}",
            expected=f"{device}, the device of the logits",
            fix=f"move them there: labels.to('{device}')",
        )
    flat, kept = given.reshape(-1), None
    if ignore_index is not None:
        ends = {"low": -(2**63), "most": 2**63 - 1}
        number = check_count(ignore_index, "ignore_index", **ends, fix="pass a label such as ignore_index=255")
        ignored = flat.long() == number  # labels of 8 bits would turn -100 into 156
        if bool(ignored.any()):
            kept = (~ignored).nonzero()[:, 0]
            flat = flat[kept]
            if not len(kept) and not any_number:
                raise LabelError(
                    f"all {len(ignored):,} labels are {ignore_index}, the ignore_index",
                    expected="at least one position with a label",
                    fix="pass labels of these inputs, or another ignore_index",
                )
    hint = "pass ignore_index=255, or the value of positions without a label; use the class list of the logits for the others"

    def place(row: int) -> str:
        return layout.place(row if kept is None else int(kept[row]))

    return kept, check_labels(flat, batch=len(flat), classes=layout.classes, place=place, fix=hint)


def check_labelled_rows(logits: Any, labels: Any, class_dim: Any, ignore_index: Any) -> tuple[Tensor, Tensor]:
    """Logits `(exits, rows, classes)` and labels `(rows,)` to fit on, from plain or, with `class_dim`, dense ones."""
    check_ignored(class_dim, ignore_index)
    if class_dim is None:
        return check_labelled(logits, labels)
    given = as_tensor(logits, "logits")
    layout = Layout.of(tuple(given.shape), class_dim)
    kept, known = used_positions(labels, layout, ignore_index, given.device)
    rows = DenseRows(given, class_dim, kept=kept)
    return check_labelled(rows[:, : len(known)], known)


def labelled_rows(logits: Tensor, labels: Any, class_dim: int, ignore_index: int | None) -> tuple[Tensor, Tensor | None]:
    """Dense logits as `(exits, rows, classes)`, and the labels of these rows; none are left if all are `ignore_index`."""
    layout = Layout.of(tuple(logits.shape), class_dim)
    kept, known = None, None
    if labels is not None:
        kept, known = used_positions(labels, layout, ignore_index, logits.device, any_number=True)
    rows = DenseRows(logits, class_dim, kept=kept)
    return rows[:, : rows.shape[1]], known


def check_ignored(class_dim: Any, ignore_index: Any) -> None:
    """Refuse `ignore_index` without `class_dim`."""
    if class_dim is None and ignore_index is not None:
        raise OptionError(
            f"ignore_index is {ignore_index!r}, without class_dim",
            expected="class_dim, the dimension of the classes of dense logits",
            fix=f"pass {_EXAMPLE}; for plain logits, leave these rows out",
        )


def _whole_inputs(start: int, stop: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Rows as a part of an input, then whole inputs, then a part of an input: none of these spans two parts of inputs."""
    while start < stop:
        first, offset = divmod(start, size)
        whole = 0 if offset else (stop - start) // size
        end = start + whole * size if whole else min(stop, (first + 1) * size)
        yield slice(first, first + max(whole, 1)), slice(offset, offset + end - start)
        start = end

"""Batches from whatever a caller has: a DataLoader, a map-style data set, a pair of tensors, or any iterable of batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from anytime.checks import INDICES, LABELS, Inputs, as_tensor, check_inputs, count_rows, map_inputs, tensors_of
from anytime.errors import DtypeError, InputError, LabelError

_EXPECTED = "a DataLoader, a map-style data set, a tuple of tensors (x, y), or an iterable of batches (x, y)"


def read_batch(batch: Any) -> tuple[Inputs, Tensor | None]:
    """The inputs and the labels, if there are any, of what a loader yields.

    Args:
        batch: `(x, y)`, `(x,)`, `x`, or a dict whose `labels` or `label` are the labels and whose other tensors are the inputs.
            `x` is a tensor or an array, or a tuple or dict of these. Of more than two values the last one is the labels.

    Example:
        >>> x, y = read_batch({"input_ids": torch.zeros(2, 5), "labels": torch.tensor([0, 1])})
        >>> sorted(x), y.tolist()
        (['input_ids'], [0, 1])
    """
    inputs, labels = _split(batch)
    if isinstance(batch, Mapping):
        wrong = next((name for name, value in inputs.items() if not isinstance(value, Tensor | np.ndarray)), None)
        if wrong is not None:
            raise DtypeError(
                f"{wrong!r} of a batch is a {type(inputs[wrong]).__name__}",
                expected="tensors with the batch first",
                fix="keep what the model takes, as tensors: dataset.with_format('torch', columns=[...])",
            )
    checked = check_inputs(inputs, "the input of a batch")
    if isinstance(labels, list | tuple) and all(isinstance(value, int) for value in labels):
        labels = torch.tensor(labels, dtype=torch.int64)
    return checked, None if labels is None else as_tensor(labels, "labels", fix=INDICES).detach()


def labelled_batch(batch: Any) -> tuple[Inputs, Tensor]:
    """As `read_batch`; a batch without labels is refused."""
    inputs, labels = read_batch(batch)
    if labels is None:
        raise LabelError(
            f"a batch is {_describe(batch)}, without labels",
            expected="(x, y), or a dict with an entry labels",
            fix="yield the class index of each input as the last entry of a batch",
        )
    return inputs, labels


def _split(batch: Any) -> tuple[Any, Any]:
    """The inputs and the labels of a batch or of a single sample, unchecked."""
    if isinstance(batch, Mapping):
        names = [name for name in LABELS if name in batch]
        if len(names) > 1:
            raise InputError(
                "a batch has both 'labels' and 'label'",
                expected="one of them",
                fix="remove one: dataset.remove_columns('label')",
            )
        return {name: batch[name] for name in batch if name not in names}, batch[names[0]] if names else None
    if isinstance(batch, tuple | list) and len(batch):
        *inputs, labels = batch if len(batch) > 1 else (*batch, None)
        return inputs[0] if len(inputs) == 1 else tuple(inputs), labels
    return batch, None


def digest(inputs: Inputs, labels: Tensor | None) -> str:
    """A fingerprint of a batch: other inputs, labels, names or another order give another text."""
    found = hashlib.blake2b(digest_size=16)
    names = sorted(inputs) if isinstance(inputs, Mapping) else ()
    for tensor in (*tensors_of(inputs, names), *(() if labels is None else (labels,))):
        values = (tensor if tensor.layout is torch.strided else tensor.to_dense()).detach().cpu().contiguous()
        found.update(f"{names}{values.dtype}{tuple(values.shape)}".encode())
        found.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def as_batches(data: Any, *, batch: int, generator: torch.Generator | None = None, once: bool = False) -> Iterable[Any]:
    """The batches of `data`, which can be iterated more than once unless `once` is enough.

    A data set becomes a DataLoader with `batch` rows per batch; everything else has batches of its own.

    Args:
        data: A DataLoader, a map-style data set, all rows as `(x, y)` in tensors, or an iterable of batches.
        batch: Rows per batch of a data set.
        generator: Shuffles a data set in each iteration, and leaves out rows that do not fill a batch.
        once: Whether a generator, which can be iterated only once, is accepted.

    Example:
        >>> loader = as_batches((torch.zeros(5, 2), torch.zeros(5)), batch=4)
        >>> [len(y) for x, y in loader]
        [4, 1]
    """
    if isinstance(data, DataLoader):
        return data
    rows = _as_rows(data)
    if rows is not None:
        whole = generator is not None and len(rows) >= batch  # type: ignore[arg-type]
        shuffle = generator is not None
        return DataLoader(rows, batch, shuffle=shuffle, generator=generator, drop_last=whole, collate_fn=_collate)
    if isinstance(data, str | bytes | Tensor | np.ndarray | Mapping) or not isinstance(data, Iterable):
        raise InputError(
            f"the data are {_describe(data)}", expected=_EXPECTED, fix="pass DataLoader(TensorDataset(x, y), batch_size=64)"
        )
    if isinstance(data, Iterator) and not once:
        raise InputError(
            f"the data are a {type(data).__name__}, which can be iterated only once",
            expected=_EXPECTED,
            fix="pass the loader itself, or a list of the batches: list(data)",
        )
    return data


def _collate(rows: list[Any]) -> Any:
    """A batch of rows; those that cannot be joined are refused."""
    try:
        return default_collate(rows)
    except (RuntimeError, TypeError, KeyError) as error:
        raise InputError(
            f"rows of the data set do not make a batch: {error}",
            expected="rows of the same entries, tensors of one shape each",
            fix="pass a DataLoader with a collate_fn, which pads texts of different lengths or turns images into tensors",
        ) from error


def _as_rows(data: Any) -> Dataset[Any] | None:
    """The data set of single rows that `data` is, or None if it consists of batches."""
    if isinstance(data, tuple) and len(data) > 1 and all(isinstance(part, Tensor | np.ndarray) for part in data):
        columns = check_inputs(data, "data")
        return TensorDataset(*columns)
    if isinstance(data, tuple) and len(data) == 2 and _are_columns(*data):
        return _Columns(*data)
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset)
    if not indexed or isinstance(data, str | bytes | Tensor | np.ndarray | Mapping):
        return None
    if not len(data):
        raise InputError("the data are empty", expected=_EXPECTED, fix="pass at least one batch, or a data set with rows")
    single = isinstance(data, Dataset) or _is_scalar(_split(data[0])[1])
    return data if single else None


def _are_columns(x: Any, y: Any) -> bool:
    """Whether these are several tensors of inputs with the labels of their rows, not two batches."""
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple) else ()
    tensors = (*parts, y)
    return len(tensors) > 1 and y is not None and all(isinstance(part, Tensor | np.ndarray) for part in tensors)


class _Columns(Dataset[Any]):
    """Rows of inputs in several tensors, with their labels."""

    def __init__(self, x: Any, y: Any) -> None:
        self._x, self._y = check_inputs(x), as_tensor(y, "y")
        rows = count_rows(self._x)
        if self._y.ndim == 0 or len(self._y) != rows:
            raise LabelError(
                f"y has shape {tuple(self._y.shape)} for {rows} rows of x",
                expected=f"{rows} labels",
                fix="pass labels and inputs of the same rows, in the same order",
            )

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, row: int) -> Any:
        return map_inputs(lambda tensor: tensor[row], self._x), self._y[row]


def _is_scalar(label: Any) -> bool:
    return isinstance(label, int | float | np.generic) or (isinstance(label, Tensor | np.ndarray) and label.ndim == 0)


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"
    return f"a {type(value).__name__}" + (f" of shape {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else "")

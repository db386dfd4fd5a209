"""Batches from whatever a caller has: a DataLoader, a map-style data set, a pair of tensors, or any iterable of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from anytime.checks import Inputs, check_inputs
from anytime.errors import InputError, LabelError

_LABELS = ("labels", "label")
_EXPECTED = "a DataLoader, a map-style data set, a tuple of tensors (x, y), or an iterable of batches (x, y)"


def split_batch(batch: Any) -> tuple[Any, Any]:
    """The inputs and the labels of a batch or of a single sample, unchecked; without labels, None.

    A dict has its labels under `labels` or `label`. Of a tuple or list with several entries, the last one is the labels.

    Example:
        >>> split_batch(("x", "y")), split_batch(("ids", "mask", "y")), split_batch({"ids": 1, "labels": 2})
        (('x', 'y'), (('ids', 'mask'), 'y'), ({'ids': 1}, 2))
    """
    if isinstance(batch, Mapping):
        found = next((name for name in _LABELS if name in batch), None)
        return {name: batch[name] for name in batch if name != found}, None if found is None else batch[found]
    if isinstance(batch, tuple | list):
        *inputs, labels = batch if len(batch) > 1 else (*batch, None)
        return inputs[0] if len(inputs) == 1 else tuple(inputs), labels
    return batch, None


def labelled_batch(batch: Any) -> tuple[Inputs, Any]:
    """The inputs of a batch as tensors, and its labels; a batch without labels is refused."""
    inputs, labels = split_batch(batch)
    if labels is None:
        raise LabelError(
            f"a batch is {_describe(batch)}, without labels",
            expected="(x, y), or a dict with an entry labels",
            fix="yield the class index of each input as the last entry of a batch",
        )
    return check_inputs(inputs, "the inputs of a batch"), labels


def as_batches(data: Any, *, batch: int, generator: torch.Generator | None = None) -> Iterable[Any]:
    """The batches of `data`, which can be iterated more than once.

    A data set becomes a DataLoader with `batch` rows per batch; everything else has batches of its own.

    Args:
        data: A DataLoader, a map-style data set, a tuple of tensors, or an iterable of batches.
        batch: Rows per batch of a data set.
        generator: Shuffles a data set in each iteration, and leaves out rows that do not fill a batch.

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
        return DataLoader(rows, batch, shuffle=generator is not None, generator=generator, drop_last=whole)
    if isinstance(data, str | bytes | Tensor | np.ndarray | Mapping) or not isinstance(data, Iterable):
        raise InputError(
            f"the data are {_describe(data)}", expected=_EXPECTED, fix="pass DataLoader(TensorDataset(x, y), batch_size=64)"
        )
    if isinstance(data, Iterator):
        raise InputError(
            f"the data are a {type(data).__name__}, which can be iterated only once",
            expected=_EXPECTED,
            fix="pass the loader itself, or a list of the batches: list(data)",
        )
    return data


def _as_rows(data: Any) -> Dataset[Any] | None:
    """The data set of single rows that `data` is, or None if it consists of batches."""
    if isinstance(data, tuple) and len(data) > 1 and all(isinstance(part, Tensor | np.ndarray) for part in data):
        columns = check_inputs(data, "data")
        return TensorDataset(*columns)
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset)
    if not indexed or isinstance(data, str | bytes | Tensor | np.ndarray | Mapping):
        return None
    if not len(data):
        raise InputError("the data are empty", expected=_EXPECTED, fix="pass at least one batch, or a data set with rows")
    single = isinstance(data, Dataset) or _is_scalar(split_batch(data[0])[1])
    return data if single else None


def _is_scalar(label: Any) -> bool:
    return isinstance(label, int | float | np.generic) or (isinstance(label, Tensor | np.ndarray) and label.ndim == 0)


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"
    return f"a {type(value).__name__}" + (f" of shape {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else "")

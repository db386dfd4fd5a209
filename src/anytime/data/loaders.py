"""Batches from whatever a caller has: a DataLoader, a map-style data set, a pair of tensors, or any iterable of batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from anytime.checks import Inputs, as_tensor, check_inputs
from anytime.errors import DtypeError, InputError, LabelError, ShapeError

LABELS = ("labels", "label")
"""The keys of a dict that hold the labels, as in Hugging Face's data sets."""
_EXPECTED = "a DataLoader, a map-style data set, a tuple of tensors (x, y), or an iterable of batches (x, y)"


def split_batch(batch: Any) -> tuple[Inputs, Tensor | None]:
    """The inputs and the labels, if there are any, of what a loader yields.

    Args:
        batch: `(x, y)`, `(x,)`, `x`, or a dict whose `labels` or `label` are the labels and whose other tensors are the inputs.
            `x` is a tensor or an array, or a tuple or dict of these.

    Example:
        >>> x, y = split_batch({"input_ids": torch.zeros(2, 5), "labels": torch.tensor([0, 1])})
        >>> sorted(x), y.tolist()
        (['input_ids'], [0, 1])
    """
    if isinstance(batch, Mapping):
        return _split_dict(batch)
    if not isinstance(batch, list | tuple):
        return check_inputs(batch, "the batch"), None
    if len(batch) not in (1, 2):
        raise ShapeError(
            f"a batch is a {type(batch).__name__} of {len(batch)} values",
            expected="(x, y), (x,), x, or a dict with 'labels'",
            fix="yield pairs: ((batch[0], batch[-1]) for batch in loader); several inputs are a tuple or dict inside the pair",
        )
    inputs = check_inputs(batch[0], "the inputs")
    return inputs, None if len(batch) == 1 or batch[1] is None else _labels(batch[1])


def labelled_batch(batch: Any) -> tuple[Inputs, Tensor]:
    """The inputs of a batch as tensors, and its labels; a batch without labels is refused."""
    inputs, labels = split_batch(batch)
    if labels is None:
        raise LabelError(
            f"a batch is {_describe(batch)}, without labels",
            expected="(x, y), or a dict with an entry labels",
            fix="yield pairs of inputs and class indices",
        )
    return inputs, labels


def as_batches(data: Any, *, batch: int, generator: torch.Generator | None = None) -> Iterable[Any]:
    """The batches of `data`, which can be iterated more than once.

    A data set becomes a DataLoader with `batch` rows per batch; everything else has batches of its own.

    Args:
        data: A DataLoader, a map-style data set, a tuple of tensors `(x, y)`, or an iterable of batches.
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
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor | np.ndarray) for part in data):
        columns = check_inputs(data, "data")
        return TensorDataset(*columns)
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, IterableDataset)
    if not indexed or isinstance(data, str | bytes | Tensor | np.ndarray | Mapping):
        return None
    if not len(data):
        raise InputError("the data are empty", expected=_EXPECTED, fix="pass at least one batch, or a data set with rows")
    single = isinstance(data, Dataset) or _is_scalar(_label_of(data[0]))
    return data if single else None


def _label_of(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return next((sample[name] for name in LABELS if name in sample), None)
    return sample[-1] if isinstance(sample, tuple | list) and len(sample) > 1 else None


def _is_scalar(label: Any) -> bool:
    return isinstance(label, int | float | np.generic) or (isinstance(label, Tensor | np.ndarray) and label.ndim == 0)


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"
    return f"a {type(value).__name__}" + (f" of shape {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else "")


def _split_dict(batch: Mapping[str, Any]) -> tuple[Inputs, Tensor | None]:
    names = [name for name in LABELS if name in batch]
    if len(names) > 1:
        raise InputError(
            "a batch has both 'labels' and 'label'", expected="one of them", fix="remove one: dataset.remove_columns('label')"
        )
    rest = {name: value for name, value in batch.items() if name not in names}
    wrong = next((name for name, value in rest.items() if not isinstance(value, Tensor | np.ndarray)), None)
    if wrong is not None:
        raise DtypeError(
            f"{wrong!r} of a batch is a {type(rest[wrong]).__name__}",
            expected="tensors with the batch first",
            fix="keep what the model takes, as tensors: dataset.with_format('torch', columns=[...])",
        )
    labels = None if not names or batch[names[0]] is None else _labels(batch[names[0]])
    return check_inputs(rest, "the batch"), labels


def _labels(values: Any) -> Tensor:
    if isinstance(values, list | tuple) and all(isinstance(value, int) for value in values):
        values = torch.tensor(values, dtype=torch.int64)
    return as_tensor(values, "labels").detach().cpu()

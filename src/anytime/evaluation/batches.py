"""What a loader yields: inputs and labels of a batch, from a pair, a tensor or a dict."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.checks import Inputs, as_tensor, check_inputs, tensors_of
from anytime.errors import DtypeError, InputError, OptionError, ShapeError

LABELS = ("labels", "label")
"""The keys of a dict that hold the labels, as in Hugging Face's data sets."""


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


def digest(inputs: Inputs, labels: Tensor | None) -> str:
    """A fingerprint of a batch: other inputs, labels, names or another order give another text."""
    found = hashlib.blake2b(digest_size=16)
    names = sorted(inputs) if isinstance(inputs, Mapping) else ()
    for tensor in (*tensors_of(inputs, names), *(() if labels is None else (labels,))):
        values = tensor.detach().cpu().contiguous()
        found.update(f"{names}{values.dtype}{tuple(values.shape)}".encode())
        found.update(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def check_loader(loader: Any) -> Iterable[Any]:
    """Refuse what cannot be iterated batch by batch."""
    if isinstance(loader, Tensor | np.ndarray | str | Mapping) or not isinstance(loader, Iterable):
        raise OptionError(
            f"the loader is a {type(loader).__name__}",
            expected="a DataLoader, or any iterable of batches",
            fix="pass a list of batches: [(x, y)] for one batch that fits the model",
        )
    return loader


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

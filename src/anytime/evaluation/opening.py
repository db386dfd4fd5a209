"""Logits and labels in any form that `evaluate` takes, opened and checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anytime.checks import as_tensor, check_labels, check_logits, check_scale
from anytime.combine.dense import DenseRows, Layout, check_ignored, used_positions
from anytime.errors import DtypeError, OptionError, ShapeError
from anytime.evaluation.blocks import LogitRows, unchecked
from anytime.evaluation.files import check_stamp, scale_rows, stamp_of
from anytime.evaluation.source import CollectedLogits, LogitsFile, Mapped, open_labels, open_logits


def open_rows(
    logits: Any, labels: Any, probabilities: bool, *, class_dim: int | None = None, ignore_index: int | None = None
) -> LogitRows:
    """Open and check logits and labels in any form that `evaluate` takes."""
    if isinstance(logits, nn.Module):
        raise DtypeError(
            f"the logits are a {type(logits).__name__}, a model",
            expected="logits, (exits, rows, classes)",
            fix="run it first: anytime.collect_logits(model, batches)",
        )
    path = labels if isinstance(labels, str | Path) else None
    if isinstance(logits, str | Path):
        logits, labels = open_logits(logits, path), None if path is not None else labels
    check = _unchanged(logits)
    if isinstance(logits, LogitsFile | CollectedLogits):
        labels, logits = logits.labels if labels is None else labels, logits.logits
    if isinstance(logits, np.ndarray) and not isinstance(logits, np.ma.MaskedArray):  # may exceed the memory
        logits = Mapped(logits)
    values: Tensor | Mapped = logits if isinstance(logits, Mapped) else as_tensor(logits, "logits").detach()
    if isinstance(labels, str | Path):
        labels = open_labels(labels, tuple(values.shape))
    device = values.device if isinstance(values, Tensor) else None
    check_ignored(class_dim, ignore_index)
    given: Tensor | Mapped | DenseRows = values
    if class_dim is None:
        known = None
        check_logits(values[:, :0] if values.ndim == 3 else values[...])  # rank and element type, without reading the data
    else:
        given, known = _dense_rows(values, labels, class_dim, ignore_index, device)
        check_logits(given[:, :0])
    exits, samples, classes = given.shape
    if exits < 2 or classes < 2 or samples < 1:
        what = "one exit" if exits < 2 else "one class" if classes < 2 else "no samples"
        raise ShapeError(
            f"logits of shape {tuple(values.shape)}: {what}",
            expected="shape (exits, samples, classes) with at least two exits, one sample and two classes",
            fix="reorder the dimensions with numpy.transpose; a model with a single exit has nothing to compare",
        )
    if class_dim is None and labels is not None:
        known = check_labels(labels, batch=samples, classes=classes, device=device)
    rows = LogitRows(given, known, probabilities, ignore_index, check=check)
    if not probabilities:
        check_scale(rows.block(scale_rows(given.shape), 0))
    return rows


def _unchanged(logits: Any) -> Callable[[], None]:
    """A check that the file of mapped logits stays as it is."""
    if isinstance(logits, LogitsFile) and isinstance(logits.logits.array, np.memmap):
        return partial(check_stamp, logits.path, stamp_of(logits.path))
    return unchecked


def _dense_rows(
    values: Tensor | Mapped, labels: Any, class_dim: int, ignore_index: int | None, device: torch.device | None
) -> tuple[DenseRows, Tensor | None]:
    """Dense logits as rows, without the positions that are not labelled, and the labels of these rows."""
    source = values.array if isinstance(values, Mapped) else values
    read = values.read if isinstance(values, Mapped) else Tensor.contiguous
    if labels is None:
        if ignore_index is not None:
            raise OptionError(
                f"ignore_index is {ignore_index!r}, and there are no labels",
                expected="labels",
                fix="pass labels, or omit ignore_index",
            )
        return DenseRows(source, class_dim, read=read), None
    kept, known = used_positions(labels, Layout.of(tuple(values.shape), class_dim), ignore_index, device)
    return DenseRows(source, class_dim, kept=kept, read=read), known

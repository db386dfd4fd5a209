"""Columns of Parquet and Arrow files as arrays (pyarrow, extra `parquet`)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anytime.errors import DtypeError, FormatError, MissingExtraError, ShapeError


def import_arrow(module: str) -> Any:
    """A module of pyarrow, such as `parquet`."""
    try:
        return import_module(f"pyarrow.{module}")
    except ImportError as error:
        raise MissingExtraError(
            "pyarrow is not installed", expected="pyarrow, for Parquet and Arrow files", fix="pip install 'anytime-nn[parquet]'"
        ) from error


def is_list(kind: Any) -> bool:
    """Whether a type of pyarrow is a list."""
    types = import_arrow("types")
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def as_array(values: Any, path: Path) -> NDArray[Any]:
    """A column of numbers, texts, lists of equal length (also of lists) or tensors, as an array with the rows first."""
    from pyarrow import FixedShapeTensorArray, types

    if values.null_count:
        raise FormatError(
            f"{path} has {values.null_count} nulls in the inputs",
            expected="a value in each row",
            fix="drop these rows",
            path=path,
        )
    if isinstance(values, FixedShapeTensorArray):
        return np.asarray(values.to_numpy_ndarray())
    kind = values.type
    if is_list(kind):
        flat = as_array(values.flatten(), path)
        lengths = {kind.list_size} if types.is_fixed_size_list(kind) else set(np.unique(values.value_lengths()).tolist())
        if len(lengths) > 1:
            raise ShapeError(f"{path} has inputs of {len(lengths)} lengths", expected="one length", fix="pad or crop them")
        return flat.reshape(len(values), lengths.pop() if lengths else 0, *flat.shape[1:])
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_primitive(kind)):
        raise DtypeError(
            f"{path} has inputs of type {kind}", expected="numbers, texts, or lists of numbers", fix="convert them"
        )
    return np.asarray(values.to_numpy(zero_copy_only=False))

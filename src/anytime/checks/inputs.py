"""Inputs of a model: a tensor, or a tuple or dict of tensors, all with the batch first.

Inside the library inputs travel as a flat tuple of tensors, the carry of the first stage. A model that takes a dict names its
tensors in `input_names`, which fixes their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anytime.checks.tensors import as_tensor
from anytime.errors import DtypeError, InputError, ShapeError

Inputs = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
"""What a model is called with."""
LABELS = ("labels", "label")
"""The keys of a dict that hold the labels in a batch of a loader, as in Hugging Face's data sets."""
_CONVERT = (
    "convert it first: torch.tensor for lists of numbers, the model's tokenizer with return_tensors='pt' for texts; "
    "leave out None and options"
)


def check_inputs(x: Any, name: str = "x") -> Inputs:
    """Inputs as tensors, with at least one row, and as many rows in each tensor.

    Args:
        x: A tensor or an array, or a tuple or mapping of these. A list of tensors is a tuple.
        name: What to call it in an error.

    Example:
        >>> import torch
        >>> check_inputs({"ids": torch.zeros(2, 5), "mask": torch.ones(2, 5)})["mask"].shape
        torch.Size([2, 5])
    """
    if isinstance(x, Tensor) and x.ndim and x.shape[0]:
        return x  # the usual case: a check takes part of each request's time
    if isinstance(x, Mapping):
        named = {key: as_tensor(value, f"{name}[{key!r}]", fix=_CONVERT) for key, value in x.items()}
        _check_rows(named, name)
        return named
    if isinstance(x, tuple) or (isinstance(x, list) and x and all(isinstance(value, Tensor) for value in x)):
        several = tuple(as_tensor(value, f"{name}[{index}]", fix=_CONVERT) for index, value in enumerate(x))
        _check_rows({str(index): value for index, value in enumerate(several)}, name)
        return several
    single = as_tensor(x, name, fix=_CONVERT)
    _check_rows({"": single}, name)
    return single


def tensors_of(x: Inputs, names: Sequence[str] = ()) -> tuple[Tensor, ...]:
    """Inputs as a flat tuple, the carry of the first stage.

    Args:
        x: The inputs.
        names: The names of the tensors, in the order of the result; by default a dict's own order, and any number of them.

    Example:
        >>> import torch
        >>> [len(tensor) for tensor in tensors_of({"b": torch.zeros(2), "a": torch.zeros(2)}, ("a", "b"))]
        [2, 2]
    """
    _refuse_others(x)
    if isinstance(x, Tensor) and len(names) < 2:
        return (x,)
    if isinstance(x, Mapping):
        if names and set(names) != set(x):
            missing, unknown = [name for name in names if name not in x], [str(name) for name in x if name not in names]
            raise InputError(
                f"the inputs are named {', '.join(map(str, x))}",
                expected=f"the names {', '.join(names)}, as in the example that the model was made with",
                fix="; ".join(f"{do} {', '.join(odd)}" for do, odd in (("add", missing), ("leave out", unknown)) if odd),
            )
        return tuple(x[name] for name in names or x)
    tensors = (x,) if isinstance(x, Tensor) else tuple(x)
    if names and len(tensors) != len(names):
        raise InputError(
            "one tensor of inputs" if isinstance(x, Tensor) else f"{len(tensors)} tensors of inputs",
            expected=f"{len(names)}: {', '.join(names)}",
            fix="pass a dict with these names, or a tuple in this order",
        )
    return tensors


def count_rows(x: Inputs) -> int:
    """The number of inputs in a batch."""
    return tensors_of(x)[0].shape[0]


def map_inputs(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Apply a function to each tensor: `map_inputs(lambda tensor: tensor[:2], x)` takes the first two rows.

    Example:
        >>> import torch
        >>> map_inputs(lambda tensor: tensor[:1], (torch.zeros(3, 2), torch.ones(3)))
        (tensor([[0., 0.]]), tensor([1.]))
    """
    return function(x) if isinstance(x, Tensor) else join_inputs(lambda tensors: function(tensors[0]), (x,))


def repeat_rows(x: Inputs, rows: int) -> Inputs:
    """So many rows, by repeating those of a batch in order.

    Example:
        >>> import torch
        >>> repeat_rows(torch.tensor([1, 2]), 3)
        tensor([1, 2, 1])
    """
    return map_inputs(lambda tensor: tensor[torch.arange(rows, device=tensor.device) % len(tensor)], x)


def join_inputs(function: Callable[[Sequence[Tensor]], Tensor], parts: Sequence[Inputs]) -> Inputs:
    """Apply a function to the tensors in the same place of several inputs: `join_inputs(torch.cat, parts)` is one batch.

    Args:
        function: From the tensors of all parts to one tensor.
        parts: Inputs of the same structure.

    Example:
        >>> import torch
        >>> join_inputs(torch.cat, [{"ids": torch.zeros(2, 5)}, {"ids": torch.zeros(1, 5)}])["ids"].shape
        torch.Size([3, 5])
    """
    each: Any = parts
    if isinstance(parts[0], Tensor):
        return function(each)
    if isinstance(parts[0], Mapping):
        return {name: function([part[name] for part in each]) for name in parts[0]}
    return tuple(function(tensors) for tensors in zip(*each, strict=True))


def _refuse_others(x: Any) -> None:
    """Refuse texts and other values: iterating over them would look like a tuple of inputs."""
    values = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else (x,)
    if not all(isinstance(value, Tensor) for value in values):
        raise DtypeError(
            f"the input is a {type(x).__name__}" + ("" if values == (x,) else " of other values than tensors"),
            expected="a tensor, or a tuple or dict of tensors",
            fix=_CONVERT,
        )


def _check_rows(tensors: Mapping[str, Tensor], name: str) -> None:
    if not tensors:
        raise InputError(f"{name} is empty", expected="a tensor, or a tuple or dict of tensors", fix="pass a batch of inputs")
    for key, tensor in tensors.items():
        if tensor.ndim == 0 or tensor.shape[0] == 0:
            raise ShapeError(
                f"{_place(name, key)} has shape {tuple(tensor.shape)}",
                expected="inputs with the batch first, and at least one input",
                fix="add a batch dimension, e.g. x[None]; skip an empty batch",
            )
    rows = {key: len(tensor) for key, tensor in tensors.items()}
    if len(set(rows.values())) > 1:
        raise ShapeError(
            "the inputs have different numbers of rows: " + ", ".join(f"{_place(name, key)} {n}" for key, n in rows.items()),
            expected="as many rows in each tensor, with the batch first",
            fix="repeat a tensor that all inputs share: t.expand(batch, *t.shape)",
        )


def _place(name: str, key: str) -> str:
    return f"{name}[{key!r}]" if key and not key.isdigit() else f"{name}[{key}]" if key else name

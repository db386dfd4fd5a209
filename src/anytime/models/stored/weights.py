"""Weights by name: stored once where they are tied, compared with a module by name, shape and type, and loaded into it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anytime.errors import DtypeError, FormatError, InputError, ShapeError

_SAME = "build the model exactly as it was when it was saved: the same class, sizes and number of classes"


def weights_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The parameters and buffers of a module by name, and for each tied one the name under which it is stored.

    Example:
        >>> pair = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        >>> pair["b"].weight = pair["a"].weight
        >>> tensors, tied = weights_of(pair)
        >>> sorted(tensors), tied
        (['a.bias', 'a.weight', 'b.bias'], {'b.weight': 'a.weight'})
    """
    state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    first: dict[Any, str] = {}
    tensors, tied = {}, {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise DtypeError(
                f"{name} in the model's state is a {type(value).__name__}",
                expected="tensors only: anything else would need pickle",
                fix="keep it in the function that builds the model, and out of get_extra_state",
            )
        original = first.setdefault(_place(value), name)
        if original == name:
            tensors[name] = value.detach()
        else:
            tied[name] = original
    return tensors, tied


def check_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise unless these are the weights of a model: the names, the shapes, and whether each is floating point."""
    own: Mapping[str, Tensor] = model.state_dict()
    missing = [name for name in own if name not in weights]
    unknown = [name for name in weights if name not in own]
    if missing or unknown:
        parts = [f"{len(odd)} {what}: {_some(odd)}" for what, odd in (("missing", missing), ("unknown", unknown)) if odd]
        raise InputError(
            f"the names of the weights do not fit a {type(model).__name__}; " + "; ".join(parts),
            expected=f"its {len(own)} names",
            fix="create the network with the settings that the weights were trained with",
        )
    for name, known in own.items():
        tensor = weights[name]
        if tensor.shape != known.shape:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}",
                expected=f"shape {tuple(known.shape)}",
                fix="create the network with the settings that the weights were trained with, including classes",
            )
        if tensor.is_floating_point() != known.is_floating_point():
            raise DtypeError(
                f"{name} has dtype {tensor.dtype}", expected=f"{known.dtype}", fix="convert it, e.g. with .float()"
            )


def check_stored(
    module: nn.Module, weights: Mapping[str, Tensor], tied: Mapping[str, str], *, path: Path, made_by: str
) -> None:
    """Raise, with the first difference, unless a module has exactly the weights of a file.

    Args:
        module: The module.
        weights: By name, without those that are tied.
        tied: For each tied one the name under which it is stored.
        path: The file, for the error.
        made_by: What made the module, for the error.
    """
    try:
        check_weights(module, {**weights, **{name: weights[original] for name, original in tied.items()}})
    except InputError as error:
        raise FormatError(
            f"{path} does not fit {made_by}: {error.got}", expected=error.expected, fix=_SAME, path=path
        ) from error
    own_tied = weights_of(module)[1]
    for name, original in {**own_tied, **tied}.items():
        if tied.get(name) != own_tied.get(name):
            stored, made = ("one tensor", "two tensors") if name in tied else ("two tensors", "one tensor")
            raise FormatError(
                f"{path} does not fit {made_by}: {original} and {name} are {stored} in the file",
                expected=f"{made}, as in {made_by}",
                fix=_SAME,
                path=path,
            )


def fill(module: nn.Module, weights: Mapping[str, Tensor], tied: Mapping[str, str], *, path: Path, made_by: str) -> None:
    """Load weights into a module, in the types in which they were stored; all of them fit, or it is not changed.

    The arguments are those of `check_stored`.
    """
    check_stored(module, weights, tied, path=path, made_by=made_by)
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, stored in weights.items():
        if name in own and own[name].dtype != stored.dtype:
            own[name].data = own[name].data.to(stored.dtype)
    module.load_state_dict({**weights, **{name: weights[original] for name, original in tied.items()}})


def part_of(prefix: str, weights: Mapping[str, Tensor], tied: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights of a part of a module by their names there; those tied to a tensor outside of the part are its own there."""
    inside = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    kept = {}
    for name, original in tied.items():
        if name.startswith(prefix) and original.startswith(prefix):
            kept[name.removeprefix(prefix)] = original.removeprefix(prefix)
        elif name.startswith(prefix):
            inside[name.removeprefix(prefix)] = weights[original]
    return inside, kept


def _place(tensor: Tensor) -> Any:
    """What is equal for tensors that are one and the same; empty tensors and those without memory are only equal themselves."""
    if tensor.is_meta or tensor.numel() == 0 or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()


def _some(items: list[str], most: int = 5) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")

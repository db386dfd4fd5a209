"""Tensors as safetensors, the only format of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from anytime.errors import DtypeError, IntegrityError

if TYPE_CHECKING:
    from torch import Tensor


def tensors_to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as safetensors: the same bytes for the same content. Tensors that share memory are stored separately."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save

    try:
        return save({name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()})
    except (SafetensorError, ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise DtypeError(
            f"these tensors cannot be stored: {error}",
            expected="dense tensors by name",
            fix="convert sparse or quantised tensors: tensor.to_dense(), tensor.dequantize()",
        ) from error


def tensors_from_bytes(data: bytes, *, path: str | Path = "tensors") -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU. `path` names the file in an error."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, AssertionError, OverflowError) as error:
        raise IntegrityError(
            f"{path} is not a complete safetensors file: {error}",
            expected="a file written by a safetensors library",
            fix="copy or write it again",
            path=path,
        ) from error

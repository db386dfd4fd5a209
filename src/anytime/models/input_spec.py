"""What a model takes: the names, types and shapes of its input tensors, recorded from an example.

A stored model is attached, profiled and served again from these alone; the example itself, which may be private, is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from anytime.checks import Inputs, check_memory

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_FLOATS, *_INTEGERS)}
_MOST_TENSORS, _MOST_SIZES, _LARGEST = 64, 8, 1 << 28
_MOST_TRIALS = 16
_BYTES_PER_NUMBER = 32
"""Activations take several times the input, and engines are compared with one another."""


@dataclass(frozen=True)
class InputSpec:
    """One tensor that a model takes.

    Attributes:
        name: Its name in a dict of inputs; empty if inputs are given by position.
        dtype: Its type.
        shape: Its shape without the batch.
        fill: For integers, a value that occurred: a token of the vocabulary, a 1 of a mask.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fill: int = 0

    def document(self) -> dict[str, Any]:
        """The entry of a JSON document."""
        kind = str(self.dtype).removeprefix("torch.")
        return {"name": self.name, "dtype": kind, "shape": list(self.shape), "fill": self.fill}

    @classmethod
    def from_document(cls, document: Any) -> InputSpec:
        """The tensor that an entry describes; raises `ValueError` if it is not valid."""
        match document:
            case {"name": str() as name, "dtype": str() as kind, "shape": [*sizes], "fill": int() as fill}:
                valid = all(type(size) is int and 0 <= size <= _LARGEST for size in sizes) and len(sizes) < _MOST_SIZES
                if kind in _DTYPES and valid and math.prod(sizes) <= _LARGEST and abs(fill) < 1 << 62:
                    return cls(name, _DTYPES[kind], tuple(sizes), int(fill))
        raise ValueError(f"an input is described as {document!r}"[:200])


def specs_from_documents(documents: Any) -> tuple[InputSpec, ...]:
    """The tensors that a list of entries describes; raises `ValueError` if it is not valid."""
    if not isinstance(documents, list) or len(documents) > _MOST_TENSORS:
        raise ValueError(f"inputs are described as {documents!r}"[:200])
    found = tuple(map(InputSpec.from_document, documents))
    names = [spec.name for spec in found]
    if any(names) and (not all(names) or len(set(names)) < len(names)):
        raise ValueError(f"the inputs are named {names}")
    return found


def input_specs(x: Inputs) -> tuple[InputSpec, ...]:
    """What an example of the inputs says about all of them.

    Example:
        >>> input_specs({"ids": torch.tensor([[5, 0]])})
        (InputSpec(name='ids', dtype=torch.int64, shape=(2,), fill=5),)
    """
    named = x if isinstance(x, Mapping) else dict.fromkeys(("",), x) if isinstance(x, Tensor) else dict(enumerate(x))
    return tuple(
        InputSpec(name if isinstance(name, str) else "", tensor.dtype, tuple(tensor.shape[1:]), _largest(tensor))
        for name, tensor in named.items()
    )


def specs_that_run(x: Inputs, run: Callable[[Inputs], object]) -> tuple[InputSpec, ...]:
    """What an example says, with integers that a model also takes in all places: some need an end-of-sequence token.

    Args:
        x: The example, which the model takes.
        run: Runs the model; any error means that it does not take the inputs.
    """
    specs = input_specs(x)
    tensors = list(x.values() if isinstance(x, Mapping) else (x,) if isinstance(x, Tensor) else x)
    tokens = [place for place, spec in enumerate(specs) if not spec.dtype.is_floating_point and spec.fill > 1]
    rows = {place: tensors[place][0].flatten().tolist() for place in tokens}
    longest = max(map(len, rows.values()), default=0)
    for back in range(min(longest, _MOST_TRIALS)):
        try:
            run(make_inputs(specs, batch=1))
        except Exception:  # the next one may work: from the last token, which often ends a sequence, to the first
            fills = {place: int(row[max(0, len(row) - 1 - back)]) for place, row in rows.items()}
            specs = tuple(replace(spec, fill=fills.get(place, spec.fill)) for place, spec in enumerate(specs))
        else:
            return specs
    return input_specs(x)


def make_inputs(specs: Sequence[InputSpec], batch: int) -> Inputs:
    """Inputs as described, always the same: normal numbers, and integers that occurred in the example.

    Example:
        >>> make_inputs([InputSpec("", torch.float32, (3, 8, 8))], batch=2).shape
        torch.Size([2, 3, 8, 8])
    """
    count = batch * sum(math.prod(spec.shape) for spec in specs)
    size = f"{batch:,} inputs of {' and '.join('×'.join(map(str, spec.shape)) for spec in specs)} numbers"
    check_memory(_BYTES_PER_NUMBER * count, size, fix="use a smaller batch or shape")
    generator = torch.Generator().manual_seed(0)
    tensors = [_make(spec, batch, generator) for spec in specs]
    if specs[0].name:
        return {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _make(spec: InputSpec, batch: int, generator: torch.Generator) -> Tensor:
    if spec.dtype.is_floating_point:
        return torch.randn(batch, *spec.shape, generator=generator).to(spec.dtype)
    return torch.full((batch, *spec.shape), spec.fill, dtype=spec.dtype)


def _largest(tensor: Tensor) -> int:
    return 0 if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() == 0 else int(tensor.max())

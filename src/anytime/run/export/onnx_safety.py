"""ONNX files from anybody: what could reach outside of the file is refused before ONNX Runtime sees it.

An ONNX graph holds no code, but a tensor may be "external": bytes of another file, or even of the process's own memory, which
the stage then gives away as its answer. Operators outside of the standard's own domain come from libraries that somebody
registered. A tensor may claim more numbers than the file holds. What was understood is written anew, so that the checked bytes
are the loaded bytes. What a stage computes is not limited: it can take as much time and memory as it asks for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from anytime.run.engines.onnx import require

_STANDARD = ("", "ai.onnx")
_NUMBERS_PER_ITEM = 8
"""No element type packs more numbers into a byte, or into an entry of a list of numbers."""
_LISTS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")


def safe_onnx(data: bytes) -> bytes:
    """An ONNX file that was checked, without its metadata; raises `ValueError` with the reason if it is refused."""
    onnx = require("onnx")
    try:
        model = onnx.ModelProto.FromString(data)
    except Exception as error:  # the parser's own type of error belongs to protobuf
        raise ValueError("it is not an ONNX file") from error
    # A newer reader may understand what this one does not.
    model.DiscardUnknownFields()
    for message in messages(model):
        _check(message, message.DESCRIPTOR.name)
    strip_metadata(model)
    checked: bytes = model.SerializeToString()
    return checked


def strip_metadata(model: Any) -> None:
    """Remove metadata and comments: a runtime may take settings from them, and exporters write the paths of their sources."""
    for message in messages(model):
        for field in ("metadata_props", "doc_string"):
            if field in message.DESCRIPTOR.fields_by_name:
                message.ClearField(field)


def messages(message: Any) -> Iterator[Any]:
    """A protobuf message and all messages inside it, at any depth: subgraphs, functions, attributes, sparse tensors."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from messages(part)


def _check(message: Any, kind: str) -> None:
    if kind == "TensorProto":
        _check_tensor(message)
    elif kind == "NodeProto" and message.domain not in _STANDARD:
        raise ValueError(f"it uses the operator {message.op_type[:80]!r} of the domain {message.domain[:80]!r}")
    elif kind in ("FunctionProto", "SparseTensorProto", "TrainingInfoProto"):
        raise ValueError(f"it holds a {kind}, which exported stages never do")


def _check_tensor(tensor: Any) -> None:
    if tensor.external_data or tensor.data_location:
        raise ValueError(f"the tensor {tensor.name[:80]!r} is external data: it names bytes outside of the file")
    stored = len(tensor.raw_data) + sum(len(getattr(tensor, name)) for name in _LISTS)
    if any(size < 0 for size in tensor.dims) or math.prod(tensor.dims) > _NUMBERS_PER_ITEM * stored:
        shape = ", ".join(map(str, tensor.dims[:8]))
        raise ValueError(f"the tensor {tensor.name[:80]!r} claims the shape ({shape}) and holds {stored} items")

"""The Open Inference Protocol, version 2: requests as arrays, and arrays as responses, in JSON or with binary tensor data.

Functions of bytes alone: they know nothing of HTTP frameworks, models or schedulers. A tensor is never a Python object per
number longer than orjson needs it, and never passes through pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from anytime.errors import InputError
from anytime.serve.strict_json import parse_json

TYPES = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2", "INT32": "<i4",
    "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
"""NumPy's types of the fixed-size datatypes; BYTES, the other one, is a list of texts."""
_NAMES = {np.dtype(known): name for name, known in TYPES.items()}
HEADER_LENGTH = "inference-header-content-length"
_KINDS = {"b": "b", "u": "iu", "i": "iu", "f": "iuf"}  # of NumPy, and what JSON may have given for it
_LARGEST_DIMENSION = 1 << 40
_REMEMBERED, _SHORT = 256, 2048
"""How many JSON documents before binary data are remembered, and up to how many bytes."""

Array = NDArray[Any] | list[str]
W = TypeVar("W")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a model takes or gives; -1 is a variable size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def document(self) -> dict[str, Any]:
        """As in the metadata of a model."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}

    def check(self, shape: Sequence[int]) -> None:
        """Refuse a shape that does not fit."""
        fits = len(shape) == len(self.shape) and all(own in (-1, got) for own, got in zip(self.shape, shape, strict=True))
        if not fits or 0 in shape:
            raise _wrong(f"the input {self.name} has shape {list(shape)}", f"shape {list(self.shape)}, where -1 is any size")


class _Given(NamedTuple):
    """An input as the JSON document describes it: with its data, or with the size of its binary data."""

    spec: TensorSpec
    shape: list[int]
    elements: int
    size: int | None
    data: Any


class InferRequest(NamedTuple, Generic[W]):
    """A request, without its data.

    Attributes:
        id: Repeated in the response, if given.
        given: Its inputs.
        wanted: What the parameters ask for.
        outputs: For each output that is requested whether it is sent as binary data; None if the request names none.
        binary: Whether the outputs are sent as binary data if it names none.
    """

    id: str | None
    given: tuple[_Given, ...]
    wanted: W
    outputs: dict[str, bool] | None
    binary: bool


class RequestReader(Generic[W]):
    """Reads requests to one model.

    A client sends the same JSON document before its binary data again and again, so documents are remembered.

    Args:
        inputs: What the model takes.
        outputs: The names of what it gives.
        most: The largest number of elements of a tensor.
        wanted: What parameters ask for: a dictionary of texts, numbers and booleans.
    """

    def __init__(
        self, inputs: Sequence[TensorSpec], outputs: Iterable[str], *, most: int, wanted: Callable[[dict[str, Any]], W]
    ) -> None:
        self._inputs, self._outputs, self._most, self._wanted = tuple(inputs), frozenset(outputs), most, wanted
        self._remembered = lru_cache(_REMEMBERED)(self._read_document)

    def __call__(self, body: bytes, header: str | None) -> tuple[InferRequest[W], memoryview]:
        """Read a request; returns the binary data apart, for `read_inputs`.

        Args:
            body: The JSON document, then the binary data, if any.
            header: The header `Inference-Header-Content-Length`: the length of the JSON document.
        """
        length = _header_length(header, len(body))
        read = self._remembered if length < len(body) and length <= _SHORT else self._read_document
        return read(body[:length]), memoryview(body)[length:]

    def _read_document(self, data: bytes) -> InferRequest[W]:
        document = parse_json(data)
        _check_members(document, {"id", "parameters", "inputs", "outputs"}, "the request")
        name = document.get("id")
        if name is not None and not isinstance(name, str):
            raise _wrong("an id that is not a string", "a string")
        parameters = _parameters(document, "the request")
        binary = _flag(parameters.pop("binary_data_output", False), "binary_data_output")
        specs, given = {spec.name: spec for spec in self._inputs}, []
        for each in _objects(document.get("inputs"), "inputs"):
            spec = specs.pop(each["name"], None)
            if spec is None:
                names = ", ".join(spec.name for spec in self._inputs)
                raise _wrong(f"an input named {each['name']!r}", f"each of {names}, once")
            given.append(_read_tensor(each, spec, self._most))
        if specs:
            raise _wrong(f"a request without the input {', '.join(specs)}", "every input of the model")
        outputs = _read_outputs(document.get("outputs"), self._outputs, binary)
        return InferRequest(name, tuple(given), self._wanted(parameters), outputs, binary)


def read_inputs(request: InferRequest[Any], data: memoryview) -> dict[str, Array]:
    """The inputs of a request: arrays by name; texts are lists.

    Args:
        request: The request.
        data: The binary data, if any.
    """
    arrays = {}
    for given in request.given:
        arrays[given.spec.name], data = _read_data(given, data)
    if len(data):
        raise _wrong(f"{len(data)} bytes after the binary data", "the bytes that binary_data_size states")
    return arrays


def read_numbers(data: Any, spec: TensorSpec, most: int) -> Array:
    """JSON as one input or a batch of them: nested lists of numbers, or texts.

    Args:
        data: What JSON gave.
        spec: What the model takes.
        most: The largest number of elements.
    """
    if spec.datatype == "BYTES":
        texts = [data] if isinstance(data, str) else data
        return _from_json(texts, spec, [], len(texts) if isinstance(texts, list) and texts else 1)
    try:
        found = np.asarray(data)
    except ValueError:  # lists of different lengths
        found = np.empty(0)
    shape = [1, *found.shape] if found.ndim == len(spec.shape) - 1 else list(found.shape)
    spec.check(shape)
    if found.size > most:
        raise _wrong(f"{found.size:,} numbers", f"at most {most:,}")
    return _from_json(data, spec, shape, found.size)


def encode(
    arrays: Mapping[str, NDArray[Any]], binary: Mapping[str, bool], *, model: str, id: str | None, parameters: Mapping[str, Any]
) -> tuple[bytes, int | None]:
    """A response: its body, and the length of its JSON document if binary data follow.

    Args:
        arrays: The outputs.
        binary: For each of them whether it is sent as binary data.
        model: The name of the model.
        id: Of the request.
        parameters: Of the response.
    """
    outputs, tail = [], []
    for name, array in arrays.items():
        described: dict[str, Any] = {"name": name, "datatype": _NAMES[array.dtype], "shape": array.shape}
        if binary[name]:
            tail.append(array.tobytes())
            described["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            described["data"] = np.ascontiguousarray(array).ravel()
        outputs.append(described)
    document = {"model_name": model, "model_version": "1", "parameters": parameters, "outputs": outputs}
    head = orjson.dumps(document if id is None else {"id": id, **document}, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join([head, *tail]), len(head)) if tail else (head, None)


def _read_tensor(given: dict[str, Any], spec: TensorSpec, most: int) -> _Given:
    _check_members(given, {"name", "shape", "datatype", "parameters", "data"}, f"the input {spec.name}")
    shape = given.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < _LARGEST_DIMENSION for size in shape):
        raise _wrong(f"the input {spec.name} without a valid shape", "a list of sizes")
    if given.get("datatype") != spec.datatype:
        raise _wrong(f"the input {spec.name} with datatype {given.get('datatype')!r}", spec.datatype)
    spec.check(shape)
    elements = prod(shape)
    if elements > most:
        raise _wrong(f"the input {spec.name} with {elements:,} elements", f"at most {most:,}")
    parameters = _parameters(given, f"the input {spec.name}")
    size = parameters.pop("binary_data_size", None)
    if parameters or (size is None) == ("data" not in given):
        raise _wrong(f"the input {spec.name} with data and parameters that do not fit", "data, or binary_data_size alone")
    if size is not None and (type(size) is not int or size < 0):
        raise _wrong(f"binary_data_size {size!r} of {spec.name}", "a number of bytes")
    return _Given(spec, shape, elements, size, given.get("data"))


def _read_data(given: _Given, data: memoryview) -> tuple[Array, memoryview]:
    """An input, and the binary data after it."""
    spec, shape, elements, size, numbers = given
    if size is None:
        return _from_json(numbers, spec, shape, elements), data
    if size > len(data):
        raise _wrong(f"binary_data_size {size} of {spec.name}, with {len(data)} bytes left", "the bytes that were sent")
    return _from_bytes(data[:size], spec, shape, elements), data[size:]


def _from_json(data: Any, spec: TensorSpec, shape: list[int], elements: int) -> Array:
    if spec.datatype == "BYTES":
        if not isinstance(data, list) or len(data) != elements or not all(isinstance(text, str) for text in data):
            raise _wrong(f"data of {spec.name} that are not {elements} texts", "a list of strings")
        return data
    wanted = np.dtype(TYPES[spec.datatype])
    try:
        found = np.asarray(data)
    except ValueError:  # lists of different lengths
        found = np.empty(0, dtype=object)
    if found.dtype.kind not in _KINDS[wanted.kind] or found.size != elements or not isinstance(data, list):
        raise _wrong(f"data of {spec.name} that are not {elements} numbers", f"{spec.datatype} numbers, flat or nested")
    with np.errstate(over="ignore"):
        array = found.astype(wanted).reshape(shape)
    if wanted.kind in "iu" and not np.array_equal(array.ravel(), found.ravel()):
        raise _wrong(f"numbers of {spec.name} outside the range of {spec.datatype}", f"{spec.datatype} numbers")
    return _finite(array, spec)


def _from_bytes(data: memoryview, spec: TensorSpec, shape: list[int], elements: int) -> Array:
    if spec.datatype == "BYTES":
        return _read_texts(data, spec, elements)
    wanted = np.dtype(TYPES[spec.datatype])
    if len(data) != elements * wanted.itemsize:
        raise _wrong(
            f"{len(data)} bytes of binary data for {spec.name}", f"{elements * wanted.itemsize}: {elements} × {spec.datatype}"
        )
    return _finite(np.frombuffer(data, dtype=wanted).reshape(shape), spec)


def _read_texts(data: memoryview, spec: TensorSpec, elements: int) -> list[str]:
    """Texts, each after its length in four bytes."""
    texts: list[str] = []
    wrong = _wrong(f"binary data of {spec.name} that are not {elements} texts", "each text in UTF-8 after its length (uint32)")
    while len(data) >= 4 and len(texts) < elements:
        length = int.from_bytes(data[:4], "little")
        if length > len(data) - 4:
            raise wrong
        try:
            texts.append(str(data[4 : 4 + length], "utf-8"))
        except UnicodeDecodeError:
            raise wrong from None
        data = data[4 + length :]
    if len(data) or len(texts) != elements:
        raise wrong
    return texts


def _finite(array: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise _wrong(f"NaN or infinity in {spec.name}", "finite numbers")
    return array


def _read_outputs(given: Any, known: Collection[str], binary: bool) -> dict[str, bool] | None:
    if given is None:
        return None
    found = {}
    for each in _objects(given, "outputs"):
        _check_members(each, {"name", "parameters"}, "an output")
        parameters = _parameters(each, f"the output {each['name']}")
        found[each["name"]] = _flag(parameters.pop("binary_data", binary), "binary_data")
        if each["name"] not in known or parameters:
            raise _wrong(
                f"the output {each['name']!r} {parameters or ''}".strip(), f"one of {', '.join(sorted(known))}, and binary_data"
            )
    return found or None


def _header_length(header: str | None, length: int) -> int:
    if header is None:
        return length
    if not (header.isascii() and header.isdigit() and len(header) < 19 and int(header) <= length):
        raise _wrong(f"{HEADER_LENGTH} is {header!r} in a body of {length} bytes", "the length of the JSON document")
    return int(header)


def _parameters(given: dict[str, Any], where: str) -> dict[str, Any]:
    parameters = given.get("parameters", {})
    if not isinstance(parameters, dict) or not all(isinstance(value, str | int | float) for value in parameters.values()):
        raise _wrong(f"parameters of {where} that are not scalars", "an object of strings, numbers and booleans")
    return dict(parameters)


def _objects(given: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in given):
        raise _wrong(f"{what} that are not a list of named tensors", f'"{what}": [{{"name": ...}}]')
    return given


def _check_members(given: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(given) - known):
        raise _wrong(f"the unknown member {unknown[0]!r} in {where}", f"only {', '.join(sorted(known))}")


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(f"{name} is {value!r}", "true or false")
    return value


def _wrong(got: str, expected: str) -> InputError:
    return InputError(got, expected=expected, fix="see the metadata of the model: GET /v2/models/NAME")

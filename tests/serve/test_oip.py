"""The Open Inference Protocol, without a server."""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("orjson")

from hypothesis import given
from hypothesis import strategies as st

from anytime.errors import InputError
from anytime.serve.oip import TYPES, Array, InferRequest, RequestReader, TensorSpec, encode, read_inputs
from anytime.serve.strict_json import parse_json

IMAGE = TensorSpec("input", "FP32", (-1, 2, 3))
TEXTS = TensorSpec("input", "BYTES", (-1,))


class Read(NamedTuple):
    """A request and its inputs."""

    request: InferRequest[dict[str, Any]]
    inputs: dict[str, Array]


def read(document: Any, tail: bytes = b"", *, spec: TensorSpec = IMAGE, header: str | None = None, most: int = 100) -> Read:
    head = document if isinstance(document, bytes) else json.dumps(document).encode()
    length = header if header is not None else str(len(head)) if tail else None
    reader = RequestReader([spec], ["labels", "probabilities"], most=most, wanted=dict)
    request, data = reader(head + tail, length)
    return Read(request, read_inputs(request, data))


def tensor(data: Any = None, *, shape: Any = (1, 2, 3), **more: Any) -> dict[str, Any]:
    found = {"name": "input", "datatype": "FP32", "shape": list(shape), **more}
    return found if data is None else {**found, "data": data}


def test_json_data_may_be_flat_or_nested() -> None:
    flat, nested = (read({"inputs": [tensor(data)]}).inputs["input"] for data in ([1, 2, 3, 4, 5, 6], [[[1, 2, 3], [4, 5, 6]]]))
    assert isinstance(flat, np.ndarray)
    assert flat.dtype == np.float32
    assert flat.shape == (1, 2, 3)
    assert np.array_equal(flat, nested)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=6, max_size=6))
def test_binary_data_are_the_same_numbers_as_json(values: list[float]) -> None:
    array = np.array(values, dtype=np.float32).reshape(1, 2, 3)
    by_json = read({"inputs": [tensor(array.tolist())]}).inputs["input"]
    by_bytes = read({"inputs": [tensor(parameters={"binary_data_size": 24})]}, array.tobytes()).inputs["input"]
    assert np.array_equal(by_json, by_bytes)
    assert np.array_equal(by_bytes, array)


def test_texts_in_json_and_binary() -> None:
    words = ["", "one", "zwei ✓"]
    described = {"name": "input", "datatype": "BYTES", "shape": [3]}
    tail = b"".join(struct.pack("<I", len(word.encode())) + word.encode() for word in words)
    assert read({"inputs": [{**described, "data": words}]}, spec=TEXTS).inputs["input"] == words
    binary = {**described, "parameters": {"binary_data_size": len(tail)}}
    assert read({"inputs": [binary]}, tail, spec=TEXTS).inputs["input"] == words


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", TYPES)
def test_responses_have_the_arrays(datatype: str, binary: bool) -> None:
    array = np.arange(6).reshape(2, 3).astype(TYPES[datatype])
    if datatype == "FP16" and not binary:
        pytest.skip("JSON has no half precision")
    body, length = encode({"y": array}, {"y": binary}, model="m", id="7", parameters={"exit": 1})
    document = json.loads(body[:length])
    (output,) = document["outputs"]
    assert (document["id"], document["parameters"], output["datatype"]) == ("7", {"exit": 1}, datatype)
    assert (length is not None) == binary
    tail = body[length:] if binary else b""
    data = np.frombuffer(tail, TYPES[datatype]) if binary else np.array(output["data"])
    assert np.array_equal(data.reshape(output["shape"]), array)


GOOD = [1.0, 2, 3, 4, 5, 6]
VALID = json.dumps({"inputs": [tensor(GOOD)]}).encode()
WRONG: dict[str, Any] = {
    "NaN literal": b'{"inputs": [{"name": "input", "datatype": "FP32", "shape": [1,2,3], "data": [NaN,1,1,1,1,1]}]}',
    "Infinity literal": b'{"inputs": [Infinity]}',
    "duplicate key": b'{"inputs": [], ' + VALID[1:],
    "duplicate inner key": VALID.replace(b'"name"', b'"name": "input", "name"'),
    "duplicate escaped key": b'{"parameters": {"a\\u0062": 1, "ab": 2}, "inputs": []}',
    "deep": b'{"inputs": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    "deep objects": b'{"inputs": ' + b'{"a":' * 100 + b"1" + b"}" * 101,
    "not JSON": b"{",
    "empty": b"",
    "a list": b"[]",
    "not UTF-8": b'{"id": "\xff"}',
    "no inputs": {},
    "inputs no list": {"inputs": {"name": "input"}},
    "input no name": {"inputs": [{"shape": [1]}]},
    "other name": {"inputs": [{**tensor(GOOD), "name": "image"}]},
    "twice": {"inputs": [tensor(GOOD), tensor(GOOD)]},
    "unknown member": {"inputs": [tensor(GOOD)], "url": "file:///etc/passwd"},
    "unknown input member": {"inputs": [tensor(GOOD, path="/etc/passwd")]},
    "other type": {"inputs": [{**tensor(GOOD), "datatype": "FP64"}]},
    "wrong shape": {"inputs": [tensor(GOOD, shape=(1, 3, 2))]},
    "rank": {"inputs": [tensor(GOOD, shape=(6,))]},
    "no rows": {"inputs": [tensor([], shape=(0, 2, 3))]},
    "negative": {"inputs": [tensor(GOOD, shape=(-1, 2, 3))]},
    "boolean size": {"inputs": [tensor(GOOD, shape=(True, 2, 3))]},
    "huge": {"inputs": [tensor(GOOD, shape=(1 << 39, 2, 3))]},
    "beyond integers": {"inputs": [tensor(GOOD, shape=(1 << 70, 2, 3))]},
    "too many": {"inputs": [tensor([1.0] * 120, shape=(20, 2, 3))]},
    "short": {"inputs": [tensor([1.0] * 5)]},
    "long": {"inputs": [tensor([1.0] * 7)]},
    "ragged": {"inputs": [tensor([[1, 2, 3], [4, 5]])]},
    "strings": {"inputs": [tensor(["1"] * 6)]},
    "nulls": {"inputs": [tensor([None] * 6)]},
    "booleans": {"inputs": [tensor([True] * 6)]},
    "objects": {"inputs": [tensor([{}] * 6)]},
    "number": {"inputs": [tensor(3.0)]},
    "overflow": {"inputs": [tensor([1e300] * 6)]},
    "no data": {"inputs": [tensor()]},
    "data twice": {"inputs": [tensor(GOOD, parameters={"binary_data_size": 24})]},
    "binary size without bytes": {"inputs": [tensor(parameters={"binary_data_size": 24})]},
    "binary size no number": {"inputs": [tensor(parameters={"binary_data_size": "24"})]},
    "parameters no object": {"inputs": [tensor(GOOD)], "parameters": [1]},
    "nested parameter": {"inputs": [tensor(GOOD)], "parameters": {"a": [1]}},
    "id no string": {"inputs": [tensor(GOOD)], "id": 3},
    "unknown output": {"inputs": [tensor(GOOD)], "outputs": [{"name": "weights"}]},
    "output parameters": {"inputs": [tensor(GOOD)], "outputs": [{"name": "labels", "parameters": {"classification": 3}}]},
    "flag": {"inputs": [tensor(GOOD)], "parameters": {"binary_data_output": "yes"}},
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_documents_are_refused(case: str) -> None:
    with pytest.raises(InputError):
        read(WRONG[case])


@pytest.mark.parametrize("tail", [b"", bytes(23), bytes(25), bytes(48), b"\x00\x00\xc0\x7f" * 6], ids=len)
def test_wrong_binary_data_are_refused(tail: bytes) -> None:
    with pytest.raises(InputError):
        read({"inputs": [tensor(parameters={"binary_data_size": 24})]}, tail)
    with pytest.raises(InputError):
        read({"inputs": [tensor(parameters={"binary_data_size": len(tail)})]}, tail)


@pytest.mark.parametrize("header", ["-1", "1e3", "99999", "9" * 30, "", "²", " 5"])
def test_wrong_header_lengths_are_refused(header: str) -> None:
    with pytest.raises(InputError):
        read({"inputs": [tensor(GOOD)]}, header=header)


@pytest.mark.parametrize("tail", [b"\x01\x00\x00", b"\xff\xff\xff\xffab", b"\x01\x00\x00\x00\xff", b"\x00\x00\x00\x00" * 2])
def test_wrong_binary_texts_are_refused(tail: bytes) -> None:
    described = {"name": "input", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(tail)}}
    with pytest.raises(InputError):
        read({"inputs": [described]}, tail, spec=TEXTS)


def test_a_colon_in_a_string_is_not_a_key() -> None:
    assert parse_json(b'{"a": "\\":", "b": ["c", "d\\\\"], "e" : {"a": "x: \\"y\\": "}}')["b"] == ["c", "d\\"]


def test_outputs_and_their_encoding() -> None:
    found = read({"inputs": [tensor(GOOD)], "outputs": [{"name": "labels", "parameters": {"binary_data": True}}]})
    assert found.request.outputs == {"labels": True}
    assert read({"inputs": [tensor(GOOD)], "parameters": {"binary_data_output": True, "timeout": 5}}).request.binary

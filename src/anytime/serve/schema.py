"""The OpenAPI description of each operation, written by hand: no tensor passes through pydantic, which would describe it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from anytime.serve.oip import HEADER_LENGTH, TensorSpec

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 1}
NUMBER: Schema = {"type": "number"}


def record(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, *, more: bool = False) -> Schema:
    """An object with these members."""
    members = {**required, **(optional or {})}
    return {"type": "object", "properties": members, "required": list(required), "additionalProperties": more}


def list_of(items: Schema) -> Schema:
    """An array."""
    return {"type": "array", "items": items}


_SCALARS: Schema = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
_SHAPE = list_of({"type": "integer"})
_PROBLEM = record({"error": TEXT, "code": TEXT}, {"expected": TEXT, "fix": TEXT, "retry_after_ms": COUNT, "forecast_us": COUNT})
_HOW = record(
    {"exit": {"type": "integer", "minimum": 0}, "exits_total": COUNT, "elapsed_us": {"type": "integer"}, "deadline_met": FLAG}
    | {"fell_back": FLAG},
    {"reason": TEXT, "set": TEXT},
)
_OUTPUT = record({"name": TEXT, "datatype": TEXT, "shape": _SHAPE}, {"data": {"type": "array"}, "parameters": _SCALARS})
_TENSOR = record({"name": TEXT, "datatype": TEXT, "shape": _SHAPE})
RESPONSE = record({"model_name": TEXT, "model_version": TEXT, "parameters": _HOW, "outputs": list_of(_OUTPUT)}, {"id": TEXT})
METADATA = record(
    {"name": TEXT, "versions": list_of(TEXT), "platform": TEXT, "inputs": list_of(_TENSOR), "outputs": list_of(_TENSOR)}
    | {"parameters": _SCALARS}
)
EVENT = record({"event": {"enum": ["exit", "error"]}, "data": {**TEXT, "description": "A response, or an error, as JSON."}})
SERVER = record({"name": TEXT, "version": TEXT, "extensions": list_of(TEXT)})
_CLASS = {"label": {"type": "integer"}, "name": TEXT, "probability": NUMBER}
PEOPLE = record(
    {
        "model": TEXT,
        "answers": list_of(record({**_CLASS, "fell_back": FLAG, "top": list_of(record(_CLASS))}, {"set": list_of(TEXT)})),
        **_HOW["properties"],
    }
)
PEOPLE["required"] = [name for name in PEOPLE["required"] if name not in ("reason", "set")]


def asked(exits: int) -> dict[str, Schema]:
    """What a request may ask for besides its deadline."""
    exit: Schema = {**COUNT, "maximum": exits}
    confidence = {**NUMBER, "exclusiveMinimum": 0, "maximum": 1}
    return {"min_exit": exit, "max_exit": exit, "target_confidence": confidence}


def asked_by_people(exits: int) -> dict[str, Schema]:
    """The query of `/predict`."""
    deadline = {**TEXT, "pattern": r"^[0-9]{1,9}(\.[0-9]{1,9})?(us|ms|s)$", "example": "20ms"}
    return {"deadline": deadline, "top": {**COUNT, "maximum": 1000}, **asked(exits)}


def infer_body(specs: Sequence[TensorSpec], outputs: Iterable[str], exits: int, longest: float) -> Schema:
    """A request for inference.

    Args:
        specs: The model's inputs.
        outputs: The names of its outputs.
        exits: Its number of exits.
        longest: The longest deadline, in seconds.
    """
    tensors = [_input(spec) for spec in specs]
    every = tensors[0] if len(tensors) == 1 else {"oneOf": tensors}
    inputs = {**list_of(every), "minItems": len(specs), "maxItems": len(specs)}
    output = record({"name": {"enum": list(outputs)}}, {"parameters": record({}, {"binary_data": FLAG})})
    timeout = {**COUNT, "maximum": round(1e6 * longest), "description": "Microseconds from the whole request to its answer."}
    parameters = record({}, {"timeout": timeout, **asked(exits), "set": FLAG, "binary_data_output": FLAG})
    whole = record({"inputs": inputs}, {"id": TEXT, "parameters": parameters, "outputs": list_of(output)})
    return {**whole, "example": {"inputs": [_example(spec) for spec in specs]}}


def _input(spec: TensorSpec) -> Schema:
    sizes = [{**COUNT, "const": size} if size > 0 else COUNT for size in spec.shape]
    shape = {"type": "array", "prefixItems": sizes, "minItems": len(sizes), "maxItems": len(sizes)}
    described: dict[str, Schema] = {"name": {"const": spec.name}, "datatype": {"const": spec.datatype}, "shape": shape}
    binary = record({}, {"binary_data_size": {"type": "integer", "minimum": 0}})
    return record(described, {"data": {"type": "array"}, "parameters": binary})


def _example(spec: TensorSpec) -> dict[str, Any]:
    shape = [1 if size == -1 else size for size in spec.shape]
    value = {"BYTES": "a text", "BOOL": True}.get(
        spec.datatype, int("INT" in spec.datatype)
    )  # a mask of zeros hides all tokens
    data = [value] * prod(shape)
    return {"name": spec.name, "datatype": spec.datatype, "shape": shape, "data": data}


_REFUSALS = {
    400: "The request is not valid; `expected` says what would be.",
    401: "No valid token.",
    403: "Sent by another web page.",
    404: "There is no such model.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "Neither an image, a text nor JSON, or compressed.",
    422: "Not even the first exit (or min_exit) fits into the deadline, whatever the load.",
    429: "Overloaded: it would not be answered in time.",
    503: "Shutting down.",
}
_RETRY = {"retry-after": {"schema": COUNT}, "retry-after-ms": {"schema": COUNT}}


def operation(
    summary: str,
    answer: Schema | None,
    *,
    media: str = "application/json",
    body: Mapping[str, Schema] | None = None,
    path: Mapping[str, str] | None = None,
    query: Mapping[str, Schema] | None = None,
    header: str | None = None,
    refusals: Iterable[int] = (),
) -> dict[str, Any]:
    """Arguments of a FastAPI route.

    Args:
        summary: One line.
        answer: The schema of status 200, or None for text.
        media: Its media type.
        body: Schemas of the request body by media type.
        path: Names and only values of path parameters.
        query: Schemas of query parameters.
        header: An optional header of the request with a count.
        refusals: Further statuses; 400, 401 and 403 are always possible.
    """
    known = {name: {**TEXT, "enum": [value]} for name, value in (path or {}).items()}
    parameters = [{"name": name, "in": "path", "required": True, "schema": schema} for name, schema in known.items()]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in (query or {}).items()]
    parameters += [] if header is None else [{"name": header, "in": "header", "schema": {**COUNT, "minimum": 0}}]
    extra: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {kind: {"schema": schema} for kind, schema in body.items()}}
    responses: dict[int, dict[str, Any]] = {
        200: {"description": "The answer.", "content": {media: {"schema": TEXT if answer is None else answer}}}
    }
    for status in sorted({400, 401, 403, *refusals}):
        content = {"application/json": {"schema": _PROBLEM}}
        responses[status] = {"description": _REFUSALS[status], "content": content}
    if 429 in responses:
        responses[429]["headers"] = _RETRY
    if answer is RESPONSE and media == "application/json":
        responses[200]["content"]["application/octet-stream"] = {"schema": {**TEXT, "format": "binary"}}
        responses[200]["headers"] = {HEADER_LENGTH: {"schema": COUNT}}
    return {"summary": summary, "responses": responses, "openapi_extra": extra}

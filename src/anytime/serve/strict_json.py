"""JSON as a server should read it: bounded, without NaN, duplicate keys or deep nesting."""

from __future__ import annotations

import re
from typing import Any

import orjson

from anytime.errors import InputError

_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"(\s*:)?', re.DOTALL)
_DEEPEST = 64
_LONGEST = 4 << 20
"""Bytes of a JSON document: while one is parsed, no other thread of Python runs."""


def parse_json(data: bytes) -> dict[str, Any]:
    """A JSON object; NaN, duplicate keys and deep nesting are refused.

    >>> parse_json(b'{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    if len(data) > _LONGEST:
        raise _wrong(f"{len(data):,} bytes of JSON", f"at most {_LONGEST:,}; tensors may be binary data")
    try:
        document = orjson.loads(data)
    except orjson.JSONDecodeError as error:  # NaN and Infinity too, and nesting beyond 1,024
        raise _wrong(f"a body that is not JSON: {error}", "one JSON object in UTF-8") from None
    if not isinstance(document, dict):
        raise _wrong("JSON that is not an object", "one JSON object")
    if sum(1 for match in _STRINGS.finditer(data) if match[1]) != _count_keys(document):
        raise _wrong("JSON in which a key appears twice", "each key once per object")
    return document


def _count_keys(value: Any, depth: int = 0) -> int:
    if depth > _DEEPEST:
        raise _wrong("JSON that is nested too deeply", f"at most {_DEEPEST} levels")
    if isinstance(value, dict):
        return len(value) + sum(_count_keys(each, depth + 1) for each in value.values())
    if isinstance(value, list) and value and isinstance(value[0], dict | list):  # numbers are not looked at one by one
        return sum(_count_keys(each, depth + 1) for each in value)
    return 0


def _wrong(got: str, expected: str) -> InputError:
    return InputError(got, expected=expected, fix="send JSON as a JSON library writes it")

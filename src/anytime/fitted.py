"""Small objects that were fitted on held-out rows and are kept beside a model: one JSON file each, with a checksum.

A subclass is a frozen dataclass whose fields are numbers, texts, booleans, None, tensors, and tuples or dicts of these:

>>> @dataclass(frozen=True)
... class Offset(Fitted, kind="offset"):
...     values: tuple[float, ...]
>>> Offset(exits=2, classes=10, values=(0.5, math.inf)).document()["fields"]["values"]
[0.5, {'float': 'inf'}]
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from anytime.artifacts import json_text, write_text
from anytime.checks import check_count
from anytime.errors import AnytimeError, FormatError, IntegrityError, ShapeError
from anytime.outputs import check_file
from anytime.reading import parsing, read_file

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = "anytime fitted object"
_INLINE = 256
"""Tensors of up to so many numbers are written as numbers, larger ones as base64 of their bytes."""
_DTYPES = ("float64", "float32", "int64", "bool")
_LARGEST_FILE = 1 << 30


@dataclass(frozen=True)
class Fitted:
    """Base of all fitted objects.

    Args:
        exits: How many exits it was fitted for.
        classes: How many classes, or None where it does not depend on them.
    """

    kind: ClassVar[str] = ""
    version: ClassVar[int] = 1
    exits: int
    classes: int | None

    def __init_subclass__(cls, kind: str = "", version: int = 1, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.kind, cls.version = kind or cls.kind, version

    def __post_init__(self) -> None:
        for name, value in (("exits", self.exits), ("classes", self.classes)):
            if value is not None:
                check_count(value, name)

    def check_fits(self, exits: int, classes: int) -> None:
        """Refuse logits with another number of exits or classes than it was fitted for."""
        if exits != self.exits or (self.classes is not None and classes != self.classes):
            fitted = f"{self.exits} exits" + ("" if self.classes is None else f" and {self.classes} classes")
            raise ShapeError(
                f"the logits have {exits} exits and {classes} classes",
                expected=f"{fitted}, for which this {self.kind} was fitted",
                fix="fit it anew on held-out logits of this model",
            )

    def save(self, path: str | Path) -> Path:
        """Write it to a file, all or nothing; a file that holds something else than an object of this kind is not replaced."""
        check_saving(path, self.kind)
        write_text(path, json_text(self.document()))
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read one from a file; a damaged file, or one that holds something else, is refused."""
        document = read_document(path)
        if document["kind"] != cls.kind:
            raise FormatError(
                f"{path} holds a {document['kind']}",
                expected=f"a {cls.kind}",
                fix="anytime.load(path) reads any kind",
                path=path,
            )
        return cls.from_document(document, path=path)

    def document(self) -> dict[str, Any]:
        """What `save` writes."""
        fields = {field.name: _encode(getattr(self, field.name)) for field in dataclasses.fields(self)}
        body = {"format": _FORMAT, "version": self.version, "kind": self.kind, "fields": fields}
        return {**body, "sha256": _checksum(body)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], *, path: str | Path = "the document") -> Self:
        """The object that a checked document describes."""
        version = document.get("version")
        if version != cls.version:
            older = isinstance(version, int) and version < cls.version
            raise FormatError(
                f"{path} holds version {version!r} of a {cls.kind}",
                expected=f"version {cls.version}",
                fix="an earlier release wrote it: fit it again with this one" if older else "update anytime-nn",
                path=path,
            )
        names = {field.name for field in dataclasses.fields(cls)}
        fields = document.get("fields")
        if not isinstance(fields, dict) or set(fields) != names:
            raise FormatError(
                f"{path} has the fields {sorted(fields) if isinstance(fields, dict) else fields!r}",
                expected=f"{sorted(names)}",
                fix="it is from another version of anytime: fit it anew",
                path=path,
            )
        what, expected = f"does not describe a {cls.kind}", "a file that save() wrote"
        try:
            with parsing(path, expected=expected, fix="fit it anew", kind=FormatError, what=what):
                return cls(**{name: _decode(value) for name, value in fields.items()})
        except FormatError:
            raise
        except AnytimeError as error:
            raise FormatError(f"{path}: {error.got}", expected=error.expected, fix="fit it anew", path=path) from None


def check_saving(path: str | Path, kind: str, *, inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuse a path for an object of a kind unless it is new or holds an older one; `inputs` are not written over either."""
    begins = re.compile(
        rb'\{\s*"format": "%s",\s*"version": \d+,\s*"kind": "%s"' % (_FORMAT.encode(), re.escape(kind).encode())
    )
    check_file(path, ours=lambda head: begins.match(head) is not None, inputs=inputs)


def read_document(path: str | Path) -> dict[str, Any]:
    """The document in a file, with its checksum looked at; `kind` says what it describes."""
    fix = "check the path, or fit and save one"
    data = read_file(path, most=_LARGEST_FILE, expected="a fitted object's file", fix=fix)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise _damaged(path, "it is not JSON") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise FormatError(
            f"{path} holds no fitted object", expected="a file that save() wrote", fix="check the path", path=path
        )
    try:
        sound = document.pop("sha256", None) == _checksum(document) and isinstance(document.get("kind"), str)
    except RecursionError:  # writing nests a little deeper than reading
        sound = False
    if not sound:
        raise _damaged(path, "its checksum is off")
    return document


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _damaged(path: str | Path, why: str) -> IntegrityError:
    return IntegrityError(
        f"{path} is damaged: {why}",
        expected="the file as save() wrote it",
        fix="restore it from a copy, or fit it anew",
        path=path,
    )


def _encode(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, tuple | list):
        return [_encode(part) for part in value]
    if isinstance(value, Mapping):
        return {"dict": {str(name): _encode(part) for name, part in value.items()}}
    return _encode_tensor(value)


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(part) for part in value)
    if not isinstance(value, dict):
        return value
    match value:
        case {"float": str() as text}:
            return float(text)
        case {"dict": dict() as parts}:
            return {name: _decode(part) for name, part in parts.items()}
        case {"tensor": str() as dtype, "shape": [*shape], "data": data} if dtype in _DTYPES:
            return _decode_tensor(dtype, shape, data)
    raise ValueError(f"unknown value {list(value)}")


def _encode_tensor(value: Tensor) -> dict[str, Any]:
    tensor = value.detach().cpu().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TypeError(f"a tensor of {dtype} cannot be saved")
    flat = tensor.flatten()
    data = _encode(flat.tolist()) if flat.numel() <= _INLINE else base64.b64encode(flat.numpy().tobytes()).decode()
    return {"tensor": dtype, "shape": list(tensor.shape), "data": data}


def _decode_tensor(dtype: str, shape: list[int], data: Any) -> Tensor:
    import numpy as np
    import torch

    if isinstance(data, str):
        array = np.frombuffer(base64.b64decode(data, validate=True), dtype=dtype).copy()
    else:
        array = np.array(_decode(data), dtype=dtype)
    return torch.from_numpy(array).reshape(shape)

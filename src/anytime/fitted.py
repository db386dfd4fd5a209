"""Small objects that were fitted on held-out rows, each stored as one JSON file with a checksum.

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
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from anytime.artifacts import json_text, write_text
from anytime.checks import check_count
from anytime.display.brief import brief_repr
from anytime.errors import AnytimeError, FormatError, IntegrityError, ShapeError
from anytime.outputs import check_file
from anytime.reading import parsing, read_file

if TYPE_CHECKING:
    from torch import Tensor

_FORMAT = "anytime fitted object"
_INLINE = 256
"""Tensors of up to this many elements are written as numbers, larger ones as base64."""
_DTYPES = ("float64", "float32", "int64", "bool")
LARGEST_FILE = 1 << 30
KINDS = {
    "adaptive-threshold": "anytime.calibrate.AdaptiveThreshold",
    "budget-policy": "anytime.policy.BudgetPolicy",
    "certificate": "anytime.calibrate.Certificate",
    "choice-certificate": "anytime.calibrate.ChoiceCertificate",
    "conformal-sets": "anytime.conformal.ConformalSets",
    "fitted-product": "anytime.calibrate.FittedProduct",
    "fitted-rule": "anytime.calibrate.FittedRule",
    "frontier": "anytime.calibrate.Frontier",
    "laplace": "anytime.calibrate.Laplace",
    "nested-intervals": "anytime.conformal.NestedIntervals",
    "nested-sets": "anytime.conformal.NestedSets",
    "plain-policy": "anytime.policy.PlainPolicy",
    "profile": "anytime.run.Profile",
    "risk-control": "anytime.policy.RiskControl",
    "temperature": "anytime.calibrate.Temperature",
    "tuned-rule": "anytime.calibrate.TunedRule",
    "window-policy": "anytime.policy.WindowPolicy",
}
"""The kind that a file names, and the class that reads it: imported when such a file is read."""
_EARLY_KINDS = {"rule": "tuned-rule", "last-layer Laplace": "laplace"}


@dataclass(frozen=True)
class Fitted:
    """Base of all fitted objects: for a number of exits and of classes, None where it does not depend on them."""

    kind: ClassVar[str] = ""
    version: ClassVar[int] = 1
    oldest: ClassVar[int] = 1
    renamed: ClassVar[Mapping[str, str]] = {}
    exits: int
    classes: int | None

    def __init_subclass__(
        cls, kind: str = "", version: int = 1, oldest: int | None = None, renamed: Mapping[str, str] | None = None, **more: Any
    ) -> None:
        """Register a subclass: its files state `kind` (the class name in lower case with hyphens) and `version`.

        It reads versions from `oldest` on; `renamed` maps field names of older versions to those of today. Fields that they did
        not have take their defaults.
        """
        super().__init_subclass__(**more)
        # Else dataclass would write them: a repr with every number, and comparisons of tensors, which have no single answer.
        for name in ("__repr__", "__eq__", "__hash__"):
            if name not in vars(cls):
                setattr(cls, name, vars(Fitted)[name])
        cls.kind, cls.version, cls.oldest = kind or cls.kind, version, version if oldest is None else oldest
        cls.renamed = dict(renamed or {})

    def __repr__(self) -> str:
        return brief_repr(self)

    def __eq__(self, other: object) -> bool:
        """Whether the other object is of the same kind and would be saved as the same file."""
        if type(self) is not type(other):
            return NotImplemented
        assert isinstance(other, Fitted)
        return self.document() == other.document()

    def __hash__(self) -> int:
        return hash((type(self), self.exits, self.classes))

    def __post_init__(self) -> None:
        for name, value in (("exits", self.exits), ("classes", self.classes)):
            if value is not None:
                object.__setattr__(self, name, check_count(value, name))

    def check_fits(self, exits: int, classes: int) -> None:
        """Refuse logits with other numbers of exits or classes."""
        if exits != self.exits or (self.classes is not None and classes != self.classes):
            fitted = f"{self.exits} exits" + ("" if self.classes is None else f" and {self.classes} classes")
            raise ShapeError(
                f"the logits have {exits} exits and {classes} classes",
                expected=f"{fitted}, for which this {type(self).__name__} was fitted",
                fix="fit it on held-out logits of this model",
            )

    def save(self, path: str | Path) -> Path:
        """Write it to a file, completely or not at all; only a file with an object of this kind is replaced."""
        check_saving(path, self.kind)
        write_text(path, json_text(self.document()))
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read it from a file; a damaged file, or one with another kind of object, is refused."""
        document = read_document(path)
        if document["kind"] != cls.kind:
            raise FormatError(
                f"{path} holds a {document['kind']}",
                expected=f"a {cls.kind}",
                fix="read it with anytime.load(path), which accepts any kind",
                path=path,
            )
        return cls.from_document(document, path=path)

    def document(self) -> dict[str, Any]:
        """The JSON document that `save` writes."""
        fields = {field.name: _encode(getattr(self, field.name)) for field in dataclasses.fields(self)}
        body = {"format": _FORMAT, "version": self.version, "kind": self.kind, "fields": fields}
        return {**body, "sha256": _checksum(body)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], *, path: str | Path = "the document") -> Self:
        """The object described by a checked document."""
        version = document.get("version")
        if not isinstance(version, int) or not cls.oldest <= version <= cls.version:
            older = isinstance(version, int) and version < cls.oldest
            raise FormatError(
                f"{path} holds version {version!r} of a {cls.kind}",
                expected=f"version {cls.version}" if cls.oldest == cls.version else f"version {cls.oldest} to {cls.version}",
                fix="fit it again with this release" if older else "update anytime-nn",
                path=path,
            )
        names = {field.name for field in dataclasses.fields(cls)}
        fields = document.get("fields")
        if isinstance(fields, dict) and version < cls.version:
            new = {field.name: field.default for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}
            fields = new | {cls.renamed.get(name, name): value for name, value in fields.items()}
        if not isinstance(fields, dict) or set(fields) != names:
            raise FormatError(
                f"{path} has the fields {sorted(fields) if isinstance(fields, dict) else fields!r}",
                expected=f"{sorted(names)}",
                fix="fit it again: another version of anytime wrote this file",
                path=path,
            )
        what, expected = f"does not describe a {cls.kind}", "a file that save() wrote"
        try:
            with parsing(path, expected=expected, fix="fit it again", kind=FormatError, what=what):
                return cls(**{name: _decode(value) for name, value in fields.items()})
        except FormatError:
            raise
        except AnytimeError as error:
            raise FormatError(f"{path}: {error.got}", expected=error.expected, fix="fit it again", path=path) from None


def check_saving(path: str | Path, *kinds: str, inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuse to save to a path that holds something else than an object of these kinds, or is one of `inputs`."""
    begins = re.compile(rb'\{\s*"format": "%s",\s*"version": \d+,\s*"kind": "([^"]*)"' % _FORMAT.encode())

    def ours(head: bytes) -> bool:
        found = begins.match(head)
        return found is not None and _current_kind(found[1].decode(errors="replace")) in kinds

    check_file(path, ours=ours, inputs=inputs)


def read_fitted(path: str | Path) -> Fitted:
    """The fitted object in a file, of any kind of this library."""
    return fitted_from(read_document(path), path=path)


def fitted_from(document: Mapping[str, Any], *, path: str | Path) -> Fitted:
    """The fitted object of any kind of this library that a checked document describes."""
    home = KINDS.get(document["kind"])
    if home is None:
        raise FormatError(
            f"{path} holds an object of kind {document['kind']!r}",
            expected=f"one of {', '.join(KINDS)}",
            fix="update anytime-nn; read an object of your own with its class: MyFitted.load(path)",
            path=path,
        )
    package, _, name = home.rpartition(".")
    known: type[Fitted] = getattr(import_module(package), name)
    return known.from_document(document, path=path)


def read_document(path: str | Path) -> dict[str, Any]:
    """The document of a file, after checking its checksum; `kind` says what it describes."""
    expected, fix = "the file of a fitted object, or for anytime.load a folder with a model", "check the path"
    if Path(path).suffix.lower() in (".npz", ".npy", ".safetensors", ".parquet"):
        raise FormatError(
            f"{path} is a file of arrays", expected=expected, fix="logits are read by anytime.evaluate(path)", path=path
        )
    return document_from(read_file(path, most=LARGEST_FILE, expected=expected, fix=fix), path)


def document_from(data: bytes, path: str | Path) -> dict[str, Any]:
    """The document in the bytes of a file, as `read_document` returns it."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise _damaged(path, "it is not JSON") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise FormatError(
            f"{path} does not hold a fitted object", expected="a file that save() wrote", fix="pass the path of one", path=path
        )
    try:
        sound = document.pop("sha256", None) == _checksum(document) and isinstance(document.get("kind"), str)
    except RecursionError:  # encoding nests deeper than decoding
        sound = False
    if not sound:
        raise _damaged(path, "its checksum is wrong")
    return {**document, "kind": _current_kind(document["kind"])}


def _current_kind(kind: str) -> str:
    """The current name of a kind: early releases wrote some with spaces and capitals, and two under other names."""
    return _EARLY_KINDS.get(kind) or kind.lower().replace(" ", "-")


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _damaged(path: str | Path, why: str) -> IntegrityError:
    return IntegrityError(
        f"{path} is damaged: {why}",
        expected="the file as save() wrote it",
        fix="restore it from a copy, or fit it again",
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

"""`exported.json`, the description of exported stages, read from a file that may come from an untrusted source.

Every value is checked before use, against the limits here and against the other values: the outputs of a stage must match the
inputs of the next one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from anytime.run.export.rule_step import OUTPUTS

NAME = "exported.json"
KIND = "export"
FORMAT = "anytime exported stages"
VERSION = 2
LARGEST_DESCRIPTION = 1 << 24
"""Bytes."""
Format = Literal["onnx", "torch-export"]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
}
"""Element types of the inputs and outputs of stages."""
_MOST_EXITS, _MOST_CLASSES, _MOST_DIMENSIONS, _LARGEST_SIZE, _LARGEST_NUMBER = 1000, 1 << 24, 8, 1 << 31, 1e30
_VALUES = {"kind", "exits", "classes", "class_names", "macs", "data", "rule", "stages"}


def read_description(data: bytes) -> dict[str, Any]:
    """The description in a file; raises `ValueError` with the reason if it is not one."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    _require(isinstance(document, dict) and document.get("format") == FORMAT, "does not describe exported stages")
    version = document.get("version")
    _require(version == VERSION, f"has version {str(version)[:20]}, and this release reads version {VERSION}")
    check_description(document)
    return dict(document)


def check_description(document: Mapping[str, Any]) -> None:
    """Raise `ValueError` with the reason unless every value is valid and consistent with the others."""
    missing = _VALUES - set(document)
    _require(not missing, f"lacks {', '.join(sorted(missing))}")
    _require(document["kind"] in get_args(Format), f"has an unknown kind: {_short(document['kind'])}")
    exits, classes = _count(document, "exits", _MOST_EXITS), _count(document, "classes", _MOST_CLASSES)
    names, macs, stages = document["class_names"], document["macs"], document["stages"]
    if names is not None:
        valid = isinstance(names, list) and len(names) == classes and all(isinstance(name, str) for name in names)
        _require(valid, f"does not have one name per class: {_short(names)}")
    if macs is not None:
        valid = isinstance(macs, list) and len(macs) == exits and all(_is_number(value) for value in macs)
        increasing = valid and all(a < b for a, b in zip([0, *macs], macs, strict=False))
        _require(increasing, f"has the MACs {_short(macs)} for {exits} exits")
    _require(isinstance(document["rule"], str), f"has the rule {_short(document['rule'])}")
    _check_data(document["data"])
    valid = isinstance(stages, list) and all(isinstance(stage, dict) for stage in stages) and len(stages) == exits
    _require(valid, f"describes {len(stages) if isinstance(stages, list) else 'no'} stages for {exits} exits")
    files = [stage.get("file") for stage in stages]
    _require(all(isinstance(file, str) for file in files) and len(set(files)) == exits, "does not name one file per stage")
    _check_chain(stages, classes)
    _check_example(document.get("example"), tensors_of_stage(stages[0], "inputs"))


def tensors_of_stage(stage: Mapping[str, Any], side: str) -> list[tuple[str, str, tuple[int | str, ...]]]:
    """Name, element type and shape of the `inputs` or `outputs` of a stage."""
    listed = stage.get(side)
    _require(isinstance(listed, list), f"does not list the {side} of a stage")
    found = []
    for each in listed if isinstance(listed, list) else ():
        match each:
            case {"name": str() as name, "dtype": str() as dtype, "shape": ["batch", *sizes]} if (
                dtype in DTYPES and len(sizes) < _MOST_DIMENSIONS and all(_is_size(size) for size in sizes)
            ):
                found.append((name, dtype, ("batch", *sizes)))
            case _:
                raise ValueError(f"describes a tensor as {_short(each)}")
    _require(len({name for name, _, _ in found}) == len(found), f"has {side} of the same name")
    return found


def _check_chain(stages: Sequence[Mapping[str, Any]], classes: int) -> None:
    """Each stage returns an answer and the inputs of the next."""
    answer = [("float32", ("batch", classes)), ("float32", ("batch", classes)), ("bool", ("batch",)), ("int64", ("batch",))]
    left: list[Any] | None = None
    for number, stage in enumerate(stages, 1):
        inputs = [(dtype, shape) for _, dtype, shape in tensors_of_stage(stage, "inputs")]
        outputs = tensors_of_stage(stage, "outputs")
        fits = inputs == left if left is not None else len(inputs) > 0
        _require(fits, f"has inputs of stage {number} that do not match the outputs of the stage before")
        names, kinds = [name for name, _, _ in outputs], [(dtype, shape) for _, dtype, shape in outputs]
        _require(names[: len(OUTPUTS)] == list(OUTPUTS), f"has a stage {number} without the outputs {', '.join(OUTPUTS)}")
        _require(kinds[: len(OUTPUTS)] == answer, f"has answers of stage {number} of other types or shapes")
        left = kinds[len(OUTPUTS) :]
    _require(not left, "has a last stage with outputs for another one")


def _check_example(sizes: Any, inputs: Sequence[tuple[str, str, tuple[int | str, ...]]]) -> None:
    """The sizes of an example of the inputs, without the batch, which earlier releases did not write."""
    if sizes is None:
        return
    shapes = [shape[1:] for _, _, shape in inputs]
    valid = isinstance(sizes, list) and all(isinstance(each, list) for each in sizes)
    valid = valid and [len(each) for each in sizes] == [len(shape) for shape in shapes]
    pairs = [pair for each, shape in zip(sizes, shapes, strict=True) for pair in zip(each, shape, strict=True)] if valid else []
    valid = valid and all(type(one) is int and _is_size(one) and (one == size or isinstance(size, str)) for one, size in pairs)
    _require(valid, f"has an example of other sizes than the inputs: {_short(sizes)}")


def _check_data(data: Any) -> None:
    match data:
        case None:
            return
        case {"name": str(), "mean": [*mean], "std": [*std]} if len(mean) == len(std):
            numbers = all(_is_number(value) for value in (*mean, *std))
            _require(numbers and all(value > 0 for value in std), f"normalises inputs by {_short(data)}")
        case _:
            raise ValueError(f"describes the data as {_short(data)}")


def _count(document: Mapping[str, Any], name: str, most: int) -> int:
    value = document[name]
    _require(type(value) is int and 1 <= value <= most, f"has {name} {_short(value)}, which must be from 1 to {most}")
    return int(value)


def _is_size(size: Any) -> bool:
    return (type(size) is int and 0 <= size <= _LARGEST_SIZE) or isinstance(size, str)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST_NUMBER  # false for NaN


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise ValueError(why)


def _short(value: object) -> str:
    return repr(value)[:100]

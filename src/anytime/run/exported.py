"""Exported stages run again: what `anytime.run.export` wrote, as something that gives distributions exit by exit."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytime.artifacts import read_bundle
from anytime.combine.rules import Prediction
from anytime.errors import DtypeError, FormatError, ShapeError
from anytime.run.engines.folding import on_cpu
from anytime.run.engines.onnx import make_session
from anytime.run.engines.running import Running, check_inputs

DESCRIPTION = "exported.json"
FORMAT = "anytime exported stages"
VERSION = 2

Stage = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""What a stage's file does: tensors in, tensors out, in the order of the description."""


class ExportedModel:
    """Stages with a rule inside; made by `load_exported`. It gives distributions, not logits.

    `anytime.Runner.load(folder)` runs them by a deadline.

    Attributes:
        num_exits: How many exits there are.
        classes: How many classes.
        rule: The rule inside, as text.
        class_names: What the classes are called, where that was written down.
        costs: The cumulative cost up to each exit, where that was written down.
        description: All of `exported.json`.
    """

    name = "exported"

    def __init__(self, description: Mapping[str, Any], stages: Sequence[Stage]) -> None:
        self.description = description
        self.num_exits: int = description["exits"]
        self.classes: int = description["classes"]
        self.rule: str = description["rule"]
        self.class_names: list[str] | None = description["class_names"]
        self.costs: list[float] | None = description["costs"]
        self._stages = stages

    def begin(self, x: Tensor) -> ExportedRun:
        """Take inputs, batch first; nothing is computed yet. `advance` runs a stage and gives its `Prediction`."""
        inputs, wanted = on_cpu(check_inputs(x)), self.description["stages"][0]["inputs"][0]
        if not _fits(inputs.shape, wanted["shape"]):
            raise ShapeError(
                f"x has shape {tuple(inputs.shape)}",
                expected=f"({', '.join(map(str, wanted['shape']))})",
                fix="export the model with an example of this shape, or resize the inputs",
            )
        if inputs.dtype != getattr(torch, wanted["dtype"]):
            raise DtypeError(f"x is {inputs.dtype}", expected=wanted["dtype"], fix=f"convert it to {wanted['dtype']}")
        return ExportedRun(self._stages, inputs.contiguous())

    def run(self, x: Tensor) -> Iterator[Prediction]:
        """Yield the prediction after each exit; what is not asked for is not computed."""
        running = self.begin(x)
        try:
            for _ in range(self.num_exits):
                yield running.advance()
        finally:
            running.close()


def _fits(shape: Sequence[int], wanted: Sequence[int | str]) -> bool:
    """Whether a shape is as it should be; names stand for any size.

    >>> _fits((3, 7), ["batch", "length"]), _fits((3, 7), ["batch", 8])
    (True, False)
    """
    return len(shape) == len(wanted) and all(
        isinstance(one, str) or one == size for one, size in zip(wanted, shape, strict=True)
    )


class ExportedRun(Running[Prediction]):
    """One input, or batch of inputs, on its way through exported stages."""

    def __init__(self, stages: Sequence[Stage], x: Tensor) -> None:
        super().__init__(len(stages), len(x))
        self._stages = stages
        self._values: Sequence[Tensor] = [x]

    def _run(self, exit: int) -> Prediction:
        _, log_probs, fell_back, labels, *self._values = self._stages[exit](self._values)
        return Prediction(log_probs, fell_back, labels)

    def _select(self, rows: Tensor) -> None:
        self._values = [value[rows] for value in self._values]

    def _drop(self) -> None:
        self._values = []


def load_exported(folder: str | Path, *, threads: int = 1) -> ExportedModel:
    """The stages that `export` wrote to a folder; a damaged bundle is refused.

    ONNX files hold no code. Files of `torch.export` are read by torch, which trusts them: take them only from people you trust.

    Args:
        folder: Where they lie.
        threads: For one stage in ONNX Runtime.
    """
    files = read_bundle(folder)
    path = Path(folder) / DESCRIPTION
    description = _read(files.get(DESCRIPTION, b""), path)
    try:
        contents = [files[stage["file"]] for stage in description["stages"]]
        names = [[each["name"] for each in stage["inputs"]] for stage in description["stages"]]
        if description["kind"] == "onnx":
            stages = [_onnx_stage(file, each, threads) for file, each in zip(contents, names, strict=True)]
        else:
            stages = [_torch_stage(file) for file in contents]
        return ExportedModel(description, stages)
    except (FormatError, ImportError):
        raise
    except Exception as error:
        raise _unreadable(path, f"cannot be used: {type(error).__name__}: {error}") from error


def _onnx_stage(file: bytes, names: Sequence[str], threads: int) -> Stage:
    session = make_session(file, threads=threads)

    def run(values: Sequence[Tensor]) -> Sequence[Tensor]:
        given = dict(zip(names, (value.numpy() for value in values), strict=True))
        return [torch.from_numpy(array) for array in session.run(None, given)]

    return run


def _torch_stage(file: bytes) -> Stage:
    _refuse_pickles(file)
    module: Any = torch.export.load(io.BytesIO(file)).module()

    def run(values: Sequence[Tensor]) -> Sequence[Tensor]:
        with torch.inference_mode():
            gave: Sequence[Tensor] = module(*values)
        return gave

    return run


def _refuse_pickles(file: bytes) -> None:
    """Nothing that `export` writes is pickled; what is could run any code when it is read."""
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        for name in archive.namelist():
            place, _, last = name.rpartition("/")
            if place.endswith("data/constants") and not (last.startswith("tensor_") or last.endswith(".json")):
                raise ValueError(f"{name} is a pickled object")
            if last.endswith("_config.json") and b'"use_pickle": true' in archive.read(name):
                raise ValueError(f"{name} names pickled tensors")


def _read(data: bytes, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"is not JSON: {error}" if data else "is not there") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("version") != VERSION:
        raise _unreadable(path, "does not describe exported stages of this version")
    missing = {"kind", "exits", "classes", "class_names", "costs", "rule", "stages"} - set(document)
    if missing or document["kind"] not in ("onnx", "torch-export") or not isinstance(document["stages"], list):
        raise _unreadable(path, f"lacks {', '.join(sorted(missing)) or 'stages of a known kind'}")
    if len(document["stages"]) != document["exits"]:
        raise _unreadable(path, f"describes {len(document['stages'])} stages for {document['exits']} exits")
    return document


def _unreadable(path: Path, came: str) -> FormatError:
    return FormatError(f"{path} {came}", expected="a folder that 'anytime export' wrote", fix="export it again", path=path)

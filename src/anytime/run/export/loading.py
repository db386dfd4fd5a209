"""Running exported stages: what `anytime.run.export` wrote, as an engine that returns distributions exit by exit.

A folder of stages may come from an untrusted source. ONNX files are checked (`anytime.run.export.onnx_safety`) and contain no
code. `.pt2` files of `torch.export` can run any code while torch reads them, so they are read only with `trusted=True`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytime.artifacts import bundle_reader
from anytime.checks import Inputs, check_flag, check_threads
from anytime.combine import Prediction
from anytime.errors import AnytimeError, FormatError, InputError, ShapeError, UntrustedError
from anytime.models.base import Carry
from anytime.models.given import fits, flat_inputs, no_batch, places, wrong_type
from anytime.run.engines.folding import on_cpu
from anytime.run.engines.onnx import ONNX_TYPES, make_session
from anytime.run.engines.running import Joinable
from anytime.run.export.description import DTYPES, LARGEST_DESCRIPTION, NAME, read_description, tensors_of_stage
from anytime.run.export.onnx_safety import safe_onnx

LARGEST_STAGE = (1 << 31) - 1
"""Bytes: the limit of protobuf, and so of ONNX."""

Stage = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""A loaded stage: tensors in, tensors out, in the order of the description."""


class ExportedModel:
    """Stages with a rule inside, made by `load_exported`. It returns distributions, not logits.

    `anytime.Runner.load(folder)` runs them by a deadline.

    Attributes:
        num_exits: The number of exits.
        classes: The number of classes.
        rule: The rule inside, as text.
        class_names: The names of the classes, if they were exported.
        macs: The cumulative MACs up to each exit, if they were exported.
        inputs: Name, element type and shape of each input; in a shape, text stands for any size.
        input_names: The names of the inputs.
        description: All of `exported.json`.
    """

    name = "exported"
    joins = True

    def __init__(
        self, description: Mapping[str, Any], stages: Sequence[Stage], *, path: Path, threads: int = 1, trusted: bool = False
    ) -> None:
        self.description = description
        self.num_exits: int = description["exits"]
        self.classes: int = description["classes"]
        self.rule: str = description["rule"]
        self.class_names: list[str] | None = description["class_names"]
        self.macs: list[float] | None = description["macs"]
        self.inputs = tensors_of_stage(description["stages"][0], "inputs")
        self.input_names = tuple(name for name, _, _ in self.inputs)
        self.why = f"{description['kind']} stages"
        self.in_python = self.merges = description["kind"] != "onnx"
        self._stages, self._path, self._threads, self._trusted = stages, path, threads, trusted

    def __repr__(self) -> str:
        taken = ", ".join(f"{name} {kind} ({', '.join(map(str, shape))})" for name, kind, shape in self.inputs)
        return f"ExportedModel({self.num_exits} exits, {self.classes} classes, rule={self.rule}, {self.why}, takes {taken})"

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: the folder, which is read again."""
        return _read_again, (self._path.parent, self._threads, self._trusted)

    def begin(self, x: Inputs) -> ExportedRun:
        """Take inputs, batch first; nothing is computed yet. `advance` runs a stage and returns its `Prediction`."""
        given = tuple(on_cpu(each) for each in flat_inputs(x, self.input_names))
        sizes: dict[int | str, int] = {}
        for each, called, (_, dtype, shape) in zip(given, places(len(given), self.input_names), self.inputs, strict=True):
            _check_input(each, called, dtype, shape, sizes)
        return ExportedRun(self._stages, tuple(each.contiguous() for each in given), self.classes, self._path)

    def run(self, x: Inputs) -> Iterator[Prediction]:
        """Yield the prediction after each exit; stages that are not requested are not computed."""
        running = self.begin(x)
        try:
            for _ in range(self.num_exits):
                yield running.advance()
        finally:
            running.close()


def _read_again(folder: Path, threads: int, trusted: bool) -> ExportedModel:
    return load_exported(folder, threads=threads, trusted=trusted)


def _check_input(x: Tensor, called: str, dtype: str, shape: Sequence[int | str], sizes: dict[int | str, int]) -> None:
    """Refuse an input of another type or shape; `sizes` are those that names stand for in the inputs before."""
    if x.dtype != DTYPES[dtype]:
        raise wrong_type(x, called, DTYPES[dtype])
    if fits((1, *x.shape), shape) and not fits(x.shape, shape):
        raise no_batch(x, called)
    known = [sizes.get(size, size) for size in shape]
    if not fits(x.shape, known):
        raise ShapeError(
            f"{called} has shape {tuple(x.shape)}",
            expected=f"({', '.join(map(str, known))})",
            fix="resize the inputs, or export the model with an example of this shape",
        )
    sizes.update(zip(shape, x.shape, strict=True))


class ExportedRun(Joinable[Prediction]):
    """One batch of inputs on its way through exported stages."""

    def __init__(self, stages: Sequence[Stage], given: Carry, classes: int, path: Path) -> None:
        super().__init__(len(stages), len(given[0]))
        self._stages, self._classes, self._path = stages, classes, path
        self._carry: Sequence[Tensor] = given

    def _run(self, exit: int) -> Prediction:
        try:
            _, log_probs, fell_back, labels, *values = self._stages[exit](self._carry)
        except Exception as error:  # the runtimes have no common type of error
            raise InputError(
                f"stage {exit + 1} of {self._exits} failed on values of shape {tuple(self._carry[0].shape)}: "
                f"{_first_line(error)}",
                expected="inputs like the example of the export: for a text model, token ids of its vocabulary",
                fix="check the range and the length of the inputs; if they are right, export the model again",
            ) from error
        # A file may declare one shape and return another.
        rows = self._batch
        valid = log_probs.shape == (rows, self._classes) and fell_back.shape == labels.shape == (rows,)
        if not valid or not all(value.ndim and len(value) == rows for value in values):
            shapes = [tuple(value.shape) for value in (log_probs, fell_back, labels, *values)]
            raise FormatError(
                f"stage {exit + 1} returns tensors of shapes {shapes} for {rows} inputs and {self._classes} classes",
                expected="one row per input in each of them",
                fix="export the model again",
                path=self._path,
            )
        self._carry = values
        return Prediction(log_probs, fell_back, labels)


def load_exported(folder: str | Path, *, threads: int = 1, trusted: bool = False) -> ExportedModel:
    """Read the stages that `export` wrote to a folder; a damaged or hostile bundle is refused.

    Args:
        folder: The folder with `exported.json`.
        threads: Threads per stage in ONNX Runtime.
        trusted: Whether to read `.pt2` files of `torch.export`, too. They can run any code while they are read: use True only
            for files from sources whose programs you would run. ONNX files need no trust.
    """
    check_threads(threads)
    check_flag(trusted, "trusted")
    path = Path(folder) / NAME
    with bundle_reader(folder) as read:
        try:
            description = read_description(read(NAME, LARGEST_DESCRIPTION))
        except ValueError as error:
            raise _unreadable(path, str(error)) from error
        onnx = description["kind"] == "onnx"
        if not onnx and not trusted:
            raise UntrustedError(
                f"{folder} contains .pt2 files of torch.export",
                expected="ONNX stages: .pt2 files can run any code while they are read",
                fix="export the model as ONNX, the default format; or, if you trust the source of this folder as you would "
                "trust a program, pass trusted=True (--trust on the command line)",
                path=path,
            )
        stages = [_stage(read, stage, Path(folder), threads if onnx else None) for stage in description["stages"]]
    return ExportedModel(description, stages, path=path.absolute(), threads=threads, trusted=trusted)


def _stage(read: Callable[[str, int], bytes], stage: Mapping[str, Any], folder: Path, threads: int | None) -> Stage:
    file = read(stage["file"], LARGEST_STAGE)
    try:
        return _torch_stage(file) if threads is None else _onnx_stage(file, stage, threads)
    except AnytimeError:
        raise
    except Exception as error:  # the runtimes have no common type of error
        raise _unreadable(folder / stage["file"], f"cannot be used: {_first_line(error)}") from error


def _onnx_stage(file: bytes, stage: Mapping[str, Any], threads: int) -> Stage:
    session = make_session(safe_onnx(file), threads=threads)
    for side, real in (("inputs", session.get_inputs()), ("outputs", session.get_outputs())):
        described = tensors_of_stage(stage, side)
        types = [(name, f"tensor({ONNX_TYPES.get(dtype, dtype)})") for name, dtype, _ in described]
        same = types == [(each.name, each.type) for each in real]
        if not same or not all(fits(each.shape, shape) for each, (_, _, shape) in zip(real, described, strict=True)):
            raise ValueError(f"its {side} are {[(each.name, each.type, each.shape) for each in real][:8]}")
    names = [name for name, _, _ in tensors_of_stage(stage, "inputs")]

    def run(values: Sequence[Tensor]) -> Sequence[Tensor]:
        arrays = dict(zip(names, (value.numpy() for value in values), strict=True))
        return [torch.from_numpy(array) for array in session.run(None, arrays)]

    return run


def _torch_stage(file: bytes) -> Stage:
    module: Any = torch.export.load(io.BytesIO(file)).module()

    @torch.inference_mode()
    def run(values: Sequence[Tensor]) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = module(*values)
        return outputs

    return run


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _unreadable(path: Path, got: str) -> FormatError:
    return FormatError(
        f"{path} {got}", expected="a folder written by 'anytime export'", fix="export the model again", path=path
    )

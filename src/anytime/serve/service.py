"""One model behind one runner: what a request may ask of it, its inputs as batches, its answers as arrays.

The model, its rule and its calibration are the operator's; no request can name another.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anytime.checks import Inputs, check_inputs
from anytime.combine import Rule
from anytime.data.description import Description
from anytime.data.text import load_tokenizer
from anytime.errors import AnytimeError, FewClassesWarning, InputError, OptionError
from anytime.fitted import Fitted
from anytime.loading.inputs import image_batch
from anytime.loading.models import input_specs, make_batch, reads_texts
from anytime.models.input_spec import InputSpec
from anytime.run import Answer, Budget, Opened, Runner, RunOptions, open_folder
from anytime.run.export import ExportedModel
from anytime.run.export.description import DTYPES
from anytime.samples import digits_model
from anytime.serve.oip import TYPES, Array, TensorSpec

INPUT = "input"
_TORCH_TYPES = {torch.from_numpy(np.empty(0, known)).dtype: name for name, known in TYPES.items()}
_DOT = b"GIF87a\x01\x00\x01\x00\x80\x00\x00\x00\x00\x00\xff\xff\xff,\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02D\x01\x00;"
_PARAMETERS = ("timeout", "min_exit", "max_exit", "target_confidence", "set")


class Wanted(NamedTuple):
    """What the parameters of a request ask for: its limits, and whether to return the prediction set."""

    budget: Budget
    set: bool = False


@dataclass(frozen=True, eq=False)
class Service:
    """A model that is ready to answer.

    Attributes:
        name: In addresses and metadata.
        opened: The model and its data set.
        runner: Runs it.
        sets: Whether prediction sets were calibrated.
        deadline: Seconds, for requests that state none.
        longest: The longest deadline that a request may state.
    """

    name: str
    opened: Opened
    runner: Runner
    sets: bool
    deadline: float
    longest: float

    @cached_property
    def exits(self) -> int:
        """Number of exits."""
        return int(self.opened.model.num_exits)

    @cached_property
    def texts(self) -> bool:
        """Whether the inputs are texts."""
        return reads_texts(self.opened)

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors that a request has: one, or those of a model that takes several under their names."""
        model = self.opened.model
        if isinstance(model, ExportedModel) and len(model.inputs) > 1:
            return tuple(
                TensorSpec(name, _TORCH_TYPES[DTYPES[dtype]], tuple(size if isinstance(size, int) else -1 for size in shape))
                for name, dtype, shape in model.inputs
            )
        if self.texts:
            return (TensorSpec(INPUT, "BYTES", (-1,)),)
        specs = input_specs(model)
        several = len(specs) > 1
        return tuple(
            TensorSpec((spec.name or f"x{place}") if several else INPUT, _TORCH_TYPES[_sent_as(spec.dtype)], _sizes(spec))
            for place, spec in enumerate(specs)
        )

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The tensors of an answer; `set` only if prediction sets were calibrated."""
        classes = self.opened.classes
        found = (
            TensorSpec("probabilities", "FP32", (-1, classes)),
            TensorSpec("labels", "INT64", (-1,)),
            TensorSpec("fell_back", "BOOL", (-1,)),
        )
        return (*found, TensorSpec("set", "BOOL", (-1, classes))) if self.sets else found

    def metadata(self) -> dict[str, Any]:
        """As the Open Inference Protocol describes a model."""
        return {
            "name": self.name,
            "versions": ["1"],
            "platform": f"anytime_{self.runner.engine.name}",
            "inputs": [spec.document() for spec in self.inputs],
            "outputs": [spec.document() for spec in self.outputs],
            "parameters": {
                "exits_total": self.exits,
                "rule": repr(self.runner.rule),
                "deadline_us": round(1e6 * self.deadline),
            },
        }

    def wanted(self, parameters: Mapping[str, Any]) -> Wanted:
        """The parameters of a request, checked."""
        for name in parameters:
            if name not in _PARAMETERS:
                raise _wrong(f"the parameter {name!r}", f"one of {', '.join(_PARAMETERS)}")
        least = _count(parameters, "min_exit", self.exits)
        most = _count(parameters, "max_exit", self.exits)
        if least is not None and most is not None and least > most:
            raise _wrong(f"min_exit {least} with max_exit {most}", "a min_exit that is not above max_exit")
        timeout = _count(parameters, "timeout", round(1e6 * self.longest))
        confidence = parameters.get("target_confidence")
        if confidence is not None and not (type(confidence) in (int, float) and 0 < confidence <= 1):
            raise _wrong(f"target_confidence {confidence!r}", "a number above 0 and at most 1")
        wants_set = parameters.get("set", False)
        if not isinstance(wants_set, bool) or (wants_set and not self.sets):
            raise _wrong(f"set {wants_set!r}", "true or false" if self.sets else "no set: none was calibrated for this server")
        seconds = self.deadline if timeout is None else timeout / 1e6
        return Wanted(Budget(seconds, exits=most, min_exits=least, confidence=confidence), wants_set)

    def batch(self, arrays: Mapping[str, Array], most: int) -> Inputs:
        """The inputs of a request as the batch that the model takes; `most` is the largest number of rows."""
        rows = max(map(len, arrays.values()))
        if rows > most:
            raise _wrong(f"{rows:,} inputs", f"at most {most:,} per request")
        tensors = {name: self._tensor(given) for name, given in arrays.items()}
        if list(tensors) == [INPUT]:
            return tensors[INPUT].to(self._dtypes[0])
        ordered = {spec.name: tensors[spec.name].to(dtype) for spec, dtype in zip(self.inputs, self._dtypes, strict=True)}
        by_name = bool(input_specs(self.opened.model)[0].name)
        return check_inputs(ordered if by_name else tuple(ordered.values()), "inputs")

    @cached_property
    def _dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(spec.dtype for spec in input_specs(self.opened.model))

    def _tensor(self, given: Array) -> Tensor:
        if isinstance(given, list):
            tokenizer, length = self._tokenizer
            ids, lengths = tokenizer.encode(given, length=length)
            kept: Tensor = ids[:, : int(lengths.max())]
            return kept
        return torch.from_numpy(given.copy() if not given.flags.writeable else given)

    def image(self, data: bytes, pixels: int) -> Tensor:
        """An image file as a batch of one."""
        if len(self.inputs) > 1:
            raise _wrong("an image", f"the tensors {', '.join(spec.name for spec in self.inputs)}")
        return image_batch(io.BytesIO(data), "the image", self.opened, most=pixels)[0]

    def word(self, label: int) -> str:
        """The name of a class."""
        return (self.opened.data or Description(self.name, (), ())).word(label)

    def array(self, answer: Answer, name: str) -> NDArray[Any]:
        """One of the `outputs` of an answer."""
        match name:
            case "probabilities":
                return answer.probs.numpy().astype(np.float32, copy=False)
            case "labels":
                return answer.labels.numpy().astype(np.int64, copy=False)
            case "fell_back":
                return answer.fell_back.numpy()
        assert answer.prediction_set is not None  # `outputs` has no set otherwise
        return answer.prediction_set.numpy()

    @cached_property
    def _tokenizer(self) -> tuple[Any, int]:
        return load_tokenizer(self.opened.folder)


def _sent_as(dtype: torch.dtype) -> torch.dtype:
    """The type in a request: NumPy has no bfloat16."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _sizes(spec: InputSpec) -> tuple[int, ...]:
    """The sizes of a tensor: sequences of integers, such as tokens, have any length."""
    return (-1, *(spec.shape if spec.dtype.is_floating_point else (-1,) * len(spec.shape)))


def describe(answer: Answer, seconds: float, *, with_set: bool) -> dict[str, Any]:
    """The parameters of a response: how the answer came about.

    Args:
        answer: The answer.
        seconds: From the whole request to the answer.
        with_set: Whether to add the classes of the prediction set: `"3,5"`, and for several inputs `"3,5;1"`.
    """
    found: dict[str, Any] = {
        "exit": answer.last_exit,
        "exits_total": answer.exits,
        "elapsed_us": round(1e6 * seconds),
        "deadline_met": answer.deadline_met is not False,
        "fell_back": bool(answer.fell_back.numpy().any()),
    }
    if answer.reason is not None:
        found["reason"] = answer.reason
    if with_set and answer.prediction_set is not None:
        rows = [row.nonzero()[:, 0].tolist() for row in answer.prediction_set]
        found["set"] = ";".join(",".join(map(str, row)) for row in rows)
    return found


def open_service(
    folder: Path | None,
    *,
    deadline: float,
    longest: float,
    name: str | None = None,
    rule: str | Rule[Any] | None = None,
    calibration: Sequence[Fitted] = (),
    data: str | None = None,
    engine: str = "auto",
    profile: Path | None = None,
    options: RunOptions | None = None,
    build: Any = None,
    trust: bool = False,
) -> Service:
    """Open a model, build its engine and measure its stages.

    Args:
        folder: As `anytime.run.open_folder` takes it; None for the sample model, with its prediction sets.
        deadline: Seconds, for requests that state none.
        longest: The longest deadline that a request may state.
        name: In addresses; by default that of the folder.
        rule: How the exits are combined; by default the saved one, that of the calibration, or as `Runner` chooses.
        calibration: Fitted objects; by default those that were saved.
        data: What the model was trained on, if its folder does not say so.
        engine: What runs the stages.
        profile: Initial stage times.
        options: Scheduling.
        build: For a model of the operator's own, the function that makes it.
        trust: Whether to load stages that can run code while they are loaded.
    """
    options = options or RunOptions()
    fitted = list(calibration)
    if folder is None:
        folder, sample_sets = digits_model()
        fitted = fitted or ([sample_sets] if rule is None else [])
    opened = open_folder(folder, data, build=build, threads=options.threads or 1, trusted=trust)
    for each in fitted:
        each.check_fits(opened.model.num_exits, opened.classes)
    example = make_batch(opened.model, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewClassesWarning)  # the operator has chosen the rule
        chosen = {"rule": rule, "calibration": tuple(fitted) or None, "profile": profile}
        given = {argument: value for argument, value in chosen.items() if value is not None}
        arguments = opened.runner_arguments(engine=engine, example=example, **given)
        runner = Runner(opened.model, options=options, **arguments)
    try:
        runner.warm_up(example)
        sets = runner.predict(example).prediction_set is not None
        service = Service(_address(opened.name if name is None else name), opened, runner, sets, deadline, longest)
        with suppress(AnytimeError):  # a model without images; the first image takes longer than most deadlines
            service.image(_DOT, 1)
    except BaseException:
        runner.close()
        raise
    return service


def _address(name: str) -> str:
    """A name that can be part of an address."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise OptionError(
            f"the model is called {name!r}",
            expected="letters, digits, dots, hyphens and underscores, at most 100",
            fix="pass --name with another name",
        )
    return name


def _count(parameters: Mapping[str, Any], name: str, most: int) -> int | None:
    value = parameters.get(name)
    if value is not None and not (type(value) is int and 1 <= value <= most):
        raise _wrong(f"{name} {value!r}", f"a whole number from 1 to {most:,}")
    return value


def _wrong(got: str, expected: str) -> InputError:
    return InputError(got, expected=expected, fix="see docs/serving.md for the parameters of a request")

"""Models for the command line and the server: in any folder that this library writes, or by name."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from anytime.checks import Inputs
from anytime.errors import MissingFileError, OptionError, ShapeError
from anytime.models import dvit, imta, mlp, msdnet, names, resnet
from anytime.models.base import MultiExit
from anytime.models.input_spec import InputSpec, make_inputs
from anytime.models.text import encoder
from anytime.models.zoo import create
from anytime.run import Opened, engines, open_folder
from anytime.run.combining import choose_rule
from anytime.run.engines import Engine
from anytime.run.export import ExportedModel
from anytime.run.saved.reading import inputs_of, is_exported

_PRESETS: dict[str, Any] = {
    name: config for home in (msdnet, imta, dvit, resnet, mlp, encoder) for name, config in home.PRESETS.items()
}


def open_model(folder: Path, *, build: Any = None) -> Opened:
    """As `anytime.run.open_folder`, but without exported stages."""
    if is_exported(folder):
        raise OptionError(
            f"{folder} has exported stages",
            expected="the folder of a training run, or of anytime.save",
            fix="pass the network that was exported; anytime predict and anytime profile run exported stages",
        )
    return open_folder(folder, build=build)


def open_model_or_name(text: str, *, build: Any = None, threads: int = 1, trust: bool = False) -> Opened:
    """The model in a folder, or an untrained network by its name."""
    if not Path(text).exists() and text in names():
        config = _PRESETS[text]
        return Opened(create(text, classes=config.classes).eval(), text, Path(), False, known_classes=config.classes)
    try:
        return open_folder(text, build=build, threads=threads, trusted=trust)
    except MissingFileError as error:
        if Path(text).exists():
            raise
        close = get_close_matches(text, names(), n=1)
        raise MissingFileError(
            error.got,
            expected=f"{error.expected}; or a network by name: {', '.join(names())}",
            fix=f"did you mean {close[0]!r}?" if close else "check the path or the name",
            path=text,
        ) from None


def saved_rule(opened: Opened) -> Any:
    """The rule that was saved beside a model, with its calibration or policy, or else the default one for its classes."""
    return choose_rule(opened.rule, opened.calibration, policy=opened.policy, classes=opened.known_classes)[0]


def import_function(text: str | None) -> Any:
    """What `--build package.module:function` names, found from the current folder first; None for None."""
    if text is None:
        return None
    module, _, name = text.partition(":")
    fix = "write --build package.module:function, with a function without arguments that returns the model"
    if not all((*module.split("."), *name.split("."))) or "/" in text:
        raise OptionError(f"--build is {text!r}", expected="package.module:function", fix=fix)
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        raise OptionError(
            f"--build {text}: {error}", expected="a module in the current folder, or one that is installed", fix=fix
        ) from error
    except AttributeError:
        raise OptionError(f"--build {text}: {module} has no {name}", expected="a function of this module", fix=fix) from None
    finally:
        if here in sys.path:
            sys.path.remove(here)
    return found


def make_engine(model: MultiExit | ExportedModel, engine: str, *, example: Any, threads: int) -> Engine:
    """As `anytime.run.engines.make_engine`; exported stages run as they are."""
    if not isinstance(model, ExportedModel):
        return engines.make_engine(model, engine, example=example, threads=threads)
    if engine != "auto":
        raise OptionError(
            f"--engine is {engine!r} for exported stages",
            expected="auto: they were exported for one runtime",
            fix="leave out --engine, or pass the network that was exported",
        )
    return cast(Engine, model)


def reads_texts(opened: Opened) -> bool:
    """Whether the model has a tokenizer; exported stages have none."""
    return isinstance(getattr(opened.model, "config", None), encoder.EncoderConfig)


def input_specs(model: Any, shape: tuple[int, ...] | None = None) -> tuple[InputSpec, ...]:
    """The tensors that a model takes, or an error; `shape` replaces that of a single one."""
    found = inputs_of(model)
    if not found and shape is not None:
        return (InputSpec("", torch.float32, shape),)
    if not found:
        raise ShapeError(
            "the model takes inputs of unknown shape",
            expected="a model that was saved with an example of its inputs",
            fix="save it again: anytime.save(model, folder, example=x); anytime predict also takes a .npy with a batch, "
            "anytime profile an --input-shape",
        )
    if shape is not None and len(found) > 1:
        raise OptionError(
            f"a shape is given, and the model takes {', '.join(spec.name or 'x' for spec in found)}",
            expected="a model that takes a single tensor",
            fix="leave the shape out: that of the saved example is used",
        )
    return found if shape is None else (replace(found[0], shape=shape),)


def input_spec(model: Any) -> InputSpec:
    """The only tensor that a model takes, or an error."""
    found = input_specs(model)
    if len(found) > 1:
        raise ShapeError(
            f"the model takes {len(found)} tensors: {', '.join(spec.name or 'x' for spec in found)}",
            expected="a model that takes a single tensor",
            fix="use it from Python: anytime.Runner.load(folder)",
        )
    return found[0]


def input_shape(model: Any) -> tuple[int, ...]:
    """The shape of one input: channels, height and width of an image, numbers of a perceptron, tokens of a text."""
    return input_spec(model).shape


def make_example(model: Any, shape: tuple[int, ...], batch: int) -> Tensor:
    """Inputs of a shape, always the same: normal numbers, or tokens without padding."""
    made = make_inputs([replace(input_spec(model), name="", shape=shape)], batch)
    assert isinstance(made, Tensor)
    return made


def make_batch(model: Any, rows: int) -> Inputs:
    """Inputs of the structure that a model takes, always the same; texts of the usual length."""
    return make_inputs(input_specs(model), rows)

"""Models for the command line and the server: in the folder of a network, of a training run or of exported stages, or by name.

A training run stores `data.json` beside its network: how images were normalised, and the names of the classes. Without it,
or a known data set, images are refused: a network that gets pixels on another scale gives meaningless answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from anytime.artifacts import check_sealed, read_sealed
from anytime.checks import Inputs, check_memory
from anytime.data.cifar import STATISTICS
from anytime.data.imagenet import MEAN, STD
from anytime.errors import FormatError, MissingFileError, OptionError
from anytime.models import dvit, imta, load, mlp, msdnet, names, resnet
from anytime.models.base import MultiExit
from anytime.models.text import encoder
from anytime.models.zoo import create
from anytime.reading import is_file, json_from, parsing, read_file
from anytime.reproduce.runs import is_published, read_run
from anytime.run import engines
from anytime.run.engines import Engine
from anytime.run.export import ExportedModel, load_exported
from anytime.run.export.description import DTYPES, NAME
from anytime.safe_text import printable

DATA = "data.json"
_PRESETS: dict[str, Any] = {
    name: config for home in (msdnet, imta, dvit, resnet, mlp, encoder) for name, config in home.PRESETS.items()
}
_TOKENS = 128
_BYTES_PER_NUMBER = 32  # activations take several times the input, and engines are compared with one another
_FOLDER = "the folder of a training run, or of anytime.models.save"


@dataclass(frozen=True)
class Description:
    """How the images of a data set were normalised, and the names of its classes, if known."""

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...] | None = None

    def word(self, label: int) -> str:
        """The name of a class."""
        return f"class {label}" if self.class_names is None else printable(self.class_names[label])


KNOWN = {
    **{name: Description(name, *statistics) for name, statistics in STATISTICS.items()},
    "imagenet": Description("imagenet", MEAN, STD),
}


@dataclass(frozen=True, eq=False)
class Opened:
    """A model that is ready to run.

    Attributes:
        model: The network, or the stages that were exported from one.
        name: The name of its folder, or of the network.
        folder: Its folder; the current folder for one by name.
        trained: Whether its weights are from a folder, not random.
        data: What it was trained on, if known.
    """

    model: MultiExit | ExportedModel
    name: str
    folder: Path
    trained: bool
    data: Description | None = None

    def __post_init__(self) -> None:
        words = None if self.data is None else self.data.class_names
        if words is not None and len(words) != self.classes:
            raise OptionError(
                f"the data set has {len(words)} classes",
                expected=f"{self.classes}, as {self.name} has",
                fix="pass --data with the data set that the network was trained on",
            )

    @property
    def classes(self) -> int:
        """Number of classes."""
        known: Any = self.model if isinstance(self.model, ExportedModel) else self.model.config
        return int(known.classes)

    @property
    def network(self) -> MultiExit:
        """The network, if it is not exported stages."""
        assert isinstance(self.model, MultiExit)  # `open_model` returns nothing else
        return self.model


def open_model(folder: Path, data: str | None = None) -> Opened:
    """The network in a folder of `anytime.models.save`, of a training run, or of `results/`.

    Args:
        folder: Of the network, or of the run.
        data: What it was trained on: `cifar10`, `cifar100`, `imagenet` or the data.json of a run; by default the run's own.
    """
    if is_exported(folder):
        raise OptionError(
            f"{folder} has exported stages",
            expected=_FOLDER,
            fix="pass the network that was exported; anytime predict and anytime profile run exported stages",
        )
    place = folder / "model" if (folder / "model").is_dir() else folder
    if place == folder and (folder / "config.yaml").exists():
        raise MissingFileError(
            f"the run in {folder} has no network yet",
            expected="a finished run",
            fix=f"continue it: anytime train --resume --out {folder}",
            path=folder / "model",
        )
    if not place.is_dir():
        raise MissingFileError(f"there is no folder {folder}", expected=_FOLDER, fix="check the path", path=folder)
    whole = folder.resolve()
    name = whole.parent.name if whole.name == "model" else whole.name
    return Opened(_load(place), name, folder, trained=True, data=_describe(folder, data))


def _load(folder: Path) -> MultiExit:
    return read_run(folder).load() if is_published(folder) else load(folder)


def _describe(folder: Path, data: str | None) -> Description | None:
    if data is not None:
        return KNOWN.get(data) or read_description(Path(data))
    if is_published(folder):
        return KNOWN.get(read_run(folder).data)
    whole = folder.resolve()
    # RUN/model is the network of the run around it.
    places = (whole, whole.parent) if whole.name == "model" else (whole,)
    return next((read_description(place / DATA, sealed=True) for place in places if (place / DATA).exists()), None)


def open_any(folder: Path, data: str | None = None, *, threads: int = 1, trust: bool = False) -> Opened:
    """As `open_model`, or the stages that `anytime export` wrote.

    Args:
        folder: Of the network, of the run, or of the stages.
        data: What it was trained on; by default from the run or the stages.
        threads: Per stage.
        trust: Whether to load stages that can run code while they are loaded.
    """
    if not is_exported(folder):
        return open_model(folder, data)
    model, name = load_exported(folder, threads=threads, trusted=trust), folder.resolve().name
    stored = model.description["data"] or {"name": name, "mean": (), "std": ()}
    own = Description(stored["name"], tuple(stored["mean"]), tuple(stored["std"]))
    found = own if data is None else _describe(folder, data)
    assert found is not None  # data by name, or an error
    words = found.class_names if model.class_names is None else tuple(model.class_names)
    return Opened(model, name, folder, trained=True, data=replace(found, class_names=words))


def open_model_or_name(text: str, *, threads: int = 1, trust: bool = False) -> Opened:
    """The network or the stages in a folder, or an untrained network by its name."""
    if not Path(text).exists() and text in names():
        return Opened(create(text, classes=_PRESETS[text].classes).eval(), text, Path(), trained=False)
    try:
        return open_any(Path(text), threads=threads, trust=trust)
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


def is_exported(folder: Path) -> bool:
    """Whether a folder has exported stages."""
    try:
        return (folder / NAME).exists()
    except (OSError, ValueError):  # a name that is too long or not a valid file name
        return False


def make_engine(model: MultiExit | ExportedModel, engine: str, *, example: Tensor, threads: int) -> Engine:
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


def input_type(model: ExportedModel) -> torch.dtype:
    """The element type of the inputs of exported stages."""
    return DTYPES[model.inputs[0][1]]


def reads_texts(opened: Opened) -> bool:
    """Whether the model has a tokenizer; exported stages have none."""
    return isinstance(getattr(opened.model, "config", None), encoder.EncoderConfig)


def input_shape(model: MultiExit | ExportedModel) -> tuple[int, ...]:
    """The shape of one input: channels, height and width of an image, numbers of a perceptron, tokens of a text."""
    if isinstance(model, ExportedModel):
        _, _, (_, *sizes) = model.inputs[0]
        return tuple(size if isinstance(size, int) else _TOKENS for size in sizes)  # a variable length: that of a usual text
    config: Any = model.config
    match config:
        case mlp.MLPConfig():
            return (config.inputs,)
        case encoder.EncoderConfig():
            return (min(_TOKENS, config.max_length),)
        case resnet.ResNetConfig():
            return (config.channels, config.image_size, config.image_size)
        case _:
            return (3, config.image_size, config.image_size)


def make_example(model: MultiExit | ExportedModel, shape: tuple[int, ...], batch: int) -> Tensor:
    """Random inputs of a shape: normal numbers, or for a text model tokens without padding."""
    size = f"{batch:,} inputs of {'×'.join(map(str, shape))} numbers"
    check_memory(_BYTES_PER_NUMBER * batch * math.prod(shape), size, fix="use a smaller batch or shape")
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, ExportedModel):
        dtype = input_type(model)
        if not dtype.is_floating_point:
            return torch.ones(batch, *shape, dtype=dtype)  # the size of the vocabulary is not known
        return torch.randn(batch, *shape, generator=generator).to(dtype)
    if isinstance(model.config, encoder.EncoderConfig):
        tokens = torch.randint(1, model.config.vocabulary, (batch, *shape), generator=generator)
        return tokens.masked_fill_(tokens == model.config.pad, 1 if model.config.pad != 1 else 2)
    return torch.randn(batch, *shape, generator=generator)


def make_batch(model: MultiExit | ExportedModel, rows: int) -> Inputs:
    """Random inputs of the structure that a model takes; texts of the usual length."""
    if not isinstance(model, ExportedModel) or len(model.inputs) == 1:
        return make_example(model, input_shape(model), rows)
    generator = torch.Generator().manual_seed(0)
    made: dict[str, Tensor] = {}
    for name, kind, (_, *sizes) in model.inputs:
        shape, dtype = [rows, *(size if isinstance(size, int) else _TOKENS for size in sizes)], DTYPES[kind]
        check_memory(_BYTES_PER_NUMBER * math.prod(shape), f"{rows:,} inputs", fix="use a smaller batch or shape")
        made[name] = (
            torch.randn(shape, generator=generator).to(dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)
        )
    return made


def read_description(path: Path, *, sealed: bool = False) -> Description:
    """The data.json of a run.

    Args:
        path: The file.
        sealed: Whether it must be in the manifest of its folder; one that the caller names may be anywhere.
    """
    if not is_file(path):
        raise MissingFileError(
            f"there is no data set {str(path)!r}",
            expected=f"one of {', '.join(KNOWN)}, or the {DATA} of a training run",
            fix="check the name or the path",
            path=path,
        )
    expected, fix = "name, mean, std and class_names, as a training run writes them", "copy it again from the run's folder"
    check_sealed(path)
    data = read_sealed(path.parent, path.name) if sealed else read_file(path, expected=expected, fix=fix)
    stored = json_from(data, path, expected=expected, fix=fix)
    with parsing(path, expected=expected, fix=fix, kind=FormatError, what="does not describe a data set"):
        mean, std = (tuple(float(part) for part in stored[key]) for key in ("mean", "std"))
        found = Description(str(stored["name"]), mean, std, tuple(str(word) for word in stored["class_names"]))
        if len(found.mean) != len(found.std) or not all(part > 0 for part in found.std):
            raise ValueError("mean and std do not belong together")
    return found

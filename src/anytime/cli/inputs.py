"""What `predict` and `profile` are given: a model in a folder or by name, and a picture or an array to show it.

A training run keeps `data.json` beside its network: how pictures were normalised, and what the classes are called. Without
it, or a data set by name, no picture is read: a network that sees pixels on another scale gives answers without worth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anytime.arrays import open_npy, open_npz, read_npz
from anytime.artifacts import check_sealed, read_sealed
from anytime.checks import check_memory
from anytime.cli import stages
from anytime.data.augment import normalise
from anytime.data.cifar import STATISTICS
from anytime.data.imagenet import MEAN, STD, middle
from anytime.data.images import read_image
from anytime.data.text import load_tokenizer, read_text_input
from anytime.errors import (
    DtypeError,
    FormatError,
    InputError,
    MissingFileError,
    OptionError,
    ShapeError,
)
from anytime.models import dvit, imta, load, mlp, msdnet, names, resnet
from anytime.models.base import MultiExit
from anytime.models.text import encoder
from anytime.models.zoo import create
from anytime.reading import is_file, json_from, open_file, parsing, read_file
from anytime.reproduce.runs import is_published, read_run
from anytime.run.export import ExportedModel, load_exported
from anytime.safe_text import printable

if TYPE_CHECKING:
    from PIL.Image import Image

DATA = "data.json"
_PRESETS: dict[str, Any] = {
    name: config for home in (msdnet, imta, dvit, resnet, mlp, encoder) for name, config in home.PRESETS.items()
}
_TOKENS = 128
_SHOWN = 60
_MOST = 1 << 20
_ROOM = 32  # bytes per number
_LARGEST_INPUT, _LARGEST_TEXT = 1 << 32, 1 << 26
_NUMBERS = "a picture, or .npy or .npz with one input or a batch of them"


@dataclass(frozen=True)
class Description:
    """How the pictures of a data set were normalised, and what its classes are called, where that is known."""

    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...] | None = None

    def word(self, label: int) -> str:
        """What a class is called."""
        return f"class {label}" if self.class_names is None else printable(self.class_names[label])


KNOWN = {
    **{name: Description(name, *statistics) for name, statistics in STATISTICS.items()},
    "imagenet": Description("imagenet", MEAN, STD),
}


@dataclass(frozen=True, eq=False)
class Opened:
    """A model that is ready to be run.

    Attributes:
        model: The network, or the stages that were exported from one.
        name: What it is called: the name of its folder, or its own.
        folder: Where it lies; the current folder for one by name.
        trained: Whether its weights are from a folder, not from chance.
        data: What it learnt from, where that is known.
    """

    model: MultiExit | ExportedModel
    name: str
    folder: Path
    trained: bool
    data: Description | None = None

    @property
    def classes(self) -> int:
        """How many classes it tells apart."""
        known: Any = self.model if isinstance(self.model, ExportedModel) else self.model.config
        return int(known.classes)

    @property
    def network(self) -> MultiExit:
        """The network, where there is one."""
        assert isinstance(self.model, MultiExit)  # `open_model` gives nothing else
        return self.model


def open_model(folder: Path, data: str | None = None) -> Opened:
    """The network in a folder that `anytime.models.save` or a training run made, or in one of `results/`.

    Args:
        folder: Of the network, or of the run.
        data: What it learnt from: `cifar10`, `cifar100`, `imagenet` or the data.json of a run; by default the run's own.
    """
    if stages.is_exported(folder):
        raise OptionError(
            f"{folder} holds exported stages",
            expected="the folder of a training run, or one that anytime.models.save made",
            fix="give the network that was exported; anytime predict and anytime profile run exported stages",
        )
    place = folder / "model" if (folder / "model").is_dir() else folder
    if place == folder and (folder / "config.yaml").exists():
        raise MissingFileError(
            f"the run in {folder} has no network yet",
            expected="a run that came to its end",
            fix=f"go on with `anytime train --resume --out {folder}`",
            path=folder / "model",
        )
    if not place.is_dir():
        raise MissingFileError(
            f"there is no folder {folder}",
            expected="the folder of a training run, or one that anytime.models.save made",
            fix="check the path",
            path=folder,
        )
    model, whole, description = _load(place), folder.resolve(), _describe(folder, data)
    name = whole.parent.name if whole.name == "model" else whole.name
    opened = Opened(model, name, folder, trained=True, data=description)
    _check_words(description, opened.classes, name)
    return opened


def _check_words(description: Description | None, classes: int, name: str) -> Description | None:
    words = None if description is None else description.class_names
    if words is not None and len(words) != classes:
        raise OptionError(
            f"the data set has {len(words)} classes",
            expected=f"{classes}, as many as {name} tells apart",
            fix="give the data set that the network was trained on",
        )
    return description


def open_any(folder: Path, data: str | None = None, *, threads: int = 1, trust: bool = False) -> Opened:
    """As `open_model`, or the stages in a folder that `anytime export` wrote.

    Args:
        folder: Of the network, of the run, or of the stages.
        data: What it learnt from; by default what the run or the stages say.
        threads: For one stage.
        trust: Whether to read stages that can run code while they are read.
    """
    if not stages.is_exported(folder):
        return open_model(folder, data)
    model = load_exported(folder, threads=threads, trusted=trust)
    name, words = folder.resolve().name, model.class_names
    stored = model.description["data"] or {"name": name, "mean": (), "std": ()}
    given = (
        Description(stored["name"], tuple(stored["mean"]), tuple(stored["std"])) if data is None else _describe(folder, data)
    )
    assert given is not None  # data by name, or an error
    own = given.class_names if words is None else tuple(words)
    return Opened(model, name, folder, trained=True, data=_check_words(replace(given, class_names=own), model.classes, name))


def _load(folder: Path) -> MultiExit:
    return read_run(folder).load() if is_published(folder) else load(folder)


def _describe(folder: Path, data: str | None) -> Description | None:
    if data is not None:
        return KNOWN.get(data) or read_description(Path(data))
    if is_published(folder):
        return KNOWN.get(read_run(folder).data)
    whole = folder.resolve()
    # A network that is named by itself still has its run around it.
    places = (whole, whole.parent) if whole.name == "model" else (whole,)
    return next((read_description(at / DATA, sealed=True) for at in places if (at / DATA).exists()), None)


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


def read_description(path: Path, *, sealed: bool = False) -> Description:
    """What a run's data.json says.

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


def input_shape(model: MultiExit | ExportedModel) -> tuple[int, ...]:
    """The shape of one input: channels, height and width of a picture, numbers of a perceptron, tokens of a text."""
    if isinstance(model, ExportedModel):
        return stages.input_shape(model)
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
    """Random inputs of a shape: numbers around 0, or for a text model word pieces."""
    if isinstance(model, ExportedModel):
        return stages.make_example(model, shape, batch)
    size = f"{batch:,} inputs of {'×'.join(map(str, shape))} numbers"
    # Activations take several times as much, and engines are compared with one another.
    check_memory(_ROOM * batch * math.prod(shape), size, fix="use a smaller batch or shape")
    chance = torch.Generator().manual_seed(0)
    if isinstance(model.config, encoder.EncoderConfig):
        # No padding among them: a text as long as the shape says.
        pieces = torch.randint(1, model.config.vocabulary, (batch, *shape), generator=chance)
        return pieces.masked_fill_(pieces == model.config.pad, 1 if model.config.pad != 1 else 2)
    return torch.randn(batch, *shape, generator=chance)


def read_input(given: str, opened: Opened) -> tuple[Tensor, str | None]:
    """What the caller gave, as a batch that the model takes, and what was done to it that the caller should know.

    Args:
        given: For a model of texts, a text or a `.txt` with one a line. Else a picture, or `.npy` or `.npz` with one input or a
            batch: bytes are pixels and are normalised as pictures are; other numbers are taken as they are.
        opened: The model.
    """
    if _reads_texts(opened):
        texts = read_texts(given)
        return read_text_input(opened.folder, texts), _cut(opened, texts)
    path = Path(given)
    with open_file(path, expected=_NUMBERS):
        pass
    shape = input_shape(opened.model)
    if isinstance(opened.model, ExportedModel) and stages.reads_tokens(opened.model):
        return _as_tokens(read_array(path), opened.model), None
    if path.suffix.lower() in (".npy", ".npz"):
        return _as_batch(read_array(path), shape, opened), None
    if len(shape) != 3:
        raise FormatError(
            f"{path} is taken for a picture by its name, and {opened.name} reads {shape[0]} numbers",
            expected=f".npy or .npz of shape {shape} or (batch, {shape[0]})",
            fix="save the numbers with numpy.save",
            path=path,
        )
    description = _needed(opened, path.name)
    image = read_image(path, mode="RGB" if shape[0] == 3 else "L")
    fitted = fit_image(image, shape[1], like=description.name)
    pixels = torch.from_numpy(np.asarray(fitted, dtype=np.uint8).copy()).view(shape[1], shape[2], shape[0])
    size = f"{path.name} is {image.width} × {image.height}: scaled and cropped to {shape[2]} × {shape[1]}"
    note = None if image.size == fitted.size else size
    return normalise(pixels.permute(2, 0, 1)[None], description.mean, description.std), note


def _reads_texts(opened: Opened) -> bool:
    """Whether a model comes with a tokenizer; exported stages do not."""
    return isinstance(getattr(opened.model, "config", None), encoder.EncoderConfig)


def _cut(opened: Opened, texts: list[str]) -> str | None:
    """What to say of texts that lose their end."""
    tokenizer, length = load_tokenizer(opened.folder)
    cut = int((tokenizer.encode(texts, length=length + 1)[1] > length).sum())
    return f"cut to {length} word pieces, as {opened.name} learnt: {cut} of {len(texts)} texts lose their end" if cut else None


def shown(given: str, opened: Opened) -> str:
    """What was given, in a few words: the name of a file, or the beginning of a text."""
    if _reads_texts(opened) and not given.endswith(".txt"):
        return shorten(given, _SHOWN, placeholder=" …")
    return Path(given).name


def read_texts(given: str) -> list[str]:
    """The lines of a `.txt` that are not empty, or the text itself."""
    path = Path(given)
    if path.suffix.lower() != ".txt":
        if is_file(path):
            raise OptionError(
                f"{given} is a file", expected="a text, or a .txt with one per line", fix="call the file .txt if it holds texts"
            )
        return [given]
    expected = "a text, or a .txt with one per line"
    data = read_file(path, most=_LARGEST_TEXT, expected=expected)
    with parsing(path, expected="a text file", fix="convert it", kind=FormatError, what="is not UTF-8"):
        texts = [line for line in data.decode().split("\n") if line.strip()]
    if not texts:
        raise FormatError(f"{path} has no line with a text", expected=expected, fix="write one", path=path)
    return texts


def fit_image(image: Image, size: int, *, like: str) -> Image:
    """The middle of a picture, scaled to a square, as the data set's own test images are."""
    from PIL.Image import Resampling
    from PIL.ImageOps import fit

    if image.size == (size, size):
        return image
    return middle(image, size=size) if like == "imagenet" else fit(image, (size, size), Resampling.BILINEAR)


def read_array(path: Path) -> NDArray[Any]:
    """The array of a `.npy`, or the only one of a `.npz` (or the one called x); nothing is unpickled."""
    if path.suffix.lower() == ".npy":
        return np.array(open_npy(path))
    names = list(open_npz(path, ()))
    name = "x" if "x" in names else names[0] if len(names) == 1 else None
    if name is None:
        raise FormatError(
            f"{path} holds {', '.join(names) or 'nothing'}",
            expected="one array, or one called x",
            fix="numpy.savez('input.npz', x=...)",
            path=path,
        )
    return read_npz(path, (name,), most=_LARGEST_INPUT)[name]


def _as_batch(array: NDArray[Any], shape: tuple[int, ...], opened: Opened) -> Tensor:
    """One input or a batch, as a batch of float32; bytes are pixels, with the channels first or last."""
    if array.dtype.kind not in "fu" or (array.dtype.kind == "u" and array.dtype != np.uint8):
        raise DtypeError(
            f"an array of {array.dtype}",
            expected="floating-point numbers, or uint8 for pixels",
            fix="convert it, e.g. with .astype('float32')",
        )
    pixels, last = array.dtype == np.uint8, (*shape[1:], *shape[:1])
    given = array[None] if array.shape in (shape, last) else array
    if pixels and len(shape) == 3 and given.shape[1:] == last != shape:
        given = np.moveaxis(given, -1, 1)
    if given.shape[1:] != shape or len(given) == 0:
        raise ShapeError(
            f"an array of shape {array.shape}",
            expected=f"{shape} for one input, or (batch, {', '.join(map(str, shape))})",
            fix=f"{opened.name} takes inputs of this shape: cut or scale them, channels before height and width",
        )
    if pixels and len(shape) == 3:
        description = _needed(opened, "an array of pixels")
        return normalise(torch.from_numpy(np.ascontiguousarray(given)), description.mean, description.std)
    numbers = torch.from_numpy(np.ascontiguousarray(given, dtype=np.float32))
    if not bool(numbers.isfinite().all()):
        raise InputError("NaN or infinity in the input", expected="finite numbers", fix="leave such inputs out, or mend them")
    return numbers


def _as_tokens(array: NDArray[Any], model: ExportedModel) -> Tensor:
    """One text or a batch, as the tokens that exported stages read."""
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or array.size == 0:
        raise DtypeError(
            f"an array of {array.dtype} and shape {array.shape}",
            expected="whole numbers of shape (length,) or (batch, length): the tokens of texts",
            fix="make them with anytime.data.WordPiece.encode, or give a text to the run that the stages were exported from",
        )
    return torch.from_numpy(np.atleast_2d(array).astype(np.int64)).to(stages.input_type(model))


def _needed(opened: Opened, what: str) -> Description:
    if opened.data is None or not opened.data.mean:
        raise OptionError(
            f"{what}, and how {opened.name} wants its pixels normalised is not known",
            expected=f"{DATA} beside the network, as a training run writes it, or --data",
            fix=f"say --data {'|'.join(KNOWN)} or --data RUN/{DATA}; or give a .npy of numbers that are normalised already",
        )
    channels = input_shape(opened.model)[0]
    if len(opened.data.mean) != channels:
        raise OptionError(
            f"{opened.data.name} has {len(opened.data.mean)} channels",
            expected=f"{channels}, as many as {opened.name} reads",
            fix="give the data set that the network was trained on",
        )
    return opened.data


def counts(text: str, name: str, *, example: str) -> tuple[int, ...]:
    """Whole numbers from a list with commas.

    >>> counts("1, 8", "batch", example="1,8")
    (1, 8)
    """
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or max(found) > _MOST:
        expected = f"whole numbers from 1 to {_MOST:,}, such as {example}"
        raise OptionError(f"--{name} is {text!r}", expected=expected, fix="correct it")
    return found

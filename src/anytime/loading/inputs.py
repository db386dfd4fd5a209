"""Inputs of `anytime predict` and the server: an image, an array, or texts, as the batch that a model takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anytime.arrays import open_npy, open_npz, read_npz
from anytime.checks import Inputs, check_inputs
from anytime.data.augment import normalise
from anytime.data.description import DATA, KNOWN, Description
from anytime.data.imagenet import center_crop
from anytime.data.images import FORMATS, decode_image
from anytime.data.text import load_tokenizer, read_text_input
from anytime.errors import DtypeError, FormatError, InputError, OptionError, ShapeError
from anytime.loading.models import input_shape, input_spec, reads_texts
from anytime.models.input_spec import InputSpec
from anytime.reading import is_file, open_file, parsing, read_file
from anytime.run import Opened

if TYPE_CHECKING:
    from PIL.Image import Image

_SHOWN = 60
_LARGEST_INPUT, _LARGEST_TEXT = 1 << 32, 1 << 26
_TEXT = "a text, or a .txt with one text per line"


def read_input(given: str, opened: Opened) -> tuple[Inputs, str | None]:
    """The input as a batch that the model takes, and a note on how it was changed, if it was.

    Args:
        given: For a text model, a text or a `.txt` with one per line. Otherwise an image, or `.npy` or `.npz` with one input or
            a batch: uint8 arrays are pixels and are normalised as images are; other numbers are used as they are. For a model
            that takes several tensors, a `.npz` with an array for each of them.
        opened: The model.
    """
    if reads_texts(opened):
        texts = read_texts(given)
        return read_text_input(opened.folder, texts), _truncated(opened, texts)
    path = Path(given)
    if len(opened.inputs) > 1 or any(spec.name for spec in opened.inputs):
        return read_named(path, opened.inputs), None
    with open_file(path, expected="an image, or .npy or .npz with one input or a batch of them"):
        pass
    if not opened.inputs and path.suffix.lower() in (".npy", ".npz") and (array := read_array(path)).ndim > 1:
        # It was saved without an example: the input is one.
        kind = torch.int64 if array.dtype.kind in "iu" and array.dtype != np.uint8 else torch.float32
        opened.model.input_specs = (InputSpec("", kind, array.shape[1:]),)
    shape = input_shape(opened.model)
    if path.suffix.lower() in (".npy", ".npz") or _takes_tokens(opened):
        return array_batch(read_array(path), opened), None
    with open_file(path, expected=f"an image: {', '.join(FORMATS)}") as file:
        batch, (width, height) = image_batch(file, path.name, opened)
    size = f"{path.name} is {width} × {height}: scaled and cropped to {shape[2]} × {shape[1]}"
    return batch, None if (height, width) == shape[1:] else size


def array_batch(array: NDArray[Any], opened: Opened) -> Tensor:
    """One input or a batch as an array, as the batch that a model takes; texts as an array of strings."""
    if reads_texts(opened):
        return read_text_input(opened.folder, [str(text) for text in np.atleast_1d(array)])
    if _takes_tokens(opened):
        return _as_tokens(array, input_spec(opened.model).dtype)
    return _as_batch(array, input_shape(opened.model), opened).to(input_spec(opened.model).dtype)


def read_named(path: Path, specs: Sequence[InputSpec]) -> Inputs:
    """The arrays of a `.npz` as the tensors that a model takes: by name, or `x0`, `x1`, … for tensors by position."""
    names = [spec.name or f"x{place}" for place, spec in enumerate(specs)]
    expected = f"a .npz with the arrays {', '.join(names)}, each with the batch first"
    fix = f"numpy.savez('input.npz', {', '.join(f'{name}=...' for name in names)})"
    if path.suffix.lower() != ".npz" or not is_file(path):
        raise FormatError(f"{path} is given, and the model takes {len(specs)} tensors", expected=expected, fix=fix, path=path)
    stored = open_npz(path, ())
    if missing := [name for name in names if name not in stored]:
        raise FormatError(f"{path} has no {', '.join(missing)}", expected=expected, fix=fix, path=path)
    arrays = read_npz(path, tuple(names), most=_LARGEST_INPUT)
    tensors = {}
    for name, spec in zip(names, specs, strict=True):
        kinds, array = ("fiub" if spec.dtype.is_floating_point else "iub"), arrays[name]
        if array.dtype.kind not in kinds or array.ndim != len(spec.shape) + 1:
            raise ShapeError(
                f"{name} in {path} is an array of {array.dtype} and shape {array.shape}",
                expected=f"{spec.dtype} of shape ({', '.join(('batch', *map(str, spec.shape)))}), perhaps of other lengths",
                fix="convert it with .astype, and put the batch first: array[None]",
            )
        tensors[name] = torch.from_numpy(np.ascontiguousarray(array)).to(spec.dtype)
    return check_inputs(tensors if specs[0].name else tuple(tensors.values()), path.name)


def _takes_pixels(opened: Opened) -> bool:
    """Whether the model normalises pixels itself."""
    return input_spec(opened.model).dtype == torch.uint8


def _takes_tokens(opened: Opened) -> bool:
    dtype = input_spec(opened.model).dtype
    return not dtype.is_floating_point and not _takes_pixels(opened)


def image_batch(file: IO[bytes], name: str, opened: Opened, **limits: Any) -> tuple[Tensor, tuple[int, int]]:
    """The image in an open file as a batch of one, and its width and height.

    Args:
        file: The file.
        name: Its name in errors.
        opened: The model.
        limits: `most`, the largest number of pixels.
    """
    shape = input_shape(opened.model)
    if len(shape) != 3:
        raise FormatError(
            f"{name} looks like an image, and {opened.name} takes {shape[0]} numbers",
            expected=f".npy or .npz of shape {shape} or (batch, {shape[0]})",
            fix="save the numbers with numpy.save",
            path=name,
        )
    description = None if _takes_pixels(opened) else _needed(opened, name)
    image = decode_image(file, name, mode="RGB" if shape[0] == 3 else "L", **limits)
    fitted = fit_image(image, shape[1], like="" if description is None else description.name)
    pixels = torch.from_numpy(np.asarray(fitted, dtype=np.uint8).copy()).view(shape[1], shape[2], shape[0])
    batch = pixels.permute(2, 0, 1)[None].contiguous()
    if description is not None:
        batch = normalise(batch, description.mean, description.std)
    return batch.to(input_spec(opened.model).dtype), image.size


def _truncated(opened: Opened, texts: list[str]) -> str | None:
    """A note on texts that are too long."""
    tokenizer, length = load_tokenizer(opened.folder)
    cut = int((tokenizer.encode(texts, length=length + 1)[1] > length).sum())
    return f"truncated {cut} of {len(texts)} texts to {length} tokens, as in the training of {opened.name}" if cut else None


def short_name(given: str, opened: Opened) -> str:
    """The name of the input's file, or the beginning of a text."""
    if reads_texts(opened) and not given.endswith(".txt"):
        return shorten(given, _SHOWN, placeholder=" …")
    return Path(given).name


def read_texts(given: str) -> list[str]:
    """The non-empty lines of a `.txt`, or the text itself."""
    path = Path(given)
    if path.suffix.lower() != ".txt":
        if is_file(path):
            raise OptionError(f"{given} is a file", expected=_TEXT, fix="rename the file to .txt if it has one text per line")
        return [given]
    data = read_file(path, most=_LARGEST_TEXT, expected=_TEXT)
    with parsing(path, expected="a text file", fix="convert it to UTF-8", kind=FormatError, what="is not UTF-8"):
        texts = [line for line in data.decode().split("\n") if line.strip()]
    if not texts:
        raise FormatError(f"{path} has no text", expected=_TEXT, fix="write at least one line", path=path)
    return texts


def fit_image(image: Image, size: int, *, like: str) -> Image:
    """The centre of an image, scaled to a square, as the data set's own test images are."""
    from PIL.Image import Resampling
    from PIL.ImageOps import fit

    if image.size == (size, size):
        return image
    return center_crop(image, size=size) if like == "imagenet" else fit(image, (size, size), Resampling.BILINEAR)


def read_array(path: Path) -> NDArray[Any]:
    """The array of a `.npy`, or the only one of a `.npz` (or the one named x); nothing is unpickled."""
    if path.suffix.lower() == ".npy":
        return np.array(open_npy(path))
    name = only_name(list(open_npz(path, ())), path)
    return read_npz(path, (name,), most=_LARGEST_INPUT)[name]


def only_name(names: Sequence[str], path: Path) -> str:
    """Which of a file's arrays or columns holds the inputs: the one named x, or the only one."""
    name = "x" if "x" in names else names[0] if len(names) == 1 else None
    if name is None:
        raise FormatError(
            f"{path} has {', '.join(names) or 'no arrays'}",
            expected="one array, or one named x",
            fix="numpy.savez('input.npz', x=...)",
            path=path,
        )
    return name


def _as_batch(array: NDArray[Any], shape: tuple[int, ...], opened: Opened) -> Tensor:
    """One input or a batch, as a batch of float32; uint8 arrays are pixels, with the channels first or last."""
    if array.dtype.kind not in "fu" or (array.dtype.kind == "u" and array.dtype != np.uint8):
        raise DtypeError(
            f"an array of {array.dtype}",
            expected="floating-point numbers, or uint8 for pixels",
            fix="convert it with .astype('float32')",
        )
    raw = _takes_pixels(opened)
    pixels, last = array.dtype == np.uint8, (*shape[1:], *shape[:1])
    given = array[None] if array.shape in (shape, last) else array
    if pixels and len(shape) == 3 and given.shape[1:] == last != shape:
        given = np.moveaxis(given, -1, 1)
    if given.shape[1:] != shape or len(given) == 0:
        raise ShapeError(
            f"an array of shape {array.shape}",
            expected=f"{shape} for one input, or (batch, {', '.join(map(str, shape))})",
            fix=f"crop or scale the inputs to the shape that {opened.name} takes, channels before height and width",
        )
    if raw and not pixels:
        raise DtypeError(f"an array of {array.dtype}", expected="uint8, as the model takes", fix="pass pixels from 0 to 255")
    if raw:
        return torch.from_numpy(np.ascontiguousarray(given))
    if pixels and len(shape) == 3:
        description = _needed(opened, "an array of pixels")
        return normalise(torch.from_numpy(np.ascontiguousarray(given)), description.mean, description.std)
    numbers = torch.from_numpy(np.ascontiguousarray(given, dtype=np.float32))
    if not bool(numbers.isfinite().all()):
        raise InputError(
            "NaN or infinity in the input", expected="finite numbers", fix="remove these inputs or replace the values"
        )
    return numbers


def _as_tokens(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """One text or a batch, as the tokens that a model without a tokenizer takes."""
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or array.size == 0:
        raise DtypeError(
            f"an array of {array.dtype} and shape {array.shape}",
            expected="integers of shape (length,) or (batch, length): the tokens of texts",
            fix="make them with anytime.data.WordPiece.encode, or give a text to the run that the stages were exported from",
        )
    return torch.from_numpy(np.atleast_2d(array).astype(np.int64)).to(dtype)


def _needed(opened: Opened, what: str) -> Description:
    """How the model wants its pixels normalised, or an error."""
    if opened.data is None or not opened.data.mean:
        raise OptionError(
            f"{what} is given, and the pixel normalisation of {opened.name} is unknown",
            expected=f"{DATA} beside the network, as a training run writes it, or --data",
            fix=f"pass --data {'|'.join(KNOWN)} or --data RUN/{DATA}, or a .npy of normalised numbers",
        )
    channels = input_shape(opened.model)[0]
    if len(opened.data.mean) != channels:
        raise OptionError(
            f"{opened.data.name} has {len(opened.data.mean)} channels",
            expected=f"{channels}, as {opened.name} takes",
            fix="pass --data with the data set that the network was trained on",
        )
    return opened.data

"""Networks by name and in folders.

`create("msdnet-cifar", classes=10)` makes a network, `save` and `load` store it in a folder with `config.json`,
`model.safetensors` and a manifest of checksums, and `load_weights` loads weights from other sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anytime.artifacts import json_text, read_bundle, tensors_from_bytes, tensors_to_bytes, write_bundle
from anytime.errors import DtypeError, FormatError, InputError, OptionError, ShapeError
from anytime.models import dvit, imta, mlp, msdnet, resnet
from anytime.models.base import MultiExit
from anytime.models.text import encoder
from anytime.reading import json_from, parsing

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_COUNT = ".num_batches_tracked"
_SAVED, _SAVE_AGAIN = "what anytime.models.save writes", "save the network again with this version"
_WRAPPERS = ("module.", "_orig_mod.")  # prefixes of DataParallel and torch.compile


class _Architecture(NamedTuple):
    network: type[Any]
    config: type[Any]
    presets: Mapping[str, Any]


_ARCHITECTURES = {
    "msdnet": _Architecture(msdnet.MSDNet, msdnet.MSDNetConfig, msdnet.PRESETS),
    "imta": _Architecture(imta.IMTA, imta.IMTAConfig, imta.PRESETS),
    "dvit": _Architecture(dvit.DViT, dvit.DViTConfig, dvit.PRESETS),
    "resnet": _Architecture(resnet.ResNet, resnet.ResNetConfig, resnet.PRESETS),
    "mlp": _Architecture(mlp.MLP, mlp.MLPConfig, mlp.PRESETS),
    "encoder": _Architecture(encoder.EncoderExits, encoder.EncoderConfig, encoder.PRESETS),
}


def names() -> tuple[str, ...]:
    """The names for `create`."""
    return tuple(name for architecture in _ARCHITECTURES.values() for name in architecture.presets)


def create(name: str, *, classes: int, **options: Any) -> MultiExit:
    """Create a network with random weights.

    Args:
        name: One of `names()`.
        classes: The number of classes.
        options: Fields of the network's config to change.

    Example:
        >>> create("msdnet-cifar", classes=10, exits=3).num_exits
        3
    """
    for architecture in _ARCHITECTURES.values():
        if name in architecture.presets:
            known = [field.name for field in fields(architecture.config) if field.name != "classes"]
            for option in options:
                if option not in known:
                    raise _unknown("option", option, known)
            network: MultiExit = architecture.network(replace(architecture.presets[name], classes=classes, **options))
            return network
    raise _unknown("network", name, names())


def save(model: MultiExit, folder: str | Path) -> None:
    """Write a network of this library to a folder, completely or not at all, for `load`."""
    for name, architecture in _ARCHITECTURES.items():
        if type(model) is architecture.network:
            settings: Any = model.config
            document = {"version": 1, "architecture": name, "config": asdict(settings)}
            files = {_CONFIG: json_text(document).encode(), _WEIGHTS: tensors_to_bytes(model.state_dict())}
            write_bundle(folder, files, kind="model")
            return
    raise OptionError(
        f"the model is a {type(model).__name__}",
        expected=f"one of {', '.join(a.network.__name__ for a in _ARCHITECTURES.values())}",
        fix="unwrap it (model.module), or store your own model with anytime.artifacts.write_bundle",
    )


def load(folder: str | Path, *, classes: int | None = None) -> MultiExit:
    """Load a network that `save` wrote, on the CPU, in eval mode and in the dtype in which it was saved.

    Args:
        folder: The folder.
        classes: The number of classes that it must have; by default any.
    """
    files = read_bundle(folder)
    if not {_CONFIG, _WEIGHTS} <= set(files):
        raise FormatError(
            f"{folder} contains {', '.join(sorted(files)) or 'no files'}",
            expected=f"{_CONFIG} and {_WEIGHTS}",
            fix="pass a folder that anytime.models.save wrote",
            path=folder,
        )
    architecture, config = _read_config(files[_CONFIG], Path(folder) / _CONFIG)
    if classes is not None and config.classes != classes:
        raise FormatError(
            f"{folder} contains a network for {config.classes} classes",
            expected=f"a network for {classes} classes",
            fix="load the network that was trained on this data, or create a new one",
            path=folder,
        )
    try:
        with torch.device("meta"):
            network: MultiExit = architecture.network(config)
    except (RuntimeError, OptionError, InputError) as error:  # sizes that overflow, exits at places that do not exist
        raise _unreadable(Path(folder) / _CONFIG, f"describes a network that cannot be built: {error}") from error
    path = Path(folder) / _WEIGHTS
    weights = tensors_from_bytes(files[_WEIGHTS], path=path)
    try:
        _check_fit(network, weights)
    except InputError as error:
        raise FormatError(
            f"{path} does not fit {_CONFIG}: {error.got}", expected=error.expected, fix="save the network again", path=path
        ) from error
    network.load_state_dict(weights, assign=True)
    return network.eval()


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model: all of them, or none if any does not fit.

    Args:
        model: The model.
        weights: Tensors by name. Prefixes of DataParallel (`module.`) and torch.compile are removed. `num_batches_tracked`,
            which old versions of PyTorch did not save, may be missing.
    """
    named = isinstance(weights, Mapping) and all(isinstance(name, str) for name in weights)
    if not named or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise InputError(
            f"weights is a {type(weights).__name__}" + (" with values that are not tensors" if named else ""),
            expected="tensors by name, as state_dict() returns them",
            fix="read the file with safetensors.torch.load_file, or torch.load(file, weights_only=True)",
        )
    bare = {_bare(name): tensor for name, tensor in weights.items()}
    if len(bare) != len(weights):
        raise InputError(
            "some names of weights are equal without their prefixes",
            expected=f"names with or without {' and '.join(_WRAPPERS)}, not both",
            fix="pass the weights of one model only",
        )
    counts = {name: count for name, count in model.state_dict().items() if name.endswith(_COUNT)}
    whole = {**counts, **bare}
    _check_fit(model, whole)
    model.load_state_dict(whole)


def _bare(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def _check_fit(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    own: Mapping[str, Tensor] = model.state_dict()
    missing = [name for name in own if name not in weights]
    unknown = [name for name in weights if name not in own]
    if missing or unknown:
        parts = [f"{len(odd)} {what}: {_some(odd)}" for what, odd in (("missing", missing), ("unknown", unknown)) if odd]
        raise InputError(
            f"the names of the weights do not fit a {type(model).__name__}; " + "; ".join(parts),
            expected=f"its {len(own)} names",
            fix="create the network with the settings that the weights were trained with",
        )
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}",
                expected=f"shape {tuple(own[name].shape)}",
                fix="create the network with the settings that the weights were trained with, including classes",
            )
        if tensor.is_floating_point() != own[name].is_floating_point():
            raise DtypeError(
                f"{name} has dtype {tensor.dtype}", expected=f"{own[name].dtype}", fix="convert it, e.g. with .float()"
            )


def _read_config(data: bytes, path: Path) -> tuple[_Architecture, Any]:
    document = json_from(data, path, expected=_SAVED, fix=_SAVE_AGAIN)
    try:
        with parsing(path, expected=_SAVED, fix=_SAVE_AGAIN, kind=FormatError, what="does not describe a network"):
            version, name, settings = (document.pop(key) for key in ("version", "architecture", "config"))
            if version != 1 or document:
                odd = f"has version {version!r}" if version != 1 else f"has the unknown entries {_some(list(document))}"
                raise _unreadable(path, odd, expected="version 1")
            if name not in _ARCHITECTURES:
                raise _unreadable(path, f"has the architecture {name!r}", expected=f"one of {', '.join(_ARCHITECTURES)}")
            return _ARCHITECTURES[name], _ARCHITECTURES[name].config(**settings)
    except OptionError as error:
        raise _unreadable(path, f"has an invalid setting: {error.got}", expected=error.expected) from error


def _unreadable(path: Path, got: str, *, expected: str = _SAVED) -> FormatError:
    return FormatError(f"{path} {got}", expected=expected, fix=_SAVE_AGAIN, path=path)


def _unknown(what: str, name: object, known: list[str] | tuple[str, ...]) -> OptionError:
    close = get_close_matches(str(name), known, n=3, cutoff=0.5)
    fix = f"did you mean {' or '.join(map(repr, close))}?" if close else "pass one of those"
    return OptionError(f"there is no {what} {name!r}", expected=f"one of {', '.join(known)}", fix=fix)


def _some(items: list[str], most: int = 5) -> str:
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")

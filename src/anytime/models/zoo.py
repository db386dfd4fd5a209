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
from torch.overrides import TorchFunctionMode

from anytime.artifacts import json_text, read_bundle, tensors_from_bytes, tensors_to_bytes, write_bundle
from anytime.errors import FormatError, InputError, OptionError
from anytime.models import dvit, imta, mlp, msdnet, resnet
from anytime.models.base import MultiExit
from anytime.models.input_spec import InputSpec
from anytime.models.stored.weights import check_stored, check_weights
from anytime.models.text import encoder
from anytime.reading import json_from, parsing

KIND, CONFIG, WEIGHTS = "model", "config.json", "model.safetensors"
_COUNT = ".num_batches_tracked"
_SAVED, _SAVE_AGAIN = "what anytime.models.save writes", "save the network again with this version"
_WRAPPERS = ("module.", "_orig_mod.")  # prefixes of DataParallel and torch.compile


_TOKENS = 128
"""The length of a usual text."""


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
    """Write a network of this library to a folder, completely or not at all, for `load`. `anytime.save` stores any model."""
    described = describe(model)
    if described is None:
        raise OptionError(
            f"the model is a {type(model).__name__}",
            expected=f"one of {', '.join(a.network.__name__ for a in _ARCHITECTURES.values())}",
            fix="use anytime.save(model, folder), which stores any model; unwrap it first (model.module)",
        )
    document = {"version": 1, **described}
    write_bundle(folder, {CONFIG: json_text(document).encode(), WEIGHTS: tensors_to_bytes(model.state_dict())}, kind=KIND)


def load(folder: str | Path, *, classes: int | None = None) -> MultiExit:
    """Load a network that `save` wrote, on the CPU, in eval mode and in the dtype in which it was saved.

    Args:
        folder: The folder.
        classes: The number of classes that it must have; by default any.
    """
    files = read_bundle(folder)
    path = Path(folder) / CONFIG
    if not {CONFIG, WEIGHTS} <= set(files):
        raise FormatError(
            f"{folder} contains {', '.join(sorted(files)) or 'no files'}",
            expected=f"{CONFIG} and {WEIGHTS}",
            fix="pass a folder that anytime.models.save wrote",
            path=folder,
        )
    document = json_from(files[CONFIG], path, expected=_SAVED, fix=_SAVE_AGAIN)
    version = document.pop("version", None) if isinstance(document, dict) else None
    if version != 1:
        again = {} if version != 2 else {"fix": "use anytime.load(folder), with build= for a model of your own"}
        raise _unreadable(path, f"has version {version!r}"[:100], expected="version 1, a network of this library", **again)
    network = unfilled(document, path)
    config: Any = network.config
    if classes not in (None, config.classes):
        raise FormatError(
            f"{folder} contains a network for {config.classes} classes",
            expected=f"a network for {classes} classes",
            fix="load the network that was trained on this data, or create a new one",
            path=folder,
        )
    weights = tensors_from_bytes(files[WEIGHTS], path=Path(folder) / WEIGHTS)
    return take(network, weights, path=Path(folder) / WEIGHTS)


def describe(model: nn.Module) -> dict[str, Any] | None:
    """The architecture and the config of a network of this library; None for another model."""
    for name, architecture in _ARCHITECTURES.items():
        if type(model) is architecture.network:
            settings: Any = model.config
            return {"architecture": name, "config": asdict(settings)}
    return None


def unfilled(description: Any, path: Path) -> MultiExit:
    """The network of a description, to be given weights; `path` is its file, for errors.

    It is on torch's meta device, without memory. Placing the exits of a ResNet runs it, for which torch would import its
    compiler there, which takes longer than all else: small ones are made on the CPU.
    """
    architecture, config = _read_config(description, path)
    device = "cpu" if isinstance(config, resnet.ResNetConfig) and config.is_small else "meta"
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device), _WithoutNormals():
            network: MultiExit = architecture.network(config)
    except (RuntimeError, OptionError, InputError) as error:  # sizes that overflow, exits at places that do not exist
        raise _unreadable(path, f"describes a network that cannot be built: {error}") from error
    return network


class _WithoutNormals(TorchFunctionMode):
    """Leaves out normal numbers, for which torch imports parts of its compiler on the meta device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = getattr(function, "__name__", ""), kwargs or {}
        if name == "normal_":
            return args[0] if args else named["tensor"]
        return (torch.empty if name == "randn" else function)(*args, **named)


def take(network: MultiExit, weights: Mapping[str, Tensor], *, path: Path) -> MultiExit:
    """A network of `unfilled` with these weights, in eval mode; `path` is their file, for errors."""
    check_stored(network, weights, {}, path=path, made_by=CONFIG)
    network.load_state_dict(weights, assign=True)
    return network.eval()


def input_specs_of(model: nn.Module) -> tuple[InputSpec, ...]:
    """What a model takes, if that is known: from its config, or from the example that its exits were attached with."""
    config: Any = getattr(model, "config", None)
    match config:
        case mlp.MLPConfig():
            return (InputSpec("", torch.float32, (config.inputs,)),)
        case encoder.EncoderConfig():
            token = 1 if config.pad != 1 else 2
            return (InputSpec("", torch.int64, (min(_TOKENS, config.max_length),), fill=token),)
        case resnet.ResNetConfig():
            return (InputSpec("", torch.float32, (config.channels, config.image_size, config.image_size)),)
        case msdnet.MSDNetConfig() | imta.IMTAConfig() | dvit.DViTConfig():
            return (InputSpec("", torch.float32, (3, config.image_size, config.image_size)),)
    return getattr(model, "input_specs", ())


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
    check_weights(model, whole)
    model.load_state_dict(whole)


def _bare(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def _read_config(document: Any, path: Path) -> tuple[_Architecture, Any]:
    try:
        with parsing(path, expected=_SAVED, fix=_SAVE_AGAIN, kind=FormatError, what="does not describe a network"):
            name, settings, odd = document["architecture"], document["config"], set(document) - {"architecture", "config"}
            if odd:
                raise _unreadable(path, f"has the unknown entries {', '.join(sorted(odd))}"[:200])
            if name not in _ARCHITECTURES:
                raise _unreadable(path, f"has the architecture {name!r}"[:200], expected=f"one of {', '.join(_ARCHITECTURES)}")
            return _ARCHITECTURES[name], _ARCHITECTURES[name].config(**settings)
    except OptionError as error:
        raise _unreadable(path, f"has an invalid setting: {error.got}", expected=error.expected) from error


def _unreadable(path: Path, got: str, *, expected: str = _SAVED, fix: str = _SAVE_AGAIN) -> FormatError:
    return FormatError(f"{path} {got}", expected=expected, fix=fix, path=path)


def _unknown(what: str, name: object, known: list[str] | tuple[str, ...]) -> OptionError:
    close = get_close_matches(str(name), known, n=3, cutoff=0.5)
    fix = f"did you mean {' or '.join(map(repr, close))}?" if close else "pass one of those"
    return OptionError(f"there is no {what} {name!r}", expected=f"one of {', '.join(known)}", fix=fix)

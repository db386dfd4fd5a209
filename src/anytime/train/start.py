"""The initial network of a run: new, with pretrained weights or those of a run, or IMTA's second stage on its first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytime.artifacts import bundle_names, read_sealed, tensors_from_bytes
from anytime.errors import OptionError
from anytime.models import IMTA, AttachedExits, MSDNet, MultiExit, create, load_weights
from anytime.models.text.encoder import PRESETS as ENCODERS
from anytime.models.text.encoder import EncoderExits
from anytime.models.text.pretrained import Pretrained, load_minilm, load_pretrained, take_encoder
from anytime.reading import is_file, read_file
from anytime.train.config import TrainConfig

MINILM = "minilm"
_WEIGHTS = "model.safetensors"


def start_network(
    name: str,
    recipe: TrainConfig,
    *,
    classes: int,
    init: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    tokens: int | None = None,
) -> MultiExit:
    """The network that `recipe` trains.

    Args:
        name: Name of the network; for `one-for-all`, of the MSDNet that was trained with `equilibrium`.
        recipe: Its seed is that of the initial weights; its objective decides whether this is IMTA's second stage.
        classes: Number of classes.
        init: Initial weights: a safetensors file, a folder of `anytime.models.save`, or the folder of a run. For a network with
            attached exits, the weights of its backbone alone are enough; its heads are new then. An encoder of texts also takes
            the weights of one with other exits, or pretrained ones: `minilm`, or a folder in Hugging Face's format.
        options: Fields of the network's config to change.
        tokens: Size of the vocabulary, if the data are texts.
    """
    torch.manual_seed(recipe.seed)
    pretrained, settings = None if init is None else find_pretrained(init), {"classes": classes, **(options or {})}
    if (pretrained is not None or tokens is not None) and name not in ENCODERS:
        raise OptionError(
            f"model is {name} with texts or the weights of an encoder",
            expected=f"one of {', '.join(ENCODERS)}",
            fix="give --model minilm-l6",
        )
    if pretrained is not None:
        return _on_pretrained(name, pretrained, settings)
    model = create(name, **(settings if tokens is None else {"vocabulary": tokens, **settings}))
    if init is not None:
        _take(model, _weights(Path(init)))
    if recipe.objective != "one-for-all":
        return model
    if init is None or not isinstance(model, MSDNet):
        raise OptionError(
            f"objective is 'one-for-all' with model {name} and init {init}",
            expected="an MSDNet and its weights, trained with the objective equilibrium",
            fix="give the folder of the first stage's run: --init FOLDER",
        )
    return IMTA.on(model, hold_statistics=recipe.hold_statistics)


def find_pretrained(init: str | Path) -> Pretrained | None:
    """The pretrained encoder that `init` names, `minilm` or a folder; None if `init` is something else."""
    if str(init) == MINILM:
        return load_minilm()
    for place in (Path(init), Path(init) / "model"):
        config = place / "config.json"
        # Runs and networks of this library have such a file too.
        if is_file(config) and b'"model_type"' in read_file(config, most=1 << 24):
            return load_pretrained(place)
    return None


def _on_pretrained(name: str, pretrained: Pretrained, options: Mapping[str, Any]) -> MultiExit:
    """A network by name with its own exits and pooling, and the shape and weights of a pretrained encoder."""
    shape = {setting: value for setting, value in pretrained.settings.items() if setting not in ("layers", "pool")}
    config = replace(ENCODERS[name], **{**shape, **options})
    with torch.device("meta"):  # refuse weights that do not fit before memory is allocated
        take_encoder(EncoderExits(config), pretrained.weights, first_position=pretrained.first_position)
    model = EncoderExits(config)
    take_encoder(model, pretrained.weights, first_position=pretrained.first_position)
    return model


def _take(model: MultiExit, weights: Mapping[str, Tensor]) -> None:
    if isinstance(model, AttachedExits) and not any(name.startswith("heads.") for name in weights):
        load_weights(model.backbone, {name.removeprefix("backbone."): tensor for name, tensor in weights.items()})
        return
    own = model.state_dict()
    if isinstance(model, EncoderExits) and set(weights) != set(own):
        shared = ("encoder.", "pooler.")
        new = {name: tensor for name, tensor in own.items() if not name.startswith(shared)}
        weights = {name: tensor for name, tensor in weights.items() if name.startswith(shared)} | new
    load_weights(model, weights)


def _weights(path: Path) -> dict[str, Tensor]:
    for place in (path, path / "model"):
        if place.is_dir() and _WEIGHTS in bundle_names(place):
            return tensors_from_bytes(read_sealed(place, _WEIGHTS), path=place / _WEIGHTS)
    file = path / _WEIGHTS if path.is_dir() else path
    data = read_file(file, expected="the weights of a network", fix="give --init the folder of a run or a safetensors file")
    return tensors_from_bytes(data, path=file)

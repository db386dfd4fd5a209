"""The network a run begins with: new, with pretrained weights or those of a run, or IMTA's second stage on its first."""

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
    pieces: int | None = None,
) -> MultiExit:
    """The network that `recipe` trains.

    Args:
        name: Of the network; for `one-for-all`, of the MSDNet that was trained with `equilibrium`.
        recipe: Its seed decides the start, its objective whether this is IMTA's second stage.
        classes: How many classes there are.
        init: Weights to begin from: a safetensors file, a folder that `anytime.models.save` made, or one of a run. A network
            with attached exits also takes those of its backbone alone; its heads then are new. An encoder of texts takes
            those of one with other exits, or pretrained ones: `minilm`, or a folder as Hugging Face writes it.
        options: Fields of the network's config to change.
        pieces: How many word pieces there are, where the data are texts.
    """
    torch.manual_seed(recipe.seed)
    pretrained, settings = None if init is None else find_pretrained(init), {"classes": classes, **(options or {})}
    if (pretrained is not None or pieces is not None) and name not in ENCODERS:
        raise OptionError(
            f"texts, or the weights of an encoder, came with model {name}",
            expected=f"one of {', '.join(ENCODERS)}",
            fix="give --model minilm-l6",
        )
    if pretrained is not None:
        return _on_pretrained(name, pretrained, settings)
    model = create(name, **(settings if pieces is None else {"vocabulary": pieces, **settings}))
    if init is not None:
        _take(model, _weights(Path(init)))
    if recipe.objective != "one-for-all":
        return model
    if init is None or not isinstance(model, MSDNet):
        raise OptionError(
            f"one-for-all came with model {name} and init {init}",
            expected="an MSDNet and its weights, trained with the objective equilibrium",
            fix="give the run of the first stage: --init FOLDER",
        )
    return IMTA.on(model, hold_statistics=recipe.hold_statistics)


def find_pretrained(init: str | Path) -> Pretrained | None:
    """The pretrained encoder that `init` names: MiniLM-L6 by its name, or one in a folder; none where it is something else."""
    if str(init) == MINILM:
        return load_minilm()
    for place in (Path(init), Path(init) / "model"):
        config = place / "config.json"
        # Runs and networks of this library have such a file as well.
        if is_file(config) and b'"model_type"' in read_file(config, most=1 << 24):
            return load_pretrained(place)
    return None


def _on_pretrained(name: str, pretrained: Pretrained, options: Mapping[str, Any]) -> MultiExit:
    """A network by name with its exits and its way to pool, and with the shape and the weights of a pretrained encoder."""
    shape = {setting: value for setting, value in pretrained.settings.items() if setting not in ("layers", "pool")}
    config = replace(ENCODERS[name], **{**shape, **options})
    with torch.device("meta"):  # weights that do not fit are refused before there is memory for what the settings claim
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
    data = read_file(file, expected="the weights of an earlier run", fix="give a run's folder or file")
    return tensors_from_bytes(data, path=file)

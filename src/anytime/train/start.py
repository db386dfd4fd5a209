"""The network a run begins with: new, with weights from an earlier run, or IMTA's second stage on its first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytime.artifacts import read_bundle, tensors_from_bytes
from anytime.errors import MissingFileError, OptionError
from anytime.models import IMTA, AttachedExits, MSDNet, MultiExit, create, load_weights
from anytime.train.config import TrainConfig

_WEIGHTS = "model.safetensors"


def start_network(
    name: str, recipe: TrainConfig, *, classes: int, init: str | Path | None = None, options: Mapping[str, Any] | None = None
) -> MultiExit:
    """The network that `recipe` trains.

    Args:
        name: Of the network; for `one-for-all`, of the MSDNet that was trained with `equilibrium`.
        recipe: Its seed decides the start, its objective whether this is IMTA's second stage.
        classes: How many classes there are.
        init: Weights to begin from: a safetensors file, a folder that `anytime.models.save` made, or one of a run. A network
            with attached exits also takes those of its backbone alone; its heads then are new.
        options: Fields of the network's config to change.
    """
    torch.manual_seed(recipe.seed)
    model = create(name, classes=classes, **(options or {}))
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


def _take(model: MultiExit, weights: Mapping[str, Tensor]) -> None:
    if isinstance(model, AttachedExits) and not any(name.startswith("heads.") for name in weights):
        load_weights(model.backbone, {name.removeprefix("backbone."): tensor for name, tensor in weights.items()})
    else:
        load_weights(model, weights)


def _weights(path: Path) -> dict[str, Tensor]:
    for place in (path, path / "model"):
        if (place / "manifest.json").is_file():
            return tensors_from_bytes(read_bundle(place)[_WEIGHTS], path=place)
    file = path / _WEIGHTS if path.is_dir() else path
    if not file.is_file():
        raise MissingFileError(
            f"there is no file {file}", expected="the weights of an earlier run", fix="give a run's folder or file", path=file
        )
    return tensors_from_bytes(file.read_bytes(), path=file)

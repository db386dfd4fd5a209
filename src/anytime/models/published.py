"""The network of a published run: the folder of `results/publish.py` with settings and weights, here in parts under 3 MB."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from anytime.artifacts import open_bundle, tensors_from_bytes
from anytime.errors import FormatError
from anytime.models.base import MultiExit
from anytime.models.zoo import create, load_weights
from anytime.reading import is_file, json_from, parsing, read_file

WEIGHTS = "weights-"
METRICS = "test-metrics.json"
_CLASSES = {"cifar10": 10, "cifar100": 100}
CONFIG_EXPECTED = "JSON with data, model and a recipe with objective and seed"
PUBLISH_AGAIN = "publish the run again, or move its folder"


def is_published(folder: Path) -> bool:
    """Whether a folder is a published run, with its weights or without."""
    return is_file(folder / METRICS) or any(folder.glob(f"{WEIGHTS}*.safetensors"))


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of a published run."""
    path = folder / "config.json"
    config = json_from(
        read_file(path, expected=CONFIG_EXPECTED, fix=PUBLISH_AGAIN), path, expected=CONFIG_EXPECTED, fix=PUBLISH_AGAIN
    )
    with parsing(
        path, expected=CONFIG_EXPECTED, fix=PUBLISH_AGAIN, kind=FormatError, what="cannot be read as the settings of a run"
    ):
        if not isinstance(config["recipe"]["seed"], int):
            raise ValueError(f"the seed is {config['recipe']['seed']!r}")
        return {**config, "model": str(config["model"]), "data": str(config["data"])}


def load_published(folder: Path) -> MultiExit:
    """The network of a published run, in float32 and eval mode."""
    weights: dict[str, Tensor] = {}
    for name, path in open_bundle(folder).items():
        if name.startswith(WEIGHTS):
            parts = tensors_from_bytes(read_file(path), path=path)
            weights |= {key: part.float() if part.is_floating_point() else part for key, part in parts.items()}
    if not weights:
        raise FormatError(
            f"the run in {folder} was published without its weights",
            expected=f"{WEIGHTS}*.safetensors",
            fix=f"evaluate its logits: anytime evaluate {folder}; or train the network again, see docs/training.md",
            path=folder,
        )
    network = published_network(read_config(folder), folder)
    load_weights(network, weights)
    return network.eval()


def published_network(config: Mapping[str, Any], folder: Path) -> MultiExit:
    """The network of a published run with random weights."""
    if config["data"] not in _CLASSES:
        raise FormatError(
            f"the run in {folder} is of the data {config['data']!r}"[:200],
            expected=f"one of {', '.join(_CLASSES)}",
            fix="train the network again, see docs/training.md",
            path=folder,
        )
    return create(config["model"], classes=_CLASSES[config["data"]])

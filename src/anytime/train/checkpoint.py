"""Checkpoints: weights, optimizer state, random state and step, in one bundle of files that is replaced atomically.

A run that continues from a checkpoint on a CPU ends with the same bits as one that was never stopped. The files are safetensors
and JSON, never pickles.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anytime.artifacts import read_bundle, tensors_from_bytes, tensors_to_bytes, write_bundle
from anytime.errors import FormatError, OptionError
from anytime.models import load_weights
from anytime.reading import json_from, parsing
from anytime.train.config import TrainConfig
from anytime.train.step import TrainStep

_STATE, _MODEL, _OPTIMIZER = "state.json", "model.safetensors", "optimizer.safetensors"
_PREFIX = "optimizer."
_FIX = "remove the folder checkpoint to train from the start, or copy it again"


@dataclass(frozen=True)
class TrainState:
    """Progress of a run: steps done, and seconds spent on them."""

    step: int = 0
    seconds: float = 0.0


def exists(folder: Path) -> bool:
    """Whether there is a checkpoint in `folder`."""
    return folder.is_dir() and any(folder.iterdir())


def save(folder: Path, training: TrainStep, state: TrainState, losses: Tensor | None = None) -> None:
    """Write a checkpoint. An earlier one in `folder` is replaced as a whole or not at all.

    Args:
        folder: The folder of the checkpoint.
        training: The step.
        state: Its progress.
        losses: The losses of the unfinished epoch, if they are not those in `training`.
    """
    training.publish(state.step)
    document = {
        "step": state.step,
        "seconds": state.seconds,
        "config": training.config.to_json(),
        "data": training.identity(),
    }
    extra = {"losses": training.losses if losses is None else losses, **_random_state(training.hardware.device)}
    optimizer = {_PREFIX + name: values for name, values in training.optimizer_state().items()}
    write_bundle(
        folder,
        {
            _STATE: json.dumps(document, indent=1).encode(),
            _MODEL: tensors_to_bytes(training.model.state_dict()),
            _OPTIMIZER: tensors_to_bytes({**optimizer, **extra}),
        },
        kind="checkpoint",
    )


def load(folder: Path, training: TrainStep) -> TrainState:
    """Restore a checkpoint into `training`; one of another recipe or of other data is refused."""
    files = read_bundle(folder)
    document = _document(files, folder)
    # Settings that were added after the checkpoint was written had their defaults then.
    _check_same("recipe", {**TrainConfig().to_json(), **document["config"]}, training.config.to_json())
    _check_same("data", document["data"], training.identity())
    weights = tensors_from_bytes(files[_MODEL], path=folder / _MODEL)
    stored = tensors_from_bytes(files[_OPTIMIZER], path=folder / _OPTIMIZER)
    optimizer = {name.removeprefix(_PREFIX): values for name, values in stored.items() if name.startswith(_PREFIX)}
    with parsing(folder / _OPTIMIZER, expected="the optimizer state of this recipe", fix=_FIX, kind=FormatError):
        load_weights(training.model, weights)
        training.adopt(optimizer, stored["losses"])
        _set_random_state(stored, training, document["step"])
    return TrainState(step=document["step"], seconds=document["seconds"])


def _document(files: dict[str, bytes], folder: Path) -> dict[str, Any]:
    if not {_STATE, _MODEL, _OPTIMIZER} <= files.keys():
        raise FormatError(
            f"{folder} holds {', '.join(sorted(files))}",
            expected=f"a checkpoint: {_STATE}, {_MODEL}, {_OPTIMIZER}",
            fix="resume from a folder that a training run wrote",
            path=folder,
        )
    path, expected = folder / _STATE, "step, seconds, config and data, as a training run writes them"
    document: dict[str, Any] = json_from(files[_STATE], path, expected=expected, fix=_FIX)
    with parsing(path, expected=expected, fix=_FIX, kind=FormatError):
        step, seconds = document["step"], document["seconds"]
        if type(step) is not int or not 0 <= step <= 2**62 or not isinstance(seconds, int | float) or not 0 <= seconds <= 1e18:
            raise ValueError(f"step is {step!r} and seconds is {seconds!r}")
        if not isinstance(document["config"], dict) or not isinstance(document["data"], dict):
            raise ValueError("config or data is not an object")
    return document


def _check_same(what: str, stored: dict[str, Any], now: dict[str, Any]) -> None:
    different = sorted(name for name in {**stored, **now} if stored.get(name) != now.get(name))
    if different:
        changes = ", ".join(f"{name} was {stored.get(name)!r} and is {now.get(name)!r}" for name in different)
        raise OptionError(
            f"the checkpoint is of another {what}: {changes}",
            expected=f"the {what} of the run to continue",
            fix="give the same settings, or start a new run in another folder",
        )


def _random_state(device: str) -> dict[str, Tensor]:
    # For networks that draw random numbers, as dropout does; order and crops depend on the seed alone.
    state = {"random.cpu": torch.get_rng_state()}
    return {**state, "random.cuda": torch.cuda.get_rng_state(device)} if device.startswith("cuda") else state


def _set_random_state(stored: dict[str, Tensor], training: TrainStep, step: int) -> None:
    if training.ranks is not None and training.ranks.rank:  # what is stored is the state of rank 0
        torch.manual_seed(int(np.random.SeedSequence([step, training.ranks.rank]).generate_state(1)[0]))
        return
    torch.set_rng_state(stored["random.cpu"])
    if training.hardware.device.startswith("cuda") and "random.cuda" in stored:
        torch.cuda.set_rng_state(stored["random.cuda"], training.hardware.device)

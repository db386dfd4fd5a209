"""Where a run can go on from: weights, the optimiser's memory, random state and step, in one atomic bundle of files.

A run that goes on from a checkpoint on a CPU ends with the same bits as one that was never stopped. A file is
safetensors or JSON, never a pickle.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytime.artifacts import read_bundle, tensors_from_bytes, tensors_to_bytes, write_bundle
from anytime.data.base import ImageData
from anytime.data.text import TokenData
from anytime.errors import FormatError, OptionError
from anytime.models import load_weights
from anytime.reading import json_from, parsing
from anytime.train.config import TrainConfig
from anytime.train.step import TrainStep

_STATE, _MODEL, _OPTIMIZER = "state.json", "model.safetensors", "optimizer.safetensors"
_PREFIX = "optimizer."
_FIX = "remove the folder checkpoint to begin anew, or copy it again"


@dataclass(frozen=True)
class TrainState:
    """How far a run has come: steps done, and seconds spent on them."""

    step: int = 0
    seconds: float = 0.0


def exists(folder: Path) -> bool:
    """Whether there is a checkpoint in `folder`."""
    return folder.is_dir() and any(folder.iterdir())


def save(folder: Path, training: TrainStep, place: TrainState) -> None:
    """Write all that is needed to go on; an earlier checkpoint there is replaced at once or not at all."""
    training.publish(place.step)
    state = {
        "step": place.step,
        "seconds": place.seconds,
        "config": training.config.to_json(),
        "data": _identity(training.data),
    }
    extra = {"losses": training.losses, **_random_state(training.machine.device)}
    memory = {_PREFIX + name: values for name, values in training.optimizer.state().items()}
    write_bundle(
        folder,
        {
            _STATE: json.dumps(state, indent=1).encode(),
            _MODEL: tensors_to_bytes(training.model.state_dict()),
            _OPTIMIZER: tensors_to_bytes({**memory, **extra}),
        },
        kind="checkpoint",
    )


def load(folder: Path, training: TrainStep) -> TrainState:
    """Bring `training` to where the checkpoint was taken; refuses one of another recipe or of other data."""
    files = read_bundle(folder)
    state = _state(files, folder)
    _check_same(state, training.config, training.data)
    weights = tensors_from_bytes(files[_MODEL], path=folder / _MODEL)
    stored = tensors_from_bytes(files[_OPTIMIZER], path=folder / _OPTIMIZER)
    memory = {name.removeprefix(_PREFIX): values for name, values in stored.items() if name.startswith(_PREFIX)}
    with parsing(folder / _OPTIMIZER, expected="the memory of this recipe's optimiser", fix=_FIX, kind=FormatError):
        load_weights(training.model, weights)
        training.adopt(memory, stored["losses"])
        _set_random_state(stored, training.machine.device)
    return TrainState(step=state["step"], seconds=state["seconds"])


def _state(files: dict[str, bytes], folder: Path) -> dict[str, Any]:
    if not {_STATE, _MODEL, _OPTIMIZER} <= files.keys():
        raise FormatError(
            f"{folder} holds {', '.join(sorted(files))}",
            expected=f"a checkpoint: {_STATE}, {_MODEL}, {_OPTIMIZER}",
            fix="resume from the folder an earlier run wrote",
            path=folder,
        )
    path, expected = folder / _STATE, "step, seconds, config and data, as a training run writes them"
    state: dict[str, Any] = json_from(files[_STATE], path, expected=expected, fix=_FIX)
    with parsing(path, expected=expected, fix=_FIX, kind=FormatError):
        step, seconds = state["step"], state["seconds"]
        if type(step) is not int or not 0 <= step <= 2**62 or not isinstance(seconds, int | float) or not 0 <= seconds <= 1e18:
            raise ValueError(f"it has come to step {step!r} in {seconds!r} seconds")
        if not isinstance(state["config"], dict) or not isinstance(state["data"], dict):
            raise ValueError("its config or data are not tables")
    return state


def _check_same(state: dict[str, Any], config: TrainConfig, data: ImageData | TokenData) -> None:
    for what, stored, now in (("recipe", state["config"], config.to_json()), ("data", state["data"], _identity(data))):
        other = {name: (stored.get(name), now.get(name)) for name in {**stored, **now} if stored.get(name) != now.get(name)}
        if other:
            differences = ", ".join(f"{name} was {was!r} and is {is_!r}" for name, (was, is_) in sorted(other.items()))
            raise OptionError(
                f"the checkpoint is of another {what}: {differences}",
                expected=f"the {what} of the run that is to go on",
                fix="give the same settings, or begin anew in another folder",
            )


def _identity(data: ImageData | TokenData) -> dict[str, Any]:
    identity = {"name": data.name, "images": len(data), "rows_crc32": zlib.crc32(data.rows.cpu().numpy().tobytes())}
    if not isinstance(data, TokenData):
        return identity
    # The same texts are other rows with another vocabulary or cut at another length.
    return {**identity, "length": data.length, "ids_crc32": zlib.crc32(data.ids.cpu().numpy().tobytes())}


def _random_state(device: str) -> dict[str, Tensor]:
    # Order and crops come from the seed alone; this is for networks that draw, such as those with dropout.
    state = {"random.cpu": torch.get_rng_state()}
    return {**state, "random.cuda": torch.cuda.get_rng_state(device)} if device.startswith("cuda") else state


def _set_random_state(stored: dict[str, Tensor], device: str) -> None:
    torch.set_rng_state(stored["random.cpu"])
    if device.startswith("cuda") and "random.cuda" in stored:
        torch.cuda.set_rng_state(stored["random.cuda"], device)

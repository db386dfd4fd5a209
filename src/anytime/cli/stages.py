"""Folders of exported stages on the command line, beside folders of networks."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.run import engines
from anytime.run.engines import Engine
from anytime.run.export import ExportedModel
from anytime.run.export.description import DTYPES, NAME, tensors_of

_TOKENS = 128


def input_type(model: ExportedModel) -> torch.dtype:
    """The element type of the inputs."""
    return DTYPES[tensors_of(model.description["stages"][0], "inputs")[0][1]]


def reads_tokens(model: ExportedModel) -> bool:
    """Whether inputs are whole numbers, as the tokens of a text are."""
    return not input_type(model).is_floating_point


def input_shape(model: ExportedModel) -> tuple[int, ...]:
    """The shape of one input; a length that is free is that of a usual text."""
    _, _, (_, *sizes) = tensors_of(model.description["stages"][0], "inputs")[0]
    return tuple(size if isinstance(size, int) else _TOKENS for size in sizes)


def make_example(model: ExportedModel, shape: tuple[int, ...], batch: int) -> Tensor:
    """Random numbers around 0, or for a text model a text of one token: its vocabulary is not known."""
    if reads_tokens(model):
        return torch.ones(batch, *shape, dtype=input_type(model))
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0)).to(input_type(model))


def make_engine(model: MultiExit | ExportedModel, engine: str, *, example: Tensor, threads: int) -> Engine:
    """As `anytime.run.engines.make_engine`; exported stages are ready to run as they are."""
    if not isinstance(model, ExportedModel):
        return engines.make_engine(model, engine, example=example, threads=threads)
    if engine != "auto":
        raise OptionError(
            f"--engine is {engine!r} for exported stages",
            expected="auto: they were exported for one runtime",
            fix="leave --engine out, or give the network that was exported",
        )
    return cast(Engine, model)


def is_exported(folder: Path) -> bool:
    """Whether a folder says that it holds exported stages."""
    try:
        return (folder / NAME).exists()
    except (OSError, ValueError):  # a name that is too long, or that no file can have
        return False

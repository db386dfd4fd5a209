"""Options of `fit`: those that do not affect what is learnt, and all settings as keywords, with defaults for your own data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn

from anytime.checks import check_choice, check_count, check_flag, check_number
from anytime.errors import OptionError
from anytime.models import AttachedExits
from anytime.train.config import (
    L2W,
    Distillation,
    Hardware,
    ObjectiveName,
    OptimizerName,
    Precision,
    Schedule,
    StrongAugment,
    TrainConfig,
)
from anytime.train.log import EpochLog

EPOCHS, WARMUP = 10, 0.05
"""The default number of epochs on a caller's own data, and the fraction of them in which the learning rate first increases."""
RATES: dict[str, tuple[float, float]] = {"sgd": (0.1, 1e-4), "adam": (1e-3, 0.0), "adamw": (1e-3, 0.01)}
"""The default learning rate and weight decay with each optimizer on a caller's own data."""
HEADS_RATE = 5e-3
"""The default learning rate of Adam and AdamW for heads on a frozen backbone, which are linear."""


@dataclass(frozen=True)
class FitOptions:
    """Settings of a run that do not affect what is learnt.

    Args:
        folder: Folder for `log.csv` and `checkpoint/`; None to write neither.
        resume: Whether to continue from the checkpoint in `folder`, if there is one.
        checkpoint_every: Epochs between checkpoints. One is also written at the end and when the run is stopped.
        evaluate_every: Epochs between validations. The last epoch is always validated.
        seconds: Stop, with a checkpoint, after this many seconds.
        on_epoch: Called with the log line of each epoch.
        loggers: Objects with `log_metrics(metrics, step)`, called after each epoch: those of Lightning Fabric, for example.
    """

    folder: str | PathLike[str] | None = None
    resume: bool = False
    checkpoint_every: int = 5
    evaluate_every: int = 1
    seconds: float | None = None
    on_epoch: Callable[[EpochLog], object] = field(default=lambda line: None)
    loggers: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "evaluate_every"):
            check_count(getattr(self, name), name)
        check_flag(self.resume, "resume")
        if self.seconds is not None:
            check_number(self.seconds, "seconds", above=0)
        if not isinstance(self.folder, str | PathLike | None) or (self.path is not None and self.path.is_file()):
            raise OptionError(
                f"folder is {self.folder!r}",
                expected="the path of a folder",
                fix="pass another one, such as folder='run', or None to write no files",
            )
        if self.resume and self.folder is None:
            raise OptionError("resume is true without a folder", expected="the folder of the run", fix="pass folder=")
        if not callable(self.on_epoch):
            raise OptionError(
                f"on_epoch is {self.on_epoch!r}", expected="a function of the log line of an epoch", fix="pass on_epoch=print"
            )
        _check_loggers(self.loggers)

    @property
    def path(self) -> Path | None:
        """The folder."""
        return None if self.folder is None else Path(self.folder)


class Settings(TypedDict, total=False):
    """The fields of `TrainConfig`, `Hardware` and `FitOptions` as keywords."""

    epochs: int
    batch: int
    lr: float
    head_rate: float
    optimizer: OptimizerName
    momentum: float
    nesterov: bool
    weight_decay: float
    schedule: Schedule
    milestones: tuple[float, ...]
    warmup: float
    objective: ObjectiveName
    product_from: float
    exit_weights: tuple[float, ...] | None
    frozen: tuple[str, ...]
    hold_statistics: bool
    distillation: Distillation
    l2w: L2W
    augment: bool
    strong_augment: StrongAugment
    label_smoothing: float
    average_decay: float
    seed: int
    clip_norm: float | None
    steps_per_epoch: int | None
    device: str | torch.device
    precision: Precision
    channels_last: bool
    graph: bool
    compile: bool
    streams: bool
    threads: int | None
    folder: str | PathLike[str] | None
    resume: bool
    checkpoint_every: int
    evaluate_every: int
    seconds: float | None
    on_epoch: Callable[[EpochLog], object]
    loggers: Sequence[Any]


def settle(
    model: nn.Module,
    config: TrainConfig | None,
    hardware: Hardware | None,
    options: FitOptions | None,
    given: Settings,
) -> tuple[TrainConfig, Hardware, FitOptions]:
    """The settings of a run: the objects, or else the defaults for a caller's own data, changed by keywords.

    Args:
        model: Its device is the default, or a GPU if it is on the CPU.
        config: The recipe.
        hardware: Where and how to compute.
        options: Log, checkpoints and so on.
        given: The keywords.
    """
    values: dict[str, Any] = dict(given)
    kinds: tuple[Any, ...] = (TrainConfig, Hardware, FitOptions)
    names = {kind: [part.name for part in fields(kind)] for kind in kinds}
    known = sorted(name for part in names.values() for name in part)
    for name in values:
        check_choice(name, "the name of a setting", known, fix="did you mean 'lr'?" if name == "learning_rate" else None)
    if "device" in values:
        values["device"] = str(values["device"])
    own = {kind: {name: values[name] for name in names[kind] if name in values} for kind in kinds}
    return (
        default_recipe(own[TrainConfig], heads=_trains_heads(model))
        if config is None
        else replace(_checked(config, TrainConfig), **own[TrainConfig]),
        _hardware(model, _checked(hardware, Hardware), own[Hardware]),
        replace(_checked(options, FitOptions) or FitOptions(), **own[FitOptions]),
    )


def default_recipe(given: dict[str, Any], *, heads: bool = False) -> TrainConfig:
    """A recipe for a caller's own data: AdamW with a short warm-up and a cosine; `given` are fields to set.

    With `heads`, only heads on a frozen backbone are trained.

    >>> recipe = default_recipe({"epochs": 2})
    >>> recipe.optimizer, recipe.lr, recipe.schedule, recipe.warmup
    ('adamw', 0.001, 'cosine', 0.1)
    """
    values = {"epochs": EPOCHS, "optimizer": "adamw", "schedule": "cosine", **given}
    TrainConfig(**values)  # refuses wrong values before they are used
    lr, decay = RATES[values["optimizer"]]
    lr = HEADS_RATE if heads and values["optimizer"] != "sgd" else lr
    return TrainConfig(**{"lr": lr, "weight_decay": decay, "warmup": WARMUP * values["epochs"], **values})


def _trains_heads(model: nn.Module) -> bool:
    return isinstance(model, AttachedExits) and not any(part.requires_grad for part in model.backbone.parameters())


def _hardware(model: nn.Module, hardware: Hardware | None, given: dict[str, Any]) -> Hardware:
    if hardware is not None:
        return replace(hardware, **given)
    device = given.get("device") or str(next(model.parameters(), torch.zeros(())).device)
    if "device" not in given and device == "cpu" and torch.cuda.is_available():
        device = "cuda"
    low = device.startswith("cuda") and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return Hardware(**{"precision": "bfloat16" if low else "float32", **given, "device": device})


def _checked(value: Any, kind: type[Any]) -> Any:
    if value is not None and not isinstance(value, kind):
        raise OptionError(
            f"got {value!r} as {kind.__name__}",
            expected=f"an object of the class {kind.__name__}",
            fix="name arguments: fit(model, data, val=..., epochs=2)",
        )
    return value


def _check_loggers(loggers: Any) -> None:
    many = isinstance(loggers, Sequence) and not isinstance(loggers, str)
    for logger in loggers if many else (loggers,):
        if not many or not callable(getattr(logger, "log_metrics", None)):
            raise OptionError(
                f"loggers has {logger!r}" if many else f"loggers is {loggers!r}",
                expected="a list of objects with log_metrics(metrics, step)",
                fix="pass loggers=[CSVLogger('logs')] from lightning_fabric.loggers (pip install 'anytime-nn[train]')",
            )

"""How long each stage takes on a machine: measured once, saved, and used as the first forecast.

Times are of the stages as an engine runs them, one request after the other on a machine that does little else; the forecast
takes it from there.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from anytime.checks import check_costs
from anytime.errors import OptionError
from anytime.fitted import Fitted
from anytime.run.engines.base import Engine
from anytime.run.engines.running import check_inputs
from anytime.run.timing.clock import Clock, MonotonicClock
from anytime.run.timing.forecast import Forecast

LEVELS = (0.5, 0.9, 0.99, 1.0)
"""The quantiles that a profile keeps."""
_SEEDS = 100
_HIGH = 4
"""How many of them are high ones, for a forecast's slow quantile to be one of them."""
_WARM_UP = 3


@dataclass(frozen=True, eq=False)
class Profile(Fitted, kind="profile"):
    """Times of the stages of a model.

    Args:
        exits: How many exits the model has.
        classes: How many classes.
        engine: What it was run by.
        threads: How many threads a stage had.
        machine: What it was run on: processor, system, versions, load.
        batch_sizes: The batch sizes, rising.
        stage_seconds: Quantiles (`LEVELS`) of each stage's time, `(batch sizes, exits, levels)`.
        exit_seconds: Quantiles of the time from the start to each exit, of the same shape.
        repeats: How many runs each is from.
        macs: MACs (multiply-accumulates) for one input up to each exit, where they are known.
    """

    engine: str
    threads: int
    machine: dict[str, Any]
    batch_sizes: tuple[int, ...]
    stage_seconds: Tensor
    exit_seconds: Tensor
    repeats: int
    macs: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = (len(self.batch_sizes), self.exits, len(LEVELS))
        for name in ("stage_seconds", "exit_seconds"):
            times = getattr(self, name)
            if times.shape != shape or not bool((times >= 0).all()) or not bool(times.isfinite().all()):
                raise OptionError(
                    f"{name} have shape {tuple(times.shape)}", expected=f"{shape}, none negative", fix="measure it anew"
                )
        if self.macs is not None:
            check_costs(self.macs, exits=self.exits)

    @classmethod
    def from_document(cls, document: Mapping[str, Any], *, path: str | Path = "the document") -> Self:
        """The profile that a checked document describes. Files of before call the MACs `costs`."""
        fields = document.get("fields")
        if isinstance(fields, dict) and "macs" not in fields and "costs" in fields:
            renamed = {"macs" if name == "costs" else name: value for name, value in fields.items()}
            document = {**document, "fields": renamed}
        return super().from_document(document, path=path)

    def seconds(self, batch: int = 1, *, share: float = 0.5) -> tuple[float, ...]:
        """The time to each exit, for one of the batch sizes.

        Args:
            batch: Which.
            share: Which quantile: one of `LEVELS`.
        """
        if batch not in self.batch_sizes or share not in LEVELS:
            raise OptionError(
                f"batch size {batch} and quantile {share}",
                expected=f"a batch size of {self.batch_sizes} and a quantile of {LEVELS}",
                fix="measure a profile with this batch size",
            )
        return tuple(self.exit_seconds[self.batch_sizes.index(batch), :, LEVELS.index(share)].tolist())

    def seed(self, forecast: Forecast) -> None:
        """Begin a forecast with these times."""
        for batch, stages in zip(self.batch_sizes, self.stage_seconds.tolist(), strict=True):
            for exit, (middle, _, high, _) in enumerate(stages):
                # The few high ones last: they leave the window last.
                forecast.seed(exit, batch, [middle] * (_SEEDS - _HIGH) + [high] * _HIGH)

    def check_engine(self, name: str) -> None:
        """Refuse another engine than it was measured with."""
        if name != self.engine:
            raise OptionError(
                f"the profile was measured with the engine {self.engine!r}",
                expected=f"one measured with {name!r}, which is in use",
                fix="measure a profile with this engine, or leave the profile out: the forecast learns by itself",
            )


def profile_model(
    engine: Engine,
    example: Any,
    *,
    batch_sizes: Sequence[int] = (1,),
    repeats: int = 100,
    macs: Sequence[float] | None = None,
    clock: Clock | None = None,
) -> Profile:
    """Measure how long the stages take.

    Args:
        engine: What runs the model: `anytime.run.engines.make_engine(model, "eager")`.
        example: Inputs with the batch first; rows are used again where a batch size needs more.
        batch_sizes: Which.
        repeats: How many runs for each of them.
        macs: MACs (multiply-accumulates) for one input up to each exit, to keep beside the times.
        clock: Tells the time.
    """
    inputs = check_inputs(example)
    sizes = tuple(sorted(set(batch_sizes)))
    for name, values in (("batch_sizes", sizes), ("repeats", (repeats,))):
        if not values or any(isinstance(value, bool) or not isinstance(value, int) or value < 1 for value in values):
            raise OptionError(f"{name} is {values}", expected="whole numbers, at least 1", fix=f"correct {name}")
    time = clock or MonotonicClock()
    quantiles = torch.tensor(LEVELS, dtype=torch.float64)
    stages, totals, classes = [], [], None
    for size in sizes:
        x = inputs[torch.arange(size) % len(inputs)]
        rows = []
        for repeat in range(_WARM_UP + repeats):
            times, classes = _run_once(engine, x, time)
            if repeat >= _WARM_UP:
                rows.append(times)
        taken = torch.tensor(rows, dtype=torch.float64)  # (repeats, exits)
        stages.append(taken.quantile(quantiles, dim=0, interpolation="higher").T)
        totals.append(taken.cumsum(1).quantile(quantiles, dim=0, interpolation="higher").T)
    return Profile(
        exits=engine.num_exits,
        classes=classes,
        engine=engine.name,
        threads=torch.get_num_threads(),
        machine=describe_machine(),
        batch_sizes=sizes,
        stage_seconds=torch.stack(stages),
        exit_seconds=torch.stack(totals),
        repeats=repeats,
        macs=None if macs is None else tuple(float(cost) for cost in macs),
    )


def describe_machine() -> dict[str, Any]:
    """What this machine is, and how busy."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


@torch.inference_mode()
def _run_once(engine: Engine, x: Tensor, clock: Clock) -> tuple[list[float], int]:
    before, times, classes = clock.now(), [], 0
    stages = engine.begin(x)
    try:
        for _ in range(engine.num_exits):
            given = stages.advance()
            classes = getattr(given, "log_probs", given).shape[1]  # exported stages give distributions
            now = clock.now()
            times.append(now - before)
            before = now
    finally:
        stages.close()
    return times, classes


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()

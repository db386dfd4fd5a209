"""How long each stage takes on a machine: measured once, saved, and used as the first forecast.

The times are those of one request after another on an otherwise idle machine; the forecast adapts from there.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor

from anytime.checks import Inputs, check_choice, check_costs, check_count, check_counts, check_inputs, repeat_rows
from anytime.display.plot import plot_chart
from anytime.display.table import Displayed, Table
from anytime.errors import OptionError
from anytime.fitted import Fitted
from anytime.installed import count_cores, processor_name
from anytime.models.base import ExitModel
from anytime.run.engines.base import Engine
from anytime.run.engines.choose import make_engine
from anytime.run.timing.clock import Clock, MonotonicClock
from anytime.run.timing.forecast import Forecast
from anytime.run.timing.profile_figures import exit_table, time_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEVELS = (0.5, 0.9, 0.99, 1.0)
"""The quantiles that a profile stores."""
_SEEDS, _HIGH_SEEDS = 100, 4
"""Durations that seed a forecast, and how many of them are high, so that the forecast's slow quantile is a high one."""
_WARM_UP = 3


@dataclass(frozen=True, eq=False)
class Profile(Displayed, Fitted, kind="profile"):
    """Stage times of a model.

    Args:
        exits: The number of exits of the model.
        classes: The number of classes.
        engine: The name of the engine.
        threads: Threads per stage.
        machine: Processor, system, versions, load.
        batch_sizes: The batch sizes, increasing.
        stage_seconds: Quantiles (`LEVELS`) of each stage's time, `(batch sizes, exits, levels)`.
        exit_seconds: Quantiles of the time from the start to each exit, of the same shape.
        repeats: Runs per batch size.
        macs: MACs (multiply-accumulates) per input up to each exit, if known.
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
                    f"{name} has shape {tuple(times.shape)}",
                    expected=f"{shape}, finite and not negative",
                    fix="measure the profile again: anytime profile, or profile_model",
                )
        if self.macs is not None:
            check_costs(self.macs, exits=self.exits)

    @classmethod
    def from_document(cls, document: Mapping[str, Any], *, path: str | Path = "the document") -> Self:
        """The profile that a checked document describes. Older files call the MACs `costs`."""
        fields = document.get("fields")
        if isinstance(fields, dict) and "macs" not in fields and "costs" in fields:
            renamed = {"macs" if name == "costs" else name: value for name, value in fields.items()}
            document = {**document, "fields": renamed}
        return super().from_document(document, path=path)

    def seconds(self, batch: int = 1, *, quantile: float = 0.5) -> tuple[float, ...]:
        """The time to each exit for one of the batch sizes, at one of the `LEVELS`."""
        if batch not in self.batch_sizes or quantile not in LEVELS:
            raise OptionError(
                f"batch size {batch} and quantile {quantile}",
                expected=f"a batch size of {self.batch_sizes} and a quantile of {LEVELS}",
                fix=f"measure a profile with batch_sizes=({batch},), or choose one of these",
            )
        return tuple(self.exit_seconds[self.batch_sizes.index(batch), :, LEVELS.index(quantile)].tolist())

    def table(self) -> Table:
        """Milliseconds from the start to each exit, and the MACs if they are known."""
        return exit_table(self)

    def plot(self, batch: int | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw the time to each exit with matplotlib (extra `plot`).

        Args:
            batch: One of the batch sizes; by default the smallest.
            ax: Axes to draw into; new ones by default.
        """
        size = self.batch_sizes[0] if batch is None else batch
        check_choice(size, "batch", self.batch_sizes)
        figure = time_figure(self, size)
        return plot_chart(figure.chart, title=figure.title, ax=ax)

    def seed(self, forecast: Forecast) -> None:
        """Initialise a forecast with these times."""
        for batch, stages in zip(self.batch_sizes, self.stage_seconds.tolist(), strict=True):
            for exit, (median, _, high, _) in enumerate(stages):
                # The high ones come last, so that they leave the window last.
                forecast.seed(exit + 1, batch, [median] * (_SEEDS - _HIGH_SEEDS) + [high] * _HIGH_SEEDS)

    def check_engine(self, name: str) -> None:
        """Refuse an engine other than the one that was measured."""
        if name != self.engine:
            raise OptionError(
                f"the profile was measured with the engine {self.engine!r}",
                expected=f"a profile of the engine in use, {name!r}",
                fix="measure a profile with this engine, or omit the profile: the forecast adapts to the first requests",
            )


def profile_model(
    model: Engine | ExitModel,
    example: Any,
    *,
    batch_sizes: Sequence[int] = (1,),
    repeats: int = 100,
    macs: Sequence[float] | None = None,
    clock: Clock | None = None,
) -> Profile:
    """Measure how long the stages take.

    Args:
        model: A model with exits, which runs in the eager engine, or an engine: `anytime.run.engines.make_engine(model, "auto",
            example=x)`.
        example: A tensor, or a tuple or dict of tensors, with the batch first; rows are repeated for larger batch sizes.
        batch_sizes: The batch sizes to measure.
        repeats: Runs per batch size.
        macs: MACs (multiply-accumulates) per input up to each exit, stored with the times.
        clock: The clock to measure with.
    """
    inputs = check_inputs(example)
    engine = cast(Engine, model) if hasattr(model, "begin") else make_engine(model, "eager", threads=None)
    sizes = tuple(sorted(set(batch_sizes)))
    check_counts(sizes, "batch_sizes", fix="pass batch sizes such as (1, 8)")
    check_count(repeats, "repeats")
    time = clock or MonotonicClock()
    quantiles = torch.tensor(LEVELS, dtype=torch.float64)
    stages, totals = [], []
    for size in sizes:
        x = repeat_rows(inputs, size)
        runs = [_run_once(engine, x, time) for _ in range(_WARM_UP + repeats)]
        taken = torch.tensor([times for times, _ in runs[_WARM_UP:]], dtype=torch.float64)  # (repeats, exits)
        stages.append(taken.quantile(quantiles, dim=0, interpolation="higher").T)
        totals.append(taken.cumsum(1).quantile(quantiles, dim=0, interpolation="higher").T)
    return Profile(
        exits=engine.num_exits,
        classes=runs[-1][1],
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
    """Processor, system, versions and current load of this machine."""
    return {
        "processor": processor_name(),
        "cores": count_cores(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


@torch.inference_mode()
def _run_once(engine: Engine, x: Inputs, clock: Clock) -> tuple[list[float], int]:
    """The seconds of each stage, and the number of classes."""
    before, times, classes = clock.now(), [], 0
    stages = engine.begin(x)
    try:
        for _ in range(engine.num_exits):
            output = stages.advance()
            classes = getattr(output, "log_probs", output).shape[1]  # exported stages return distributions
            now = clock.now()
            times.append(now - before)
            before = now
    finally:
        stages.close()
    return times, classes

"""The training loop: epochs of steps, with a log, validation, checkpoints and an early stop on request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from anytime.data.base import ImageData
from anytime.data.text import TokenData
from anytime.errors import DivergedError
from anytime.models.base import MultiExit
from anytime.progress import Progress
from anytime.train import checkpoint
from anytime.train.checkpoint import TrainState
from anytime.train.config import Hardware, TrainConfig
from anytime.train.data.logits import ExitEvaluation
from anytime.train.data.named import Rows, measure
from anytime.train.data.stream import StreamedStep
from anytime.train.data.tokens import TokenStep
from anytime.train.distributed import Ranks
from anytime.train.log import CsvLog, EpochLog
from anytime.train.objectives.l2w import L2WStep
from anytime.train.objectives.plan import Phase, learnt_rule, phases
from anytime.train.schedule import learning_rate
from anytime.train.step import TrainStep
from anytime.train.stopping import Stopping

# Steps between readings of the loss and the clock: reading the loss waits for the device.
_CHECK_EVERY = 50


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
    """

    folder: Path | None = None
    resume: bool = False
    checkpoint_every: int = 5
    evaluate_every: int = 1
    seconds: float | None = None
    on_epoch: Callable[[EpochLog], None] = field(default=lambda line: None)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: after `step` of `steps` steps and `seconds`; `stopped` says why, if it ended early."""

    step: int
    steps: int
    seconds: float
    images_per_second: float
    stopped: str | None

    @property
    def finished(self) -> bool:
        """Whether all steps were done."""
        return self.step == self.steps


def fit(
    model: MultiExit,
    data: Rows,
    config: TrainConfig,
    *,
    val: Rows | None = None,
    hardware: Hardware | None = None,
    options: FitOptions | None = None,
    ranks: Ranks | None = None,
) -> Outcome:
    """Train `model` in place on `data` by a recipe; it ends on the hardware's device, in float32.

    Args:
        model: A network with exits.
        data: Training images or tokens.
        config: The recipe.
        val: Rows to measure accuracy on, without augmentation; nothing is selected by it.
        hardware: Where and how to compute; a CPU by default.
        options: Log, checkpoints, validation, time limit.
        ranks: The process group, if several processes train together.
    """
    hardware, options = hardware or Hardware(), options or FitOptions()
    plan = phases(config, exits=model.num_exits, steps_per_epoch=max(1, len(data) // config.batch))
    training = _step_type(data, config)(model, data, plan[0].objective, config, hardware, ranks)
    rank_zero = ranks is None or ranks.rank == 0
    evaluation = measure(training.model, val, graph=hardware.graph) if val is not None and rank_zero else None
    with _fastest_kernels():
        return _Loop(training, plan, evaluation, options).run()


def _step_type(data: Rows, config: TrainConfig) -> Callable[..., TrainStep]:
    if isinstance(data, TokenData):
        return TokenStep
    if not isinstance(data, ImageData):
        return StreamedStep
    return L2WStep if config.objective == "l2w" else TrainStep


class _Loop:
    """The loop and its state. All ranks run it; rank 0 writes the files."""

    def __init__(
        self, training: TrainStep, plan: tuple[Phase, ...], evaluation: ExitEvaluation | None, options: FitOptions
    ) -> None:
        self.training, self.plan, self.evaluation, self.options = training, plan, evaluation, options
        self.config, self.ranks = training.config, training.ranks
        self.rank_zero = self.ranks is None or self.ranks.rank == 0
        self.per_epoch = training.steps_per_epoch
        self.steps = self.config.epochs * self.per_epoch
        self.phase = plan[0]
        self.checkpoints = None if options.folder is None else options.folder / "checkpoint"
        self.log = CsvLog(options.folder / "log.csv" if options.folder is not None and self.rank_zero else None)
        self.progress = Progress(self.steps, self.config.batch)

    def run(self) -> Outcome:
        begun = self._resume()
        step, saved, stopped = begun.step, begun.step, None
        agree = {} if self.ranks is None else {"agree": self.ranks.maximum}
        with Stopping(self.options.seconds, **agree) as stopping:
            while step < self.steps and stopped is None:
                epoch_start, first = stopping.elapsed, step
                step = self._epoch(step, stopping)
                seconds = begun.seconds + stopping.elapsed
                rate = (step - first) * self.config.batch / (stopping.elapsed - epoch_start)
                if step % self.per_epoch == 0:
                    self._end_epoch(step, rate, seconds)
                stopped = stopping.reason if step < self.steps and stopping.requested() else None
                if stopped or step == self.steps or step - saved >= self.options.checkpoint_every * self.per_epoch:
                    self._save(TrainState(step, seconds))
                    saved = step
            seconds = stopping.elapsed
        self.progress.clear()
        images = (step - begun.step) * self.config.batch
        return Outcome(step, self.steps, begun.seconds + seconds, images / seconds if images else 0.0, stopped)

    def _resume(self) -> TrainState:
        state = TrainState()
        if self.checkpoints is not None and self.options.resume and checkpoint.exists(self.checkpoints):
            state = checkpoint.load(self.checkpoints, self.training)
        self.log.start(state.step)
        return state

    def _epoch(self, step: int, stopping: Stopping) -> int:
        """Run to the end of the epoch of `step`, or until a stop is requested; returns the steps done by then."""
        epoch = step // self.per_epoch
        self.training.begin(epoch)
        self._select_phase(step)
        while step < (epoch + 1) * self.per_epoch:
            lr = learning_rate(step, steps_per_epoch=self.per_epoch, config=self.config)
            self.training(step % self.per_epoch, lr)
            step += 1
            if self.rank_zero:
                self.progress.show(step)
            check = step % _CHECK_EVERY == 0
            if check:
                self._check_losses(step)
            if stopping.requested(check_time=check):
                break
        self._check_losses(step)
        return step

    def _select_phase(self, step: int) -> None:
        phase = max((phase for phase in self.plan if phase.start <= step), key=lambda phase: phase.start)
        if phase is not self.phase:
            self.training.minimise(phase.objective)
        self.phase = phase

    def _check_losses(self, step: int) -> None:
        losses = self.training.mean_losses().tolist()
        bad = [exit for exit, loss in enumerate(losses, 1) if not math.isfinite(loss)]
        if bad:
            kept = self.checkpoints is not None and checkpoint.exists(self.checkpoints)
            where = f"; the last good weights are in {self.checkpoints}" if kept else ""
            raise DivergedError(
                f"the loss of exit {bad[0]} is {losses[bad[0] - 1]} by step {step} (epoch {(step - 1) // self.per_epoch + 1})",
                expected="finite losses",
                fix=f"lower lr (now {self.config.lr:g}) or add warmup epochs, and start a new run{where}",
            )

    def _end_epoch(self, step: int, rate: float, seconds: float) -> None:
        epoch = step // self.per_epoch
        losses = (self.training.take_losses() / self.per_epoch).tolist()
        if not self.rank_zero:
            return
        lr = learning_rate(step - 1, steps_per_epoch=self.per_epoch, config=self.config)
        line = EpochLog(epoch, step, lr, tuple(losses), self._validate(epoch, step), rate, seconds)
        self.log.add(line)
        self.progress.clear()
        self.options.on_epoch(line)

    def _validate(self, epoch: int, step: int) -> tuple[float, ...] | None:
        if self.evaluation is None or (epoch % self.options.evaluate_every and step < self.steps):
            return None
        self.training.publish(step)
        return self.evaluation.accuracy(learnt_rule(self.config))

    def _save(self, state: TrainState) -> None:
        self.training.publish(state.step)
        losses = self.training.mean_losses()
        if self.checkpoints is not None and self.rank_zero:
            checkpoint.save(self.checkpoints, self.training, state, losses)


@contextmanager
def _fastest_kernels() -> Iterator[None]:
    """Let cuDNN time its kernels for each shape and use the fastest, within the block."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before

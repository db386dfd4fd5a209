"""The loop: epochs of steps, with a log, validation, checkpoints and an early end where one is asked for."""

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
from anytime.train import checkpoint
from anytime.train.checkpoint import TrainState
from anytime.train.config import Hardware, TrainConfig
from anytime.train.data.logits import Evaluation
from anytime.train.data.named import measure
from anytime.train.data.tokens import TokenStep
from anytime.train.log import CsvLog, EpochLog, Progress
from anytime.train.objectives.l2w import WeighedStep
from anytime.train.objectives.losses import Objective
from anytime.train.objectives.plan import Phase, learnt_rule, phases
from anytime.train.schedule import learning_rate
from anytime.train.step import TrainStep
from anytime.train.stopping import Stopping

# Steps between looks at the loss and the clock: a look waits for the device.
_LOOK_EVERY = 50


@dataclass(frozen=True)
class FitOptions:
    """What a run does beside learning.

    Args:
        folder: Where `log.csv` and the folder `checkpoint` go; none for neither.
        resume: Whether to go on from the checkpoint there, if there is one.
        checkpoint_every: Epochs between checkpoints; one is also written at the end and at an early end.
        evaluate_every: Epochs between validations; the last epoch is always validated.
        seconds: Stop, with a checkpoint, after this many.
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
    """How a run ended: after `step` of `steps` steps and `seconds`; `stopped` says why, if before its end."""

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
    data: ImageData | TokenData,
    config: TrainConfig,
    *,
    val: ImageData | TokenData | None = None,
    machine: Hardware | None = None,
    options: FitOptions | None = None,
) -> Outcome:
    """Train `model` on `data` by a recipe; it is changed in place and ends on the machine's device, in float32.

    Args:
        model: A network with exits.
        data: Training images, or texts as word pieces.
        config: The recipe.
        val: What to measure accuracy on, without augmentation; nothing is chosen by them.
        machine: Where it runs; a CPU by default.
        options: Log, checkpoints, validation, time limit.
    """
    machine, options = machine or Hardware(), options or FitOptions()
    plan = phases(config, exits=model.num_exits, steps_per_epoch=max(1, len(data) // config.batch))
    training = _step(model, data, plan[0].objective, config, machine)
    evaluation = None if val is None else measure(training.model, val, graph=machine.graph)
    return run_loop(training, plan, evaluation, options)


def _step(
    model: MultiExit, data: ImageData | TokenData, objective: Objective, config: TrainConfig, machine: Hardware
) -> TrainStep:
    """The step that fits data and objective."""
    if isinstance(data, TokenData):
        return TokenStep(model, data, objective, config, machine)
    return (WeighedStep if config.objective == "l2w" else TrainStep)(model, data, objective, config, machine)


def run_loop(training: TrainStep, plan: tuple[Phase, ...], evaluation: Evaluation | None, options: FitOptions) -> Outcome:
    """The loop itself, for a step made by the caller."""
    with _chosen_kernels():
        return _Run(training, plan, evaluation, options).run()


class _Run:
    """The state of a loop."""

    def __init__(
        self, training: TrainStep, plan: tuple[Phase, ...], evaluation: Evaluation | None, options: FitOptions
    ) -> None:
        self.training, self.plan, self.evaluation, self.options = training, plan, evaluation, options
        self.config = training.config
        self.per_epoch = training.steps_per_epoch
        self.steps = self.config.epochs * self.per_epoch
        self.checkpoints = None if options.folder is None else options.folder / "checkpoint"
        self.log = CsvLog(None if options.folder is None else options.folder / "log.csv")
        self.progress = Progress(self.steps, self.config.batch)

    def run(self) -> Outcome:
        begun = self._begin()
        step, saved, stopped = begun.step, begun.step, None
        with Stopping(self.options.seconds) as stopping:
            while step < self.steps and stopped is None:
                epoch_began, first = stopping.elapsed, step
                step = self._epoch(step, stopping)
                spent = begun.seconds + stopping.elapsed
                rate = (step - first) * self.config.batch / (stopping.elapsed - epoch_began)
                if step % self.per_epoch == 0:
                    self._end_epoch(step, rate, spent)
                stopped = stopping.reason if step < self.steps and stopping.asked() else None
                if stopped or step == self.steps or step - saved >= self.options.checkpoint_every * self.per_epoch:
                    self._save(TrainState(step, spent))
                    saved = step
            seconds = stopping.elapsed
        self.progress.clear()
        images = (step - begun.step) * self.config.batch
        return Outcome(step, self.steps, begun.seconds + seconds, images / seconds if images else 0.0, stopped)

    def _begin(self) -> TrainState:
        place = TrainState()
        if self.checkpoints is not None and self.options.resume and checkpoint.exists(self.checkpoints):
            place = checkpoint.load(self.checkpoints, self.training)
        self.log.start(place.step)
        return place

    def _epoch(self, step: int, stopping: Stopping) -> int:
        """Run to the end of the epoch that `step` lies in, or to an early end; gives the steps done by then."""
        epoch = step // self.per_epoch
        self.training.begin(epoch)
        self._follow_plan(step)
        while step < (epoch + 1) * self.per_epoch:
            lr = learning_rate(step, steps_per_epoch=self.per_epoch, config=self.config)
            self.training(step % self.per_epoch, lr)
            step += 1
            self.progress.show(step)
            if step % _LOOK_EVERY == 0:
                self._check(step)
            if (step % _LOOK_EVERY == 0 or stopping.reason) and stopping.asked():
                break
        self._check(step)
        return step

    def _follow_plan(self, step: int) -> None:
        """Change the objective where this epoch begins another phase, or a run goes on in one."""
        current = max((phase for phase in self.plan if phase.start <= step), key=lambda phase: phase.start)
        if current.start and current is not getattr(self, "_phase", None):
            self.training.minimise(current.objective)
        self._phase = current

    def _check(self, step: int) -> None:
        losses = self.training.losses.tolist()
        bad = [exit for exit, loss in enumerate(losses, 1) if not math.isfinite(loss)]
        if bad:
            kept = self.checkpoints is not None and checkpoint.exists(self.checkpoints)
            where = f"; the last good weights are in {self.checkpoints}" if kept else ""
            raise DivergedError(
                f"the loss of exit {bad[0]} is {losses[bad[0] - 1]} by step {step} (epoch {(step - 1) // self.per_epoch + 1})",
                expected="finite losses",
                fix=f"lower lr (now {self.config.lr:g}) or add warmup epochs, and begin anew{where}",
            )

    def _end_epoch(self, step: int, rate: float, seconds: float) -> None:
        epoch = step // self.per_epoch
        losses = (self.training.take_losses() / self.per_epoch).tolist()
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

    def _save(self, place: TrainState) -> None:
        self.training.publish(place.step)
        if self.checkpoints is not None:
            checkpoint.save(self.checkpoints, self.training, place)


@contextmanager
def _chosen_kernels() -> Iterator[None]:
    """Let cuDNN try its kernels on each shape and keep the fastest, for the time being."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before

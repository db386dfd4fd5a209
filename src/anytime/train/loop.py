"""The training loop: epochs of steps, with a log, validation, checkpoints and an early stop on request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import nn

from anytime.data.base import ImageData
from anytime.data.text import TokenData
from anytime.errors import DivergedError
from anytime.models.base import check_network
from anytime.progress import Progress
from anytime.threads import torch_threads
from anytime.train import checkpoint
from anytime.train.checkpoint import TrainState
from anytime.train.config import Hardware, TrainConfig
from anytime.train.data.batches import Batches, BatchStep
from anytime.train.data.logits import ExitEvaluation
from anytime.train.data.named import Rows, measure
from anytime.train.data.rows import RowsStep
from anytime.train.data.stream import StreamedStep
from anytime.train.data.tokens import TokenStep
from anytime.train.distributed import Ranks
from anytime.train.log import CsvLog, EpochLog
from anytime.train.objectives.l2w import L2WStep
from anytime.train.objectives.plan import Phase, learnt_rule, phases
from anytime.train.options import FitOptions, Settings, settle
from anytime.train.schedule import learning_rate
from anytime.train.step import TrainStep, keeping_modes
from anytime.train.stopping import Stopping

# Steps between readings of the loss and the clock: reading the loss waits for the device.
_CHECK_EVERY = 50


@dataclass(frozen=True)
class Outcome:
    """How a run ended: after `step` of `steps` steps and `seconds`; `stopped` says why, if it ended early.

    `history` has the log line of each epoch of this call.
    """

    step: int
    steps: int
    seconds: float
    images_per_second: float
    stopped: str | None
    history: tuple[EpochLog, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether all steps were done."""
        return self.step == self.steps

    def __repr__(self) -> str:
        steps, losses = f"step={self.step} of {self.steps}, epochs={len(self.history)}, seconds={self.seconds:.3g}", ""
        if self.history:
            losses = f", losses=({', '.join(f'{loss:.3g}' for loss in self.history[-1].losses)})"
        return f"Outcome({steps}{losses}{f', stopped={self.stopped!r}' if self.stopped else ''})"


def fit(
    model: nn.Module,
    data: Any,
    config: TrainConfig | None = None,
    *,
    val: Any = None,
    hardware: Hardware | None = None,
    options: FitOptions | None = None,
    ranks: Ranks | None = None,
    **settings: Unpack[Settings],
) -> Outcome:
    """Train `model` in place; it ends on the device where it was trained, with the modes it had.

    Only parameters that require a gradient are trained: with `attach_exits(..., frozen=True)`, the heads. Batch norms of frozen
    modules keep their statistics. Ctrl-C ends the training after the current step, with a checkpoint if there is a folder; the
    result says so in `stopped`.

    Args:
        model: A module with exits: of `attach_exits` or `from_outputs`, an ensemble, your own `MultiExit`.
        data: A DataLoader, a map-style data set, a tuple of tensors `(x, y)`, or anything that can be iterated once per epoch
            and yields batches: `(x, y)` or a dict with `labels`. Inputs may be a tensor, or a tuple or dict of tensors. Also
            images and tokens of `anytime.data`, which are trained on from the memory of the device.
        config: The recipe. By default AdamW for 10 epochs with a learning rate of 0.001 (0.005 for heads on a frozen backbone)
            that follows a cosine, and the sum of the exits' cross-entropies.
        val: Data to measure accuracy on after each epoch, under the rule that the objective trains; nothing is selected by it.
        hardware: Where and how to compute; by default the device of the model, or a GPU if it is on the CPU, where matrix
            products and convolutions are in bfloat16. Data of `anytime.data` are trained on a CPU by default.
        options: Log, checkpoints, loggers, time limit.
        ranks: The process group, if several processes train together on data of `anytime.data`.
        settings: Any field of `TrainConfig`, `Hardware` and `FitOptions` by name, such as `epochs`, `lr`, `objective`, `seed`,
            `device`, `folder`, `resume` or `loggers`. They change those of the objects.

    Example:
        >>> from anytime.models import MLP, MLPConfig
        >>> x = torch.randn(256, 2)
        >>> data = x, (x[:, 0] > 0).long()
        >>> outcome = fit(MLP(MLPConfig(classes=2, exits=3)), data, val=data, epochs=2)
        >>> outcome.finished, len(outcome.history[-1].val_accuracy)
        (True, 3)
    """
    network = check_network(model)
    ours = isinstance(data, Rows)
    config, hardware, options = settle(model, config, hardware or (Hardware() if ours else None), options, settings)
    rows = data if ours else Batches(data, config)
    steps = max(1, len(data) // config.batch) if ours else len(rows)
    plan = phases(config, exits=network.num_exits, steps_per_epoch=steps)
    rank_zero = ranks is None or ranks.rank == 0
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch_threads(hardware.threads),
        keeping_modes(model),
        torch.random.fork_rng(_gpus(hardware), enabled=not ours),
        _fastest_kernels(),
    ):
        training = _step_type(rows, config)(network, rows, plan[0].objective, config, hardware, ranks)
        evaluation = measure(training.model, val, graph=hardware.graph) if val is not None and rank_zero else None
        return _Loop(training, plan, evaluation, options).run()


def _gpus(hardware: Hardware) -> list[str]:
    return [hardware.device] if hardware.device.startswith("cuda") and torch.cuda.is_available() else []


def _step_type(data: Any, config: TrainConfig) -> Callable[..., TrainStep]:
    if isinstance(data, Batches):
        return BatchStep
    if isinstance(data, TokenData):
        return TokenStep
    if not isinstance(data, ImageData):
        return StreamedStep
    return L2WStep if config.objective == "l2w" else RowsStep


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
        folder = options.path
        self.checkpoints = None if folder is None else folder / "checkpoint"
        self.log = CsvLog(folder / "log.csv" if folder is not None and self.rank_zero else None)
        self.progress = Progress(self.steps, self.config.batch)
        self.history: list[EpochLog] = []

    def run(self) -> Outcome:
        begun = self._resume()
        step, saved, stopped = begun.step, begun.step, None
        agree = {} if self.ranks is None else {"agree": self.ranks.maximum}
        with Stopping(self.options.seconds, **agree) as stopping:
            while step < self.steps and stopped is None:
                epoch_start, before = stopping.elapsed, self.training.inputs
                step = self._epoch(step, stopping)
                seconds = begun.seconds + stopping.elapsed
                rate = (self.training.inputs - before) / (stopping.elapsed - epoch_start)
                if step % self.per_epoch == 0:
                    self._end_epoch(step, rate, seconds)
                stopped = stopping.reason if step < self.steps and stopping.requested() else None
                if stopped or step == self.steps or step - saved >= self.options.checkpoint_every * self.per_epoch:
                    self._save(TrainState(step, seconds))
                    saved = step
            seconds = stopping.elapsed
        self.progress.clear()
        rate = self.training.inputs / seconds if self.training.inputs else 0.0
        return Outcome(step, self.steps, begun.seconds + seconds, rate, stopped, tuple(self.history))

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
                self.progress.batch = self.training.batch_size
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
            epoch = (step - 1) // self.per_epoch + 1
            raise self._diverged(f"the loss of exit {bad[0]} is {losses[bad[0] - 1]} by step {step} (epoch {epoch})")

    def _end_epoch(self, step: int, rate: float, seconds: float) -> None:
        epoch = step // self.per_epoch
        losses = (self.training.take_losses() / self.per_epoch).tolist()
        if not self.rank_zero:
            return
        lr = learning_rate(step - 1, steps_per_epoch=self.per_epoch, config=self.config)
        line = EpochLog(epoch, step, lr, tuple(losses), self._validate(epoch, step), rate, seconds)
        self.log.add(line)
        self.history.append(line)
        self.progress.clear()
        for logger in self.options.loggers:
            logger.log_metrics(line.metrics(), step=step)
            if callable(getattr(logger, "save", None)):
                logger.save()
        self.options.on_epoch(line)

    def _validate(self, epoch: int, step: int) -> tuple[float, ...] | None:
        if self.evaluation is None or (epoch % self.options.evaluate_every and step < self.steps):
            return None
        self.training.publish(step)
        return self.evaluation.accuracy(learnt_rule(self.config))

    def _check_weights(self, step: int) -> None:
        """Refuse to keep weights that an update made NaN: the losses are of before it."""
        finite = torch.stack([weight.isfinite().all() for weight in self.training.weights.parameters])
        if not bool(finite.all()):
            raise self._diverged(f"the weights are NaN or infinite by step {step}")

    def _diverged(self, what: str) -> DivergedError:
        kept = self.checkpoints is not None and checkpoint.exists(self.checkpoints)
        where = f"; the last good weights are in {self.checkpoints}" if kept else ""
        return DivergedError(
            what,
            expected="finite losses and weights",
            fix=f"check the inputs for NaN, lower lr (now {self.config.lr:g}) or add warmup epochs; start a new run{where}",
        )

    def _save(self, state: TrainState) -> None:
        self._check_weights(state.step)
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

"""Several processes that train one network, each on its share of every batch.

Process 0 leads: it alone has the loop, the log, the checkpoints and an ear for Ctrl-C, and tells the others before each step
what comes next. The gradient is averaged over all as one flat tensor, and batch norms take their statistics over the joined
batch, so that losses are those of one process with the whole batch, up to rounding. Lightning Fabric starts the processes, on
one machine by itself and on several by `torchrun`.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import active_children, resource_tracker
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from anytime.errors import AnytimeError, MissingExtraError, OptionError
from anytime.models.base import MultiExit
from anytime.safe_text import print_safely as print
from anytime.train.config import Hardware, TrainConfig
from anytime.train.data.stream import StreamedStep
from anytime.train.objectives.plan import Phase
from anytime.train.step import TrainStep

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_END, _STATE, _BEGIN, _STEP = range(4)
# Objectives that do more in a step than descend a mean over the batch.
_ALONE = ("l2w",)


class Team:
    """The processes that train together: this one is number `rank` of `size`."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device

    def mean_(self, values: Tensor) -> None:
        """Replace `values` by their mean over all processes."""
        distributed.all_reduce(values)
        values.div_(self.size)

    def share_(self, values: Tensor) -> None:
        """Replace `values` by those of the leader."""
        distributed.broadcast(values, 0)

    def tell(self, order: int, first: float = 0.0, second: float = 0.0) -> None:
        """Let the others do what this process is about to do; nothing if it does not lead."""
        if self.rank == 0:
            self.share_(torch.tensor([order, first, second], dtype=torch.float64, device=self.device))

    def hear(self) -> tuple[int, float, float]:
        """What the leader tells."""
        words = torch.zeros(3, dtype=torch.float64, device=self.device)
        try:
            self.share_(words)
        except RuntimeError:  # the leader has left; what it has to say is said there
            return _END, 0.0, 0.0
        order, first, second = words.tolist()
        return int(order), first, second


class TeamStep(TrainStep):
    """A `TrainStep` of which each process does its share of the rows."""

    def __init__(self, model: MultiExit, data: Any, objective: Any, config: TrainConfig, machine: Hardware, team: Team) -> None:
        _check(config, machine, team)
        super().__init__(model, data, objective, config, machine)
        self.team = team
        rows = config.batch // team.size
        self.share = slice(team.rank * rows, (team.rank + 1) * rows)
        self.rows = self.rows[:rows].clone()
        join_norms(self.network, team)
        self._share_state()

    def begin(self, epoch: int) -> None:
        self.team.tell(_BEGIN, epoch)
        super().begin(epoch)

    def __call__(self, index: int, lr: float) -> None:
        self.team.tell(_STEP, index, lr)
        batch = self.config.batch
        self.rows.copy_(self.order[index * batch : (index + 1) * batch][self.share])
        self.optimizer.lr.fill_(lr)
        self._run()

    def run(self) -> None:
        before = self.losses.clone()
        self.losses.zero_()
        super().run()
        self.team.mean_(self.losses)
        self.losses.add_(before)

    def share_gradient(self) -> None:
        self.team.mean_(self.weights.gradient)

    def adopt(self, optimizer: dict[str, Tensor], losses: Tensor) -> None:
        super().adopt(optimizer, losses)
        self.team.tell(_STATE)
        self._share_state()

    def follow(self, plan: tuple[Phase, ...]) -> None:
        """Do what the leader tells until it ends."""
        current = plan[0]
        while (heard := self.team.hear())[0] != _END:
            order, first, second = heard
            if order == _STATE:
                self._share_state()
            elif order == _BEGIN:
                step = int(first) * self.steps_per_epoch
                due = max((phase for phase in plan if phase.start <= step), key=lambda phase: phase.start)
                if due is not current:
                    self.minimise(due.objective)
                current = due
                self.begin(int(first))
            else:
                self(int(first), second)

    def end(self) -> None:
        """Let the others go."""
        self.team.tell(_END)

    @torch.no_grad()
    def _share_state(self) -> None:
        for values in (self.weights.master, *self.optimizer.tensors(), *self.network.buffers()):
            self.team.share_(values)
        self.weights.refresh()


class StreamedTeamStep(StreamedStep, TeamStep):
    """A `TeamStep` on images that come from a stream, of which each process decodes its share."""


def join_norms(network: nn.Module, team: Team) -> None:
    """Let each batch norm in training take its statistics over the rows of all processes."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm) and child.training and child.running_mean is not None:
                setattr(module, name, JoinedNorm(child, team))


class JoinedNorm(nn.Module):
    """A batch norm over the joined batch, on any device (PyTorch's own knows GPUs alone); parameters are those of `norm`."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: _BatchNorm, team: Team) -> None:
        super().__init__()
        self.team, self.eps, self.momentum = team, norm.eps, 0.1 if norm.momentum is None else norm.momentum
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by mean and variance over all rows and places of all processes."""
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        values = x.float()
        places = [0, *range(2, x.ndim)]
        shape = [1, -1] + [1] * (x.ndim - 2)
        count = self.team.size * x.numel() // x.shape[1]
        # Two passes: the difference of two large sums would lose digits.
        mean = joined_sum(values.sum(places), self.team) / count
        centred = values - mean.view(shape)
        variance = joined_sum(centred.square().sum(places), self.team) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / max(count - 1, 1)), self.momentum)
        normal = centred * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(x.dtype)


def joined_sum(values: Tensor, team: Team) -> Tensor:
    """The sum over all processes; gradients of all of them come back."""
    total: Tensor = _JoinedSum.apply(values)  # type: ignore[no-untyped-call]
    return total


def launch(
    processes: int,
    function: Callable[..., Any],
    *arguments: Any,
    device: str = "cpu",
    after_ctrl_c: Callable[[Any], Any] = lambda found: found,
) -> Any:
    """Run `function(*arguments, team)` in several processes at once; gives what the leader's call returns.

    That has to be small, a few kilobytes: Fabric reads it when all have ended, and a process with more to say never ends.
    Under `torchrun` the processes are there already, on this and other machines, and this is one of them.

    Args:
        processes: How many; `torchrun` knows better where it has started them.
        function: At the top of a module, as are all classes of its arguments: they are sent to the processes.
        arguments: What it is called with.
        device: `cpu` or `cuda`.
        after_ctrl_c: Called in this process on what the leader's call returned, where Ctrl-C made it return.
    """
    work = partial(function, *arguments)
    heard: list[int] = []
    if _started() or threading.current_thread() is not threading.main_thread():
        ended = _meet(processes, device, work)
    else:
        ended = _listen(processes, device, work, heard)
    if ended.error is not None:
        came, expected, fix = ended.error
        raise AnytimeError(came, expected=expected, fix=fix)
    return after_ctrl_c(ended.found) if signal.SIGINT in heard else ended.found


def _meet(processes: int, device: str, function: Callable[[Team], Any]) -> _Ended:
    """Begin the processes, at another port where somebody took the first in the moment between its choice and its use."""
    tries = 1 if "MASTER_PORT" in os.environ else 3
    while True:
        tries -= 1
        try:
            with _on_this_machine():
                ended: _Ended = _fabric(processes, device).launch(_work, function)
                return ended
        except ProcessRaisedException as error:
            if tries == 0 or "EADDRINUSE" not in str(error):
                raise


def leads() -> bool:
    """Whether this process has the say: always, save under `torchrun` in all processes but the first."""
    return not _started() or os.environ["RANK"] == "0"


def _started() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _fabric(processes: int, device: str) -> Any:
    try:
        package = importlib.import_module("lightning_fabric")
    except ImportError as error:
        raise MissingExtraError(
            "several processes were asked for, and lightning-fabric is not installed",
            expected="the package lightning-fabric",
            fix="pip install 'anytime-nn[train]', or leave processes at 1",
        ) from error
    local = int(os.environ["LOCAL_WORLD_SIZE"]) if _started() else processes
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    return package.Fabric(
        accelerator="gpu" if device.startswith("cuda") else "cpu",
        devices=local,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local if _started() else 1,
        strategy="ddp" if _started() else "ddp_spawn",
    )


class _Ended:
    """What a process returns. No dataclass, nor are arguments bare: Fabric would take them apart, and fail where frozen."""

    def __init__(self, found: Any = None, error: tuple[str, str, str] | None = None) -> None:
        self.found, self.error = found, error


def _work(fabric: Any, function: Callable[[Team], Any]) -> _Ended:
    if fabric.global_rank:
        # Only the leader stops at a signal, between two steps; the others stop when it says so.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    elif not _started() and hasattr(multiprocessing, "_prctl_pr_set_pdeathsig"):
        # If the program that began it is killed, the leader is to stop; torch would send Ctrl-C, which is blocked.
        multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)
    try:
        ended = _Ended(function(Team(fabric.global_rank, fabric.world_size, fabric.device)))
        # All leave together: one whose partners have gone before may fail while it takes its connections down.
        with suppress(RuntimeError):
            distributed.barrier()
    except AnytimeError as error:  # as plain words: an exception with keywords does not travel between processes
        ended = _Ended(error=(error.got, error.expected, error.fix))
        if fabric.global_rank:  # what the leader gets of it is a lost connection
            print(f"anytime: process {fabric.global_rank}: {error}", file=sys.stderr, flush=True)
    except RuntimeError as error:
        if not _lost(error):
            raise
        ended = _Ended(error=("another process has ended before this one", "all to go on to the end", "mend what it said"))
    distributed.destroy_process_group()
    return ended


def _lost(error: RuntimeError) -> bool:
    """Whether it is that of a partner who has gone; gloo has no class for it."""
    return isinstance(error, distributed.DistError) or "gloo/transport" in str(error)


@contextmanager
def _on_this_machine() -> Iterator[None]:
    """Talk by the loopback interface, whatever the machine's name resolves to, and keep no port for the next time."""
    names = ("GLOO_SOCKET_IFNAME", "MASTER_PORT")
    before = {name: os.environ.get(name) for name in names}
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if not _started() and loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _listen(processes: int, device: str, work: Callable[[Team], Any], heard: list[int]) -> _Ended:
    """Begin the processes from a thread, and hand on to them what this process is told by signals meanwhile.

    A terminal sends Ctrl-C to all processes of a program. These are born with it blocked, and are asked to terminate from here
    alone: one that has not begun to train ends at once, and the leader of those that have stops after its step.
    """
    told: set[int | None] = set()
    before = {number: signal.signal(number, lambda number, frame: heard.append(number)) for number in _SIGNALS}
    try:
        with ThreadPoolExecutor(1, initializer=_block_interrupts) as threads:
            ended = threads.submit(_meet, processes, device, work)
            while not wait((ended,), timeout=0.1).done:
                if heard:  # torch would warn of the processes that are ended on purpose
                    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
                for child in active_children() if heard else ():
                    if len(heard) > 1:
                        child.kill()
                    elif child.pid not in told:
                        child.terminate()
                        told.add(child.pid)
            try:
                return ended.result()
            except (ProcessRaisedException, ProcessExitedException):
                if not heard:
                    raise
                if signal.SIGINT in heard:
                    raise KeyboardInterrupt from None
                came = "training was asked to terminate before it had begun"
                raise AnytimeError(came, expected="time to train", fix="begin again") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _block_interrupts() -> None:
    # A thread's processes are born with what it blocks. Python's tracker of semaphores unblocks Ctrl-C when it begins.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


class _JoinedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        distributed.all_reduce(total)
        return total


def _check(config: TrainConfig, machine: Hardware, team: Team) -> None:
    if config.batch % team.size:
        raise OptionError(
            f"batch is {config.batch} with {team.size} processes", expected="a multiple of processes", fix="change one of them"
        )
    if config.objective in _ALONE:
        raise OptionError(
            f"objective is {config.objective!r} with {team.size} processes", expected="one process", fix="leave processes at 1"
        )
    if machine.graph or machine.compile or machine.fused or machine.streams:
        raise OptionError(
            "graph, compile, fused or streams came with several processes",
            expected="the plain step, which exchanges gradients and statistics",
            fix="leave them off",
        )

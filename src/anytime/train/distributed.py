"""Data-parallel training: every rank runs the same loop on its part of each batch (DDP, through Lightning Fabric).

DDP averages the gradients, and batch norms use the statistics of the joined batch, so the losses equal those of one process
on the whole batch up to rounding. Rank 0 is the process that calls `launch`; it starts the other ranks, writes all files and
decides when to stop. `torchrun` starts the ranks itself, on one machine or on several.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import wait as multiprocessing_wait
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from anytime.errors import AnytimeError, MissingExtraError, OptionError
from anytime.safe_text import print_safely as print
from anytime.train.config import Hardware, TrainConfig
from anytime.train.stopping import ctrl_c_ignored

_TORCHRUN = "TORCHELASTIC_RUN_ID"
_SECONDS_TO_REPORT = 10.0


class Ranks:
    """The process group as this rank sees it: it has number `rank` of `size` and computes on `device`."""

    def __init__(self, fabric: Any) -> None:
        self._fabric = fabric
        self.rank: int = fabric.global_rank
        self.size: int = fabric.world_size
        self.device: torch.device = fabric.device
        # Decisions are exchanged on the CPU, so that they never wait for a GPU.
        self._control = distributed.new_group(backend="gloo")

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module in DDP, which averages the gradients over all ranks in `backward`."""
        wrapped: nn.Module = self._fabric.setup_module(module)
        return wrapped

    def backward(self, loss: Tensor) -> None:
        """Compute gradients, averaged over all ranks."""
        self._fabric.backward(loss)

    def mean(self, values: Tensor) -> Tensor:
        """The mean of `values` over all ranks."""
        total = values.clone()
        distributed.all_reduce(total)
        return total / self.size

    def maximum(self, number: int) -> int:
        """The largest `number` of all ranks."""
        value = torch.tensor([number])
        distributed.all_reduce(value, distributed.ReduceOp.MAX, group=self._control)
        return int(value)


class SyncBatchNorm(nn.Module):
    """A batch norm over the joined batch of all ranks, with the parameters and statistics of `norm`.

    `torch.nn.SyncBatchNorm` runs on GPUs only. This one also runs on a CPU, where two ranks are tested against one process.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: _BatchNorm, size: int) -> None:
        super().__init__()
        assert norm.momentum is not None  # `sync_norms` refuses it
        self.size, self.eps, self.momentum = size, norm.eps, norm.momentum
        self.weight, self.bias = norm.weight, norm.bias
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `(batch, channels, ...)` by mean and variance over the rows and positions of all ranks."""
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        values = x.float()
        positions = [0, *range(2, x.ndim)]
        shape = [1, -1] + [1] * (x.ndim - 2)
        count = self.size * x.numel() // x.shape[1]
        # Two passes: the difference of two large sums would lose digits.
        mean = _sum_over_ranks(values.sum(positions)) / count
        centred = values - mean.view(shape)
        variance = _sum_over_ranks(centred.square().sum(positions)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / max(count - 1, 1)), self.momentum)
        normal = centred * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(x.dtype)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.contiguous().clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _SumOverRanks.forward(ctx, gradient)


def _sum_over_ranks(values: Tensor) -> Tensor:
    """The sum over all ranks, differentiable: the gradient is summed too."""
    total: Tensor = _SumOverRanks.apply(values)  # type: ignore[no-untyped-call]
    return total


def sync_norms(network: nn.Module, size: int) -> None:
    """Replace each batch norm in training mode by a `SyncBatchNorm`."""
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm) and child.training and child.running_mean is not None:
                if child.momentum is None:
                    raise OptionError(
                        f"the batch norm {name} has momentum=None, and several processes train",
                        expected="a momentum, since statistics of all processes are averaged with it",
                        fix="set its momentum, such as 0.1, or train with one process",
                    )
                setattr(module, name, SyncBatchNorm(child, size))


def launch(
    processes: int,
    function: Callable[..., Any],
    *arguments: Any,
    device: str = "cpu",
    on_rank_zero: Mapping[str, Any] | None = None,
) -> Any:
    """Call `function(*arguments, ranks)` on every rank; returns the result of rank 0, which is this process.

    Under `torchrun` the ranks exist already, this process is one of them, and its own result is returned.

    Args:
        processes: Number of ranks; ignored under `torchrun`.
        function: A function at the top level of a module. It and its arguments are pickled for the other ranks.
        arguments: The arguments of `function`.
        device: `cpu` or `cuda`.
        on_rank_zero: Keyword arguments for the call on rank 0; they need not be picklable.
    """
    _fabric_package()
    here = partial(function, **(on_rank_zero or {})) if is_rank_zero() else function
    try:
        if _TORCHRUN in os.environ:
            return _run_rank(device, here, arguments)
        with _torchrun_variables(processes), _other_ranks(processes, device, function, arguments) as others:
            try:
                result = _run_rank(device, here, arguments)
            except RuntimeError as error:
                if not _is_lost_connection(error):
                    raise
                raise _failure(others) from error
            for process, pipe in others:
                pipe.send("done")
                process.join()
            return result
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


def is_rank_zero() -> bool:
    """Whether this process is rank 0: always, except under `torchrun` on all ranks but the first."""
    return _TORCHRUN not in os.environ or os.environ["RANK"] == "0"


def check_distributed(config: TrainConfig, hardware: Hardware, processes: int) -> None:
    """Refuse settings that several processes cannot train with."""
    if config.batch % processes:
        raise OptionError(
            f"batch is {config.batch} with {processes} processes",
            expected="a multiple of processes",
            fix=f"set batch={config.batch // processes * processes or processes}",
        )
    if config.objective == "l2w":
        raise OptionError(
            f"objective is 'l2w' with {processes} processes",
            expected="processes=1: L2W differentiates through the optimizer step, which DDP does not support",
            fix="set processes=1, or use another objective",
        )
    used = [name for name in ("graph", "compile", "streams") if getattr(hardware, name)]
    if used:
        raise OptionError(
            f"{' and '.join(used)} with {processes} processes",
            expected="the plain step, which exchanges gradients and batch norm statistics",
            fix="set " + " ".join(f"{name}=false" for name in used),
        )


def _fabric_package() -> Any:
    """Lightning Fabric, installed by itself or as a part of Lightning."""
    for name in ("lightning_fabric", "lightning.fabric"):
        with suppress(ImportError):
            return importlib.import_module(name)
    raise MissingExtraError(
        "processes is above 1, and lightning-fabric is not installed",
        expected="the package lightning-fabric",
        fix="pip install 'anytime-nn[train]', or set processes=1",
    )


def _run_rank(device: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Join the process group as the rank that torchrun's environment variables name, and call the function."""
    package = _fabric_package()
    strategies = importlib.import_module(f"{package.__name__}.strategies")
    logging.getLogger(package.__name__).setLevel(logging.WARNING)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = package.Fabric(
        accelerator="gpu" if device.startswith("cuda") else "cpu",
        devices=local,
        num_nodes=int(os.environ["WORLD_SIZE"]) // local,
        # A static graph also allows parameters that no exit reads.
        strategy=strategies.DDPStrategy(static_graph=True),
    )
    fabric.launch()
    return function(*arguments, Ranks(fabric))


@contextmanager
def _torchrun_variables(processes: int) -> Iterator[None]:
    """Set the environment variables of `torchrun` for rank 0 on this machine, and restore what Fabric changes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = str(processes)
    changed = {_TORCHRUN: "anytime", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": size}
    changed |= {"LOCAL_WORLD_SIZE": size, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:  # the host name may resolve to an address that is not reachable
        changed["GLOO_SOCKET_IFNAME"] = loopback.pop()
    before = {name: os.environ.get(name) for name in (*changed, "OMP_NUM_THREADS")}
    threads = torch.get_num_threads()
    os.environ.update(changed)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _other_ranks(
    processes: int, device: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Iterator[list[tuple[Any, Any]]]:
    """Start ranks 1, 2, ...; gives each process with a pipe to it. They are killed if this rank fails: they write no files."""
    context = multiprocessing.get_context("spawn")
    others: list[tuple[Any, Any]] = []
    try:
        with ctrl_c_ignored():  # the new processes inherit this: a terminal sends Ctrl-C to all, and rank 0 decides
            for rank in range(1, processes):
                here, there = context.Pipe()
                work = (rank, dict(os.environ), there, device, function, arguments)
                process = context.Process(target=_other_rank, args=work, daemon=True)
                process.start()
                there.close()
                others.append((process, here))
        for _, pipe in others:
            try:
                pipe.recv()  # without this, a rank that fails to start would leave the others waiting for it
            except EOFError:
                raise _failure(others) from None
        yield others
    finally:
        for process, _ in others:
            process.kill()


def _other_rank(
    rank: int, variables: dict[str, str], pipe: Any, device: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """The program of a rank that `_other_ranks` starts."""
    if hasattr(multiprocessing, "_prctl_pr_set_pdeathsig"):  # on Linux, end with rank 0 even if that is killed
        multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
    os.environ.update({**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    pipe.send("started")
    try:
        _run_rank(device, function, arguments)
        pipe.recv()  # keep the connections until rank 0 has finished
        distributed.destroy_process_group()
    except AnytimeError as error:
        if device.startswith("cuda"):  # NCCL aborts rank 0 before it can report this
            print(f"anytime: rank {rank}: {error}", file=sys.stderr, flush=True)
        pipe.send((error.got, error.expected, error.fix))
        sys.exit(2)
    except (EOFError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_lost_connection(error):
            raise
        sys.exit(1)


def _failure(others: list[tuple[Any, Any]]) -> AnytimeError:
    """The error that ended another rank, in its own words if it sent them."""
    multiprocessing_wait([process.sentinel for process, _ in others], _SECONDS_TO_REPORT)
    for rank, (_, pipe) in enumerate(others, 1):
        with suppress(EOFError):
            while pipe.poll():
                message = pipe.recv()
                if isinstance(message, tuple):
                    got, expected, fix = message
                    return AnytimeError(f"rank {rank}: {got}", expected=expected, fix=fix)
    codes = {rank: process.exitcode for rank, (process, _) in enumerate(others, 1) if process.exitcode is not None}
    ended = ", ".join(f"rank {rank} with exit code {code}" for rank, code in codes.items()) or "another rank"
    return AnytimeError(
        f"{ended} ended before the training was finished",
        expected="all ranks to run to the end",
        fix="see the messages above, then continue with --resume",
    )


def _is_lost_connection(error: RuntimeError) -> bool:
    return isinstance(error, distributed.DistError) or "gloo" in str(error)

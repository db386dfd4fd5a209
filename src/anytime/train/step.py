"""One training step as a function of fixed buffers: crop, forward, loss, backward, update.

The same code runs eagerly on a CPU and is captured as a CUDA graph on a GPU. It never reads a value back to the CPU and draws
no random numbers: the order and the crops of an epoch are drawn before it, on the CPU, from the seed and the epoch alone. So
both devices see the same batches, and a run can continue from any step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from anytime.data.augment import Draws, crop_flip, draw, no_draws, normalise
from anytime.data.base import ImageData
from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.train.config import Hardware, TrainConfig
from anytime.train.distributed import Ranks, check_distributed, sync_norms
from anytime.train.gpu.graph import Replayed, use_streams
from anytime.train.gpu.weights import TrainedWeights, optimizer_state
from anytime.train.objectives.losses import Objective
from anytime.train.schedule import default_sdn_weights, sdn_weights

_COUNTER = "num_batches_tracked"


class ExitLosses(nn.Module):
    """An objective on a network as one module, `(images, labels)` to the losses of all exits, which DDP can wrap."""

    objective: Objective

    def __init__(self, network: MultiExit) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of each exit, `(exits,)`."""
        return self.objective(self.network, images, labels)


class TrainStep:
    """A network in training, its data, and the step.

    Args:
        model: The caller's network, in float32. It is moved to the device; only `publish` changes its weights.
        data: Training images, moved to the device as a whole.
        objective: The loss to minimise; `minimise` changes it between steps.
        config: The recipe.
        hardware: Where and how to compute.
        ranks: The process group, if several processes train together.
    """

    def __init__(
        self,
        model: MultiExit,
        data: ImageData,
        objective: Objective,
        config: TrainConfig,
        hardware: Hardware,
        ranks: Ranks | None = None,
    ) -> None:
        if len(data) < config.batch:
            raise OptionError(
                f"batch is {config.batch} with {len(data)} training rows",
                expected=f"at most {len(data)}",
                fix="lower batch, or hold out fewer rows",
            )
        self.config, self.hardware, self.ranks = config, hardware, ranks
        rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        if ranks is not None:
            check_distributed(config, hardware, size)
        device = usable_device(hardware.device)
        self.model = model.to(device)
        self.network = copy.deepcopy(model).train()
        _freeze(self.network, config)
        _stop_counting(self.network)
        if hardware.streams:
            use_streams(self.network)
        if ranks is not None:
            sync_norms(self.network, size)
        self._dtype = getattr(torch, hardware.precision)
        self.weights = TrainedWeights(self.network, config, dtype=self._dtype, channels_last=hardware.channels_last)
        self.data = data.to(device)
        rows = config.batch // size
        self.rank_rows = slice(rank * rows, (rank + 1) * rows)
        self.rows = torch.zeros(rows, dtype=torch.int64, device=device)
        self.order = torch.zeros(len(data), dtype=torch.int64, device=device)
        self.draws = no_draws(len(data), device=device)
        self.losses = torch.zeros(model.num_exits, device=device)
        self.exit_weights = torch.ones(model.num_exits, device=device) if config.objective == "sdn" else None
        self._mean, self._std = (torch.tensor(getattr(data, name, ()), device=device) for name in ("mean", "std"))
        self._exit_losses = ExitLosses(self.network)
        self._forward: nn.Module = self._exit_losses if ranks is None else ranks.wrap(self._exit_losses)
        self.minimise(objective)

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches."""
        return len(self.data) // self.config.batch

    def minimise(self, objective: Objective) -> None:
        """Minimise `objective` from the next step on."""
        self._exit_losses.objective = torch.compile(objective, dynamic=False) if self.hardware.compile else objective
        self._run: Callable[[], None] = Replayed(self.run) if self.hardware.graph else self.run

    def begin(self, epoch: int) -> None:
        """Draw the order and the crops of an epoch."""
        seed = np.random.SeedSequence([self.config.seed, epoch]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(seed))
        self.order.copy_(torch.randperm(len(self.data), generator=generator))
        if self.config.augment:
            self.draws.copy_(draw(len(self.data), generator=generator))
        if self.exit_weights is not None:
            final = self.config.exit_weights or default_sdn_weights(self.network.num_exits)
            self.exit_weights.copy_(torch.tensor(sdn_weights(epoch, epochs=self.config.epochs, final=final)))

    def __call__(self, index: int, lr: float) -> None:
        """Train on batch `index` of this epoch with learning rate `lr`; the losses are added to `losses`."""
        batch = self.config.batch
        self.rows.copy_(self.order[index * batch : (index + 1) * batch][self.rank_rows])
        self.weights.set_lr(lr)
        self._run()

    def run(self) -> None:
        """The step itself, on the contents of the buffers."""
        losses = self._forward(*self.batch())
        self.descend(losses if self.exit_weights is None else losses * self.exit_weights)

    def batch(self) -> tuple[Tensor, Tensor]:
        """The network's input and the labels of this step."""
        pixels = self.pixels(self.rows, self.draws[self.rows])
        images = normalise(pixels, self._mean, self._std, dtype=self._dtype)
        memory_format = torch.channels_last if self.hardware.channels_last else torch.contiguous_format
        return images.contiguous(memory_format=memory_format), self.data.labels[self.rows]

    def pixels(self, rows: Tensor, draws: Draws) -> Tensor:
        """The images of `rows` as bytes, cropped and mirrored."""
        return crop_flip(self.data.images, rows, draws)

    def descend(self, losses: Tensor, *, fraction: float = 1.0) -> None:
        """Take one optimizer step on the sum of the losses, which are those of a `fraction` of a batch."""
        if self.ranks is None:
            # Parameters that no exit reads get a gradient of zero.
            gradients = torch.autograd.grad(losses.sum(), self.weights.parameters, materialize_grads=True)
        else:
            self.ranks.backward(losses.sum())
            gradients = tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in self.weights.parameters)
            self.network.zero_grad()
        self.weights.step(gradients)
        self.losses.add_(losses.detach(), alpha=fraction)

    @torch.no_grad()
    def publish(self, steps: int) -> None:
        """Copy weights and statistics, after `steps` steps, to the caller's model."""
        trained = self.weights.named
        for name, parameter in self.model.named_parameters():
            if name in trained:
                parameter.copy_(trained[name])
        statistics = dict(self.network.named_buffers())
        for name, buffer in self.model.named_buffers():
            if name in statistics:
                buffer.copy_(statistics[name])
            elif name.endswith(_COUNTER):
                buffer.fill_(steps)

    def optimizer_state(self) -> dict[str, Tensor]:
        """The state of the optimizer by name, for a checkpoint."""
        return optimizer_state(self.weights.optimizer, self.weights.named)

    @torch.no_grad()
    def adopt(self, optimizer: dict[str, Tensor], losses: Tensor) -> None:
        """Continue from the caller's model, an optimizer state and the losses of an unfinished epoch."""
        self.weights.load(dict(self.model.named_parameters()), optimizer)
        statistics = dict(self.model.named_buffers())
        for name, buffer in self.network.named_buffers():
            buffer.copy_(statistics[name])
        self.losses.copy_(losses)

    def mean_losses(self) -> Tensor:
        """The sum of the losses in this epoch so far per exit, as the mean over all ranks."""
        return self.losses if self.ranks is None else self.ranks.mean(self.losses)

    def take_losses(self) -> Tensor:
        """`mean_losses` on the CPU; the sum starts again from zero."""
        losses = self.mean_losses().to("cpu", copy=True)
        self.losses.zero_()
        return losses


def usable_device(name: str) -> torch.device:
    """The device of this name, if it is available and can train."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"device is {name!r}", expected="cpu, cuda or cuda:1", fix="give --device cpu or cuda") from error
    gpus = torch.cuda.device_count()
    if device.type == "meta" or (device.type == "cuda" and (device.index or 0) >= gpus):
        raise OptionError(
            f"device is {name!r}",
            expected=f"cpu, or one of the {gpus} GPUs that torch finds" if gpus else "cpu, as torch finds no GPU",
            fix="give --device cpu, or install a build of torch that supports the GPU",
        )
    return device


def _freeze(network: nn.Module, config: TrainConfig) -> None:
    for name in config.frozen:
        try:
            module = network.get_submodule(name)
        except AttributeError as error:
            known = ", ".join(child for child, _ in network.named_children())
            raise OptionError(
                f"frozen has {name!r}, which is not a module of {type(network).__name__}",
                expected=f"some of {known}, or modules within them",
                fix=f"remove {name!r} from frozen, or name one of these modules",
            ) from error
        module.requires_grad_(False)
        if config.hold_statistics:
            module.eval()


def _stop_counting(network: nn.Module) -> None:
    """Drop the step counters of batch norms: a moving average does not need them, and each costs a kernel launch."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.momentum is not None:
            module.num_batches_tracked = None

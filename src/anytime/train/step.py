"""One training step as a function of buffers that stay in place: crop, forward, loss, backward, update.

The same code runs eagerly on a CPU and is captured as a CUDA graph on a GPU. Nothing in it reads a value back to the
host or draws a random number: order and crops of an epoch are drawn before it, on the CPU, from the seed and the number
of the epoch alone. So both devices see the same batches, and a run can go on from any step.
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
from anytime.train.gpu.branches import run_side_by_side
from anytime.train.gpu.fused import fuse_norms
from anytime.train.gpu.graph import Replayed
from anytime.train.gpu.optimizers import Optimizer, optimizer_for
from anytime.train.gpu.weights import FlatWeights
from anytime.train.objectives.losses import Objective
from anytime.train.objectives.sdn import even_shares, growing_weights

_COUNTER = "num_batches_tracked"


class TrainStep:
    """A network in training, its data, and the step.

    Args:
        model: The caller's network, in float32; it is moved to the machine's device and changed by `publish` alone.
        data: Training images; they are moved to the device whole.
        objective: What is minimised; may be changed between steps with `minimise`.
        config: The recipe.
        machine: Where it runs.
    """

    def __init__(self, model: MultiExit, data: ImageData, objective: Objective, config: TrainConfig, machine: Hardware) -> None:
        if len(data) < config.batch:
            raise OptionError(
                f"a batch of {config.batch} came with {len(data)} images", expected="at least one batch", fix="lower batch"
            )
        self.config, self.machine = config, machine
        device = usable_device(machine.device)
        self.model = model.to(device)
        self.network = copy.deepcopy(model).train()
        _freeze(self.network, config)
        _stop_counting(self.network)
        if machine.streams:
            run_side_by_side(self.network)
        if machine.fused:
            fuse_norms(self.network)
        self._dtype = getattr(torch, machine.precision)
        self.weights = FlatWeights(self.network, rounded=self._dtype, channels_last=machine.channels_last)
        self.optimizer: Optimizer = optimizer_for(self.weights, config)
        self.data = data.to(device)
        self.rows = torch.zeros(config.batch, dtype=torch.int64, device=device)
        self.order = torch.zeros(len(data), dtype=torch.int64, device=device)
        self.draws = no_draws(len(data), device=device)
        self.losses = torch.zeros(model.num_exits, device=device)
        self.exit_weights = torch.ones(model.num_exits, device=device) if config.objective == "sdn" else None
        self._mean, self._std = (torch.tensor(values, device=device) for values in (data.mean, data.std))
        self.minimise(objective)

    @property
    def steps_per_epoch(self) -> int:
        """How many full batches there are."""
        return len(self.data) // self.config.batch

    def minimise(self, objective: Objective) -> None:
        """Minimise this from the next step on."""
        self._objective = torch.compile(objective, dynamic=False) if self.machine.compile else objective
        self._run: Callable[[], None] = Replayed(self.run) if self.machine.graph else self.run

    def begin(self, epoch: int) -> None:
        """Draw the order and the crops of an epoch."""
        seed = np.random.SeedSequence([self.config.seed, epoch]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(seed))
        self.order.copy_(torch.randperm(len(self.data), generator=generator))
        if self.config.augment:
            self.draws.copy_(draw(len(self.data), generator=generator))
        if self.exit_weights is not None:
            shares = self.config.exit_weights or even_shares(self.network.num_exits)
            weights = growing_weights(epoch, epochs=self.config.epochs, shares=shares)
            self.exit_weights.copy_(torch.tensor(weights))

    def __call__(self, index: int, lr: float) -> None:
        """Train on batch `index` of this epoch with rate `lr`; the losses are added to `losses`."""
        batch = self.config.batch
        self.rows.copy_(self.order[index * batch : (index + 1) * batch])
        self.optimizer.lr.fill_(lr)
        self._run()

    def run(self) -> None:
        """The step itself, on what lies in the buffers."""
        images, labels = self.batch()
        losses = self._objective(self.network, images, labels)
        self.descend(losses if self.exit_weights is None else losses * self.exit_weights)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Images, as the network sees them, and labels of the rows of this step."""
        return self.images(self.rows, self.draws[self.rows]), self.data.labels[self.rows]

    def descend(self, losses: Tensor, *, share: float = 1.0) -> None:
        """One step of the optimiser down the sum of the losses; they count as a `share` of a batch in `losses`."""
        # Parameters that no exit reads get a gradient of zero.
        gradients = torch.autograd.grad(losses.sum(), self.weights.parameters, materialize_grads=True)
        self.weights.collect(gradients)
        self.share_gradient()
        self.optimizer.step()
        self.losses.add_(losses.detach(), alpha=share)

    def share_gradient(self) -> None:
        """Where several processes train one network: make one gradient of theirs."""

    def images(self, rows: Tensor, draws: Draws) -> Tensor:
        """Training images as the network sees them."""
        bytes_ = crop_flip(self.data.images, rows, draws)
        images = normalise(bytes_, self._mean, self._std, dtype=self._dtype)
        return images.contiguous(memory_format=torch.channels_last) if self.machine.channels_last else images

    @torch.no_grad()
    def publish(self, steps: int) -> None:
        """Copy weights and statistics to the caller's model, which has then been trained for `steps` steps."""
        trained = self.weights.named()
        for name, parameter in self.model.named_parameters():
            if name in trained:
                parameter.copy_(trained[name])
        statistics = dict(self.network.named_buffers())
        for name, buffer in self.model.named_buffers():
            if name in statistics:
                buffer.copy_(statistics[name])
            elif name.endswith(_COUNTER):
                buffer.fill_(steps)

    @torch.no_grad()
    def adopt(self, optimizer: dict[str, Tensor], losses: Tensor) -> None:
        """Go on from the caller's model, with this state of the optimiser and these losses of an unfinished epoch."""
        self.weights.load(self.weights.master, dict(self.model.named_parameters()))
        self.optimizer.load(optimizer)
        self.weights.refresh()
        statistics = dict(self.model.named_buffers())
        for name, buffer in self.network.named_buffers():
            buffer.copy_(statistics[name])
        self.losses.copy_(losses)

    def take_losses(self) -> Tensor:
        """The sum of the losses since last asked, per exit, on the host."""
        losses = self.losses.to("cpu", copy=True)
        self.losses.zero_()
        return losses


def usable_device(name: str) -> torch.device:
    """The device of this name, if it is here and can train."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"device is {name!r}", expected="cpu, cuda or cuda:1", fix="correct device") from error
    gpus = torch.cuda.device_count()
    if device.type == "meta" or (device.type == "cuda" and (device.index or 0) >= gpus):
        raise OptionError(
            f"device is {name!r}",
            expected=f"cpu, or one of the {gpus} GPUs that torch finds" if gpus else "cpu, as torch finds no GPU",
            fix="give --device cpu, or install a torch that knows the GPU",
        )
    return device


def _freeze(network: nn.Module, config: TrainConfig) -> None:
    for name in config.frozen:
        try:
            module = network.get_submodule(name)
        except AttributeError as error:
            known = ", ".join(child for child, _ in network.named_children())
            raise OptionError(
                f"frozen names {name!r}, which {type(network).__name__} does not have",
                expected=f"some of {known}, or modules within them",
                fix="correct frozen",
            ) from error
        module.requires_grad_(False)
        if config.hold_statistics:
            module.eval()


def _stop_counting(network: nn.Module) -> None:
    """Batch norms that keep a moving average do not need their count, and counting is a launch for each."""
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.momentum is not None:
            module.num_batches_tracked = None

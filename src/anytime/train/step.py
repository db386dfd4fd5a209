"""What all training steps share: a network, its weights and optimizer, an objective and its losses.

Where the batches come from is up to the subclasses: rows on the device (`anytime.train.data.rows`), or a loader
(`anytime.train.data.batches`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anytime.checks import Inputs
from anytime.errors import OptionError
from anytime.train.average import WeightAverage
from anytime.train.config import Hardware, TrainConfig
from anytime.train.distributed import Ranks
from anytime.train.gpu.graph import Replayed
from anytime.train.gpu.weights import TrainedWeights, optimizer_state
from anytime.train.objectives.losses import Objective, smooth_labels
from anytime.train.schedule import default_sdn_weights, sdn_weights

_COUNTER = "num_batches_tracked"
_TRAINED, _UPDATES = "trained.", "average.updates"


class ExitLosses(nn.Module):
    """An objective on a network as one module, `(inputs, labels)` to the losses of all exits, which DDP can wrap."""

    objective: Objective

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Any, labels: Tensor) -> Tensor:
        """The loss of each exit, `(exits,)`."""
        network: Any = self.network
        return self.objective(network, inputs, labels)


class TrainStep(ABC):
    """A network in training: what the loop and checkpoints need.

    Args:
        model: The caller's network. Unless it is `network` itself, only `publish` changes its weights.
        network: The network that is trained, in train mode and on its device.
        objective: The loss to minimise; `minimise` changes it between steps.
        config: The recipe.
        hardware: Where and how to compute.
        ranks: The process group, if several processes train together.
        dtype: Element type of the network's convolutions and linear layers.

    Attributes:
        inputs: How many inputs were trained on by this object.
    """

    def __init__(
        self,
        model: Any,
        network: Any,
        objective: Objective,
        config: TrainConfig,
        hardware: Hardware,
        ranks: Ranks | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.network = model, network
        self.config, self.hardware, self.ranks = config, hardware, ranks
        self.device = torch.device(hardware.device)
        self.inputs = 0
        self.weights = TrainedWeights(network, config, dtype=dtype, channels_last=hardware.channels_last)
        self.losses = torch.zeros(model.num_exits, device=self.device)
        self.exit_weights = torch.ones(model.num_exits, device=self.device) if config.objective == "sdn" else None
        self.average = WeightAverage(self._state(), decay=config.average_decay) if config.average_decay else None
        self._exit_losses = ExitLosses(network)
        self._forward: nn.Module = self._exit_losses if ranks is None else ranks.wrap(self._exit_losses)
        self.minimise(objective)

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """The number of steps in an epoch."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """The number of inputs of a step, over all ranks; of the latest step if they differ."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What a checkpoint says of the data; a run continues only on data with the same identity."""

    @abstractmethod
    def batch(self) -> tuple[Inputs, Tensor]:
        """The network's input and the labels of this step."""

    def minimise(self, objective: Objective) -> None:
        """Minimise `objective` from the next step on."""
        self._exit_losses.objective = torch.compile(objective, dynamic=False) if self.hardware.compile else objective
        self._run: Callable[[], None] = Replayed(self.run) if self.hardware.graph else self.run

    def begin(self, epoch: int) -> None:
        """Prepare an epoch."""
        if self.exit_weights is not None:
            final = self.config.exit_weights or default_sdn_weights(self.network.num_exits)
            self.exit_weights.copy_(torch.tensor(sdn_weights(epoch, epochs=self.config.epochs, final=final)))

    def __call__(self, index: int, lr: float) -> None:
        """Train on batch `index` of this epoch with learning rate `lr`; the losses are added to `losses`."""
        self.weights.set_lr(lr)
        self._run()
        if self.average is not None:
            self.average.update()
        self.inputs += self.batch_size

    def run(self) -> None:
        """The step itself, on the batch."""
        losses = self._forward(*self.batch())
        self.descend(losses if self.exit_weights is None else losses * self.exit_weights)

    def descend(self, losses: Tensor, *, fraction: float = 1.0) -> None:
        """Take one optimizer step on the sum of the losses, which are those of a `fraction` of a batch."""
        if self.ranks is None:
            # Parameters that no exit reads get a gradient of zero.
            gradients = torch.autograd.grad(losses.sum(), self.weights.parameters, materialize_grads=True)
        else:
            self.ranks.backward(losses.sum())
            gradients = tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in self.weights.parameters)
            self.network.zero_grad()
        if self.config.clip_norm is not None:
            norm = torch.nn.utils.get_total_norm(gradients)
            scale = (self.config.clip_norm / norm.clamp(min=1e-12)).clamp(max=1)
            gradients = tuple(gradient * scale.to(gradient.dtype) for gradient in gradients)
        self.weights.step(gradients)
        self.losses.add_(losses.detach(), alpha=fraction)

    def targets(self, labels: Tensor, classes: int) -> Tensor:
        """What the objective compares with: the labels, or probabilities of the classes if the recipe smooths or mixes them."""
        config = self.config
        soft = config.label_smoothing or config.strong_augment.mixes
        return smooth_labels(labels, classes, smoothing=config.label_smoothing) if soft else labels

    @torch.no_grad()
    def publish(self, steps: int) -> None:
        """Copy weights and statistics, or their average, after `steps` steps to the caller's model."""
        if self.network is self.model:
            return
        average = {} if self.average is None else self.average.values
        trained = {**self.weights.named, **average}
        for name, parameter in self.model.named_parameters():
            if name in trained:
                parameter.copy_(trained[name])
        statistics = {**dict(self.network.named_buffers()), **average}
        for name, buffer in self.model.named_buffers():
            if name in statistics:
                buffer.copy_(statistics[name])
            elif name.endswith(_COUNTER):
                buffer.fill_(steps)

    def optimizer_state(self) -> dict[str, Tensor]:
        """The state of the optimizer by name, for a checkpoint; with an average, also the weights, which are not published."""
        state = optimizer_state(self.weights.optimizer, self.weights.named)
        if self.average is None:
            return state
        trained = {_TRAINED + name: value for name, value in self.average.weights.items()}
        return {**state, **trained, _UPDATES: torch.tensor(self.average.updates)}

    @torch.no_grad()
    def adopt(self, optimizer: dict[str, Tensor], losses: Tensor) -> None:
        """Continue from the caller's model, an optimizer state and the losses of an unfinished epoch."""
        values = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        if self.average is not None:
            self.average.load(values, updates=int(optimizer[_UPDATES]))
            values |= {name: optimizer[_TRAINED + name] for name in self.average.values}
        own = {name: value for name, value in optimizer.items() if name != _UPDATES and not name.startswith(_TRAINED)}
        self.weights.load(values, own)
        for name, buffer in self.network.named_buffers():
            buffer.copy_(values[name])
        self.losses.copy_(losses)

    def _state(self) -> dict[str, Tensor]:
        """The trained weights and the statistics, by name; they change in place."""
        statistics = {name: buffer for name, buffer in self.network.named_buffers() if buffer.is_floating_point()}
        return {**self.weights.named, **statistics}

    def mean_losses(self) -> Tensor:
        """The sum of the losses in this epoch so far per exit, as the mean over all ranks."""
        return self.losses if self.ranks is None else self.ranks.mean(self.losses)

    def take_losses(self) -> Tensor:
        """`mean_losses` on the CPU; the sum starts again from zero."""
        losses = self.mean_losses().to("cpu", copy=True)
        self.losses.zero_()
        return losses


def seed_of(*path: int) -> int:
    """A seed derived from others: that of the run, then the epoch, the purpose, the step."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0])


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Afterwards every module has its mode, and every parameter its `requires_grad`, of before."""
    modes = [(module, module.training) for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)


def usable_device(name: str) -> torch.device:
    """The device of this name, if it is available and can train."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(
            f"device is {name!r}", expected="cpu, cuda or cuda:1", fix="set device to cpu or cuda (--device cpu)"
        ) from error
    gpus = torch.cuda.device_count()
    if device.type == "meta" or (device.type == "cuda" and (device.index or 0) >= gpus):
        raise OptionError(
            f"device is {name!r}",
            expected=f"cpu, or one of the {gpus} GPUs that torch finds" if gpus else "cpu, as torch finds no GPU",
            fix="set device to cpu (--device cpu), or install a build of torch that supports the GPU",
        )
    return device


def freeze(network: nn.Module, config: TrainConfig) -> None:
    """Freeze the modules that a recipe names."""
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

"""L2W, learning to weight samples (Han et al. 2022): a small network gives each sample a weight at each exit.

At inference easy samples leave early and hard ones late, yet plain training shows all samples to all exits alike. Here a
weight network turns a sample's losses into weights. It learns by looking ahead: a weighted step on one half of the batch,
kept differentiable, is evaluated on the other half, where each exit is responsible only for the samples that would leave
there. Then the real step is taken with the new weights, and the halves swap roles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.policy import exit_fractions
from anytime.train.config import L2W, Centring, Hardware, TrainConfig
from anytime.train.data.rows import RowsStep
from anytime.train.gpu.graph import Replayed
from anytime.train.gpu.weights import load_optimizer_state, optimizer_state, set_lr
from anytime.train.objectives.losses import Objective, at_least_float32

_HIDDEN = 500
_PREFIX = "weigher."


class Half(NamedTuple):
    """Half a batch: the network's input, and `(samples,)` labels."""

    images: Tensor
    labels: Tensor


class WeightNetwork(nn.Sequential):
    """From a sample's losses at all exits, `(samples, exits)`, to a number between -1 and 1 for each."""

    def __init__(self, exits: int) -> None:
        super().__init__(nn.Linear(exits, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, exits), nn.Tanh())


def centre(values: Tensor, mode: Centring) -> Tensor:
    """`(samples, exits)` minus the mean of all (`mat`), of each sample over the exits (`col`) or of each exit (`row`).

    >>> centre(torch.tensor([[0.0, 1.0], [2.0, 5.0]]), "col").tolist()
    [[-0.5, 0.5], [-1.5, 1.5]]
    """
    if mode == "mat":
        return values - values.mean()
    return values - values.mean(1 if mode == "col" else 0, keepdim=True)


def sample_weights(weigher: nn.Module, losses: Tensor, settings: L2W) -> Tensor:
    """The weight of each sample at each exit, `(samples, exits)`, from its losses there; no gradient flows to the losses."""
    weights: Tensor = 1 + settings.strength * centre(weigher(losses.detach()), settings.centring)
    return weights


def assign(confidence: Tensor, fractions: tuple[float, ...]) -> tuple[Tensor, ...]:
    """The samples that leave at each exit: the most confident of those left, a given fraction of all; the last takes the rest.

    Args:
        confidence: The confidence of each exit, `(exits, samples)`.
        fractions: One fraction of all samples per exit; the counts are rounded down.

    Returns:
        One tensor of sample indices per exit; each sample occurs once.
    """
    samples = confidence.shape[1]
    left = torch.arange(samples, device=confidence.device)
    leaving = []
    for own, fraction in zip(confidence[:-1], fractions, strict=False):
        count = math.floor(samples * fraction)
        left = left[own[left].argsort(descending=True, stable=True)]
        leaving.append(left[:count])
        left = left[count:]
    return (*leaving, left)


def meta_loss(
    network: MultiExit,
    weigher: nn.Module,
    weights: Mapping[str, Tensor],
    velocity: Mapping[str, Tensor],
    halves: tuple[Half, Half],
    *,
    lr: float | Tensor,
    config: TrainConfig,
) -> Tensor:
    """The loss on the second half after a weighted step on the first, as a function of the weight network.

    The network and its statistics do not change. Everything but the gradient of the first half is a constant.

    Args:
        network: The network, in training mode.
        weigher: The weight network.
        weights: The trained parameters by name, in float32.
        velocity: The optimizer's momentum buffers by name.
        halves: The half to step on, and the half to evaluate on.
        lr: The learning rate of the step.
        config: Momentum, decay, and the settings of L2W.
    """
    first, second = halves
    parameters = {name: parameter for name, parameter in network.named_parameters() if name in weights}
    losses = cross_entropies(_with_copied_statistics(network, {}, first.images), first.labels)
    weighted = (sample_weights(weigher, losses, config.l2w) * losses).mean(0).sum()
    gradients = torch.autograd.grad(weighted, list(parameters.values()), create_graph=True)
    ahead = {}
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        current = weights[name].detach()
        change = config.momentum * velocity[name] + gradient + config.weight_decay * current
        ahead[name] = (current - lr * change).to(parameter.dtype)
    return _assigned_loss(_with_copied_statistics(network, ahead, second.images), second.labels, config.l2w)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each sample at each exit, `(samples, exits)`."""
    exits, samples, classes = logits.shape
    flat = F.cross_entropy(at_least_float32(logits).reshape(-1, classes), labels.repeat(exits), reduction="none")
    return flat.view(exits, samples).T


class L2WStep(RowsStep):
    """A training step of L2W: two optimizer steps per batch, each on a half, each after a step of the weight network.

    The look-ahead differentiates through a gradient, which streams do not support.
    """

    def __init__(
        self, model: MultiExit, data: Any, objective: Objective, config: TrainConfig, hardware: Hardware, *rest: Any
    ) -> None:
        _check(config, hardware)
        super().__init__(model, data, objective, config, hardware, *rest)
        device = self.rows.device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.weigher = WeightNetwork(model.num_exits).to(device)
        # On a GPU the learning rate is a tensor there, so that it can change between replays of a captured step.
        on_gpu = device.type == "cuda"
        lr = torch.zeros((), device=device) if on_gpu else 0.0
        decay = config.l2w.meta_weight_decay
        self.meta_optimizer = torch.optim.Adam(self.weigher.parameters(), lr, weight_decay=decay, capturable=on_gpu)
        self._meta = True

    def minimise(self, objective: Objective) -> None:
        """Minimise `objective` from the next step on; steps with and without a meta step are captured separately."""
        super().minimise(objective)
        self._runs: dict[bool, Callable[[], None]] = {True: self._run}
        self._runs[False] = Replayed(self.run) if self.hardware.graph else self.run

    def __call__(self, index: int, lr: float) -> None:
        settings = self.config.l2w
        self._meta = index % settings.meta_every == 0
        self._run = self._runs[self._meta]
        set_lr(self.meta_optimizer, settings.meta_lr * lr / self.config.lr)
        super().__call__(index, lr)

    def run(self) -> None:
        images, labels = self.batch()
        first, second = (Half(*parts) for parts in zip(images.chunk(2), labels.chunk(2), strict=True))
        for halves in ((first, second), (second, first)):
            if self._meta:
                self._meta_step(halves)
            self.descend(self._weighted(halves[0]), fraction=0.5)

    def optimizer_state(self) -> dict[str, Tensor]:
        weigher = dict(self.weigher.named_parameters())
        meta = {**{name: p.detach() for name, p in weigher.items()}, **optimizer_state(self.meta_optimizer, weigher)}
        return {**super().optimizer_state(), **{_PREFIX + name: value for name, value in meta.items()}}

    @torch.no_grad()
    def adopt(self, optimizer: dict[str, Tensor], losses: Tensor) -> None:
        meta = {name.removeprefix(_PREFIX): value for name, value in optimizer.items() if name.startswith(_PREFIX)}
        weigher = dict(self.weigher.named_parameters())
        for name, parameter in weigher.items():
            parameter.copy_(meta.pop(name))
        load_optimizer_state(self.meta_optimizer, weigher, meta)
        super().adopt({name: value for name, value in optimizer.items() if not name.startswith(_PREFIX)}, losses)

    def _meta_step(self, halves: tuple[Half, Half]) -> None:
        """One step of the weight network."""
        weights, parameters = self.weights, list(self.weigher.parameters())
        states = {name: weights.optimizer.state[weight] for name, weight in weights.named.items()}
        velocity = {name: state.get("momentum_buffer", weights.named[name].new_zeros(())) for name, state in states.items()}
        loss = meta_loss(self.network, self.weigher, weights.named, velocity, halves, lr=weights.lr, config=self.config)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        self.meta_optimizer.step()

    def _weighted(self, half: Half) -> Tensor:
        losses = cross_entropies(torch.stack(tuple(self.network.exits(half.images))), half.labels)
        with torch.no_grad():
            weights = sample_weights(self.weigher, losses, self.config.l2w)
        return (weights * losses).mean(0)


def _with_copied_statistics(network: MultiExit, parameters: dict[str, Tensor], images: Tensor) -> Tensor:
    """The logits with other parameters, and with copies of the batch norm statistics, which a forward pass changes."""
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    logits: Tensor = functional_call(network, {**parameters, **buffers}, (images,))
    return logits


def _assigned_loss(logits: Tensor, labels: Tensor, settings: L2W) -> Tensor:
    losses = cross_entropies(logits, labels)
    confidence = at_least_float32(logits.detach()).softmax(-1).amax(-1)
    groups = assign(confidence, tuple(exit_fractions(settings.ratio, len(logits)).tolist()))
    return torch.stack([losses[:, exit].index_select(0, rows).mean() for exit, rows in enumerate(groups) if len(rows)]).sum()


def _check(config: TrainConfig, hardware: Hardware) -> None:
    used = [name for name in ("compile", "streams") if getattr(hardware, name)]
    if used:
        raise OptionError(
            f"objective is 'l2w' with {' and '.join(used)}",
            expected="neither compile nor streams: they do not support a gradient of a gradient",
            fix="set " + " ".join(f"{name}=false" for name in used),
        )
    if config.label_smoothing or config.strong_augment.mixes:
        raise OptionError(
            "objective is 'l2w' with label_smoothing, mixup or cutmix",
            expected="one label per sample, to whose loss L2W gives a weight",
            fix="set label_smoothing=0, and neither mixup nor cutmix in strong_augment",
        )
    if config.nesterov or config.batch % 2 or config.optimizer != "sgd" or config.clip_norm is not None:
        raise OptionError(
            f"objective is 'l2w' with optimizer={config.optimizer}, nesterov={config.nesterov}, batch={config.batch} and "
            f"clip_norm={config.clip_norm}",
            expected="SGD with plain momentum, which the look-ahead repeats, and an even batch",
            fix="set optimizer=sgd, nesterov=false, clip_norm=null and an even batch",
        )

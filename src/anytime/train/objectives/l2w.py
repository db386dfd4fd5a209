"""L2W, learning to weigh samples (Han et al. 2022): a small network gives each sample a weight at each exit.

Easy samples leave early and hard ones late when the network is used, yet plain training shows all samples to all exits alike.
Here a weight network turns a sample's losses into weights. It learns by looking ahead: a weighted step on one half of the
batch, kept differentiable, is judged on the other half, where each exit answers only for the samples it would be given. Then
the true step is taken with the new weights, and the halves change places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from anytime.data.base import ImageData
from anytime.errors import OptionError
from anytime.models.base import MultiExit
from anytime.policy import exit_fractions
from anytime.train.config import L2W, Centring, Hardware, TrainConfig
from anytime.train.gpu.graph import Replayed
from anytime.train.gpu.optimizers import SGD
from anytime.train.gpu.weights import FlatWeights
from anytime.train.objectives.losses import Objective, at_least_float32
from anytime.train.step import TrainStep

_HIDDEN = 500
_PREFIX = "weigher."


class Half(NamedTuple):
    """Half a batch: images as the network sees them, and `(samples,)` labels."""

    images: Tensor
    labels: Tensor


class WeightNetwork(nn.Sequential):
    """From a sample's losses at all exits, `(samples, exits)`, to a number between -1 and 1 for each."""

    def __init__(self, exits: int) -> None:
        super().__init__(nn.Linear(exits, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, exits), nn.Tanh())


def centre(values: Tensor, mode: Centring) -> Tensor:
    """`(samples, exits)` less their mean over all (`mat`), over a sample's exits (`col`) or over an exit's samples (`row`).

    >>> centre(torch.tensor([[0.0, 1.0], [2.0, 5.0]]), "col").tolist()
    [[-0.5, 0.5], [-1.5, 1.5]]
    """
    if mode == "mat":
        return values - values.mean()
    return values - values.mean(1 if mode == "col" else 0, keepdim=True)


def sample_weights(weigher: nn.Module, losses: Tensor, settings: L2W) -> Tensor:
    """The weight of each sample at each exit, `(samples, exits)`, from its losses there, to which no gradient goes."""
    weights: Tensor = 1 + settings.strength * centre(weigher(losses.detach()), settings.centring)
    return weights


def assign(confidence: Tensor, shares: tuple[float, ...]) -> tuple[Tensor, ...]:
    """Which samples leave at each exit: its share of those it is most sure of among those still there, the last the rest.

    Args:
        confidence: Of each exit in its own answer, `(exits, samples)`.
        shares: One an exit, of all samples, rounded down.

    Returns:
        One tensor of sample numbers an exit; together they hold each sample once.
    """
    samples = confidence.shape[1]
    left = torch.arange(samples, device=confidence.device)
    leaving = []
    for own, share in zip(confidence[:-1], shares, strict=False):
        count = math.floor(samples * share)
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

    Neither the network nor its statistics change. All but the gradient of the first half counts as constant.

    Args:
        network: In training mode.
        weigher: Gives the weights.
        weights: The trained parameters by name, in full precision.
        velocity: The optimiser's momentum buffer by name.
        halves: The one stepped on, and the one that judges.
        lr: The rate of the step.
        config: Momentum, decay, and the settings of L2W.
    """
    first, second = halves
    parameters = {name: parameter for name, parameter in network.named_parameters() if name in weights}
    losses = cross_entropies(_with_spare_statistics(network, {}, first.images), first.labels)
    weighted = (sample_weights(weigher, losses, config.l2w) * losses).mean(0).sum()
    gradients = torch.autograd.grad(weighted, list(parameters.values()), create_graph=True)
    ahead = {}
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        here = weights[name].detach()
        change = config.momentum * velocity[name] + gradient + config.weight_decay * here
        ahead[name] = (here - lr * change).to(parameter.dtype)
    return _assigned_loss(_with_spare_statistics(network, ahead, second.images), second.labels, config.l2w)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of each sample at each exit, `(samples, exits)`."""
    exits, samples, classes = logits.shape
    flat = F.cross_entropy(at_least_float32(logits).reshape(-1, classes), labels.repeat(exits), reduction="none")
    return flat.view(exits, samples).T


class TwoOptimizers(SGD):
    """Gradient descent for the network, and Adam for the weight network; `state` holds all that both need to go on."""

    def __init__(self, weights: FlatWeights, config: TrainConfig, *, exits: int) -> None:
        super().__init__(weights, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.weigher = WeightNetwork(exits).to(weights.master.device)
        self.meta_lr = torch.tensor(config.l2w.meta_lr, device=weights.master.device)
        # On a GPU its count of steps and its rate lie there too, so that a captured step can move them.
        self._steps_at = weights.master.device if weights.master.is_cuda else torch.device("cpu")
        self.adam = torch.optim.Adam(
            self.weigher.parameters(),
            lr=self.meta_lr,
            weight_decay=config.l2w.meta_weight_decay,
            capturable=weights.master.is_cuda,
        )

    def meta_step(self, loss: Tensor) -> None:
        """Move the weight network down `loss`, at a rate that falls as the network's own does."""
        parameters = list(self.weigher.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        self.adam.step()

    def state(self) -> dict[str, Tensor]:
        state = super().state()
        for name, parameter in self.weigher.named_parameters():
            state[_PREFIX + name] = parameter.detach()
            for moment, value in self.adam.state.get(parameter, {}).items():
                state[f"{_PREFIX}{name}.{moment}"] = value
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        super().load(state)
        for name, parameter in self.weigher.named_parameters():
            own = _PREFIX + name
            parameter.copy_(state[own])
            moments = {key.removeprefix(f"{own}."): value for key, value in state.items() if key.startswith(f"{own}.")}
            self.adam.state[parameter] = {
                moment: value.to(self._steps_at if moment == "step" else parameter.device, copy=True)
                for moment, value in moments.items()
            }


class WeighedStep(TrainStep):
    """A training step of L2W: two steps of the optimiser a batch, each on a half, with one of the weight network before.

    The look-ahead differentiates through a gradient, which fused norms and parts on streams of their own cannot.
    """

    optimizer: TwoOptimizers

    def __init__(self, model: MultiExit, data: ImageData, objective: Objective, config: TrainConfig, machine: Hardware) -> None:
        _check(config, machine)
        super().__init__(model, data, objective, config, machine)
        self.optimizer = TwoOptimizers(self.weights, config, exits=model.num_exits)
        self._meta = True

    def minimise(self, objective: Objective) -> None:
        """Minimise this from the next step on; steps with and without one of the weight network are captured apart."""
        super().minimise(objective)
        self._runs: dict[bool, Callable[[], None]] = {True: self._run}
        self._runs[False] = Replayed(self.run) if self.machine.graph else self.run

    def __call__(self, index: int, lr: float) -> None:
        settings = self.config.l2w
        self._meta = index % settings.meta_every == 0
        self._run = self._runs[self._meta]
        self.optimizer.meta_lr.fill_(settings.meta_lr * lr / self.config.lr)
        super().__call__(index, lr)

    def run(self) -> None:
        images, labels = self.batch()
        first, second = (Half(*parts) for parts in zip(images.chunk(2), labels.chunk(2), strict=True))
        for halves in ((first, second), (second, first)):
            if self._meta:
                self.optimizer.meta_step(self._judged(halves))
            self.descend(self._weighted(halves[0]), share=0.5)

    def _judged(self, halves: tuple[Half, Half]) -> Tensor:
        both, weights = self.optimizer, self.weights
        velocity = weights.named(both.velocity)
        return meta_loss(self.network, both.weigher, weights.named(), velocity, halves, lr=both.lr, config=self.config)

    def _weighted(self, half: Half) -> Tensor:
        losses = cross_entropies(torch.stack(tuple(self.network.exits(half.images))), half.labels)
        with torch.no_grad():
            weights = sample_weights(self.optimizer.weigher, losses, self.config.l2w)
        return (weights * losses).mean(0)


def _with_spare_statistics(network: MultiExit, parameters: dict[str, Tensor], images: Tensor) -> Tensor:
    """The logits with other parameters, and with copies of the batch norms' statistics, as training moves these."""
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    logits: Tensor = functional_call(network, {**parameters, **buffers}, (images,))
    return logits


def _assigned_loss(logits: Tensor, labels: Tensor, settings: L2W) -> Tensor:
    losses = cross_entropies(logits, labels)
    confidence = at_least_float32(logits.detach()).softmax(-1).amax(-1)
    groups = assign(confidence, tuple(exit_fractions(settings.ratio, len(logits)).tolist()))
    judged = [losses[:, exit].index_select(0, rows).mean() for exit, rows in enumerate(groups) if len(rows)]
    return torch.stack(judged).sum()


def _check(config: TrainConfig, machine: Hardware) -> None:
    if machine.compile or machine.fused or machine.streams:
        raise OptionError(
            "l2w came with compilation, fused norms or streams",
            expected="none of them: its look-ahead differentiates through a gradient, which they cannot",
            fix="leave compile, fused and streams off",
        )
    if config.nesterov or config.batch % 2 or config.optimizer != "sgd":
        raise OptionError(
            f"l2w came with optimizer={config.optimizer}, nesterov={config.nesterov} and a batch of {config.batch}",
            expected="sgd with plain momentum, which its look-ahead repeats, and a batch that can be halved",
            fix="set optimizer=sgd, nesterov=False and an even batch",
        )

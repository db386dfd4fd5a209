"""The float32 weights that the optimizer updates, and the bfloat16 copies that the network computes with.

In bfloat16 the parameters of convolutions and linear layers are copies of float32 weights and refreshed after each step; all
others, such as those of batch norms, are float32 themselves. Optimizers are those of `torch.optim`. On a GPU they are fused,
with the learning rate in a tensor, so that it can change between replays of a captured step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anytime.errors import DtypeError, OptionError
from anytime.train.config import TrainConfig

_ROUNDED = (nn.Conv1d, nn.Conv2d, nn.Linear)
# Modules that are new where the rest is pretrained. A pooler is not among them: every exit reads it.
_HEADS = ("heads", "mixes", "classifier")


class TrainedWeights:
    """The trainable parameters of a network, their float32 weights, and the optimizer.

    Args:
        network: The network, on its device.
        config: The recipe.
        dtype: Element type of convolutions and linear layers.
        channels_last: Whether filters use the channels-last memory format.

    Attributes:
        parameters: The network's parameters, in the order of the gradients that `step` takes.
        named: The float32 weights by name, in the same order.
    """

    def __init__(
        self, network: nn.Module, config: TrainConfig, *, dtype: torch.dtype = torch.float32, channels_last: bool = False
    ) -> None:
        if channels_last:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        modules = network.modules() if dtype != torch.float32 else ()
        low = {id(p) for module in modules if isinstance(module, _ROUNDED) for p in module.parameters(recurse=False)}
        trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        if not trained:
            raise OptionError(
                "no parameter of the network requires a gradient",
                expected="at least one parameter to train",
                fix="remove a module from frozen, or call requires_grad_(True) on a part of the network",
            )
        half = next((name for name, p in trained.items() if p.dtype == torch.float16), None)
        if half is not None:
            raise DtypeError(
                f"the weights to train are in float16, such as {half!r}",
                expected="weights in float32, whose updates and gradients do not become zero or infinite",
                fix="call model.float() before, and pass precision='bfloat16' for a step in half precision",
            )
        trained = dict(sorted(trained.items(), key=lambda item: id(item[1]) not in low))  # the rounded ones first
        self.parameters = list(trained.values())
        self.named = {name: p.detach().clone() if id(p) in low else p.detach() for name, p in trained.items()}
        for parameter in network.parameters():
            if id(parameter) in low:
                parameter.data = parameter.data.to(dtype)
        self._rounded = sum(id(p) in low for p in self.parameters)
        self._weights = list(self.named.values())
        self._gradients = [torch.zeros_like(weight) for weight in self._weights]
        for weight, gradient in zip(self._weights, self._gradients, strict=True):
            weight.grad = gradient
        self.optimizer = _optimizer(self.named, config)

    @property
    def lr(self) -> float | Tensor:
        """The learning rate of the first group of weights."""
        lr: float | Tensor = self.optimizer.param_groups[0]["lr"]
        return lr

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next steps."""
        set_lr(self.optimizer, lr)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor]) -> None:
        """Take one optimizer step."""
        for part in (slice(None, self._rounded), slice(self._rounded, None)):  # one kernel per element type
            if self._weights[part]:
                torch._foreach_copy_(self._gradients[part], list(gradients[part]))
        self.optimizer.step()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the float32 weights to the parameters that are rounded."""
        if self._rounded:
            torch._foreach_copy_([p.data for p in self.parameters[: self._rounded]], self._weights[: self._rounded])

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        """Replace the weights and the optimizer's state."""
        for name, weight in self.named.items():
            weight.copy_(weights[name])
        load_optimizer_state(self.optimizer, self.named, state)
        self.refresh()


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups, times their factor, in place if it is a tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * group.get("factor", 1.0))
        else:
            group["lr"] = lr * group.get("factor", 1.0)


def optimizer_state(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of an optimizer as `{"ENTRY.WEIGHT": tensor}`."""
    return {f"{entry}.{name}": value for name, weight in named.items() for entry, value in optimizer.state[weight].items()}


def load_optimizer_state(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Restore what `optimizer_state` returned for the same weights."""
    entries = ("momentum_buffer",) if isinstance(optimizer, torch.optim.SGD) else ("step", "exp_avg", "exp_avg_sq")
    found = {name: {entry: state[f"{entry}.{name}"] for entry in entries if f"{entry}.{name}" in state} for name in named}
    if len({tuple(values) for values in found.values()}) != 1 or len(state) != sum(map(len, found.values())):
        raise ValueError("it is the state of another optimizer or of other weights")
    for name, values in found.items():
        if any(value.shape != named[name].shape for entry, value in values.items() if entry != "step"):
            raise ValueError(f"the state of {name} has another shape")
    groups = optimizer.state_dict()["param_groups"]
    by_weight = {id(weight): {e: _like(weight, value) for e, value in found[name].items()} for name, weight in named.items()}
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    optimizer.load_state_dict({"state": {i: by_weight[id(w)] for i, w in enumerate(weights)}, "param_groups": groups})


def _like(weight: Tensor, value: Tensor) -> Tensor:
    """The value in the memory format of its weight, which fused optimizers require; files are contiguous."""
    return torch.empty_like(weight, dtype=value.dtype).copy_(value) if value.shape == weight.shape else value


def _optimizer(named: Mapping[str, Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of a recipe, with a group of weights per learning rate and decay."""
    device = next(iter(named.values())).device
    on_gpu = device.type == "cuda"
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, weight in named.items():
        factor = config.head_rate if name.partition(".")[0] in _HEADS else 1.0
        decay = config.weight_decay if config.optimizer != "adamw" or weight.ndim > 1 else 0.0
        groups.setdefault((factor, decay), []).append(weight)
    parts: list[dict[str, Any]] = [
        {"params": weights, "factor": factor, "weight_decay": decay, "lr": torch.zeros((), device=device) if on_gpu else 0.0}
        for (factor, decay), weights in groups.items()
    ]
    if config.optimizer != "sgd":
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
        return kind(parts, fused=on_gpu or None, capturable=on_gpu)
    nesterov = config.nesterov and config.momentum > 0
    optimizer = torch.optim.SGD(parts, momentum=config.momentum, nesterov=nesterov, fused=on_gpu or None)
    for weight in named.values() if config.momentum else ():
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer

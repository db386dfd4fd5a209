"""The cost of each exit of a network: MACs and parameters, counted as in the MSDNet papers.

The count is for one input and cumulative over the exits, earlier classifiers included. A convolution costs its
multiply-accumulates (without its bias), a linear layer the same plus its bias, a ReLU one per element, a pool of size k one k²
per output, a batch norm nothing, because it can be folded into its convolution. Layer norms and GELUs cost one per element.

Outside of these layers, matrix products and convolutions count, such as the two products of an attention, as
`torch.utils.flop_counter` counts them (two FLOPs per multiply-accumulate, no bias). Other functions (softmax, exponentials,
sums, `F.relu`) cost nothing. So do layers of other types; if they have parameters but no product inside, such as other norms,
they cost one per element and are named in `Cost.estimated`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from anytime.checks import Inputs, map_inputs
from anytime.models.attach.probe import FlopCounter, check_example
from anytime.models.base import MultiExit, check_network
from anytime.models.outputs import on_device_of

Counter = Callable[[Any, Tensor, Tensor], int]
"""The cost of one call of a layer, from the layer, its input and its output."""


@runtime_checkable
class CountsItself(Protocol):
    """A layer with parameters that counts its own cost."""

    def macs(self, x: Tensor, out: Tensor) -> int:
        """The cost of one call, including all products inside."""
        ...


@dataclass(frozen=True)
class Cost:
    """The cost up to each exit.

    Attributes:
        macs: Multiply-accumulates for one input, which the MSDNet papers call FLOPs.
        parameters: Parameters used, without running statistics.
        unused: Names of parameters that no exit uses.
        estimated: Types of layers that were counted as one per element of their output: they have parameters, but neither a
            counter nor products inside.
    """

    macs: tuple[int, ...]
    parameters: tuple[int, ...]
    unused: tuple[str, ...] = ()
    estimated: tuple[str, ...] = ()

    @property
    def stage_macs(self) -> tuple[int, ...]:
        """Multiply-accumulates of each stage, its exit included."""
        return tuple(after - before for before, after in zip((0, *self.macs), self.macs, strict=False))


def measure_cost(model: MultiExit, example: Inputs, *, layers: Mapping[type[nn.Module], Counter] | None = None) -> Cost:
    """Count the MACs and parameters up to every exit of `model` for one input.

    A copy of the model, which shares its parameters, runs on its device. On the meta device torch would import its compiler,
    which takes longer than the run.

    Args:
        model: The network. A layer may count itself with a method `macs`, see `CountsItself`.
        example: A batch, of which the first row is used; floating-point inputs get the type of the weights.
        layers: Counters for other types of layers, or to replace those above.

    Example:
        >>> from anytime.models import MSDNet, MSDNetConfig
        >>> measure_cost(MSDNet(MSDNetConfig(classes=10)), torch.zeros(1, 3, 32, 32)).macs[0]
        15128842
    """
    check_network(model)
    row = on_device_of(model, map_inputs(lambda tensor: tensor[:1], check_example(example)))
    counters = {**_COUNTERS, **(layers or {})}
    device = next(model.parameters(), torch.zeros(())).device
    return _count(_sharing_copy(model), map_inputs(lambda tensor: tensor.to(device), row), counters)


def _count(shadow: MultiExit, row: Inputs, counters: Mapping[type[nn.Module], Counter]) -> Cost:
    """Count with hooks, which are left on `shadow`."""
    shadow.eval()
    names = {parameter: name for name, parameter in shadow.named_parameters()}
    used: set[nn.Parameter] = set()
    estimated: set[str] = set()
    spent, covered = 0, 0  # the cost of the layers, and the FLOPs inside of them
    began: list[int] = []
    others: list[int] = []  # for layers without a counter
    counter = FlopCounter()

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        began.append(counter.flops)

    def leave(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        nonlocal spent, covered
        before = began.pop()
        if not began:
            covered += counter.flops - before
        count = _counter(module, counters)
        assert count is not None
        spent += count(module, (*args, *named.values())[0], output)

    def enter_other(module: nn.Module, args: tuple[Any, ...]) -> None:
        others.append(counter.flops)

    def leave_other(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal spent
        if others.pop() == counter.flops and not began and isinstance(output, Tensor):
            spent += output.numel()
            estimated.add(type(module).__name__)

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        used.update(module.parameters(recurse=False))

    # Before all other hooks: one that waits at an exit would delay the count of its layer.
    for module in shadow.modules():
        module.register_forward_hook(note, prepend=True)
        if _counter(module, counters) is not None:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave, prepend=True, with_kwargs=True)
        elif next(module.parameters(recurse=False), None) is not None and next(module.children(), None) is None:
            module.register_forward_pre_hook(enter_other)
            module.register_forward_hook(leave_other, prepend=True)
    macs, parameters = [], []
    with torch.no_grad(), counter:
        for _ in shadow.exits(row):
            macs.append(spent + (counter.flops - covered) // 2)
            parameters.append(sum(parameter.numel() for parameter in used))
    unused = tuple(name for parameter, name in names.items() if parameter not in used)
    return Cost(tuple(macs), tuple(parameters), unused, tuple(sorted(estimated)))


def _convolution(layer: nn.Conv1d | nn.Conv2d, x: Tensor, out: Tensor) -> int:
    return out.numel() * layer.weight[0].numel()


def _linear(layer: nn.Linear, x: Tensor, out: Tensor) -> int:
    return out.numel() * (layer.in_features + (layer.bias is not None))


def _pool(layer: nn.AvgPool2d | nn.MaxPool2d, x: Tensor, out: Tensor) -> int:
    height, width = (layer.kernel_size,) * 2 if isinstance(layer.kernel_size, int) else layer.kernel_size
    return out.numel() * height * width


def _per_element(layer: nn.Module, x: Tensor, out: Tensor) -> int:
    return out.numel()


def _recurrent(layer: nn.RNNBase, x: Tensor, out: Any) -> int:
    return x.numel() // layer.input_size * sum(parameter.numel() for parameter in layer.parameters())  # each once per step


def _free(layer: nn.Module, x: Tensor, out: Tensor) -> int:
    return 0


_COUNTERS: dict[type[nn.Module], Counter] = {
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Linear: _linear,
    nn.BatchNorm1d: _free,
    nn.BatchNorm2d: _free,
    nn.Embedding: _free,
    nn.LayerNorm: _per_element,
    nn.ReLU: _per_element,
    nn.GELU: _per_element,
    nn.AvgPool2d: _pool,
    nn.MaxPool2d: _pool,
    nn.RNNBase: _recurrent,
    nn.AdaptiveAvgPool2d: lambda layer, x, out: x.numel(),  # its windows tile the input: k² per output is one per input
}


def _counter(module: nn.Module, counters: Mapping[type[nn.Module], Counter]) -> Counter | None:
    known = next((counters[kind] for kind in type(module).__mro__ if kind in counters), None)
    return type(module).macs if known is None and isinstance(module, CountsItself) else known


def _sharing_copy(model: MultiExit) -> MultiExit:
    """A copy of `model` with its parameters; the memo prevents deepcopy from copying the tensors."""
    memo: dict[int, Any] = {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in model.parameters()}
    return copy.deepcopy(model, memo)

"""What each exit of a network costs: multiply-accumulates and parameters, counted as the MSDNet papers count them.

The count is of one input, cumulative over the exits, earlier classifiers included: whoever takes exit m has paid for all
before it. A convolution costs its multiply-accumulates (its bias nothing), a linear layer the same plus its bias, a ReLU one
an element, a pool of size k one k² an output, a batch norm nothing, as it can be folded into its convolution. A layer norm
cannot be folded and costs one an element, as a GELU does.

What runs outside of these layers costs its matrix products and convolutions, such as the two products of an attention, as
`torch.utils.flop_counter` counts them (a multiply-accumulate is two of its FLOPs, a bias nothing). Other functions (softmax,
exponentials, sums, a ReLU called as a function) cost nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from anytime.errors import OptionError, ShapeError
from anytime.models.base import MultiExit

Counter = Callable[[Any, Tensor, Tensor], int]
"""Cost of one call of a layer, from the layer, its input and its output."""


@runtime_checkable
class CountsItself(Protocol):
    """A layer that knows its own cost, for layers with parameters that are of no type known here."""

    def macs(self, x: Tensor, out: Tensor) -> int:
        """Cost of one call, from its input and its output; products inside of it are not counted besides."""
        ...


@dataclass(frozen=True)
class Cost:
    """What it takes to get to each exit.

    Attributes:
        macs: Multiply-accumulates for one input up to each exit. What the MSDNet papers call FLOPs.
        parameters: Parameters used up to each exit, each counted once, running statistics not counted.
        unused: Names of the parameters of layers that no exit ran.
    """

    macs: tuple[int, ...]
    parameters: tuple[int, ...]
    unused: tuple[str, ...] = ()

    @property
    def stage_macs(self) -> tuple[int, ...]:
        """Multiply-accumulates of each stage alone, its exit included."""
        return tuple(after - before for before, after in zip((0, *self.macs), self.macs, strict=False))


def measure_cost(model: MultiExit, example: Tensor, *, layers: Mapping[type[nn.Module], Counter] | None = None) -> Cost:
    """The cost of every exit of `model` on one input.

    The network runs on shapes alone (torch's meta device), so that a large one costs no time and `model` stays untouched. One
    that looks at values on its way runs as a copy.

    Args:
        model: A network of convolutions, linear layers, norms, ReLUs, GELUs, pools, and functions between them. A layer of
            another type that has parameters needs a method `macs` (see `CountsItself`) or a counter in `layers`.
        example: A batch of which the first row is used; its numbers do not matter, save where a network looks at values.
        layers: Counters for further types of layers, or other ones for the types above.

    Example:
        >>> from anytime.models import MSDNet, MSDNetConfig
        >>> measure_cost(MSDNet(MSDNetConfig(classes=10)), torch.zeros(1, 3, 32, 32)).macs[0]
        15128842
    """
    if example.ndim < 2 or example.shape[0] == 0:
        raise ShapeError(
            f"the example has shape {tuple(example.shape)}",
            expected="a batch with at least one row",
            fix="add a batch dimension, e.g. example[None]",
        )
    counters = {**_COUNTERS, **(layers or {})}
    _check_layers(model, counters)
    try:
        return _count(_on_meta(model), example[:1].to("meta"), counters)
    except RuntimeError:  # there are no values to look at
        tensor = next(model.parameters(), example)
        return _count(copy.deepcopy(model), example[:1].to(tensor.device), counters)


def _count(shadow: MultiExit, row: Tensor, counters: Mapping[type[nn.Module], Counter]) -> Cost:
    """The cost of every exit, by hooks that stay on `shadow`."""
    shadow.eval()
    names = {parameter: name for name, parameter in shadow.named_parameters()}
    used: set[nn.Parameter] = set()
    spent, covered = 0, 0  # what the layers cost, and the FLOPs that ran inside of them
    began: list[int] = []
    flops = FlopCounterMode(display=False)

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        began.append(flops.get_total_flops())

    def leave(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        nonlocal spent, covered
        before = began.pop()
        if not began:
            covered += flops.get_total_flops() - before
        counter = _counter(module, counters)
        assert counter is not None
        spent += counter(module, (*args, *named.values())[0], output)

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        used.update(module.parameters(recurse=False))

    # Before all other hooks: one that waits at an exit would have a layer counted after it.
    for module in shadow.modules():
        module.register_forward_hook(note, prepend=True)
        if _counter(module, counters) is not None:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave, prepend=True, with_kwargs=True)
    macs, parameters = [], []
    with torch.no_grad(), flops:
        for _ in shadow.exits(row):
            macs.append(spent + (flops.get_total_flops() - covered) // 2)
            parameters.append(sum(parameter.numel() for parameter in used))
    unused = tuple(name for parameter, name in names.items() if parameter not in used)
    return Cost(tuple(macs), tuple(parameters), unused)


def _convolution(layer: nn.Conv1d | nn.Conv2d, x: Tensor, out: Tensor) -> int:
    return out.numel() * layer.weight[0].numel()


def _linear(layer: nn.Linear, x: Tensor, out: Tensor) -> int:
    return out.numel() * (layer.in_features + (layer.bias is not None))


def _element(layer: nn.Module, x: Tensor, out: Tensor) -> int:
    return out.numel()


def _pool(layer: nn.AvgPool2d | nn.MaxPool2d, x: Tensor, out: Tensor) -> int:
    height, width = (layer.kernel_size,) * 2 if isinstance(layer.kernel_size, int) else layer.kernel_size
    return out.numel() * height * width


def _input_element(layer: nn.Module, x: Tensor, out: Tensor) -> int:
    return x.numel()


def _nothing(layer: nn.Module, x: Tensor, out: Tensor) -> int:
    return 0


def _own_count(layer: CountsItself, x: Tensor, out: Tensor) -> int:
    return layer.macs(x, out)


_COUNTERS: dict[type[nn.Module], Counter] = {
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Linear: _linear,
    nn.BatchNorm1d: _nothing,
    nn.BatchNorm2d: _nothing,
    nn.Embedding: _nothing,
    nn.LayerNorm: _element,
    nn.ReLU: _element,
    nn.GELU: _element,
    nn.AvgPool2d: _pool,
    nn.MaxPool2d: _pool,
    nn.AdaptiveAvgPool2d: _input_element,  # its windows tile the input: k² an output is one an input
}


def _counter(module: nn.Module, counters: Mapping[type[nn.Module], Counter]) -> Counter | None:
    known = next((counters[kind] for kind in type(module).__mro__ if kind in counters), None)
    return _own_count if known is None and isinstance(module, CountsItself) else known


def _check_layers(model: nn.Module, counters: Mapping[type[nn.Module], Counter]) -> None:
    for name, module in model.named_modules():
        has_parameters = next(module.parameters(recurse=False), None) is not None
        if has_parameters and _counter(module, counters) is None:
            kind = type(module).__name__
            known = ", ".join(kind.__name__ for kind in counters)
            raise OptionError(
                f"the layer {name or 'at the top'!r} is a {kind}, which has parameters and no known cost",
                expected=f"layers with parameters among {known}",
                fix=f"pass layers={{{kind}: counter}}, where counter(layer, input, output) gives its cost, or a method macs",
            )


def _on_meta(model: MultiExit) -> MultiExit:
    """A copy of `model` without numbers. The memo keeps deepcopy from copying the tensors."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo)

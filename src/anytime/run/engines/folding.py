"""Fewer steps for the same function: batch norms become part of the layers before them, and more of that kind.

In eval mode a batch norm is a scale and a shift a channel, which the convolution or linear layer before it can do itself. Who
comes before whom is seen in a run on an example, by what is handed on, so that it does not matter how a network is written
down. In the same way a convolution takes up the ReLU after it, and convolutions that read the same become one.
Every change is then checked: one after which the logits are not the same is taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from anytime.errors import OptionError
from anytime.models.base import Carry, StagedModel

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
TOLERANCE = 1e-4
"""How far the logits may move, relative to the largest of an exit."""

Change = Callable[[nn.Module], None]


class ConvReLU(nn.Module):
    """A convolution and its ReLU in one call where cuDNN has one."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution
        if convolution.bias is None:
            convolution.bias = nn.Parameter(convolution.weight.new_zeros(convolution.out_channels), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        own = self.convolution
        if x.is_cuda:
            assert not isinstance(own.padding, str)
            return torch.cudnn_convolution_relu(x, own.weight, own.bias, own.stride, own.padding, own.dilation, own.groups)
        return F.relu(own(x))


class _Siblings(nn.Module):
    """Convolutions of the same input as one: computed when the first is asked for, the others take their channels of it."""

    def __init__(self, layers: Sequence[ConvReLU]) -> None:
        super().__init__()
        first = layers[0].convolution
        self.sizes = [layer.convolution.out_channels for layer in layers]
        joined = nn.Conv2d(
            first.in_channels,
            sum(self.sizes),
            first.kernel_size,  # type: ignore[arg-type]
            stride=first.stride,  # type: ignore[arg-type]
            padding=first.padding,  # type: ignore[arg-type]
            dilation=first.dilation,  # type: ignore[arg-type]
        )
        joined.weight = nn.Parameter(torch.cat([layer.convolution.weight for layer in layers]), requires_grad=False)
        biases = [layer.convolution.bias for layer in layers]
        joined.bias = nn.Parameter(torch.cat([bias for bias in biases if bias is not None]), requires_grad=False)
        self.layer = ConvReLU(joined)
        self.left: dict[int, Tensor] = {}
        self.read: Tensor | None = None

    def take(self, place: int, x: Tensor) -> Tensor:
        if self.read is not x or place not in self.left:
            self.read, self.left = x, dict(enumerate(self.layer(x).split(self.sizes, dim=1)))
        part = self.left.pop(place)
        if not self.left:
            self.read = None
        return part


class _Sibling(nn.Module):
    """One of these convolutions. As they wait for each other, they are for tracing and for one thread only."""

    def __init__(self, together: _Siblings, place: int) -> None:
        super().__init__()
        self.together, self.place = together, place

    def forward(self, x: Tensor) -> Tensor:
        return self.together.take(self.place, x)


def folded_copy(model: StagedModel, example: Tensor, *, with_relu: bool = False, merged: bool = False) -> nn.Module:
    """A copy in eval mode, on the CPU, whose batch norms are part of the layers before them, where that changes nothing.

    Args:
        model: A staged torch module; it stays as it is.
        example: Inputs to look and to check with.
        with_relu: Whether convolutions do the ReLU after them too.
        merged: Whether such convolutions that read the same become one. The copy is for one thread then.
    """
    folded, example = copied(model), on_cpu(example)
    _apply(folded, example, _folds(folded, example))
    if with_relu or merged:
        _apply(folded, example, _fusions(folded, example))
    if merged:
        _apply(folded, example, _merges(folded, example))
    return folded


def copied(model: StagedModel) -> nn.Module:
    """A copy in eval mode, on the CPU and in float32, to be changed without changing the model."""
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"the model is a {type(model).__name__}",
            expected="a torch module whose stages can be run one by one",
            fix="use engine='eager', which runs any model with exits",
        )
    try:
        return deepcopy(model).eval().requires_grad_(False).cpu().float()
    except Exception as error:
        raise OptionError(
            f"a {type(model).__name__} cannot be copied: {error}", expected="a model that copy.deepcopy takes", fix=_EAGER
        ) from error


def on_cpu(example: Tensor) -> Tensor:
    """An example as a copied model takes it."""
    wanted = torch.float32 if example.is_floating_point() else example.dtype
    if example.is_cpu and example.dtype == wanted and not example.requires_grad:
        return example  # as most are: each call on a tensor costs a request some microseconds
    return example.detach().to("cpu", wanted)


def apart(given: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference between logits, relative to the largest logit of an exit (at least 1)."""
    shares = [
        (one - other).abs().max().item() / max(1.0, other.abs().max().item()) for one, other in zip(given, wanted, strict=True)
    ]
    return max(float("inf") if share != share else share for share in shares)


@torch.no_grad()
def logits_of_stages(model: StagedModel, x: Tensor) -> list[Tensor]:
    """The logits of all exits, stage by stage."""
    carry: Carry = (x,)
    found = []
    for exit in range(model.num_exits):
        carry, logits = model.stage(exit, carry)
        found.append(logits)
    return found


@contextmanager
def rounded_factors(tf32: bool) -> Iterator[None]:
    """Inside, products on a GPU round their factors to ten bits, or do not, whatever torch is set to outside."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, tf32
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=tf32):
            yield
    finally:
        matmul.allow_tf32 = before


class _Call(NamedTuple):
    """One call of a layer. The version tells whether a tensor was written over in between."""

    stage: int
    name: str
    module: nn.Module
    given: Tensor
    given_version: int
    gave: Tensor
    gave_version: int


def _folds(model: nn.Module, example: Tensor) -> list[Change]:
    return [
        _fold(first.name, second.name)
        for first, second in _followed(model, example)
        if isinstance(second.module, _NORMS)
        and second.module.running_mean is not None
        and (isinstance(first.module, _CONVOLUTIONS) or (isinstance(first.module, nn.Linear) and first.gave.ndim == 2))
    ]


def _fusions(model: nn.Module, example: Tensor) -> list[Change]:
    return [
        _fuse(first.name, second.name)
        for first, second in _followed(model, example)
        if isinstance(second.module, nn.ReLU)
        and type(first.module) is nn.Conv2d
        and first.module.padding_mode == "zeros"
        and not isinstance(first.module.padding, str)
    ]


def _merges(model: nn.Module, example: Tensor) -> list[Change]:
    groups: dict[tuple[object, ...], list[str]] = {}
    for call in _calls(model, example):
        if isinstance(call.module, ConvReLU) and call.module.convolution.groups == 1:
            own = call.module.convolution
            form = (own.kernel_size, own.stride, own.padding, own.dilation)
            groups.setdefault((call.stage, id(call.given), call.given_version, form), []).append(call.name)
    return [_merge(names) for names in groups.values() if len(names) > 1]


def _merge(names: Sequence[str]) -> Change:
    def change(model: nn.Module) -> None:
        layers = [model.get_submodule(name) for name in names]
        together = _Siblings([layer for layer in layers if isinstance(layer, ConvReLU)])
        for place, name in enumerate(names):
            model.set_submodule(name, _Sibling(together, place).eval())

    return change


def _fold(layer: str, norm: str) -> Change:
    def change(model: nn.Module) -> None:
        first, second = model.get_submodule(layer), model.get_submodule(norm)
        fuse = fuse_linear_bn_eval if isinstance(first, nn.Linear) else fuse_conv_bn_eval
        model.set_submodule(layer, fuse(first, second).requires_grad_(False))  # type: ignore[type-var, arg-type]
        model.set_submodule(norm, nn.Identity().eval())

    return change


def _fuse(layer: str, relu: str) -> Change:
    def change(model: nn.Module) -> None:
        convolution = model.get_submodule(layer)
        assert isinstance(convolution, nn.Conv2d)
        model.set_submodule(layer, ConvReLU(convolution).eval())
        model.set_submodule(relu, nn.Identity().eval())

    return change


def _apply(model: nn.Module, example: Tensor, changes: Sequence[Change]) -> None:
    """Make all changes; if the logits are others then, one by one, without those that make them so."""
    assert isinstance(model, StagedModel)
    wanted = logits_of_stages(model, example)
    before = dict(model.named_modules())
    for change in changes:
        change(model)
    if apart(logits_of_stages(model, example), wanted) <= TOLERANCE:
        return
    _restore(model, before)
    for change in changes:
        before = dict(model.named_modules())
        change(model)
        if apart(logits_of_stages(model, example), wanted) > TOLERANCE:
            _restore(model, before)


def _restore(model: nn.Module, before: dict[str, nn.Module]) -> None:
    for name, module in before.items():
        if name and model.get_submodule(name) is not module:
            model.set_submodule(name, module)


def _followed(model: nn.Module, example: Tensor) -> Iterator[tuple[_Call, _Call]]:
    """Calls of which the second was given just what the first gave."""
    makers: dict[int, _Call] = {}
    for second in _calls(model, example):
        first = makers.get(id(second.given))
        if first is not None and first.gave_version == second.given_version:
            yield first, second
        makers[id(second.gave)] = second


@torch.no_grad()
def _calls(model: nn.Module, example: Tensor) -> list[_Call]:
    """The calls of layers in a run, in order, but for layers that were called twice.

    They keep their tensors alive, so that no two of these have the same id.
    """
    assert isinstance(model, StagedModel)
    calls: list[_Call] = []
    carry: Carry = (example,)
    for exit in range(model.num_exits):
        with _watched(model, exit, calls):
            carry, _ = model.stage(exit, carry)
    times = Counter(call.name for call in calls)
    return [call for call in calls if times[call.name] == 1]


@contextmanager
def _watched(model: nn.Module, stage: int, calls: list[_Call]) -> Iterator[None]:
    """Note the calls of layers while inside."""
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, (*_CONVOLUTIONS, *_NORMS, nn.Linear, nn.ReLU, ConvReLU)):
            versions: list[int] = []
            handles.append(module.register_forward_pre_hook(lambda _, given, seen=versions: seen.append(given[0]._version)))
            handles.append(
                module.register_forward_hook(
                    lambda module, given, gave, name=name, seen=versions: calls.append(
                        _Call(stage, name, module, given[0], seen.pop(), gave, gave._version)
                    )
                )
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_EAGER = "use engine='eager', which takes the model as it is"
